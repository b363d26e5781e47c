"""The memory that earlier runs have taken, beside what they were expected to take.

A run directory has `prediction.json` from its start and `rank-N.memory.json` from its ranks' ends. What
another user could have planted is left out.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from launcher.codec import load
from launcher.files import read_file
from launcher.protocol import name_memory_file
from launcher.runs.memory_prediction import PREDICTION
from launcher.runs.run_lookup import list_runs, name_run

MOST_RUNS = 200
"""Newest runs that are looked at."""
MOST_LEARNED = 5
"""Newest runs of a program that count."""
LARGEST_RECORD = 64 << 10
LEAST_RATIO, MOST_RATIO = 0.2, 5.0
"""Beyond these a record is of something else than what was expected."""


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
    paths = islice(list_runs(runs_dir), MOST_RUNS)
    found = (each for path in paths if (each := read_measured(path, fingerprint, device, expected)))
    return list(islice(found, MOST_LEARNED))


def read_measured(path: Path, fingerprint: str, device: str, expected: int) -> MeasuredRun | None:
    """Return what one run has measured if it is of this fingerprint; None for any other."""
    try:
        prediction = load(Prediction, read_file(path / PREDICTION, LARGEST_RECORD, own=True))
    except (OSError, ValueError):
        return None
    if (prediction.fingerprint, prediction.device) != (fingerprint, device) or expected <= 0:
        return None
    peaks = [peak for record in read_rank_memories(path) if (peak := find_rank_peak(record, device))]
    measured = max(peaks, default=0)
    if not LEAST_RATIO <= measured / expected <= MOST_RATIO:
        return None
    return MeasuredRun(name_run(path), expected, measured)


def read_rank_memories(path: Path) -> Iterator[RankMemory]:
    """Give the ranks' records of a run that are this user's and can be read."""
    for file in sorted(path.glob(name_memory_file("*"))):
        try:
            yield load(RankMemory, read_file(file, LARGEST_RECORD, own=True))
        except (OSError, ValueError):
            continue


def find_rank_peak(record: RankMemory, device: str) -> int:
    """Return a rank's peak on one device, in bytes."""
    if device == "cpu":
        return record.resident
    return max((each.reserved for each in record.devices), default=0)


def summarize_ratios(runs: Iterable[MeasuredRun]) -> tuple[float, float]:
    """Return the median of measured over expected, and half of the range over the median."""
    ratios = [run.measured / run.expected for run in runs]
    middle = statistics.median(ratios)
    return middle, (max(ratios) - min(ratios)) / 2 / middle
