"""What the ranks of a trial have measured, written by `launch_inprocess.measurements`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.codec import load
from launcher.files import LARGEST, read_file
from launcher.tune.search import UNITS, Trial

FEWEST = 4
"""Measured steps below which nothing can be said."""


class MeasureError(Exception):
    """A trial that says nothing; the text says why, and what to do."""


class MismatchError(MeasureError):
    """The program's DataLoader has another number of workers than was to be tried."""


@dataclass(frozen=True, slots=True)
class Loader:
    """What the program's DataLoaders of one kind have in common."""

    workers: int
    iterable: bool
    """The dataset is an IterableDataset."""
    batches: int
    """What they gave."""
    batch_size: int | None = None
    """Samples of a batch; None if its sampler does not say."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rank's."""

    rank: int
    unit: str
    """A key of UNITS."""
    steps: int
    """All steps, those before the first measured one among them."""
    first: int | None
    """Number of the first measured step; None if the warm-up did not end."""
    times: tuple[float, ...]
    """Seconds of each measured step."""
    waits: tuple[float, ...]
    """Seconds of them in which it waited for data."""
    loaders: tuple[Loader, ...]
    """One of each kind."""
    memory_kib: int
    ended: bool
    """The program has come to its own end."""
    batches: int = 0
    """Batches that the loaders gave in the measured steps."""
    peak_kib: int = 0
    """The most memory that the rank had; 0 if unknown."""
    gpu_total_kib: int = 0
    """Memory of its GPU; 0 without one."""
    gpu_reserved_kib: int = 0
    """The most that PyTorch had reserved there."""
    gpu_other_kib: int = 0
    """What else was in use there."""


def read_trial_records(folder: Path) -> list[Record]:
    """Return the records in a folder, by rank; raises MeasureError for a damaged one."""
    return sorted(map(read_record, folder.glob("rank-*.json")), key=lambda record: record.rank)


def read_record(path: Path) -> Record:
    """Read one record; raises MeasureError."""
    try:
        return load(Record, read_file(path, LARGEST))
    except (OSError, ValueError) as error:
        raise MeasureError(f"{path} cannot be read ({error})") from None


def measure_trial(records: Sequence[Record], workers: int, ranks: int) -> Trial:
    """Return what a trial has measured; raises MeasureError if that says nothing of `workers`."""
    check_records(records, ranks)
    check_loaders(records, workers)
    short = min(records, key=lambda record: len(record.times))
    if len(short.times) < FEWEST:
        unit = short.unit if short.steps == 1 else UNITS[short.unit]
        raise MeasureError(
            f"the program ended after {short.steps} {unit} of rank {short.rank}, too"
            f" few to measure: let it run for {2 * workers + 20} at least"
        )
    return Trial(
        workers,
        rate=min(len(record.times) / sum(record.times) for record in records),
        wait=share_wait(records),
        steps=max(record.steps for record in records),
        memory_kib=sum(record.memory_kib for record in records),
        unit=records[0].unit,
    )


def check_records(records: Sequence[Record], ranks: int) -> None:
    """Raise MeasureError if a rank has measured nothing."""
    missing = sorted(set(range(ranks)) - {record.rank for record in records})
    if len(missing) == ranks:
        raise MeasureError(
            "no rank trains or loads data by PyTorch: give a Python program that does, without the"
            " options -I, -E and -S"
        )
    if missing:
        raise MeasureError(
            f"rank {missing[0]} of {ranks} measured nothing: it has neither an optimizer nor a DataLoader"
        )


def check_loaders(records: Sequence[Record], workers: int) -> None:
    """Raise MismatchError, or MeasureError, if the number of workers is not the launcher's to choose."""
    loaders = [loader for record in records for loader in record.loaders]
    if not loaders:
        raise MeasureError("the program reads from no torch.utils.data.DataLoader: there is nothing to tune")
    loader = max(loaders, key=lambda loader: loader.batches)
    if loader.workers == workers:
        return
    if loader.iterable:
        raise MismatchError(
            f"the DataLoader of an IterableDataset has num_workers={loader.workers}, and is given no other"
            " number, since a dataset that does not shard by worker would return everything once for each:"
            " let the program take it, from LAUNCH_NUM_WORKERS or by `{num_workers}` among its arguments"
        )
    raise MismatchError(
        f"the program sets num_workers={loader.workers} itself, and cannot be tuned so: leave num_workers"
        " out of its DataLoader(...), or let it take LAUNCH_NUM_WORKERS or `{num_workers}` among its"
        " arguments"
    )


def share_wait(records: Sequence[Record]) -> float:
    """Return the share of the time in which any rank waits for data: the others then wait for that rank.

    Steps are compared by their numbers, which agree if ranks train together.
    """
    steps = [dict(enumerate(zip(r.times, r.waits, strict=True), r.first or 0)) for r in records]
    common = set(steps[0]).intersection(*steps[1:])
    if len(common) < FEWEST:
        return max(sum(record.waits) / sum(record.times) for record in records)
    waited = sum(max(each[number][1] for each in steps) for number in common)
    return min(1.0, waited / max(sum(each[number][0] for number in common) for each in steps))
