"""Which micro-batch to try next, and what the trials say: the largest that fits, and the fastest.

The size is doubled until it does not fit, then the middle of the last two is tried. Memory grows with the
size along a line, so that two trials tell what a third one needs; what the machine may not have is not tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.text import describe_time, format_size

FITS, TOO_LARGE, FAILED = "fits", "does_not_fit", "failed"
"""Verdicts on a size; `failed` is for another reason than memory."""
FIRST_BATCH = 8
"""Size of the first trial if nothing else is known."""
MARGIN = 0.05
"""Share of the memory to spare, since fragmentation grows in a long run."""
WORTH = 1.02
"""Gain in throughput below which a trial is not made for it."""
AS_FAST = 0.985
"""Share of the best throughput from which a smaller size is as good."""
STEPS = 8
"""Steps of which a trial's measured part has to consist at least, whatever they take."""
ALL_STEPS = 11
"""The same with those before."""


@dataclass(frozen=True, slots=True)
class BatchTrial:
    """What a size has brought."""

    batch: int
    """Sequences of a rank in a micro-step."""
    verdict: str = FITS
    rate: float = 0.0
    """Sequences per second of all ranks; 0 if they could not be measured."""
    error: float = 0.0
    """Standard error of the rate, as a share of it."""
    step_seconds: float = 0.0
    steps: int = 0
    """Steps that it took, those that do not count among them."""
    unit: str = "step"
    """`step` or `batch`: what was counted."""
    memory_kib: int = 0
    """The most memory of all ranks and their workers; 0 if unknown."""
    gpu_kib: int = 0
    """The most memory of the fullest GPU, by PyTorch and all else; 0 without a GPU."""
    gpu_total_kib: int = 0
    loader_batch: int = 0
    """Samples of the DataLoader's batches; 0 if unknown."""
    reason: str = ""
    """Why it does not fit, or has failed, or could not be timed."""


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """What a search keeps to."""

    start: int
    max_batch: int
    memory_kib: int
    """Memory of the machine that the ranks may use; 0 if unknown."""
    seconds: float
    """Seconds of measuring for each size."""
    timeout: float
    """Seconds that a run may take."""


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """What a search has found."""

    largest: int
    """The largest that fits, of those that were tried."""
    largest_safe: int | None
    """The largest that fits with MARGIN to spare; None if none is known to."""
    fastest: int | None
    """The smallest whose throughput is the best's within noise; None if none was measured."""
    batch: int
    """What to use: the fastest of those with a margin."""
    is_bounded: bool
    """A larger one was tried and does not fit."""
    why: str
    """Why none is larger."""


def choose_next_batch(trials: Sequence[BatchTrial], bounds: BatchBounds) -> int | None:
    """Return the size to try next; None if all is known that a few runs can tell."""
    fitting = list_fitting(trials)
    if not trials:
        return min(bounds.start, bounds.max_batch)
    if not fitting:
        return min(trial.batch for trial in trials) // 2 or None
    return choose_larger(trials, bounds) or choose_faster(trials) or choose_spare(trials, bounds)


def choose_larger(trials: Sequence[BatchTrial], bounds: BatchBounds) -> int | None:
    """Return a larger size than any that fits: twice as large, or the middle; None if there is none to try.

    If only one size is known, and its memory forbids a larger one, half of it tells how memory grows.
    """
    fitting = list_fitting(trials)
    largest, tried = fitting[-1].batch, {trial.batch for trial in trials}
    limit = find_ceiling(trials) or bounds.max_batch + 1
    for size in list_larger(largest):
        if size < limit and not refuse_batch(trials, size, bounds):
            return size
    lone = len(fitting) == 1 and largest > 1 and largest // 2 not in tried
    return largest // 2 if lone and lacks_memory(trials, 2 * largest, bounds) else None


