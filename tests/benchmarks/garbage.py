"""Collections that keep the other ranks waiting, under each policy: `make bench ARGS=gc`."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.benchmarks.jobs import HERE, WAYS, make_command, start_job
from tests.benchmarks.measure import print_head, print_row

RANKS = 2
WARMUP, STEPS = 30, 630
"""Steps until objects are frozen, and in all; a collection in step comes each 50: see jobs.toml."""


def run_policy(folder: Path, way: Sequence[str], steps: int) -> dict[str, float]:
    """Run the program once; return the figures of steps after the warm-up, in ms, and of the whole."""
    words = [str(HERE / "garbage_program.py"), str(steps), str(folder)]
    with start_job(folder, make_command(way, words, RANKS)) as job:
        job.wait(600)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    times = 1e3 * np.diff(ranks[0]["marks"])[WARMUP:]
    found = {f"p{share}": float(np.percentile(times, share)) for share in (50, 99)}
    found |= {"longest": float(times.max())}
    return found | {name: max(rank[name] for rank in ranks) for name in ("seconds", "peak_mib")}


def bench_gc(folder: Path, rounds: int, steps: int = STEPS) -> None:
    """Run the program under each policy in turn, and print medians."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS["collections"]}
    for _ in range(rounds):
        for name, way in WAYS["collections"].items():
            runs[name].append(run_policy(folder, way, steps))
    title = f"Collections and the other ranks: {RANKS} ranks, {steps} steps, rounds: {rounds}"
    names = ("p50", "p99", "longest", "seconds", "peak_mib")
    print_head(title, "ms", *names, "p99, of the first", "seconds")
    first: dict[str, float] = {}
    for name, several in runs.items():
        row = {one: statistics.median(run[one] for run in several) for one in names}
        first = first or row
        shares = (f"{row[one] / first[one]:.2f}" for one in ("p99", "seconds"))
        print_row(name, *(f"{row[one]:.1f}" for one in names), *shares)
