"""Resident memory of DataLoader workers whose samples leave cyclic garbage."""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import clean_environ

PROGRAM = Path(__file__).with_name("worker_program.py")
WAYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "the interpreter's default": ("gc=default", ()),
    "`gc.disable()` in the program": ("gc=default", ("--disable-gc",)),
    "`gc=synchronized`": ("gc=synchronized", ()),
    "`gc=disabled`": ("gc=disabled", ()),
}
"""The launcher's setting, and the program's words."""


def bench_workers(folder: Path, rounds: int) -> None:
    """Run each way in turn, and print the medians of the largest worker."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, (setting, words) in WAYS.items():
            found[name].append(max(read_workers(folder, setting, *words)))
    medians = {name: statistics.median(values) for name, values in found.items()}
    first = next(iter(medians.values()))
    print("\nA DataLoader worker after 4,000 samples that leave cyclic garbage, highest resident memory\n")
    print("| | MB | more than the first |\n|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.0f} | {value - first:+.0f} |")


def read_workers(folder: Path, setting: str, *words: str) -> list[float]:
    """Highest resident memory of each worker in MB; raises CalledProcessError."""
    report = folder / "workers.json"
    launch = [sys.executable, "-m", "launcher", "nproc_per_node=1", setting, "--", str(PROGRAM)]
    quiet = subprocess.DEVNULL
    subprocess.run(
        [*launch, *words, str(report)],
        cwd=folder,
        env=clean_environ(),
        check=True,
        stdout=quiet,
        stderr=quiet,
    )
    return [float(value) for value in json.loads(report.read_text())["VmHWM"]]