def list_larger(batch: int) -> Iterator[int]:
    """Give what may come after a size that fits: twice as much, the middle, and after a middle its double."""
    yield 2 * batch
    if batch % 2 == 0:
        yield batch + batch // 2
    if batch % 3 == 0:
        yield batch + batch // 3


def choose_spare(trials: Sequence[BatchTrial], bounds: BatchBounds) -> int | None:
    """Return three quarters of the largest size, if that has no memory to spare, and none is near it."""
    *smaller, largest = list_fitting(trials)
    is_close = any(3 * trial.batch >= 2 * largest.batch for trial in smaller)
    if largest.batch % 4 or is_close or has_margin(largest, trials, bounds):
        return None
    size = largest.batch - largest.batch // 4
    return None if any(trial.batch == size for trial in trials) else size


def choose_faster(trials: Sequence[BatchTrial]) -> int | None:
    """Return a size that may be faster than the best, or smaller and as fast; None if there is none."""
    timed = [trial for trial in list_fitting(trials) if trial.rate]
    tried = {trial.batch for trial in trials}
    if not timed:
        return None
    best = max(timed, key=lambda trial: trial.rate)
    fastest = find_fastest(timed)
    if fastest is timed[0] and fastest.batch > 1 and fastest.batch // 2 not in tried:
        return fastest.batch // 2
    middle = best.batch + best.batch // 2
    if best.batch % 2 or middle in tried or bound_between(timed, best, middle) <= WORTH * best.rate:
        return None
    return middle


def bound_between(timed: Sequence[BatchTrial], best: BatchTrial, batch: int) -> float:
    """Return what throughput a size between the best and the next larger one can have, if it is concave.

    That is the line through the best and the one before it; 0 for a size that is not between two others.
    """
    before = [trial for trial in timed if trial.batch < best.batch]
    above = min((trial.batch for trial in timed if trial.batch > best.batch), default=0)
    if not before or batch >= above:
        return 0.0
    slope = (best.rate - before[-1].rate) / (best.batch - before[-1].batch)
    return best.rate + slope * (batch - best.batch)


def refuse_batch(trials: Sequence[BatchTrial], batch: int, bounds: BatchBounds) -> str:
    """Say why a larger size is not to be tried; empty if it may be."""
    largest = list_fitting(trials)[-1]
    if lacks_memory(trials, batch, bounds):
        need = format_size(predict_memory(trials, batch))
        return f"it would take about {need} of the {format_size(bounds.memory_kib)} that it may use here"
    step = largest.step_seconds * batch / largest.batch
    if ALL_STEPS * step > bounds.timeout:
        return f"its run would take more than tune.timeout={bounds.timeout:g} s"
    if STEPS * step > bounds.seconds and not is_gaining(trials):
        return f"no more throughput, and steps of about {describe_time(step)}"
    return ""


def lacks_memory(trials: Sequence[BatchTrial], batch: int, bounds: BatchBounds) -> bool:
    """Tell whether a size would take more memory of the machine than the ranks may use."""
    return 0 < bounds.memory_kib < predict_memory(trials, batch)


def is_gaining(trials: Sequence[BatchTrial]) -> bool:
    """Tell whether the largest size is faster than each that is at most half of it."""
    fitting = list_fitting(trials)
    largest = fitting[-1]
    smaller = [trial.rate for trial in fitting if 2 * trial.batch <= largest.batch]
    return largest.rate > WORTH * max(smaller, default=0.0)


def predict_memory(trials: Sequence[BatchTrial], batch: int) -> int:
    """Return the KiB that a larger size takes, by the line through the two largest; 0 if nothing is known.

    A single trial is taken for proportional, which is the most that it can be.
    """
    known = [(trial.batch, trial.memory_kib) for trial in list_fitting(trials) if trial.memory_kib]
    return extend_line(known, batch)


