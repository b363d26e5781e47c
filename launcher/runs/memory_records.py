"""The memory that runs were expected to take, what they have taken, and which runs are of the same program.

A run directory has `prediction.json` from its start and `rank-N.memory.json` from its ranks' ends. What
another user could have planted is left out.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from launcher.codec import dump, load
from launcher.files import read_file
from launcher.protocol import name_memory_file
from launcher.runs.run_directory import RunDir, write_private

PREDICTION = "prediction.json"
MOST_RUNS = 200
"""Newest runs that are looked at."""
MOST_LEARNED = 5
"""Newest runs of a program that count."""
LARGEST_RECORD = 64 << 10
LEAST_RATIO, MOST_RATIO = 0.2, 5.0
"""Beyond these a record is of something else than what was expected."""
IGNORED = (
    r"-{1,2}(epochs?|num[-_]epochs|num[-_]train[-_]epochs|(max[-_]|train[-_])?steps|max[-_]iters|iters|"
    r"total[-_]steps|seed|lr|learning[-_]rate|min[-_]lr([-_]ratio)?|warmup([-_](steps|ratio))?|"
    r"weight[-_]decay|log[-_](every|interval)|logging[-_]steps|save[-_](every|steps|interval)|"
    r"eval[-_](every|steps|interval)|output[-_]dir|out[-_]dir|run[-_]name|name|resume([-_]from)?|"
    r"num[-_]workers|checkpoint[-_](dir|every))"
)
"""Options whose values change nothing of the memory of a step."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run was expected to take."""

    fingerprint: str
    """Of the program and the settings that matter."""
    expected: int
    """Bytes that torch reserves on a GPU, or that are resident in a rank's process; 0 if nobody said."""
    device: str
    """`gpu` or `cpu`."""
    schema: int = 1


def keep_prediction(run: RunDir, argv: Sequence[str], device: str, ranks: int, expected: int = 0) -> None:
    """Keep in a run directory which program it is, and the bytes that it was expected to take, if known.

    `device` is `gpu` or `cpu`. A file that cannot be written is left out.
    """
    prediction = Prediction(fingerprint_ranks(argv, device, ranks), expected, device)
    with contextlib.suppress(OSError):
        write_private(run.path / PREDICTION, dump(prediction, indent=1))


def fingerprint_ranks(argv: Sequence[str], device: str, ranks: int) -> str:
    """Return what stands for a program on a number of ranks: 16 hexadecimal digits.

    Options that do not matter are left out, and so is the GPU's type: the tensors are the same on another.
    """
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if not (name.startswith("-") and re.fullmatch(IGNORED, name)):
            kept.append(word)
        elif not equals:
            next(words, None)
    text = "\0".join([*kept, "", device, f"ranks={ranks}"])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """What torch has had of a GPU."""

    index: int
    reserved: int
    allocated: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's record."""

    rank: int
    resident: int
    devices: tuple[DevicePeak, ...] = ()
    steps: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of the same program: what it was expected to take, and took."""

    run: str
    expected: int
    measured: int


def read_measured_runs(runs_dir: Path, fingerprint: str, device: str, expected: int) -> list[MeasuredRun]:
    """Return the newest runs with this fingerprint that have left records.

    `expected` is what is expected now of the same program: an older estimate does not count.
    """
    from launcher.runs.run_lookup import list_runs, name_run  # not at every start

    found: list[MeasuredRun] = []
    for path in islice(list_runs(runs_dir), MOST_RUNS):
        try:
            prediction = load(Prediction, read_file(path / PREDICTION, LARGEST_RECORD, own=True))
        except (OSError, ValueError):
            continue
        if (prediction.fingerprint, prediction.device) != (fingerprint, device):
            continue
        measured = 0
        for file in path.glob(name_memory_file("*")):
            with contextlib.suppress(OSError, ValueError):
                record = load(RankMemory, read_file(file, LARGEST_RECORD, own=True))
                reserved = max((each.reserved for each in record.devices), default=0)
                measured = max(measured, record.resident if device == "cpu" else reserved)
        if expected > 0 and LEAST_RATIO <= measured / expected <= MOST_RATIO:
            found.append(MeasuredRun(name_run(path), expected, measured))
            if len(found) == MOST_LEARNED:
                break
    return found


def summarize_ratios(runs: Iterable[MeasuredRun]) -> tuple[float, float]:
    """Return the median of measured over expected, and half of the range over the median."""
    import statistics  # not at every start

    ratios = [run.measured / run.expected for run in runs]
    middle = statistics.median(ratios)
    return middle, (max(ratios) - min(ratios)) / 2 / middle
