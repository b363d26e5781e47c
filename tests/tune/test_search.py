"""The search for the number of workers, over made-up programs."""

import statistics

import pytest

from launcher.inprocess.launch_inprocess.measurements import choose_block, find_error, is_enough
from launcher.tune.search import bound_rate, choose_best, choose_next, price_all
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


def test_the_first_trial_is_without_workers_and_ends_it_where_nothing_waits() -> None:
    assert choose_next([], 8) == 0
    assert choose_next([Trial(0, 10, 0.0, 15)], 8) is None
    assert choose_next([Trial(0, 10, 0.01, 15)], 8) is None
    assert choose_next([Trial(0, 10, 0.5, 15)], 8) is not None


def test_the_book_s_program_needs_two_trials() -> None:
    """100 samples of 5 ms, 0.2 s of computing: 3 workers (ml-engineering book)."""
    first = Trial(0, 1 / 0.7, 0.5 / 0.7, 15)
    assert choose_next([first], 8) == 3
    assert choose_next([first, Trial(3, 5, 0.0, 20)], 8) is None
    assert choose_best([first, Trial(3, 5, 0.0, 20)]) == Trial(3, 5, 0.0, 20)


def test_fewer_workers_win_within_noise() -> None:
    trials = [Trial(8, 10.0), Trial(4, 9.9), Trial(2, 9.0)]
    chosen = choose_best(trials)
    assert chosen is not None and chosen.value == 4


def test_a_failed_number_is_not_tried_again_nor_chosen() -> None:
    trials = [Trial(0, 1, 0.9), Trial(4, reason="no room")]
    assert choose_next(trials, 3) in (1, 2, 3)
    assert choose_best(trials) == trials[0]
    assert choose_best([Trial(0, reason="x")]) is None
    assert choose_next([Trial(0, reason="x")], 3) is None


def test_a_peak_between_two_trials_is_looked_for() -> None:
    """As fast with 8 as with 4: up to 6 may be faster than both."""
    trials = [Trial(0, 1, 0.8), Trial(2, 2, 0.6), Trial(4, 4, 0.5), Trial(8, 4, 0.5)]
    found = choose_next(trials, 8)
    assert found in (5, 6, 7)


def test_without_steps_left_fewer_workers_are_not_looked_for() -> None:
    trials = [Trial(0, 1, 0.9, 15), Trial(4, 4, 0.2, 20), Trial(8, 5, 0.0, 30)]
    assert choose_next(trials, 8, 100) in (5, 6, 7)
    assert choose_next(trials, 8, 90) is None


def test_bounds_are_those_of_a_concave_throughput() -> None:
    trials = [Trial(0, 1, 0.5), Trial(2, 3, 0.5)]
    assert bound_rate(trials[:1], 4) == 2  # nothing to wait for
    assert bound_rate([Trial(0, 1, 0.9)], 1) == pytest.approx(1.15 / 0.9)  # a worker loads as fast
    assert bound_rate(trials[1:], 3) == pytest.approx(3 * 1.02 * 3 / 2)  # each worker as much again


def test_a_slowed_first_trial_does_not_end_the_search() -> None:
    """Something else on the machine has slowed computing in the first trial; one worker is waited for."""
    trials = [Trial(0, 13.1, 0.48, 51), Trial(1, 29.9, 0.97, 51)]
    assert choose_next(trials, 3) in (2, 3)


def test_the_price_of_trying_all() -> None:
    assert price_all(0, 48) == 51
    assert price_all(2, 48) == 51 + 53 + 55


def test_even_steps_are_enough_soon_and_uneven_ones_late() -> None:
    even, uneven = [0.1] * 60, [0.1, 0.1, 0.1, 0.4, 0.1] * 12
    assert find_enough(even, 1) == 12
    assert find_enough(uneven, 1) == 48
    assert find_enough(even, 16) == 48
    assert find_enough(uneven, 4, seconds=1) == 8


def find_enough(times: list[float], workers: int, seconds: float = 99) -> int:
    block = choose_block(workers)
    return next(count for count in range(1, 61) if is_enough(times[:count], block, 48, seconds))


@pytest.mark.parametrize(("workers", "block"), [(0, 4), (1, 4), (2, 4), (3, 6), (4, 4), (5, 5), (16, 16)])
def test_a_block_is_whole_rounds_of_the_workers(workers: int, block: int) -> None:
    assert choose_block(workers) == block


def test_bursts_of_workers_are_no_noise() -> None:
    """Four workers that deliver together: a long step, three short ones, again and again."""
    bursts = [0.37, 0.01, 0.01, 0.01] * 12
    assert is_enough(bursts[:12], choose_block(4), 48, 99)
    assert find_error(bursts[:12]) > 0.3
    assert not is_enough(bursts[:13], choose_block(4), 48, 99)
