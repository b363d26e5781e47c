"""GPU memory under sequences of varying length, for the GPU proof."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

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


def fill(folder: Path, allocator: str, batch: int, *words: str) -> Fill:
    """Run the program once, in a process of its own; raises RuntimeError where it fails."""
    report = folder / "fill.json"
    report.unlink(missing_ok=True)
    launch = [sys.executable, "-m", "launcher", "nproc_per_node=1", f"allocator={allocator}", "--"]
    command = [*launch, str(PROGRAM), f"--batch={batch}", *words, str(report)]
    run_quietly(command, folder)
    return Fill(**json.loads(report.read_text()))
