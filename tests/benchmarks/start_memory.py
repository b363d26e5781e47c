"""Memory of a node whose ranks are forked from a process that has imported torch, beside others.

PSS (proc(5), smaps_rollup) counts a page that N processes share as 1/N in each: a sum over processes is
what they take together. torch's libraries are shared in any case, by the page cache.
"""

import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.start import WARM, WAYS, make_environ

PROGRAM = Path(__file__).with_name("start_memory_program.py")
RANKS = 8
PATIENCE = 120.0
"""Seconds that the ranks have to come to their wait."""
MEASURED = ("torchrun", "launch agent=torchrun", "launch, direct, exec (start.warm=off)", WARM)
WORK: Mapping[str, int] = {"after `import torch`": 0, "after 3 steps with DDP": 3}


@dataclass(frozen=True, slots=True)
class Pss:
    """Memory of a job's processes, in bytes."""

    node: int
    """Of all: the ranks, and what started them."""
    ranks: int


def bench_start_memory(folder: Path, rounds: int) -> None:
    """Measure each way in turn, and print the medians for a node."""
    for what, steps in WORK.items():
        found: dict[str, list[Pss]] = {name: [] for name in MEASURED}
        for _ in range(rounds):
            for name in MEASURED:
                found[name].append(measure_way(name, folder, steps))
        print(f"\nMemory of a node with {RANKS} ranks {what}, PSS\n")
        print("| | all processes, MB | ranks, MB | of torchrun |\n|---|---|---|---|")
        base = statistics.median(pss.node for pss in found["torchrun"])
        for name, values in found.items():
            node, ranks = (
                statistics.median(getattr(pss, key) for pss in values) for key in ("node", "ranks")
            )
            print(f"| {name} | {node / 1e6:.0f} | {ranks / 1e6:.0f} | {node / base:.2f} |")


def measure_way(name: str, folder: Path, steps: int) -> Pss:
    """Start the ranks, and measure once all of them wait."""
    for path in (*folder.glob("ready-*"), folder / "done"):
        path.unlink(missing_ok=True)
    command = WAYS[name](RANKS, str(PROGRAM), str(folder), str(steps))
    sink = subprocess.DEVNULL
    environ = make_environ()
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=sink, stderr=sink) as process:
        try:
            return measure_job(psutil.Process(process.pid), await_ranks(process, folder))
        finally:
            (folder / "done").touch()


def await_ranks(process: "subprocess.Popen[bytes]", folder: Path) -> list[int]:
    """Return the ranks' PIDs once all wait; raises RuntimeError if they do not come to that."""
    end = time.monotonic() + PATIENCE
    marks = [folder / f"ready-{rank}" for rank in range(RANKS)]
    while not all(mark.exists() and mark.read_text() for mark in marks):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{process.args!r}: not all ranks have come to their wait")
        time.sleep(0.05)
    return [int(mark.read_text()) for mark in marks]


def measure_job(job: psutil.Process, ranks: Sequence[int]) -> Pss:
    """Return the memory of a process and of all below it, and of its ranks."""
    sizes = {each.pid: read_pss(each.pid) for each in (job, *job.children(recursive=True))}
    return Pss(sum(sizes.values()), sum(sizes[pid] for pid in ranks))


def read_pss(pid: int) -> int:
    """Return a process's proportional set size in bytes; 0 if it has gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    line = next(line for line in text.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024
