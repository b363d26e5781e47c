"""What watching costs: steps, CPU, the start and memory, with and without it in turn.

`python -m tests.benchmarks watch-cost rounds=10 parts=steps,start,memory`; `scale=0.2` makes fewer steps.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.benchmarks.measure import measure_in_turn, print_table
from tests.seam import LAUNCH, QUICK_AGENT, clean_environ, find_processes

PROGRAM = Path(__file__).with_name("steady_program.py")
WAYS = {"without": "watch.enabled=false", "with": "watch.enabled=true"}
PARTS = ("steps", "start", "memory")
SIZES = {"about 2 ms": (12, 10_000), "about 50 ms": (300, 400)}
"""Matrix products in a step, and steps, so that a run takes 20 s."""
MANY = 8
SETTLE = 20.0
"""Seconds until the watcher has begun and has reported several times."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One run."""

    mean: float
    """Milliseconds of a step."""
    median: float
    rank_cpu: float
    """Seconds of the rank in its steps."""
    job_cpu: float
    """Seconds of all processes, from the command line to the end."""


def run_steps(way: str, size: tuple[int, int], folder: Path) -> Timed:
    """Run the program once with one rank; raises CalledProcessError."""
    file = folder / "steps"
    words = ["nproc_per_node=1", WAYS[way], "name=cost", "--", str(PROGRAM), *map(str, size), str(file)]
    process = subprocess.Popen(
        [*LAUNCH, *words],
        cwd=folder,
        env=clean_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    found = json.loads(Path(f"{file}.0").read_text())
    return Timed(found["mean"], found["median"], found["cpu"], usage.ru_utime + usage.ru_stime)


def bench_steps(folder: Path, rounds: int, scale: float) -> None:
    """Pairs of runs, the first of each pair in turn; medians of the pairs' differences."""
    print(f"\nSteps with and without watching, 1 rank, {rounds} pairs\n")
    head = ("steps", "what", "without", "with", "more (median of pairs)", "pairs from", "to")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|", flush=True)
    for name, (products, steps) in SIZES.items():
        size = products, max(2, int(steps * scale))
        runs: dict[str, list[Timed]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                runs[way].append(run_steps(way, size, folder))
        for field, unit in (("mean", "ms"), ("median", "ms"), ("rank_cpu", "s"), ("job_cpu", "s")):
            print_pairs(name, f"{field}, {unit}", runs, field)


def print_pairs(name: str, what: str, runs: Mapping[str, list[Timed]], field: str) -> None:
    """Print a row: medians, and by how much each run with watching exceeds its partner."""
    without, watched = ([getattr(run, field) for run in runs[way]] for way in WAYS)
    more = sorted(100 * (b / a - 1) for a, b in zip(without, watched, strict=True))
    cells = [name, what, f"{statistics.median(without):.4f}", f"{statistics.median(watched):.4f}"]
    cells += [f"{statistics.median(more):+.2f}%", f"{more[0]:+.2f}%", f"{more[-1]:+.2f}%"]
    print(f"| {' | '.join(cells)} |", flush=True)


def bench_start(folder: Path, rounds: int) -> None:
    """A whole `launch` of two ranks that end at once, under torchrun and under an agent without torch."""
    for title, extra in (("torchrun", {}), ("an agent without torch", {"PYTHONPATH": QUICK_AGENT})):
        things = {name: partial(time_start, setting, folder, extra) for name, setting in WAYS.items()}
        print_table(f"`launch nproc_per_node=2 -- true`, {title}", measure_in_turn(things, rounds))


def time_start(setting: str, folder: Path, extra: Mapping[str, str]) -> float:
    """Milliseconds of a whole `launch`; raises CalledProcessError."""
    command = [*LAUNCH, "nproc_per_node=2", setting, "name=start", "--", "true"]
    sink, start = subprocess.DEVNULL, time.perf_counter()
    environ = {**clean_environ(), **extra}
    subprocess.run(command, cwd=folder, env=environ, check=True, stdin=sink, stdout=sink, stderr=sink)
    return 1e3 * (time.perf_counter() - start)


@contextmanager
def run_many(setting: str, folder: Path) -> Iterator[int]:
    """Eight ranks that sleep, under an agent without torch; gives the PID of `launch`."""
    mark = f"LAUNCH_TEST_MARK=cost-{os.getpid()}"
    environ = {**clean_environ(), "PYTHONPATH": QUICK_AGENT, **dict([mark.split("=")])}
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    command = [*LAUNCH, f"nproc_per_node={MANY}", setting, "binding=none", "name=many", "--", *program]
    sink = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=folder, env=environ, stdin=sink, stdout=sink, stderr=sink)
    try:
        yield process.pid
    finally:
        process.kill()
        for pid in find_processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


def read_pss(pid: int) -> float:
    """A process's proportional share of memory in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024e-6 for line in lines if line.startswith("Pss:"))


def bench_memory(folder: Path) -> None:
    """Memory of `launch` and of its watcher, and the watcher's CPU over a minute, with eight ranks."""
    print(f"\nMemory with {MANY} ranks\n\n| | `launch`, PSS MB | watcher, PSS MB | watcher, CPU s in 60 s |")
    print("|---|---|---|---|", flush=True)
    for name, setting in WAYS.items():
        with run_many(setting, folder) as pid:
            time.sleep(SETTLE)
            watchers = find_watchers(pid)
            cells = [f"{read_pss(pid):.1f}", "", ""]
            if watchers:
                before = read_cpu(watchers[0])
                time.sleep(60)
                cells[1:] = [f"{read_pss(watchers[0]):.1f}", f"{read_cpu(watchers[0]) - before:.2f}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def find_watchers(parent: int) -> list[int]:
    """The watchers that a process has started."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    found = []
    for pid in map(int, text.split()):
        with suppress(OSError):
            if b"launcher.watch" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def read_cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def bench_watch(folder: Path, options: Mapping[str, str]) -> None:
    """All parts, or `parts=`."""
    chosen = options.get("parts", ",".join(PARTS)).split(",")
    rounds = int(options.get("rounds", "10"))
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"parts are {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if "steps" in chosen:
        bench_steps(folder, rounds, float(options.get("scale", "1")))
    if "start" in chosen:
        bench_start(folder, rounds)
    if "memory" in chosen:
        bench_memory(folder)
