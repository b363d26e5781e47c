"""Collections that keep the other ranks waiting: the launcher's policies beside those that programs write."""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.seam import clean_environ

PROGRAM = Path(__file__).with_name("straggler_program.py")
RANKS = 2
WARMUP, EVERY = 30, 50
"""Steps until objects are frozen, and from one collection in step to the next."""
STEPS = WARMUP + 12 * EVERY


@dataclass(frozen=True, slots=True)
class Policy:
    """A way of collecting."""

    settings: tuple[str, ...]
    """The launcher's."""
    words: tuple[str, ...] = ()
    """The program's; none where it is left as it is."""


UNTOUCHED = ("gc=default",)
POLICIES: Mapping[str, Policy] = {
    "the interpreter's default": Policy(UNTOUCHED),
    "`gc=synchronized`": Policy(("gc=synchronized", f"gc.warmup={WARMUP}", f"gc.every={EVERY}")),
    "`gc=disabled`": Policy(("gc=disabled", f"gc.every={EVERY}")),
    "`gc=frozen`": Policy(("gc=frozen", f"gc.warmup={WARMUP}")),
    "in the program, Megatron's way": Policy(UNTOUCHED, ("--gc=megatron", f"--every={EVERY}")),
    "in the program, torchtitan's": Policy(UNTOUCHED, ("--gc=torchtitan", f"--every={EVERY}")),
}
"""The default first."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run, all its ranks."""

    steps: NDArray[np.float64]
    """Milliseconds from each all_reduce to the next, the same for all ranks."""
    seconds: float
    """The loop's, warm-up included, on the slowest rank."""
    peak_mb: float
    """Highest resident memory of the largest rank."""
    final_mb: float


def bench_gc(folder: Path, rounds: int) -> None:
    """Run the program under each policy in turn; print the figures."""
    things = {name: partial(run_policy, policy, folder) for name, policy in POLICIES.items()}
    runs = run_in_turn(things, rounds)
    print_runs(runs)


def run_in_turn(things: Mapping[str, Callable[[], Run]], rounds: int) -> dict[str, list[Run]]:
    """Run each in turn, so that a machine whose speed drifts slows all."""
    runs: dict[str, list[Run]] = {name: [] for name in things}
    for _ in range(rounds):
        for name, thing in things.items():
            runs[name].append(thing())
    return runs


def run_policy(policy: Policy, folder: Path, sizes: Sequence[str] = (f"--steps={STEPS}",)) -> Run:
    """Run the program once; raises CalledProcessError."""
    report = folder / "report"
    shutil.rmtree(report, ignore_errors=True)
    report.mkdir()
    launch = [sys.executable, "-m", "launcher", f"nproc_per_node={RANKS}", *policy.settings, "--"]
    words = [str(PROGRAM), f"--report={report}", *policy.words, *sizes]
    environ = clean_environ()
    subprocess.run([*launch, *words], cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)
    return read_run(report)


def read_run(report: Path) -> Run:
    """Read what the ranks have written; raises FileNotFoundError."""
    ranks = [json.loads((report / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    return Run(
        steps=1e3 * np.diff(ranks[0]["marks"]),
        seconds=max(rank["seconds"] for rank in ranks),
        peak_mb=max(rank["peak_mb"] for rank in ranks),
        final_mb=max(rank["final_mb"] for rank in ranks),
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """A policy's figures over all rounds: medians, but for the longest step."""

    p50: float
    p99: float
    longest: float
    freezing: float
    """The step in which objects are frozen under `synchronized` and `frozen`; in none of the above."""
    seconds: float
    peak_mb: float
    final_mb: float


def sum_up(runs: Sequence[Run]) -> Figures:
    """Take the figures of steps after the warm-up, which ends with the step that freezes."""
    steady = [run.steps[WARMUP:] for run in runs]
    return Figures(
        p50=statistics.median(float(np.percentile(steps, 50)) for steps in steady),
        p99=statistics.median(float(np.percentile(steps, 99)) for steps in steady),
        longest=max(float(steps.max()) for steps in steady),
        freezing=statistics.median(float(run.steps[WARMUP - 1]) for run in runs),
        seconds=statistics.median(run.seconds for run in runs),
        peak_mb=statistics.median(run.peak_mb for run in runs),
        final_mb=statistics.median(run.final_mb for run in runs),
    )


def print_runs(runs: Mapping[str, Sequence[Run]]) -> None:
    """Print a row for each policy, and what it is of the first."""
    rounds = {len(several) for several in runs.values()}
    print(f"\nCollections and stragglers, {RANKS} ranks, {STEPS} steps, rounds: {max(rounds)}\n")
    print(
        f"| | step after warm-up: p50 (ms) | p99 | longest | step {WARMUP} | all {STEPS} steps (s) "
        "| resident: peak (MB) | at the end | p99, of the first | total | peak |"
    )
    print("|---" * 11 + "|")
    figures = {name: sum_up(several) for name, several in runs.items()}
    first = next(iter(figures.values()))
    for name, row in figures.items():
        cells = [f"{row.p50:.1f}", f"{row.p99:.1f}", f"{row.longest:.0f}", f"{row.freezing:.0f}"]
        cells += [f"{row.seconds:.1f}", f"{row.peak_mb:.0f}", f"{row.final_mb:.0f}"]
        cells += [f"{row.p99 / first.p99:.2f}", f"{row.seconds / first.seconds:.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {row.peak_mb / first.peak_mb:.2f} |")
