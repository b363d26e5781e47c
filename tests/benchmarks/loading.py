"""A loader-bound program: as it is, with the plan's workers, tuned, and with every number there is."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.tune.search import WARMUP
from tests.conftest import clean_environ

PROGRAM = Path(__file__).with_name("loading_program.py")
STEPS = 48
"""Measured steps of a run."""
MEASURED = re.compile(r"measured (\d+) ([\d.]+) ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a run of the program has told of itself."""

    workers: int
    rate: float
    """Steps per second."""
    wait: float
    """Share of the time."""
    steps: int
    """All steps of the run."""


def bench_loader(folder: Path, rounds: int) -> None:
    """Steps per second and waiting for data under each setting, `rounds` times; and what finding it costs."""
    for number in range(rounds):
        compare_settings(folder / str(number))


def compare_settings(folder: Path) -> None:
    """Print a table of one round."""
    folder.mkdir()
    done = launch(folder, ["tune", "dataloader", "format=json"])
    tuned = json.loads(done)
    chosen, most = int(tuned["num_workers"]), int(tuned["max_workers"])
    every = {count: run_program(folder, count, LAUNCH_NUM_WORKERS=str(count)) for count in range(most + 1)}
    best = max(every.values(), key=lambda each: each.rate)
    rows = {
        "unmodified": run_program(folder, 0, "dataloader=text"),
        "`dataloader.default=true`": run_program(folder, 2, "dataloader.default=true"),
        "`launch tune`, then `dataloader=tuned`": run_program(folder, chosen, "dataloader=tuned"),
        "best of every number": best,
    }
    print("\nA program that loads for 0.3 s and computes for 0.12 s a step, 1 rank\n")
    print("| | workers | steps/s | waiting for data | of the best |\n|---|---|---|---|---|")
    for name, row in rows.items():
        share = row.rate / best.rate
        print(f"| {name} | {row.workers} | {row.rate:.2f} | {row.wait:.0%} | {share:.0%} |")
    print("\nEvery number: " + ", ".join(f"{n}: {each.rate:.2f}" for n, each in every.items()))
    spent, all_steps = (
        sum(each["steps"] for each in tuned["trials"]),
        sum(each.steps for each in every.values()),
    )
    tried = ", ".join(str(each["workers"]) for each in tuned["trials"])
    print(
        f"\n`launch tune` tried {tried} workers in {spent} steps; every number from 0 to {most} takes"
        f" {all_steps}: {spent / all_steps:.0%}"
    )


def run_program(folder: Path, workers: int, *words: str, **environ: str) -> Loaded:
    """Run the program with its steps measured once what was prefetched is used up."""
    warmup = WARMUP + 2 * workers
    given = words or ("dataloader.default=true",)
    out = launch(folder, list(given), environ, steps=STEPS, warmup=warmup)
    found = MEASURED.search(out)
    if found is None:
        raise SystemExit(f"the program told nothing: {out}")
    return Loaded(int(found[1]), float(found[2]), float(found[3]), STEPS + warmup)


def launch(
    folder: Path,
    words: list[str],
    environ: Mapping[str, str] | None = None,
    steps: int = 999,
    warmup: int = 3,
) -> str:
    """Return what `launch` prints to stdout; raises CalledProcessError."""
    program = ["nproc_per_node=1", "--", str(PROGRAM), str(steps), str(warmup)]
    command = [sys.executable, "-m", "launcher", *words, *program]
    env = {**clean_environ(), **(environ or {})}
    return subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
