"""Which rank the others wait for, and why: in simulated programs with and without a slow rank."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.watch.excess import ExcessHistory
from launcher.watch.stragglers import StragglerFinder
from tests.watch.simulated_ranks import PROGRAMS, Simulation, make_reports, simulate_excess

CAUSES = tomllib.loads(Path(__file__).with_name("causes.toml").read_text())["cause"]
EIGHT = Simulation("ddp", ranks=8, slow=3, excess=0.1, noise=0.02, seed=1)


@cache
def run_four(excess: float) -> list[dict[str, Any]]:
    """Four ranks on as many nodes, of which rank 1 is slow."""
    return Simulation("ddp", 4, 1, excess, noise=0.02, seed=3, clocks=(0.0,) * 4).run(100)


def find(reports: list[dict[str, Any]], finder: StragglerFinder) -> list[tuple[int, str]]:
    """What is found in two reports: the first may have begun before the slow steps."""
    found = [one for number in (1, 2) for one in finder.update(make_reports(reports, number))]
    return [(one.rank, one.cause) for one in found]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_simulated_slow_rank_is_found_though_clocks_do_not_agree(program: str) -> None:
    simulation, finder = replace(EIGHT, program=program), StragglerFinder()
    assert find(simulation.run(80), finder) == [(3, "program")]
    assert 0.06 < finder.told[0].excess < 0.35
    assert min(finder.waits, key=lambda rank: finder.waits[rank]) == 3
    if program in ("ddp", "fsdp"):
        skewed = replace(simulation, clocks=(0.0, 3.0, -0.2, 0.01))
        assert find(skewed.run(80), StragglerFinder()) == [(3, "program")]
        assert find(replace(skewed, excess=0.0).run(80), StragglerFinder()) == []


def test_shorter_collectives_show_who_came_late() -> None:
    finder = StragglerFinder()
    assert find(replace(EIGHT, program="one all_reduce", durations=True).run(100), finder) == [(3, "program")]
    assert 0.06 < finder.told[0].excess < 0.15


@pytest.mark.parametrize("ranks", [2, 8, 100])
@pytest.mark.parametrize("noise", ["normal", "heavy tails", "one-sided"])
def test_a_slow_rank_is_found_within_100_steps_and_no_other(ranks: int, noise: str) -> None:
    for seed in range(2):
        found = ExcessHistory().add(simulate_excess(ranks, 100, noise, 0.03, slow=seed, seed=seed))
        assert [slow.rank for slow in found] == [seed]
        assert not ExcessHistory().add(simulate_excess(ranks, 200, noise, 0.03, slow=None, seed=seed))


def test_a_straggler_is_told_once_in_an_episode_and_long_pauses_are_no_habit() -> None:
    history = ExcessHistory()
    slow, healthy = (simulate_excess(4, 400, "normal", 0.02, slow=rank) for rank in (1, None))
    told = list(history.add(slow[:200]))
    assert set(history.slow) == {1}
    told += history.add(healthy[200:300])
    assert not history.slow
    told += history.add(slow[300:])
    assert [one.rank for one in told] == [1, 1]
    overlapping = ExcessHistory()
    for last in (55, 58):
        overlapping.add(healthy[:last])
    assert (len(overlapping.blocks), len(overlapping.waiting)) == (5, 8), "known steps are left out"
    slow[::10, 3] = math.nan  # rank 1 is not in all steps of a block
    assert not ExcessHistory().add(slow)
    healthy[5:100:10, 1], healthy[5:100:10, 4] = 5.0, 4.0
    assert not ExcessHistory().add(healthy[:100])


@pytest.mark.parametrize("case", CAUSES, ids=lambda case: f"{case['cause']} {case['says'][:9]}")
def test_causes(case: dict[str, Any]) -> None:
    others = dict.fromkeys((0, 2), case.get("others", {}))
    reports, finder = run_four(case.get("excess", 0.12)), StragglerFinder()
    for number in (1, 2):
        made = make_reports(reports, number, {**others, 1: case["rank"]})
        made[1] = replace(made[1], memory_pressure=case.get("pressure"))
        finder.update(made)
    (found,) = finder.told
    assert (found.rank, found.host, found.cause) == (1, "n1", case["cause"]) and case["says"] in found.detail


WAITS: Mapping[int, Mapping[str, Any]] = {1: {"data_share": 0.1}}


def test_the_finder_names_rank_cause_and_waits() -> None:
    reports, finder = run_four(0.12), StragglerFinder()
    made = make_reports(reports, 1, WAITS)
    (found,) = finder.update(made)
    assert (found.rank, found.host, found.cause) == (1, "n1", "data")
    assert finder.told == (found,) and finder.waits[0] > 0.05 > finder.waits[1]
    assert finder.update(made) == ()
    assert found.detail == "it waits for data for 10% of the time, the others for 1%"
    again = {rank: {**WAITS.get(rank, {}), "pid": 500} for rank in range(4)}
    assert len(finder.update(make_reports(reports, 2, again))) == 1, "started again"
    assert len(finder.told) == 2
    times = made[0].collectives[0]
    damaged = ({"marks": mark} for mark in ("", "!!", "~" * 9, times.marks[:-5]))
    for damage in (*damaged, {"measure": "duration"}, {"groups": ()}):
        broken = replace(made[0], collectives=(replace(times, **damage),))
        assert StragglerFinder().update([broken, *made[1:]]) == ()


@pytest.mark.parametrize(("second", "cause"), [(0.1, "data"), (0.0, "program")])
def test_a_rank_is_blamed_for_its_own_code_after_a_second_report(second: float, cause: str) -> None:
    """The first may be from before it was slow."""
    finder = StragglerFinder()
    assert finder.update(make_reports(run_four(0.12), 1)) == () == finder.told
    (found,) = finder.update(make_reports(run_four(0.12), 2, {1: {"data_share": second}}))
    assert (found.rank, found.cause) == (1, cause)
    assert finder.update(make_reports(run_four(0.12), 3)) == ()
