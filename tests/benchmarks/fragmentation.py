"""GPU memory under sequences of varying length: what is reserved, and the largest batch that fits."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.probe.machine import probe
from tests.benchmarks.measure import run_quietly

PROGRAM = Path(__file__).with_name("fragmentation_program.py")
ALLOCATORS = ("default", "expandable")


@dataclass(frozen=True, slots=True)
class Fill:
    """What a run made of the GPU's memory."""

    fits: bool
    allocated_mib: float
    """The most that tensors had."""
    reserved_mib: float
    """The most that the allocator held for them."""


def bench_fragmentation(folder: Path, _rounds: int) -> None:
    """For each allocator find the largest batch, then compare both at the smaller of these."""
    title = "\nGPU memory, 60 steps with sequences of 64 to 1,024, capped at 16 GiB"
    lack = find_lack()
    if lack:
        print(f"{title}: {lack}: not measured")
        return
    largest = {
        name: find_largest(lambda batch, name=name: fill(folder, name, batch).fits)  # type: ignore[misc]  # bound now
        for name in ALLOCATORS
    }
    batch = min(largest.values())
    print(f"{title}\n\n| `allocator=` | largest batch | reserved at {batch} (MiB) | allocated | unused |")
    print("|---|---|---|---|---|")
    for name in ALLOCATORS:
        print(format_row(name, largest[name], fill(folder, name, batch) if batch else None))


def find_lack() -> str:
    """Say what is missing here for the measurement; empty where nothing is."""
    if not any(gpu.vendor == "nvidia" for gpu in probe("/").gpus):
        return "no NVIDIA GPU"
    import torch  # where there is a GPU to ask for: it takes two seconds

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA"


def find_largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, all smaller ones taken to fit too; 0 where not even 1 does."""
    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def fill(folder: Path, allocator: str, batch: int, *words: str) -> Fill:
    """Run the program once, in a process of its own; raises RuntimeError where it fails."""
    report = folder / "fill.json"
    report.unlink(missing_ok=True)
    launch = [sys.executable, "-m", "launcher", "nproc_per_node=1", f"allocator={allocator}", "--"]
    command = [*launch, str(PROGRAM), f"--batch={batch}", *words, str(report)]
    run_quietly(command, folder)
    return Fill(**json.loads(report.read_text()))


def format_row(name: str, largest: int, filled: Fill | None) -> str:
    """A row of the table."""
    if filled is None:
        return f"| {name} | {largest} | | | |"
    unused = 1 - filled.allocated_mib / filled.reserved_mib
    return f"| {name} | {largest} | {filled.reserved_mib:.0f} | {filled.allocated_mib:.0f} | {unused:.0%} |"
