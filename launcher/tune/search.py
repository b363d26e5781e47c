"""Which number of DataLoader workers to try next, and which is best.

Steps per second rise with the workers until something else is the limit, in proportion at most, and each
further worker brings no more than the one before it: throughput is concave. So what has been measured bounds
what has not been, and a number that cannot be better is not tried.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from launcher.tune.trials import Trial

GAIN = 1.02
"""Anything below is not worth a further trial, nor to be told from noise."""
DEAR_GAIN = 1.04
"""The same, once the search has become dear."""
NEAR = 0.985
"""Share of the best throughput from which fewer workers are as good."""
ERROR = 0.02
"""What a measured throughput may be off."""
LOADING = 0.15
"""How much faster a worker may load than the rank's own process does, which trains beside it."""
FIRST = 4
"""Workers of the first trial with any at most: without workers, a GPU's work is hidden behind the loading."""
WARMUP = 3
"""Steps that are not measured, with any number of workers."""
MOST_WAIT = 0.99
"""Share of waiting at most: without any computing there would be no limit to hope for."""


def choose_next(trials: Sequence[Trial], max_workers: int, thrift: float = math.inf) -> int | None:
    """Return the number of workers up to `max_workers` that tells most; None if it is clear which is best.

    If a further trial would come to more than `thrift` steps, it has to promise more, and none is made
    for the sake of fewer workers alone.
    """
    measured = sorted((trial for trial in trials if trial.rate), key=lambda trial: trial.value)
    if not measured:
        return None if trials else 0
    tried = {trial.value for trial in trials}
    best = max(trial.rate for trial in measured)
    is_dear = sum(trial.steps for trial in trials) + trials[-1].steps > thrift
    bounds = {count: bound_rate(measured, count) for count in range(1, max_workers + 1) if count not in tried}
    worth = best * (DEAR_GAIN if is_dear else GAIN)
    open_counts = [count for count, bound in bounds.items() if bound > worth]
    above = [count for count in open_counts if count > measured[-1].value]
    if above:
        return climb(measured[-1].value, above, bounds)
    if open_counts:
        return max(open_counts, key=lambda count: bounds[count])
    return None if is_dear else choose_fewer(measured, bounds, NEAR * best)


def climb(highest: int, above: Sequence[int], bounds: dict[int, float]) -> int:
    """Return the fewest workers that may reach what any may, at most twice as many as were tried."""
    hoped = NEAR * max(bounds[count] for count in above)
    aim = next(count for count in above if bounds[count] >= hoped)
    lowest, limit = highest + highest // 4, max(FIRST, 2 * highest)
    within = [count for count in above if lowest <= count <= limit]
    return min((count for count in within if count >= aim), default=max(within, default=above[0]))


def choose_fewer(measured: Sequence[Trial], bounds: dict[int, float], good: float) -> int | None:
    """Return a lower number of workers that may do as well; None if none may, or hardly lower ones."""
    fewest = next(trial.value for trial in measured if trial.rate >= good)
    below = max((trial.value for trial in measured if trial.value < fewest), default=fewest)
    fewer = [count for count, bound in bounds.items() if below < count < fewest and bound >= good]
    if not fewer or fewest - below <= max(1, fewest // 8):
        return None
    return fewer[0] if below == 0 else fewer[(len(fewer) - 1) // 2]


def choose_best(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the fewest workers whose throughput is the best's within noise; None without."""
    measured = [trial for trial in trials if trial.rate]
    best = max((trial.rate for trial in measured), default=0.0)
    good = (trial for trial in measured if trial.rate >= NEAR * best)
    return min(good, key=lambda trial: trial.value, default=None)


def bound_rate(measured: Sequence[Trial], count: int) -> float:
    """Return what steps per second a number of workers can have at most, by the trials with fewer."""
    fewer = [trial for trial in measured if trial.value < count]
    return min((math.inf, *bound_singly(fewer, count), *bound_by_pairs(fewer, count)))


def bound_singly(fewer: Sequence[Trial], count: int) -> Iterator[float]:
    """Bounds by each trial: as much again from each worker; and by the last, nothing to wait for any more.

    Computing is no faster beside more workers: if it has been, something else slowed the earlier trial.
    """
    for trial in fewer[-1:]:
        yield trial.rate / (1 - min(trial.wait, MOST_WAIT))
    for trial in fewer:
        if trial.value:
            yield trial.rate * (1 + ERROR) * count / trial.value
        elif trial.wait:
            yield count * (1 + LOADING) * trial.rate / trial.wait


def bound_by_pairs(fewer: Sequence[Trial], count: int) -> Iterator[float]:
    """Bounds by two trials next to each other: the line through them, as steep as noise allows."""
    with_workers = [trial for trial in fewer if trial.value]
    for low, high in pairwise(with_workers):
        rise = high.rate * (1 + ERROR) - low.rate * (1 - ERROR)
        slope = rise / (high.value - low.value)
        yield high.rate * (1 + ERROR) + slope * (count - high.value)


def price_all(max_workers: int, steps: int) -> int:
    """Return the steps of a search that tries 0 to `max_workers` workers, each for so many measured steps.

    Before them are those that use up what was prefetched, two batches for each worker (torch's default).
    """
    return sum(steps + WARMUP + 2 * count for count in range(max_workers + 1))
