"""Short work on each device of this node, measured: `python -m launcher.programs.node_work --kind light`.

It prints lines of JSON: first what torch there is, then a line for each piece of work. What fails, hangs or
finds no time is a line too, with `problem` or `reason`. Each GPU has its own process, and all CPUs together
have one where there is no GPU; they end with this one: nothing stays on a GPU. With
`--pair HOST:PORT --pair-rank 0|1` two nodes meet at HOST, on which rank 0 runs, and measure what is between
them.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TextIO

import torch

from launcher.programs.device_work import (
    Device,
    Group,
    NotMeasuredError,
    count_torch_gpus,
    describe_error,
    measure_all_reduce,
    measure_copies,
    measure_matmul,
    measure_memory,
    name_processor,
    open_store,
    start_gpu,
)
from launcher.programs.measurement import GpuIdentity, Measurement

SECONDS = {"light": 10.0, "deep": 60.0}
DURATIONS = {
    "light": {"matmul": 2.0, "memory": 0.5, "copies": 0.6, "all_reduce": 0.6, "pair": 1.0},
    "deep": {"matmul": 8.0, "memory": 3.0, "copies": 3.0, "all_reduce": 3.0, "pair": 3.0},
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
PR_SET_PDEATHSIG = 1


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Do the work, and end at once, also if a process is stuck in a driver."""
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
    # Stdout is for the results alone: what libraries print there goes to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    multi_threaded = "This process .* is multi-threaded"
    warnings.filterwarnings("ignore", message=multi_threaded, category=DeprecationWarning)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    begin, seconds = options.begin or time.monotonic(), options.seconds or SECONDS[options.kind]
    work = NodeWork(options.kind, begin + seconds, seconds, out)
    work.print({"torch": torch.__version__, "torch_cuda": torch.version.cuda or ""})
    try:
        processes = work.start(is_pair=bool(options.pair))
        if processes and options.pair:
            work.measure_pair(processes, options.pair, options.pair_rank, options.pair_name or options.pair)
        elif processes:
            work.measure_node(processes)
    except Exception as error:
        work.report(Measurement("matmul", "node", problem=describe_error(error)))
    finally:
        out.flush()
        os._exit(0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process has said to a call."""

    value: Any = None
    problem: str = ""
    reason: str = ""
    """Why it was not asked, or not waited for."""
    is_late: bool = False
    """It has not answered in time, and was ended."""


@dataclass(slots=True)
class WorkProcess:
    """A process for one device, which calls functions with `state` as their first argument.

    It is forked from this one, which has imported torch and started nothing of it, so that many start fast
    and share its memory. One that a driver keeps in the kernel cannot be killed: it is left behind.
    """

    state: Any
    connection: "Connection[Any, Any]" = field(init=False)
    process: multiprocessing.process.BaseProcess = field(init=False)
    problem: str = ""
    """Why it can do no more."""

    def __post_init__(self) -> None:
        """Start it."""
        context = multiprocessing.get_context("fork")
        self.connection, inner = context.Pipe()
        self.process = context.Process(target=self._serve, args=(inner, os.getpid()), daemon=True)
        self.process.start()
        inner.close()

    def _serve(self, connection: "Connection[Any, Any]", parent: int) -> None:
        """Call the functions that the other end names, until it closes."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        try:
            while True:
                function, arguments = connection.recv()
                try:
                    answer = Answer(function(self.state, *arguments))
                except NotMeasuredError as error:
                    answer = Answer(reason=str(error))
                except Exception as error:
                    answer = Answer(problem=describe_error(error))
                connection.send(answer)
        except (EOFError, OSError, KeyboardInterrupt):
            return

    def give_up(self, problem: str = "") -> None:
        """End it, without waiting for that; without a problem, one that has ended says how."""
        if not problem:
            self.process.join(1.0)
            code = self.process.exitcode
            how = f"was ended by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
            problem = f"its process {how}"
        self.problem = problem
        self.process.kill()
        self.connection.close()


def ask_all(
    processes: Sequence[WorkProcess],
    function: Callable[..., object],
    arguments: Callable[[int], tuple[object, ...]],
    limit: float,
) -> list[Answer]:
    """Have all processes call a function at once, `limit` seconds at most; one answer for each.

    `arguments` gives those of the process with that number. A process that does not answer is ended.
    """
    deadline = time.monotonic() + limit
    waiting: dict[Any, int] = {}
    answers: dict[int, Answer] = {}
    for number, one in enumerate(processes):
        if one.problem:
            continue
        try:
            one.connection.send((function, arguments(number)))
            waiting[one.connection] = number
        except OSError:
            one.give_up()
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            number = waiting.pop(connection)
            try:
                answers[number] = processes[number].connection.recv()
            except (EOFError, OSError):
                processes[number].give_up()
    for number in waiting.values():
        processes[number].give_up(f"no answer within {limit:.0f} s")
        answers[number] = Answer(problem=processes[number].problem, is_late=True)
    return [answers.get(number, Answer(problem=one.problem)) for number, one in enumerate(processes)]


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

    def report(self, found: Measurement, answer: Answer | None = None) -> None:
        """Print a result, or what was asked of a process whose answer has no value."""
        if answer is not None:
            problem = "" if answer.reason else answer.problem or "it has no result"
            found = replace(found, problem=problem, reason=answer.reason)
        self.print(asdict(found))

    def ask(
        self,
        processes: Sequence[WorkProcess],
        function: Callable[..., object],
        arguments: Callable[[int], tuple[object, ...]] = lambda _: (),
        seconds: float = 0.0,
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
            (answer,) = self.ask([asking], count_torch_gpus, grace=START)
            asking.give_up("it is not needed any more")
            if answer.value is None:
                self.report(Measurement("matmul", "node"), answer)
                return []
            count = int(answer.value)
        if not count:
            return [WorkProcess(Device(None, f"{name_processor()}, {len(os.sched_getaffinity(0))} CPUs"))]
        processes = [WorkProcess(Device(index)) for index in range(count)]
        answers = self.ask(processes, start_gpu, grace=START)
        identities = [answer.value for answer in answers if isinstance(answer.value, GpuIdentity)]
        self.print({"gpus": [asdict(one) for one in identities]})
        for one, answer in zip(processes, answers, strict=True):
            if isinstance(answer.value, GpuIdentity):
                one.state.name = answer.value.name
                continue
            self.report(Measurement("matmul", one.state.where), answer)
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
        asked = Measurement("all_reduce", "node", device=f"{live[0].state.name}, {len(live)} GPUs")
        (opened,) = self.ask(live[:1], open_store, lambda _: (len(live),))
        if opened.value is None:
            self.report(asked, opened)
            return
        limit = max(1.0, self.left)
        group = Group(len(live), "127.0.0.1", opened.value, self.take("all_reduce"), limit)
        self.measure_group(live, asked, group, 0, max(GRACE, limit / 2))

    def measure_each(
        self,
        processes: Sequence[WorkProcess],
        duration: str,
        function: Callable[..., object],
        measure: str,
    ) -> None:
        """Report what each device says; a line for each that has no result, too."""
        seconds = self.take(duration)
        answers = self.ask(
            processes,
            function,
            lambda _: (seconds,),
            seconds,
            # CPUs that are late are busy, and not broken.
            grace=self.left if processes[0].state.index is None else GRACE,
        )
        for one, answer in zip(processes, answers, strict=True):
            if answer.value is None:
                self.report(Measurement(measure, one.state.where, device=one.state.name), answer)
            for found in answer.value or ():
                self.report(found)

    def measure_pair(self, processes: Sequence[WorkProcess], meeting: str, rank: int, name: str) -> None:
        """Report the bandwidth between this node and the other; both have to have as many devices."""
        host, _, port = meeting.rpartition(":")
        count, limit = len(processes), max(1.0, self.left - 1.0)
        group = Group(2 * count, host, int(port), self.take("pair"), limit, is_pair=True)
        asked = Measurement("pair", name, device=f"{processes[0].state.name}, {count} on each node")
        self.measure_group(processes, asked, group, rank * count, limit)

    def measure_group(
        self, processes: Sequence[WorkProcess], asked: Measurement, group: Group, first: int, grace: float
    ) -> None:
        """Report a group's GB/s, or the first failure that is more than being left by another.

        `first` is the rank of the first process.
        """
        answers = self.ask(
            processes,
            measure_all_reduce,
            lambda at: (group, first + at),
            group.seconds,
            grace=grace,
            least=GRACE,
        )
        missing = [answer for answer in answers if answer.value is None]
        if missing:
            self.report(asked, min(missing, key=lambda answer: (answer.is_late, answer.reason == NO_TIME)))
        else:
            self.report(replace(asked, value=min(answer.value for answer in answers), unit="GB/s"))


if __name__ == "__main__":
    main()