def extend_line(points: Sequence[tuple[int, int]], at: int) -> int:
    """Return the value of the line through the last two of these points, in ascending order."""
    if not points:
        return 0
    x, y = points[-1]
    if len(points) == 1:
        return max(y, y * at // x)
    x_before, y_before = points[-2]
    return y + max(0, y - y_before) * (at - x) // (x - x_before)


def conclude_trials(trials: Sequence[BatchTrial], bounds: BatchBounds) -> BatchChoice | None:
    """Return what the trials say; None if no size fits."""
    fitting = list_fitting(trials)
    if not fitting:
        return None
    safe = [trial for trial in fitting if has_margin(trial, trials, bounds)]
    timed = [trial for trial in fitting if trial.rate]
    fastest = find_fastest(timed) if timed else None
    usable = [trial for trial in safe or fitting if trial.rate] or safe or fitting
    return BatchChoice(
        largest=fitting[-1].batch,
        largest_safe=safe[-1].batch if safe else None,
        fastest=fastest.batch if fastest else None,
        batch=find_fastest(usable).batch if fastest else usable[-1].batch,
        is_bounded=any(trial.verdict == TOO_LARGE for trial in trials),
        why=explain_largest(trials, bounds),
    )


def explain_largest(trials: Sequence[BatchTrial], bounds: BatchBounds) -> str:
    """Say why no larger size than the largest is known to fit."""
    largest = list_fitting(trials)[-1].batch
    above = min((trial for trial in trials if trial.batch > largest), key=by_size, default=None)
    if above:
        how = "does not fit" if above.verdict == TOO_LARGE else "fails, not for memory"
        return f"{above.batch} {how}: {above.reason}"
    sizes = [size for size in list_larger(largest) if size <= bounds.max_batch]
    if not sizes:
        return f"tune.max_batch={bounds.max_batch}"
    why = refuse_batch(trials, min(sizes), bounds)
    return f"{min(sizes)} was not tried: {why}" if why else "the search was ended"


def has_margin(trial: BatchTrial, trials: Sequence[BatchTrial], bounds: BatchBounds) -> bool:
    """Tell whether a size that fits would still fit if it took MARGIN more memory.

    It would if another one that fits took as much. Else the device's memory counts, unless a size that
    should have fitted there did not: then another limit holds, which nobody knows.
    """
    used, needed = measure_use(trial), (1 + MARGIN) * measure_use(trial)
    if not used:
        return False
    if any(measure_use(other) >= needed for other in list_fitting(trials)):
        return True
    capacity = trial.gpu_total_kib or bounds.memory_kib
    failed = min((other.batch for other in trials if other.verdict == TOO_LARGE), default=None)
    points = [(other.batch, measure_use(other)) for other in list_fitting(trials)]
    is_known = failed is None or extend_line(points, failed) >= (1 - MARGIN) * capacity
    return bool(capacity) and is_known and needed <= capacity


def measure_use(trial: BatchTrial) -> int:
    """Return the KiB that a trial took where memory is shortest: on the GPU if there is one."""
    return trial.gpu_kib if trial.gpu_total_kib else trial.memory_kib


def find_fastest(timed: Sequence[BatchTrial]) -> BatchTrial:
    """Return the smallest size whose throughput is the best's within noise, of one at least."""
    best = max(trial.rate for trial in timed)
    return min((trial for trial in timed if trial.rate >= AS_FAST * best), key=by_size)


def find_ceiling(trials: Sequence[BatchTrial]) -> int | None:
    """Return the smallest size that is too large, or fails, above one that fits."""
    largest = list_fitting(trials)[-1].batch
    return min((trial.batch for trial in trials if trial.batch > largest), default=None)


def list_fitting(trials: Sequence[BatchTrial]) -> list[BatchTrial]:
    """Return the trials that fit, in the order of their size."""
    return sorted((trial for trial in trials if trial.verdict == FITS), key=by_size)


def by_size(trial: BatchTrial) -> int:
    """Return a trial's size, to sort by."""
    return trial.batch
