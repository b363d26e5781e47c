"""When ranks are looked at: limits by table."""

import pytest

from launcher.watch.progress_limit import (
    RankProgress,
    choose_limit,
    find_quantile,
    find_slow_step,
    find_stall_begin,
    list_stalled,
)


def rank(number: int, idle: float | None, step: int = 10, phase: str = "training") -> RankProgress:
    return RankProgress(number, phase, step, idle)


@pytest.mark.parametrize(
    ("durations", "expected"),
    [
        ((), 0.0),
        ((40.0,), 40.0),  # a program of steps of minutes
        ((40.0, 1.0, 1.0), 40.0),
        ((40.0, 1.0, 1.0, 1.0), 1.0),  # the first step compiles
        ((*[1.0] * 90, *[8.0] * 10), 8.0),  # uneven steps, as with gradient accumulation
        ((*[1.0] * 255, 60.0), 1.0),  # a checkpoint now and then
    ],
)
def test_slow_steps(durations: tuple[float, ...], expected: float) -> None:
    assert find_slow_step(durations) == expected


@pytest.mark.parametrize(
    ("setting", "slow", "longest", "expected"),
    [
        ("auto", 0.0, 0.0, 20.0),
        ("auto", 1.0, 0.0, 20.0),
        ("auto", 5.0, 0.0, 50.0),
        ("auto", 1.0, 60.0, 120.0),  # a pause that has passed is no news when it comes again
        (3, 5.0, 60.0, 3.0),
        (4.5, 0.0, 0.0, 4.5),
        (300, 0.0, 0.0, 20.0),  # sets when it is a hang, and no later notice
    ],
)
def test_limits(setting: object, slow: float, longest: float, expected: float) -> None:
    assert choose_limit(setting, slow, longest) == expected


@pytest.mark.parametrize(
    ("ranks", "stalled"),
    [
        ([rank(0, 5), rank(1, 5)], []),
        ([rank(0, 21), rank(1, 25)], [0, 1]),
        ([rank(0, 21), rank(1, 1)], [0]),  # a group of two goes on without the other
        ([rank(0, 21), rank(1, 21, phase="saving")], [0, 1]),
        ([rank(0, 21), rank(1, None, phase="unwatched")], [0]),
        ([rank(0, 99, phase="ended"), rank(1, None, phase="exited")], []),
        ([rank(0, 30, 0, "joining"), rank(1, 25, 0, "starting")], [0, 1]),
        ([rank(0, 1), rank(1, 900, 0, "starting")], []),  # a rank that makes no steps
        ([rank(0, 30), rank(1, 900, 0, "starting")], [0, 1]),
        ([], []),
    ],
)
def test_who_counts_as_stalled(ranks: list[RankProgress], stalled: list[int]) -> None:
    assert [one.rank for one in list_stalled(ranks, 20)] == stalled


def test_a_stall_begins_when_the_last_rank_stopped() -> None:
    assert find_stall_begin([rank(0, 30), rank(1, 21)], 100.0) == 79.0
    assert find_stall_begin([], 100.0) is None


def test_quantiles() -> None:
    assert find_quantile([], 0.5) is None
    assert find_quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert find_quantile([1.0, 2.0], 0.99) == 2.0
