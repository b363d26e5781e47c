"""Seconds from a rank's death to the first step after the checkpoint, on one machine.

Each way starts the bundled program with two ranks; rank 1 gets SIGKILL a few steps after a checkpoint.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.start import launch, make_environ, torchrun
from tests.programs.start_program import PROGRAM, SMALL, read_losses
from tests.seam import find_processes

RANKS = 2
CULPRIT = 1
"""The rank that dies."""
CHECKPOINT, DEATH = 10, 15
"""Steps from a checkpoint to the next, and the step of the death."""
STEPS = 1_000_000
"""More than any run comes to."""
PATIENCE = 120.0
"""Seconds that a start, and a recovery, may take."""
RESUMED = re.compile(r"^start +at step \d+, resumed from [^\n]*\n(?:.*\n)*?step (\d+)/", re.MULTILINE)
LOGS = ("runs/*/*/logs/*/rank-0.out", "logs/**/stdout.log")
"""What `launch` and torchrun write of rank 0: a file for each start."""
RESTARTED: Mapping[str, Callable[..., list[str]]] = {
    "torchrun --max-restarts=3": lambda *program: [
        *torchrun(RANKS, "--max-restarts=3", "--redirects=3", "--log-dir=logs", *program)
    ],
    "launch agent=torchrun torchrun.max_restarts=3": lambda *program: launch(
        RANKS, *program, settings=("agent=torchrun", "torchrun.max_restarts=3")
    ),
    "launch restarts=3, exec (start.warm=off)": lambda *program: launch(
        RANKS, *program, settings=("agent=direct", "restarts=3", "start.warm=off")
    ),
    "launch restarts=3, warm": lambda *program: launch(
        RANKS, *program, settings=("agent=direct", "restarts=3")
    ),
}
"""Each makes a command line of the program's words."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A recovery, in seconds from the death."""

    seconds: float
    step: int
    """The first that was printed afterwards."""


def read_resumed(folder: Path) -> int:
    """Return the first step that rank 0 has printed after it had resumed from a checkpoint; 0 if none.

    torchrun's agents may write a restart into the file of the start before it.
    """
    texts = (path.read_text(errors="replace") for pattern in LOGS for path in folder.glob(pattern))
    found = (RESUMED.search(text) for text in texts)
    return next((int(each[1]) for each in found if each), 0)


def read_newest(folder: Path) -> int:
    """Return the newest step that rank 0 has printed; 0 if none."""
    texts = (path.read_text(errors="replace") for pattern in LOGS for path in folder.glob(pattern))
    return max((step for text in texts for step in read_losses(text)), default=0)


def make_program(folder: Path) -> list[str]:
    """Return the bundled program's words, with its checkpoints below a folder."""
    options = SMALL | {
        "steps": str(STEPS),
        "checkpoint-every": str(CHECKPOINT),
        "checkpoint-dir": str(folder / "checkpoints"),
    }
    return [*PROGRAM, *(f"--{key}={value}" for key, value in options.items())]


def await_true(check: Callable[[], object], patience: float, is_over: Callable[[], bool]) -> float:
    """Wait until something is true, and return when that was (s since the epoch).

    Raises TimeoutError if it does not come, or the job is over; that is asked for once a second.
    """
    end, ask = time.monotonic() + patience, time.monotonic() + 1
    while not check():
        now = time.monotonic()
        if now > end or (now > ask and is_over() and not check()):
            raise TimeoutError("the job is over" if now <= end else f"not within {patience:.0f} s")
        ask = now + 1 if now > ask else ask
        time.sleep(0.005)
    return time.time()


def find_rank(folder: Path, rank: int) -> int:
    """Return a rank's PID: as `launch` has recorded it, or as its variables tell under torchrun."""
    for path in folder.glob(f"runs/*/*/rank-{rank}.applied.json"):
        return int(json.loads(path.read_text())["pid"])
    for pid, words in find_processes(str(folder)).items():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if PROGRAM[1] in words and f"RANK={rank}".encode() in environ and "--max-restarts" not in words:
            return pid
    raise LookupError(f"rank {rank} is not found")


def measure_death(
    folder: Path, strike: Callable[[], float], is_over: Callable[[], bool], patience: float = PATIENCE
) -> Recovered:
    """Wait for some steps, strike, and wait for the first step of a later start.

    `strike` returns when it was; raises TimeoutError if the job does not go on.
    """
    await_true(lambda: read_newest(folder) >= DEATH, PATIENCE, is_over)
    death = strike()
    seconds = await_true(lambda: read_resumed(folder), patience, is_over) - death
    return Recovered(seconds, read_resumed(folder))


def kill_rank(folder: Path) -> float:
    """SIGKILL to the culprit; return when."""
    os.kill(find_rank(folder, CULPRIT), signal.SIGKILL)
    return time.time()


def measure_local(make: Callable[..., list[str]]) -> Recovered:
    """Start two ranks here, kill one, and wait for the next step; all has ended at the return."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        with (folder / "console").open("wb") as console:
            process = subprocess.Popen(
                make(*make_program(folder)),
                cwd=folder,
                env=make_environ(),
                stdout=console,
                stderr=console,
            )
        try:
            return measure_death(folder, lambda: kill_rank(folder), lambda: process.poll() is not None)
        except (TimeoutError, LookupError) as error:
            raise RuntimeError((folder / "console").read_text(errors="replace")[-3000:]) from error
        finally:
            end_process(process, folder)


def end_process(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End a command and whatever it has started."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in find_processes(str(folder)):
        os.kill(pid, signal.SIGKILL)


def bench_recovery(folder: Path, rounds: int) -> None:
    """Kill a rank under each way in turn, and print the seconds."""
    found: dict[str, list[Recovered]] = {name: [] for name in RESTARTED}
    for _ in range(rounds):
        for name, make in RESTARTED.items():
            found[name].append(measure_local(make))
    print_recovered(f"SIGKILL of rank {CULPRIT} of {RANKS}, on one machine", found)


def print_recovered(title: str, found: Mapping[str, Sequence[Recovered]]) -> None:
    """Print a table of the seconds from the death to the first step after it."""
    print(f"\n{title}: from the death to the first step after the checkpoint\n")
    print("| s | min | median | max | of the first | goes on with step |\n|---|---|---|---|---|---|")
    base: float | None = None
    for name, values in found.items():
        times = [one.seconds for one in values]
        if not times:
            print(f"| {name} | not measured | | | | |")
            continue
        middle = statistics.median(times)
        base = base or middle
        steps = ", ".join(str(step) for step in sorted({one.step for one in values}))
        row = f"{min(times):.1f} | {middle:.1f} | {max(times):.1f} | {middle / base:.2f} | {steps}"
        print(f"| {name} | {row} |", flush=True)
