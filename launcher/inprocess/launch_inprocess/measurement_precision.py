"""When steps have been measured often enough for their mean to be known."""

import math
from collections.abc import Sequence

WARMUP = 3
"""Steps that are slow for once: the first of everything, compilation, the workers' start."""
LEAST = 12
"""Measured steps at least."""
FEWEST_BLOCKS = 3
PRECISION = 0.015
"""Standard error of the mean, as a share of it, that is good enough."""
SHORT = 4
"""Steps that a block has at least; fewer say nothing of the noise."""


def choose_block(workers: int) -> int:
    """Return how many steps belong together: workers that start together deliver together."""
    return max(1, workers) * math.ceil(SHORT / max(1, workers))


def is_enough(times: Sequence[float], block: int, most: int, seconds: float) -> bool:
    """Tell whether the mean of these step times (s) is known, or enough has been spent on it.

    Steps count in whole blocks, unless `seconds` are over.
    """
    if len(times) >= 2 * SHORT and sum(times) >= seconds:
        return True
    if len(times) < LEAST or len(times) % block:
        return False
    if len(times) >= most:
        return True
    sums = [sum(times[at : at + block]) for at in range(0, len(times), block)]
    return len(sums) >= FEWEST_BLOCKS and find_error(sums) <= PRECISION


def find_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, as a share of it; infinite for a single value."""
    count, mean = len(values), sum(values) / len(values)
    if count < 2 or mean <= 0:
        return math.inf
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return math.sqrt(variance / count) / mean
