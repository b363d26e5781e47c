"""The search for the number of workers, over made-up programs."""

import math
import statistics

import pytest

from launcher.inprocess.launch_inprocess.measurements import choose_block, find_error, is_enough
from launcher.tune.search import bound_rate, choose_best, choose_next
from launcher.tune.trials import Trial
from tests.tune.curves import simulate

PROGRAMS = 250


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("most", [4, 8, 16, 28, 64])
def test_the_choice_is_near_the_best_for_half_the_steps(most: int, noise: float) -> None:
    done = [simulate(seed, most, noise) for seed in range(PROGRAMS)]
    far = [search for search in done if search.quality < 0.95]
    assert len(far) <= 0.04 * PROGRAMS, far
    assert min(search.quality for search in done) > 0.9
    dear = [search for search in done if search.cost > 0.5]
    assert len(dear) <= (0 if noise <= 0.05 else 0.15) * PROGRAMS, dear
    assert statistics.median(search.cost for search in done) <= 0.3
    assert all(len(set(search.tried)) == len(search.tried) for search in done)


BOOK = Trial(0, 1 / 0.7, 0.5 / 0.7, 15)
"""100 samples of 5 ms, 0.2 s of computing: 3 workers (ml-engineering book)."""
PEAK = [Trial(0, 1, 0.8), Trial(2, 2, 0.6), Trial(4, 4, 0.5), Trial(8, 4, 0.5)]
DEAR = [Trial(0, 1, 0.9, 15), Trial(4, 4, 0.2, 20), Trial(8, 5, 0.0, 30)]


@pytest.mark.parametrize(
    ("trials", "most", "thrift", "following"),
    [
        ([], 8, math.inf, [0]),
        ([Trial(0, 10, 0.0, 15)], 8, math.inf, [None]),
        ([Trial(0, 10, 0.01, 15)], 8, math.inf, [None]),
        ([Trial(0, 10, 0.5, 15)], 8, math.inf, [1, 2, 3, 4]),
        ([BOOK], 8, math.inf, [3]),
        ([BOOK, Trial(3, 5, 0.0, 20)], 8, math.inf, [None]),
        ([Trial(0, 1, 0.9), Trial(4, reason="no room")], 3, math.inf, [1, 2, 3]),
        ([Trial(0, reason="x")], 3, math.inf, [None]),
        # As fast with 8 as with 4: up to 6 may be faster than both.
        (PEAK, 8, math.inf, [5, 6, 7]),
        # Without steps left, fewer workers are not looked for.
        (DEAR, 8, 100, [5, 6, 7]),
        (DEAR, 8, 90, [None]),
        # Something else has slowed computing in the first trial; one worker is waited for.
        ([Trial(0, 13.1, 0.48, 51), Trial(1, 29.9, 0.97, 51)], 3, math.inf, [2, 3]),
    ],
)
def test_what_is_tried_next(
    trials: list[Trial], most: int, thrift: float, following: list[int | None]
) -> None:
    assert choose_next(trials, most, thrift) in following


def test_the_fewest_that_are_as_fast_are_best() -> None:
    assert choose_best([BOOK, Trial(3, 5, 0.0, 20)]) == Trial(3, 5, 0.0, 20)
    assert choose_best([Trial(8, 10.0), Trial(4, 9.9), Trial(2, 9.0)]) == Trial(4, 9.9)
    assert choose_best([Trial(0, 1, 0.9), Trial(4, reason="no room")]) == Trial(0, 1, 0.9)
    assert choose_best([Trial(0, reason="x")]) is None


def test_bounds_are_those_of_a_concave_throughput() -> None:
    trials = [Trial(0, 1, 0.5), Trial(2, 3, 0.5)]
    assert bound_rate(trials[:1], 4) == 2  # nothing to wait for
    assert bound_rate([Trial(0, 1, 0.9)], 1) == pytest.approx(1.15 / 0.9)  # a worker loads as fast
    assert bound_rate(trials[1:], 3) == pytest.approx(3 * 1.02 * 3 / 2)  # each worker as much again


def test_even_steps_are_enough_soon_and_uneven_ones_late() -> None:
    even, uneven = [0.1] * 60, [0.1, 0.1, 0.1, 0.4, 0.1] * 12
    assert find_enough(even, 1) == 12
    assert find_enough(uneven, 1) == 48
    assert find_enough(even, 16) == 48
    assert find_enough(uneven, 4, seconds=1) == 8
    assert [choose_block(workers) for workers in (0, 1, 2, 3, 4, 5, 16)] == [4, 4, 4, 6, 4, 5, 16]


def find_enough(times: list[float], workers: int, seconds: float = 99) -> int:
    block = choose_block(workers)
    return next(count for count in range(1, 61) if is_enough(times[:count], block, 48, seconds))


def test_bursts_of_workers_are_no_noise() -> None:
    """Four workers that deliver together: a long step, three short ones, again and again."""
    bursts = [0.37, 0.01, 0.01, 0.01] * 12
    assert is_enough(bursts[:12], choose_block(4), 48, 99)
    assert find_error(bursts[:12]) > 0.3
    assert not is_enough(bursts[:13], choose_block(4), 48, 99)
