"""Reports over time as numbers: bins, spreads, and where time goes; and what happened, when."""

import os
from pathlib import Path

import pytest

from launcher.report.run_account import read_account
from launcher.report.run_events import find_step_time
from launcher.report.time_series import (
    ACTIVITIES,
    MOST_BINS,
    Bins,
    bin_values,
    choose_bins,
    find_percentiles,
    find_rank_spread,
    order_slowest,
    share_time,
)
from launcher.watch.watch_model import NodeReport, RankState
from tests.cli.make_runs import make_run, write_log
from tests.report.made_up_run import BEGIN, make_full_run


def make_sample(time: float, *states: RankState, host: str = "n0", interval: float = 10.0) -> NodeReport:
    return NodeReport(host, 0, 1, 0, time, 1, interval, states)


def make_rank(rank: int = 0, phase: str = "training", **values: object) -> RankState:
    return RankState(rank, 0, 1, 0, phase, 5, 0.1, **values)  # type: ignore[arg-type]  # by their names


def test_a_bin_holds_the_mean_of_its_values() -> None:
    samples = [
        make_sample(time, make_rank(p50=value)) for time, value in ((101, 1.0), (104, 3.0), (119, 5.0))
    ]
    bins = Bins(100.0, 10.0, 2)
    assert bin_values(samples, bins, lambda state: state.p50) == {0: {0: 2.0, 1: 5.0}}
    assert bins.list_centers() == [5.0, 15.0]


@pytest.mark.parametrize(
    ("time", "found"), [(99.9, None), (100.0, 0), (109.9, 0), (110.0, 1), (120.0, 1), (130.1, None)]
)
def test_a_time_is_in_one_bin(time: float, found: int | None) -> None:
    assert Bins(100.0, 10.0, 2).find(time) == found


@pytest.mark.parametrize("value", [None, -1.0, 1e300])
def test_what_cannot_be_drawn_is_left_out(value: float | None) -> None:
    assert bin_values([make_sample(5.0, make_rank(p50=value))], Bins(0.0, 10.0, 1), lambda one: one.p50) == {}


def test_bins_are_as_fine_as_reports() -> None:
    samples = [make_sample(BEGIN + 30 * at, make_rank()) for at in range(20)]
    assert choose_bins(samples, BEGIN, BEGIN + 600).count == 20
    assert choose_bins(samples, BEGIN, BEGIN + 60).count == 2
    assert choose_bins((), BEGIN, BEGIN).count == 1
    dense = [make_sample(BEGIN + at, make_rank()) for at in range(6000)]
    assert choose_bins(dense, BEGIN, BEGIN + 6000).count == MOST_BINS


def test_nodes_that_report_at_other_times_make_finer_bins() -> None:
    """Of 40 nodes with 10 reports each, one every 100 s, at times of their own."""
    samples = [
        make_sample(BEGIN + 100 * at + 2.5 * node, make_rank(node), host=f"n{node}")
        for node in range(40)
        for at in range(10)
    ]
    assert choose_bins(samples, BEGIN, BEGIN + 1000).count == 160
    same = [
        make_sample(BEGIN + 100 * at + 1, make_rank(), host=f"n{n}") for n in range(40) for at in range(10)
    ]
    assert choose_bins(same, BEGIN, BEGIN + 1000).count == 10


def test_percentiles() -> None:
    assert find_percentiles([]) == (None, None, None)
    assert find_percentiles([7.0]) == (7.0, 7.0, 7.0)
    assert find_percentiles([float(number) for number in range(101)]) == (5.0, 50.0, 95.0)
    spread = find_rank_spread({0: {0: 1.0}, 1: {0: 3.0}, 2: {0: 2.0}}, 2)
    assert (spread.low, spread.middle, spread.high) == ((1.0, None), (2.0, None), (3.0, None))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (make_rank(wait_share=0.2, data_share=0.1), {"compute": 7.0, "waiting for others": 2.0, "data": 1.0}),
        (make_rank(wait_share=0.9, data_share=0.5), {"waiting for others": 9.0, "data": 1.0}),
        (make_rank(wait_share=-4.0, data_share=1e9), {"data": 10.0}),
        (make_rank(phase="loading"), {"data": 10.0}),
        (make_rank(phase="saving", wait_share=0.5), {"saving": 10.0}),
        (make_rank(phase="evaluating"), {"evaluating": 10.0}),
        (make_rank(phase="compiling"), {"starting": 10.0}),
        (make_rank(phase="joining"), {"starting": 10.0}),
        (make_rank(phase="exited"), {}),
    ],
    ids=str,
)
def test_where_ten_seconds_go(state: RankState, expected: dict[str, float]) -> None:
    found = share_time([make_sample(BEGIN, state)])
    seconds = dict(zip(ACTIVITIES, found[0].seconds, strict=True)) if found else {}
    assert {name: value for name, value in seconds.items() if value} == pytest.approx(expected)


def test_time_in_a_hang_counts_as_such_and_gaps_do_not_count() -> None:
    times = (0.0, 10.0, 20.0, 30.0, 40.0, 1000.0)
    samples = [make_sample(BEGIN + time, make_rank(wait_share=0.0)) for time in times]
    (found,) = share_time(samples, [(BEGIN + 15, BEGIN + 35)])
    seconds = dict(zip(ACTIVITIES, found.seconds, strict=True))
    assert seconds["hanging"] == pytest.approx(20.0)
    assert seconds["compute"] == pytest.approx(10.0 + 10.0 + 10.0 + 30.0)


def test_the_slowest_waits_least() -> None:
    states = [make_rank(rank, wait_share=share) for rank, share in enumerate((0.3, 0.05, 0.2))]
    assert [one.rank for one in order_slowest(share_time([make_sample(BEGIN, *states)]))] == [1, 2, 0]
    states = [make_rank(rank, data_share=0.1) for rank in range(2)]
    blind = share_time([make_sample(BEGIN, *states)])
    assert not any(one.knows_waits for one in blind)


@pytest.mark.parametrize(("step", "time"), [(0, 10.0), (5, 15.0), (10, 20.0), (11, None)])
def test_a_step_has_a_time_between_those_that_are_known(step: int, time: float | None) -> None:
    assert find_step_time([(0, 10.0), (10, 20.0)], step) == time


def test_events_of_a_run(tmp_path: Path) -> None:
    found = read_account(make_full_run(tmp_path, interval=300.0)).events
    kinds = [event.kind for event in found]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        **{"hang": 1, "straggler": 1, "requeue": 1, "checkpoint": 5},
        "collection": kinds.count("collection"),
    }
    assert kinds.count("collection") > 20
    (hang,) = (event for event in found if event.kind == "hang")
    assert (hang.time, hang.until) == (BEGIN + 2700, BEGIN + 2900)


def test_restarts_within_an_attempt(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    for attempt, seconds in ((0, 1), (1, 65), (2, 80)):
        write_log(path, 0, "begun\n", attempt=attempt)
        os.utime(path / "logs" / str(attempt), (BEGIN + seconds,) * 2)
    found = read_account(path).events
    assert [(event.kind, event.time) for event in found] == [("restart", BEGIN + 65), ("restart", BEGIN + 80)]
