"""Which micro-batch to try next, and what the trials say: the largest that fits, and the fastest.

The size is doubled until it does not fit, then the middle of the last two is tried. Memory grows with the
size along a line, so that two trials tell what a third one needs; what the machine may not have is not tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.text import describe_time, format_size
from launcher.tune.trials import FITS, TOO_LARGE, Trial

FIRST_BATCH = 8
"""Size of the first trial if nothing else is known."""
MARGIN = 0.05
"""Share of the memory to spare, since fragmentation grows in a long run."""
WORTH = 1.02
"""Gain in throughput below which long steps are not tried for it."""
AS_FAST = 0.985
"""Share of the best throughput from which a smaller size is as good."""
STEPS, ALL_STEPS = 8, 11
"""Steps of which a trial's measured part has to consist at least, and those with the ones before."""


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
    """What a search has found; all is unknown if no size fits."""

    batch: int | None = None
    """What to use: the fastest of those with a margin."""
    largest: int | None = None
    """The largest that fits, of those that were tried."""
    largest_with_margin: int | None = None
    """The largest that fits with MARGIN to spare; None if none is known to."""
    fastest: int | None = None
    """The smallest whose throughput is the best's within noise; None if none was measured."""
    largest_is_limit: bool = False
    """A larger one was tried and does not fit."""
    limit: str | None = None
    """Why none is larger."""


def choose_next_batch(trials: Sequence[Trial], bounds: BatchBounds) -> int | None:
    """Return the size to try next; None if all is known that a few runs can tell.

    If only one size is known, and its memory forbids a larger one, half of it tells how memory grows. Three
    quarters of the largest are tried if that has no memory to spare.
    """
    fitting = _list_fitting(trials)
    tried = {trial.value for trial in trials}
    if not trials:
        return min(bounds.start, bounds.max_batch)
    if not fitting:
        return min(tried) // 2 or None
    largest = fitting[-1].value
    limit = min((size for size in tried if size > largest), default=bounds.max_batch + 1)
    for size in _list_larger(largest):
        if size < limit and not _refuse(size, fitting, bounds):
            return size
    is_lone = len(fitting) == 1 and largest > 1 and largest // 2 not in tried
    if is_lone and 0 < bounds.memory_kib < _extend(fitting, 2 * largest):
        return largest // 2
    near = any(2 * largest <= 3 * size for size in tried if size < largest)
    if largest % 4 or near or _has_margin(fitting[-1], trials, bounds):
        return None
    return largest - largest // 4


def conclude_batches(trials: Sequence[Trial], bounds: BatchBounds) -> BatchChoice:
    """Return what the trials say."""
    fitting = _list_fitting(trials)
    if not fitting:
        return BatchChoice()
    timed = [trial for trial in fitting if trial.rate]
    safe = [trial for trial in fitting if _has_margin(trial, trials, bounds)]
    usable = [trial for trial in safe or fitting if trial.rate]
    largest = fitting[-1].value
    above = min((trial for trial in trials if trial.value > largest), key=_by_size, default=None)
    next_size = min((size for size in _list_larger(largest) if size <= bounds.max_batch), default=None)
    if above:
        how = "does not fit" if above.verdict == TOO_LARGE else "fails, not for memory"
        limit = f"{above.value} {how}: {above.reason}"
    elif next_size is None:
        limit = f"tune.max_batch={bounds.max_batch}"
    else:
        why = _refuse(next_size, fitting, bounds)
        limit = f"{next_size} was not tried: {why}" if why else "the search was ended"
    return BatchChoice(
        batch=_find_fastest(usable) if usable else (safe or fitting)[-1].value,
        largest=largest,
        largest_with_margin=safe[-1].value if safe else None,
        fastest=_find_fastest(timed) if timed else None,
        largest_is_limit=any(trial.verdict == TOO_LARGE for trial in trials),
        limit=limit,
    )


def _list_fitting(trials: Sequence[Trial]) -> list[Trial]:
    return sorted((trial for trial in trials if trial.verdict == FITS), key=_by_size)


def _by_size(trial: Trial) -> int:
    return trial.value


def _list_larger(batch: int) -> list[int]:
    """Return what may come after a size that fits: twice as much, the middle, after a middle its double."""
    middles = [batch // part for part in (2, 3) if batch % part == 0]
    return [2 * batch, *(batch + more for more in middles)]


def _refuse(batch: int, fitting: Sequence[Trial], bounds: BatchBounds) -> str:
    """Say why a larger size than any that fits is not to be tried; empty if it may be."""
    need = _extend(fitting, batch)
    if 0 < bounds.memory_kib < need:
        most = format_size(bounds.memory_kib)
        return f"it would take about {format_size(need)} of the {most} that it may use here"
    largest = fitting[-1]
    step = largest.step_seconds * batch / largest.value
    if ALL_STEPS * step > bounds.timeout:
        return f"its run would take more than tune.timeout={bounds.timeout:g} s"
    halves = [trial.rate for trial in fitting if 2 * trial.value <= largest.value]
    if STEPS * step > bounds.seconds and largest.rate <= WORTH * max(halves, default=0.0):
        return f"no more throughput, and steps of about {describe_time(step)}"
    return ""


def _extend(fitting: Sequence[Trial], batch: int, *, on_gpu: bool = False) -> int:
    """Return the KiB that a size takes, by the line through the two largest that fit; 0 if unknown.

    It is the machine's memory, or with `on_gpu` that of the GPU if there is one.
    A single trial is taken for proportional, which is the most that it can be.
    """
    uses = [(trial.value, trial.use_kib if on_gpu else trial.memory_kib) for trial in fitting]
    points = [(size, kib) for size, kib in uses if kib]
    if not points:
        return 0
    x, y = points[-1]
    if len(points) == 1:
        return max(y, y * batch // x)
    x_before, y_before = points[-2]
    return y + max(0, y - y_before) * (batch - x) // (x - x_before)


def _has_margin(trial: Trial, trials: Sequence[Trial], bounds: BatchBounds) -> bool:
    """Tell whether a size that fits would still fit if it took MARGIN more memory.

    It would if another one that fits took as much. Else the device's memory counts, unless a size that
    should have fitted there did not: then another limit holds, which nobody knows.
    """
    fitting = _list_fitting(trials)
    needed = (1 + MARGIN) * trial.use_kib
    if any(other.use_kib >= needed for other in fitting):
        return trial.use_kib > 0
    capacity = trial.gpu_total_kib or bounds.memory_kib
    failed = min((other.value for other in trials if other.verdict == TOO_LARGE), default=None)
    is_known = failed is None or _extend(fitting, failed, on_gpu=True) >= (1 - MARGIN) * capacity
    return is_known and 0 < needed <= capacity


def _find_fastest(timed: Sequence[Trial]) -> int:
    """Return the smallest size whose throughput is the best's within noise."""
    best = max(trial.rate for trial in timed)
    return min(trial.value for trial in timed if trial.rate >= AS_FAST * best)
