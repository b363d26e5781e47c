"""Trials of `launch tune`: what the ranks have measured and printed, and what that says of a value."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.codec import load
from launcher.errors import UsageError
from launcher.files import LARGEST, read_file
from launcher.text import strip_sequences

FITS, TOO_LARGE, FAILED = "fits", "does_not_fit", "failed"
VERDICTS = {FITS: "fits", TOO_LARGE: "does not fit", FAILED: "fails, not for memory"}
"""Verdicts on a value, and their words."""
UNITS = {"step": "steps", "batch": "batches"}
"""What is counted, steps of the optimizer or batches if there is none, with the plural."""
FEWEST = 4
"""Measured steps below which nothing can be said of the speed."""
MEMORY_ERROR = re.compile(
    r"OutOfMemoryError"  # torch.OutOfMemoryError, torch.cuda.OutOfMemoryError
    r"|\b(?:CUDA|HIP|XPU|MPS backend) out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|^(?:\w+\.)*_?(?:Array)?MemoryError\b|\bstd::bad_alloc\b|Cannot allocate memory"
    r"|out of memory: the kernel killed"
)
"""How PyTorch, CUDA, NumPy, Python, C++ and `launch` say that an allocation has failed."""
LONGEST_REASON = 120
"""Characters of such a line that are shown, from the error on."""


class MeasureError(UsageError):
    """A trial that says nothing, for a reason that may be the value; the text says why, and what to do."""

    def __init__(self, text: str, status: int = UsageError.exit_code, lines: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.exit_code = status
        """The program's own if it has failed."""
        self.lines = lines
        """What else there is to say of a program that failed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a value of the setting that is tuned has brought."""

    value: int
    """Workers of a rank, or sequences of a rank in a micro-step."""
    rate: float = 0.0
    """What is made in a second; 0 if that was not measured."""
    wait: float = 0.0
    """Share of the time in which a rank waited for data."""
    steps: int = 0
    """Steps that it took, those that do not count among them."""
    memory_kib: int = 0
    """The most memory of all ranks and their workers; 0 if unknown."""
    unit: str = "steps"
    """What `rate` counts: `steps` of the optimizer, `batches` if there is none, `sequences` of all ranks."""
    verdict: str = FITS
    reason: str = ""
    """Why it does not fit, or has failed, or could not be timed."""
    error: float = 0.0
    """Standard error of the rate, as a share of it."""
    step_seconds: float = 0.0
    gpu_kib: int = 0
    """The most memory of the fullest GPU, by PyTorch and all else; 0 without a GPU."""
    gpu_total_kib: int = 0
    loader_batch: int = 0
    """Samples of the DataLoader's batches; 0 if unknown."""

    @property
    def use_kib(self) -> int:
        """The memory that it took where memory is shortest: on the GPU if there is one."""
        return self.gpu_kib if self.gpu_total_kib else self.memory_kib


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the trials of a search say."""

    value: int | None
    """The value to use; None if there is none."""
    facts: Mapping[str, object]
    """What was found, for programs; what is not known is null."""
    lines: Sequence[str]
    """The same for people; why there is none."""
    remarks: Mapping[int, str]
    """What is said of values in the table."""


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
    """What one rank has measured, written by `launch_inprocess.measurements`."""

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

    @property
    def step_seconds(self) -> float:
        """Mean of the measured steps; 0 without any."""
        return sum(self.times) / len(self.times) if self.times else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What all ranks have measured of a value."""

    trial: Trial
    """As slow as the slowest rank; without a rate after too few steps, for which there is a reason."""
    records: Sequence[Record]
    loader: Loader | None
    """The one that gave most batches."""


def read_measurements(folder: Path, value: int, ranks: int) -> Measured:
    """Read the ranks' records; raises MeasureError if one is missing or damaged."""
    try:
        records = [load(Record, read_file(path, LARGEST)) for path in sorted(folder.glob("rank-*.json"))]
    except (OSError, ValueError) as error:
        raise MeasureError(f"what was measured in {folder} cannot be read ({error})") from None
    if missing := sorted(set(range(ranks)) - {record.rank for record in records}):
        raise MeasureError(
            f"rank {missing[0]} of {ranks} measured nothing, as it has neither an optimizer nor a DataLoader"
            " of PyTorch: tune a Python program that does, without Python's options -I, -E and -S"
        )
    short = min(records, key=lambda record: len(record.times))
    slowest = max(records, key=lambda record: record.step_seconds)
    fullest = max(records, key=lambda record: record.gpu_reserved_kib + record.gpu_other_kib)
    trial = Trial(
        value,
        steps=max(record.steps for record in records),
        memory_kib=sum(record.peak_kib for record in records),
        unit=UNITS[short.unit],
        gpu_kib=fullest.gpu_reserved_kib + fullest.gpu_other_kib,
        gpu_total_kib=fullest.gpu_total_kib,
    )
    if len(short.times) >= FEWEST:
        seconds = slowest.step_seconds
        off = statistics.stdev(slowest.times) / seconds / math.sqrt(len(slowest.times))
        wait = _share_wait(records)
        trial = replace(trial, rate=1 / seconds, step_seconds=seconds, error=off, wait=wait)
    else:
        unit = short.unit if short.steps == 1 else UNITS[short.unit]
        few = f"the program ended after {short.steps} {unit} of rank {short.rank}, too few"
        trial = replace(trial, steps=short.steps, reason=few)
    loaders = [loader for record in records for loader in record.loaders]
    return Measured(trial, records, max(loaders, key=lambda loader: loader.batches, default=None))


def _share_wait(records: Sequence[Record]) -> float:
    """Return the share of the time in which any rank waits for data: the others then wait for that rank.

    Steps are compared by their numbers, which agree if ranks train together.
    """
    steps = [dict(enumerate(zip(r.times, r.waits, strict=True), r.first or 0)) for r in records]
    common = set(steps[0]).intersection(*steps[1:])
    if len(common) < FEWEST:
        return max(sum(record.waits) / sum(record.times) for record in records)
    waited = sum(max(each[number][1] for each in steps) for number in common)
    return min(1.0, waited / max(sum(each[number][0] for number in common) for each in steps))


def find_memory_error(lines: Iterable[str]) -> str:
    """Return what the first line says that tells of memory which ran out; empty if there is none."""
    plain = (strip_sequences(line).strip() for line in lines)
    found = next(filter(None, map(MEMORY_ERROR.search, plain)), None)
    return "" if found is None else found.string[found.start() :][:LONGEST_REASON]
