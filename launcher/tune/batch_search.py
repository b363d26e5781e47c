"""Which micro-batch to try next, and what the trials say: the largest that fits, and the fastest.

The size is doubled until it does not fit, then the middle of the last two is tried. Memory grows with the
size along a line, so that two trials tell what a third one needs; what the machine may not have is not tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.text import describe_time, format_size
from launcher.tune.trials import FITS, TOO_LARGE, Trial

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


class BatchSearch:
    """A search after some trials."""

    def __init__(self, trials: Sequence[Trial], bounds: BatchBounds) -> None:
        self.trials = trials
        self.bounds = bounds
        self.tried = {trial.value for trial in trials}
        self.fitting = sorted((trial for trial in trials if trial.verdict == FITS), key=_by_size)
        """Those that fit, in the order of their size."""
        self.timed = [trial for trial in self.fitting if trial.rate]

    def next(self) -> int | None:
        """Return the size to try next; None if all is known that a few runs can tell."""
        if not self.trials:
            return min(self.bounds.start, self.bounds.max_batch)
        if not self.fitting:
            return min(self.tried) // 2 or None
        return self._larger() or self._faster() or self._spare()

    def conclude(self) -> BatchChoice:
        """Return what the trials say."""
        if not self.fitting:
            return BatchChoice()
        safe = [trial for trial in self.fitting if self._has_margin(trial)]
        usable = [trial for trial in safe or self.fitting if trial.rate] or safe or self.fitting
        return BatchChoice(
            batch=_find_fastest(usable).value if self.timed else usable[-1].value,
            largest=self.fitting[-1].value,
            largest_with_margin=safe[-1].value if safe else None,
            fastest=_find_fastest(self.timed).value if self.timed else None,
            largest_is_limit=any(trial.verdict == TOO_LARGE for trial in self.trials),
            limit=self._explain_largest(),
        )

    def refuse(self, batch: int) -> str:
        """Say why a larger size than any that fits is not to be tried; empty if it may be."""
        largest, bounds = self.fitting[-1], self.bounds
        if self._lacks_memory(batch):
            need = format_size(self.predict_memory(batch))
            return f"it would take about {need} of the {format_size(bounds.memory_kib)} that it may use here"
        step = largest.step_seconds * batch / largest.value
        if ALL_STEPS * step > bounds.timeout:
            return f"its run would take more than tune.timeout={bounds.timeout:g} s"
        halves = [trial.rate for trial in self.fitting if 2 * trial.value <= largest.value]
        is_gaining = largest.rate > WORTH * max(halves, default=0.0)
        if STEPS * step > bounds.seconds and not is_gaining:
            return f"no more throughput, and steps of about {describe_time(step)}"
        return ""

    def predict_memory(self, batch: int) -> int:
        """Return the KiB that a larger size takes, by the line through the two largest; 0 if unknown.

        A single trial is taken for proportional, which is the most that it can be.
        """
        known = [(trial.value, trial.memory_kib) for trial in self.fitting if trial.memory_kib]
        return _extend_line(known, batch)

    def _larger(self) -> int | None:
        """Return a larger size than any that fits: twice as large, or the middle; None if there is none.

        If only one size is known, and its memory forbids a larger one, half of it tells how memory grows.
        """
        largest = self.fitting[-1].value
        limit = min((size for size in self.tried if size > largest), default=self.bounds.max_batch + 1)
        for size in _list_larger(largest):
            if size < limit and not self.refuse(size):
                return size
        is_lone = len(self.fitting) == 1 and largest > 1 and largest // 2 not in self.tried
        return largest // 2 if is_lone and self._lacks_memory(2 * largest) else None

    def _faster(self) -> int | None:
        """Return a size that may be faster than the best, or smaller and as fast; None if there is none."""
        if not self.timed:
            return None
        best, fastest = max(self.timed, key=lambda trial: trial.rate), _find_fastest(self.timed)
        if fastest is self.timed[0] and fastest.value > 1 and fastest.value // 2 not in self.tried:
            return fastest.value // 2
        middle = best.value + best.value // 2
        smaller = [trial for trial in self.timed if trial.value < best.value]
        above = min((trial.value for trial in self.timed if trial.value > best.value), default=0)
        if best.value % 2 or middle in self.tried or not smaller or middle >= above:
            return None
        # Throughput is concave: it is below the line through the best and the one before it.
        slope = (best.rate - smaller[-1].rate) / (best.value - smaller[-1].value)
        bound = best.rate + slope * (middle - best.value)
        return middle if bound > WORTH * best.rate else None

    def _spare(self) -> int | None:
        """Return three quarters of the largest size, if that has no memory to spare, and none is near it."""
        *smaller, largest = self.fitting
        is_close = any(3 * trial.value >= 2 * largest.value for trial in smaller)
        if largest.value % 4 or is_close or self._has_margin(largest):
            return None
        size = largest.value - largest.value // 4
        return None if size in self.tried else size

    def _lacks_memory(self, batch: int) -> bool:
        """Tell whether a size would take more memory of the machine than the ranks may use."""
        return 0 < self.bounds.memory_kib < self.predict_memory(batch)

    def _has_margin(self, trial: Trial) -> bool:
        """Tell whether a size that fits would still fit if it took MARGIN more memory.

        It would if another one that fits took as much. Else the device's memory counts, unless a size that
        should have fitted there did not: then another limit holds, which nobody knows.
        """
        needed = (1 + MARGIN) * trial.use_kib
        if not trial.use_kib:
            return False
        if any(other.use_kib >= needed for other in self.fitting):
            return True
        capacity = trial.gpu_total_kib or self.bounds.memory_kib
        failed = min((other.value for other in self.trials if other.verdict == TOO_LARGE), default=None)
        points = [(other.value, other.use_kib) for other in self.fitting]
        is_known = failed is None or _extend_line(points, failed) >= (1 - MARGIN) * capacity
        return bool(capacity) and is_known and needed <= capacity

    def _explain_largest(self) -> str:
        """Say why no larger size than the largest is known to fit."""
        largest = self.fitting[-1].value
        above = min((trial for trial in self.trials if trial.value > largest), key=_by_size, default=None)
        if above:
            how = "does not fit" if above.verdict == TOO_LARGE else "fails, not for memory"
            return f"{above.value} {how}: {above.reason}"
        sizes = [size for size in _list_larger(largest) if size <= self.bounds.max_batch]
        if not sizes:
            return f"tune.max_batch={self.bounds.max_batch}"
        why = self.refuse(min(sizes))
        return f"{min(sizes)} was not tried: {why}" if why else "the search was ended"


def _list_larger(batch: int) -> Iterator[int]:
    """Give what may come after a size that fits: twice as much, the middle, and after a middle its double."""
    yield 2 * batch
    if batch % 2 == 0:
        yield batch + batch // 2
    if batch % 3 == 0:
        yield batch + batch // 3


def _extend_line(points: Sequence[tuple[int, int]], at: int) -> int:
    """Return the value of the line through the last two of these points, in ascending order."""
    if not points:
        return 0
    x, y = points[-1]
    if len(points) == 1:
        return max(y, y * at // x)
    x_before, y_before = points[-2]
    return y + max(0, y - y_before) * (at - x) // (x - x_before)


def _find_fastest(timed: Sequence[Trial]) -> Trial:
    """Return the smallest size whose throughput is the best's within noise, of one at least."""
    best = max(trial.rate for trial in timed)
    return min((trial for trial in timed if trial.rate >= AS_FAST * best), key=_by_size)


def _by_size(trial: Trial) -> int:
    return trial.value
