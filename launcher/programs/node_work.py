"""Short work on each device of this node, measured: `python -m launcher.programs.node_work --kind light`.

It prints lines of JSON: first what torch there is, then a line for each piece of work. What fails, hangs or
finds no time is a line too, with `problem` or `reason`. Each GPU has its own process, and all CPUs together
have one where there is no GPU; they end with this one: nothing stays on a GPU. With
`--pair HOST:PORT --pair-rank 0|1` two nodes meet at HOST, on which rank 0 runs, and measure what is between
them.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn, TextIO

import torch

from launcher.programs.collective_work import GroupPlace, measure_all_reduce, open_store
from launcher.programs.device_work import (
    Device,
    count_torch_gpus,
    measure_copies,
    measure_matmul,
    measure_memory,
    measure_peer_copy,
    name_cpus,
    start_gpu,
)
from launcher.programs.measurement import GpuIdentity, Measurement
from launcher.programs.work_processes import Answer, WorkProcess, ask_all, describe_error

SECONDS = {"light": 10.0, "deep": 60.0}
DURATIONS = {
    "light": {"matmul": 2.0, "memory": 0.5, "copies": 0.6, "peers": 0.4, "all_reduce": 0.6, "pair": 1.0},
    "deep": {"matmul": 8.0, "memory": 3.0, "copies": 3.0, "peers": 2.0, "all_reduce": 3.0, "pair": 3.0},
}
"""Seconds to measure."""
ENOUGH = {"light": 8.0, "deep": 27.0}
"""Seconds for a run in which nothing has to be shortened."""
SLACK = 0.5
"""Seconds that are kept for the end."""
GRACE = 5.0
"""Seconds that a piece of work may take beyond those to measure before it counts as hung."""
LEAST = 2.0
"""The same in a run whose time is over, if others have answered."""
START = 20.0
"""Seconds that CUDA may take to start."""
NO_TIME = "no time was left"


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Do the work, and end at once, also if a process is stuck in a driver."""
    options = _read_options(words)
    # Stdout is for the results alone: what libraries print there goes to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    warnings.filterwarnings(
        "ignore", message="This process .* is multi-threaded", category=DeprecationWarning
    )
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    work = NodeWork(options.kind, options.begin + options.seconds, options.seconds, out)
    work.print({"torch": torch.__version__, "torch_cuda": torch.version.cuda or ""})
    try:
        processes = work.start(is_pair=bool(options.pair))
        if processes and options.pair:
            host, _, port = options.pair.rpartition(":")
            work.measure_pair(
                processes, host, int(port), options.pair_rank, options.pair_name or options.pair
            )
        elif processes:
            work.measure_node(processes)
    except Exception as error:
        work.report(Measurement("matmul", "node", problem=describe_error(error)))
    finally:
        out.flush()
        os._exit(0)


