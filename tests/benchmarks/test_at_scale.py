"""The simulation of many ranks, against what can be said without one."""

import numpy as np
import pytest

from tests.benchmarks.at_scale import Measured, draw_bar, simulate_stalls

SPIKES = np.where(np.arange(600) % 50 == 20, 30.0, 0.0)
"""A rank that takes 30 ms in every fiftieth step."""


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_unsynchronised_ranks_wait_for_the_largest_of_independent_draws(ranks: int) -> None:
    """The expectation of the largest of n draws from the values of a series has a closed form."""
    values = np.random.default_rng(1).exponential(10, 2000)
    shares = (np.arange(values.size + 1) / values.size) ** ranks
    expected = float(np.sort(values) @ np.diff(shares))
    found = simulate_stalls(Measured([values, np.roll(values, 7)], 1), ranks)
    assert found.mean() == pytest.approx(expected, rel=0.05)


def test_ranks_in_step_wait_as_one_does() -> None:
    """However many they are: they collect at the same steps."""
    for ranks in (1, 500):
        stalls = simulate_stalls(Measured([SPIKES], 50), ranks)
        assert stalls.mean() == pytest.approx(30 / 50)


def test_ranks_out_of_step_wait_at_every_step_once_there_are_enough() -> None:
    """One rank in fifty collects in each step."""
    measured = Measured([SPIKES], 1)
    assert simulate_stalls(measured, 1).mean() == pytest.approx(30 / 50)
    assert simulate_stalls(measured, 16).mean() == pytest.approx(30 * (1 - (49 / 50) ** 16), rel=0.15)
    assert simulate_stalls(measured, 2000).mean() == pytest.approx(30)


def test_in_step_the_slowest_rank_counts() -> None:
    slow, quick = SPIKES * 2, SPIKES / 2
    assert simulate_stalls(Measured([slow, quick], 50), 300).mean() == pytest.approx(60 / 50)


def test_bars_show_the_step_and_the_wait() -> None:
    assert draw_bar(10, 20, 40) == "." * 10 + "#" * 10
