"""`python -P -m launcher.preflight REQUEST`: a node's program, see `__init__.py`.

It reads the node's facts, has the work measured by `launcher.programs.node_work` in the ranks' interpreter, a
child that is killed at its limit, and answers twice on stdout.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.codec import DecodeError, load
from launcher.doctor.model import Facts, Unchecked
from launcher.doctor.work import name_pair, plan_pairs
from launcher.launch.signals import catch_signals
from launcher.preflight import PreflightRequest, read_lines, render_answer, start_child
from launcher.probe.node import read_node_facts
from launcher.programs.measurement import Measurement, TorchBuild
from launcher.protocol import name_host
from launcher.text import escape_text

MARGIN = 0.5
"""Seconds that are kept for the answer."""
LEAST = 3.0
"""Seconds without which work does not begin: torch alone takes about as long to import."""
PAIR_SHARE = 0.5
"""Share of the time that pairs have at the end, if nodes are measured in pairs."""
PORTS = 16
"""Pairs whose ports differ; more than that are on different machines, or not at the same time."""
BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from launcher.programs.node_work import main; main()"
"""The ranks' interpreter may have no `launcher`: it finds this one, after all that it has itself."""
PACKAGES = Path(__file__).parents[2]


def main() -> int:
    """Answer what is asked, with the facts and again with the work; returns the exit code."""
    try:
        request = load(PreflightRequest, sys.argv[1])
    except (IndexError, DecodeError) as error:
        sys.stderr.write(f"launch: no request of preflight: {error}\n")
        return 2
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        facts = read_node_facts(
            paths=[*request.paths, (tempfile.gettempdir(), "temporary directory")],
            host=name_host(os.environ),
            python=request.python or None,
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
        sys.stdout.write(render_answer(replace(facts, seconds=0.0)))
        sys.stdout.flush()
        facts = add_work(facts, request, begin + request.seconds - MARGIN)
        facts = replace(facts, seconds=round(time.monotonic() - begin, 3))
        sys.stdout.write(render_answer(facts))
        sys.stdout.flush()
    except BrokenPipeError:
        return 1  # nobody waits for the answer any more
    return 0


def add_work(facts: Facts, request: PreflightRequest, deadline: float) -> Facts:
    """Do the work, with other nodes last, and add what it has found."""
    turns = [*list_turns(request, facts.host)] if request.kind == "deep" and request.endpoint else []
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in facts.gpus if gpu.uuid}  # by NVML's numbers
    left = deadline - time.monotonic()
    first, length = deadline - left * PAIR_SHARE, left * PAIR_SHARE / max(1, len(turns))
    for number, options in enumerate(([], *turns)):
        end = first + number * length if turns else deadline
        work = run_work(request.python, request.kind, end - time.monotonic(), options)
        check = "pairs" if options else "work"
        problem = (Unchecked(check, work.problem),) if work.problem else ()
        facts = replace(
            facts,
            torch=facts.torch or work.build.torch,
            torch_cuda=facts.torch_cuda or work.build.torch_cuda,
            work=(*facts.work, *(replace(one, where=names.get(one.uuid, one.where)) for one in work.results)),
            unchecked=(*facts.unchecked, *problem),
        )
        if work.problem and not work.build.torch and not options:
            break
    return facts


def list_turns(request: PreflightRequest, host: str) -> Iterator[list[str]]:
    """Give the options of the work in each round in which the node has a partner."""
    port = int(request.endpoint.rpartition(":")[2])
    for number, pairs in enumerate(plan_pairs(request.hosts)):
        for place, pair in enumerate(pairs):
            if host in pair:
                meeting = f"{pair[0]}:{port + number * PORTS + place % PORTS}"
                rank = str(pair.index(host))
                yield ["--pair", meeting, "--pair-rank", rank, "--pair-name", name_pair(pair)]


@dataclass(slots=True)
class ChildWork:
    """What the child has found."""

    results: list[Measurement] = field(default_factory=list)
    build: TorchBuild = field(default_factory=TorchBuild)
    problem: str = ""
    """Why there is nothing, or not all."""
    last_error: str = ""
    """Last line on its stderr."""

    def take(self, name: str, line: str) -> None:
        """Take a line of the child; what is none of its is left out."""
        if name == "err" and line.strip():
            self.last_error = line.strip()
        with contextlib.suppress(DecodeError):
            if name == "out" and '"measure"' in line:
                self.results.append(load(Measurement, line))
            elif name == "out" and '"torch"' in line:
                self.build = load(TorchBuild, line)


def run_work(python: str, kind: str, seconds: float, options: Sequence[str] = ()) -> ChildWork:
    """Do the work within so many seconds, if they are enough; never raises for what the child does.

    `python` is the ranks' interpreter, empty for this one.
    """
    if seconds < LEAST:
        return ChildWork(problem="no time was left")
    python, begin = python or sys.executable, time.monotonic()
    work, event = ChildWork(), ""
    words = ("--kind", kind, "--seconds", f"{seconds:.2f}", "--begin", repr(begin), *options)
    command = (python, "-P", "-c", BOOT, str(PACKAGES), *words)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        # No signal may end this process between the child's start and the block that ends the child.
        with catch_signals() as inbox, start_child(command, environ, (), signal.SIGKILL) as child:
            try:
                for event, line in read_lines(child, begin + seconds, inbox.wakeup):
                    work.take(event, line)
                    if event == "wakeup":
                        break
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1.0)
            for number in inbox.take():
                sys.exit(128 + number)
    except OSError as error:
        return ChildWork(problem=f"{python} cannot be run ({error.strerror})")
    code, last = child.returncode, f": {escape_text(work.last_error, 300)}" if work.last_error else ""
    if event != "end" and code in (None, -signal.SIGKILL):
        work.problem = f"it did not end in time{last}"
    elif code:
        work.problem = f"it ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}{last}"
    return work


if __name__ == "__main__":
    sys.exit(main())