def _read_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node_work", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kind", choices=SECONDS, default="light")
    parser.add_argument("--seconds", type=float, help="for all, torch's import included; 10 or 60")
    parser.add_argument(
        "--begin", type=float, help="monotonic time from which they count; else now, after torch's import"
    )
    parser.add_argument("--pair", metavar="HOST:PORT", help="measure between two nodes that meet there")
    parser.add_argument("--pair-rank", type=int, choices=(0, 1), default=0)
    parser.add_argument("--pair-name", default="", help="what the pair is called in the result: n1-n2")
    options = parser.parse_args(words)
    options.begin = time.monotonic() if options.begin is None else options.begin
    options.seconds = options.seconds or SECONDS[options.kind]
    return options


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A run of this program, and the time that it has."""

    kind: str
    deadline: float
    """Monotonic time at which it has to be at its end."""
    seconds: float
    """Of the whole run."""
    out: TextIO

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - SLACK - time.monotonic()

    def take(self, name: str) -> float:
        """Return the seconds for a measurement; less in a short run."""
        return DURATIONS[self.kind][name] * min(1.0, max(0.05, self.seconds / ENOUGH[self.kind]))

    def print(self, value: dict[str, object]) -> None:
        """Print a line of JSON."""
        print(json.dumps(value), file=self.out, flush=True)

    def report(self, *found: Measurement) -> None:
        """Print results."""
        for one in found:
            self.print(asdict(one))

    def ask(
        self,
        processes: Sequence[WorkProcess],
        function: Callable[..., object],
        arguments: Callable[[int], tuple[object, ...]],
        seconds: float,
        *,
        grace: float = GRACE,
        least: float = LEAST,
    ) -> list[Answer]:
        """Have all processes call a function that takes about `seconds`; one answer for each.

        If the run's time is over before `grace`, being late speaks against a device only if others have
        answered, and `least` seconds of grace have passed.
        """
        limit = seconds + grace
        if self.left < seconds:
            return [Answer(problem=one.problem, reason=NO_TIME) for one in processes]
        given = min(limit, self.left)
        answers = ask_all(processes, function, arguments, given)
        is_alone = all(one.is_late for one in answers)
        if given < limit and (is_alone or given < seconds + least):
            return [Answer(reason=NO_TIME) if one.is_late else one for one in answers]
        return answers

    def start(self, *, is_pair: bool) -> list[WorkProcess]:
        """Start a process for each GPU that torch sees, or one for all CPUs; report those that fail.

        Another process asks for the GPUs: this one has to stay without CUDA, since it forks. Empty if
        CUDA does not answer, and for a pair if a GPU fails: the other node would wait for it.
        """
        count = 0
        if torch.version.cuda or torch.version.hip:
            asking = WorkProcess(None)
            (answer,) = self.ask([asking], count_torch_gpus, lambda _: (), 0.0, grace=START)
            asking.give_up("")
            if answer.value is None:
                self.report(_miss("matmul", "node", answer))
                return []
            count = int(answer.value)
        if not count:
            return [WorkProcess(Device(None, name_cpus()))]
        processes = [WorkProcess(Device(index)) for index in range(count)]
        answers = self.ask(processes, start_gpu, lambda _: (), 0.0, grace=START)
        identities = [answer.value for answer in answers if isinstance(answer.value, GpuIdentity)]
        self.print({"gpus": [asdict(one) for one in identities]})
        for one, answer in zip(processes, answers, strict=True):
            if isinstance(answer.value, GpuIdentity):
                one.state.name = answer.value.name
                continue
            self.report(_miss("matmul", one.state.where, answer))
            if not one.problem:
                one.give_up(answer.problem or answer.reason)
        live = [one for one in processes if not one.problem]
        return [] if is_pair and len(live) < count else live

    def measure_node(self, processes: Sequence[WorkProcess]) -> None:
        """Measure this node's devices, all at once in each part."""
        self.measure_each(processes, "matmul", measure_matmul, "matmul")
        if processes[0].state.index is None:
            self.measure_each(processes, "memory", measure_memory, "memory")
            return
        self.measure_each(processes, "copies", measure_copies, "copy_to")
        live = [one for one in processes if not one.problem]
        if len(live) < 2:
            return
        indices = [one.state.index for one in live]
        peers = [*indices[1:], indices[0]]
        self.measure_each(live, "peers", measure_peer_copy, "peer_copy", peers)
        live = [one for one in live if not one.problem]
        (opened,) = self.ask(live[:1], open_store, lambda _: (len(live),), 0.0)
        device = f"{live[0].state.name}, {len(live)} GPUs"
        if opened.value is None:
            self.report(_miss("all_reduce", "node", opened, device))
            return
        seconds, limit = self.take("all_reduce"), max(1.0, self.left)
        self.report(
            self.measure_group(
                live,
                Measurement("all_reduce", "node", device=device),
                lambda rank: GroupPlace(rank, len(live), "127.0.0.1", opened.value, seconds, limit),
                seconds,
                max(GRACE, limit / 2),
            )
        )

    def measure_each(
        self,
        processes: Sequence[WorkProcess],
        duration: str,
        function: Callable[..., object],
        measure: str,
        peers: Sequence[int] = (),
    ) -> None:
        """Report what each device says; a line for each that has no result, too."""
        seconds = self.take(duration)
        answers = self.ask(
            processes, function, lambda at: (peers[at], seconds) if peers else (seconds,), seconds
        )
        for one, answer in zip(processes, answers, strict=True):
            found = answer.value or _miss(measure, one.state.where, answer, one.state.name)
            self.report(*(found if isinstance(found, tuple) else (found,)))

    def measure_pair(
        self, processes: Sequence[WorkProcess], host: str, port: int, rank: int, name: str
    ) -> None:
        """Report the bandwidth between this node and the other; both have to have as many devices."""
        count, seconds = len(processes), self.take("pair")
        limit = max(1.0, self.left - 1.0)
        self.report(
            self.measure_group(
                processes,
                Measurement("pair", name, device=f"{processes[0].state.name}, {count} on each node"),
                lambda number: GroupPlace(
                    rank * count + number, 2 * count, host, port, seconds, limit, is_pair=True
                ),
                seconds,
                limit,
            )
        )

    def measure_group(
        self,
        processes: Sequence[WorkProcess],
        asked: Measurement,
        place: Callable[[int], GroupPlace],
        seconds: float,
        grace: float,
    ) -> Measurement:
        """Return a group's GB/s, or the first failure that is more than being left by another."""
        answers = self.ask(
            processes, measure_all_reduce, lambda at: (place(at),), seconds, grace=grace, least=GRACE
        )
        missing = [answer for answer in answers if answer.value is None]
        if missing:
            worst = min(missing, key=lambda answer: (answer.is_late, answer.reason == NO_TIME))
            return _miss(asked.measure, asked.where, worst, asked.device)
        value = min(answer.value for answer in answers)
        return Measurement(asked.measure, asked.where, value, "GB/s", device=asked.device)


def _miss(measure: str, where: str, answer: Answer, device: str = "") -> Measurement:
    """Return the result of work that has given no value."""
    problem = "" if answer.reason else answer.problem or "it has no result"
    return Measurement(measure, where, problem=problem, reason=answer.reason, device=device)


if __name__ == "__main__":
    main()
