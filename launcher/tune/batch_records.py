"""What the ranks of a trial of `launch tune batch` have measured and printed."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence

from launcher.text import strip_sequences
from launcher.tune.batch_search import BatchTrial
from launcher.tune.trial_records import FEWEST, MeasureError, Record, check_records

MEMORY_ERROR = re.compile(
    r"OutOfMemoryError"  # torch.OutOfMemoryError, torch.cuda.OutOfMemoryError
    r"|\b(?:CUDA|HIP|XPU|MPS backend) out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|^(?:\w+\.)*_?(?:Array)?MemoryError\b|\bstd::bad_alloc\b|Cannot allocate memory"
)
"""How PyTorch, CUDA, NumPy, Python and C++ say that an allocation has failed."""
LONGEST_REASON = 120
"""Characters of such a line that are shown."""
LONGEST_PREFIX = 24
"""Characters before the error that are shown with it."""


def find_memory_error(lines: Iterable[str]) -> str:
    """Return what the first line says that tells of memory which ran out; empty if there is none."""
    for line in lines:
        plain = strip_sequences(line).strip()
        if found := MEMORY_ERROR.search(plain):
            said = plain[found.start() :] if found.start() > LONGEST_PREFIX else plain
            return said if len(said) <= LONGEST_REASON else f"{said[: LONGEST_REASON - 1]}…"
    return ""


def measure_batch(records: Sequence[Record], batch: int, ranks: int) -> BatchTrial:
    """Return what a size that fits has measured; raises MeasureError if that says nothing.

    A program that came to its end after a few steps fits, and has no throughput.
    """
    check_records(records, ranks)
    short = min(records, key=lambda record: len(record.times))
    if short.steps < 2:
        raise MeasureError(
            f"the program ended after {short.steps} {short.unit} of rank {short.rank}: it has too little data"
        )
    is_timed = len(short.times) >= FEWEST
    slowest = max(records, key=average_step) if is_timed else short
    seconds, loader = average_step(slowest), find_loader_batch(records)
    per_step = (slowest.batches / len(slowest.times) if is_timed else 0.0) or 1.0
    fullest = max(records, key=lambda record: record.gpu_reserved_kib + record.gpu_other_kib)
    return BatchTrial(
        batch,
        rate=ranks * (loader or batch) * per_step / seconds if is_timed else 0.0,
        error=find_standard_error(slowest.times),
        step_seconds=seconds,
        steps=max(record.steps for record in records),
        unit=records[0].unit,
        memory_kib=sum(record.peak_kib for record in records),
        gpu_kib=fullest.gpu_reserved_kib + fullest.gpu_other_kib,
        gpu_total_kib=fullest.gpu_total_kib,
        loader_batch=loader,
        reason="" if is_timed else f"the program ended after {short.steps} steps, too few to time",
    )


def average_step(record: Record) -> float:
    """Return the mean seconds of a rank's measured steps; 0 without any."""
    return sum(record.times) / len(record.times) if record.times else 0.0


def find_loader_batch(records: Sequence[Record]) -> int:
    """Return the samples of the batches of the loader that gave most; 0 if unknown.

    A loader of single items may give whole batches as such: its size of 1 says nothing.
    """
    loaders = [loader for record in records for loader in record.loaders]
    size = max(loaders, key=lambda loader: loader.batches).batch_size if loaders else None
    return size if size is not None and size > 1 else 0


def find_standard_error(times: Sequence[float]) -> float:
    """Return the standard error of the mean, as a share of it; 0 if it cannot be told."""
    if len(times) < 2 or not sum(times):
        return 0.0
    return statistics.stdev(times) / statistics.fmean(times) / math.sqrt(len(times))


def check_effect(trials: Sequence[BatchTrial], option: str) -> None:
    """Raise MeasureError if the option does not change the DataLoader's batches."""
    by_loader: dict[int, BatchTrial] = {}
    for trial in trials:
        other = by_loader.setdefault(trial.loader_batch, trial)
        if trial.loader_batch and other.batch != trial.batch:
            raise MeasureError(
                f"the DataLoader gives batches of {trial.loader_batch} with {option} {other.batch} and"
                f" with {trial.batch}: name the option of the micro-batch, tune.option=…"
            )
