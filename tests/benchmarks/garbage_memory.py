"""Memory and step time of programs whose garbage holds large tensors, under each collection policy."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.measure import run_quietly

PROGRAM = Path(__file__).with_name("garbage_memory_program.py")
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "4 micro-steps, 400 evaluation batches": ("--micro-steps=4", "--evaluate=400"),
    "40 micro-steps": ("--micro-steps=40",),
    "1 micro-step": ("--micro-steps=1", "--steps=600"),
    "4 micro-steps, 20,000 containers": ("--micro-steps=4", "--containers=20000"),
}
"""Words of the program. In the last one, garbage outlives the middle generation's collections, too."""
TORCHRUN = "torchrun alone"
DEFAULT = "`gc=default`"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    DEFAULT: ("-m", "launcher", "nproc_per_node=1", "gc=default", "--"),
    "`gc=synchronized`": ("-m", "launcher", "nproc_per_node=1", "gc=synchronized", "--"),
    "`gc=frozen`": ("-m", "launcher", "nproc_per_node=1", "gc=frozen", "--"),
    "`gc=disabled`": ("-m", "launcher", "nproc_per_node=1", "gc=disabled", "--"),
    TORCHRUN: ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What one run reports."""

    peak_mb: float
    """Highest resident memory."""
    median_ms: float
    """Of a step after the warm-up."""
    allocated_mb: float = 0.0
    """The most that tensors had of the GPU; 0 without one."""
    reserved_mb: float = 0.0
    """The most that the allocator held for them."""


def bench_garbage_memory(folder: Path, rounds: int) -> None:
    """Run each program under each policy in turn, and print medians, and ratios to Python's own collector."""
    for title, words in PROGRAMS.items():
        runs: dict[str, list[Run]] = {name: [] for name in COMMANDS}
        for _ in range(rounds):
            for name, command in COMMANDS.items():
                runs[name].append(run_program(folder, command, words))
        print_runs(f"Garbage with 8 MB tensors, {title}, rounds: {rounds}", runs)


def run_program(folder: Path, command: Sequence[str], words: Sequence[str]) -> Run:
    """Run the program once; raises RuntimeError where it fails."""
    report = folder / "garbage.json"
    run_quietly([sys.executable, *command, str(PROGRAM), *words, str(report)], folder)
    return Run(**json.loads(report.read_text()))


def print_runs(title: str, runs: Mapping[str, Sequence[Run]]) -> None:
    """Print a row for each policy."""
    print(
        f"\n{title}\n\n| | peak (MB) | median step (ms) | peak, of the first | step |\n|---|---|---|---|---|"
    )
    rows = {name: sum_up(several) for name, several in runs.items()}
    first = rows[DEFAULT]
    for name, row in rows.items():
        ratios = f"{row.peak_mb / first.peak_mb:.2f} | {row.median_ms / first.median_ms:.2f}"
        print(f"| {name} | {row.peak_mb:.0f} | {row.median_ms:.1f} | {ratios} |", flush=True)


def sum_up(runs: Sequence[Run]) -> Run:
    """Take the medians of several runs."""
    return Run(
        peak_mb=statistics.median(run.peak_mb for run in runs),
        median_ms=statistics.median(run.median_ms for run in runs),
    )
