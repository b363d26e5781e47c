"""Which rank the others wait for, and why: in simulated programs with and without a slow rank."""

import math
import random
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.codec import convert
from launcher.watch.flight_recorder import (
    DURATION,
    ENQUEUED,
    QUICK,
    STEP_ENDS,
    Mark,
    ReadingTimes,
    choose_reading_interval,
    pack_marks,
    unpack_marks,
)
from launcher.watch.model import CollectiveTimes, Heartbeat, NodeReport, Rank
from launcher.watch.own_time import ExcessHistory, StepExcess, measure_steps, measure_waits
from launcher.watch.stragglers import Facts, StragglerFinder, explain_straggler, find_cause, list_slow_ranks
from tests.watch.simulated_ranks import PROGRAMS, Simulation, simulate_excess

CAUSES = tomllib.loads(Path(__file__).with_name("causes.toml").read_text())["cause"]
HEALTHY = {
    "rank": 0,
    "local_rank": 0,
    "pid": 100,
    "attempt": 0,
    "phase": "training",
    "step": 50,
    "step_age": 0.1,
    "data_share": 0.01,
    "cpu": 0.95,
    "thread_delay": 0.01,
    "gpu": {"index": 0, "sm_clock": 1980, "pcie_width": 16, "max_pcie_width": 16},
}
SLOW = Simulation("ddp", ranks=4, slow=1, excess=0.12, noise=0.02, seed=3)


def make_state(**more: Any) -> Rank:
    return convert(Rank, HEALTHY | more)


def make_report(marks: dict[int, list[Mark]], number: int, pids: int = 100, waits: float = 0.1) -> NodeReport:
    """A node's report of the ranks with these marks, of which rank 1 waits for data."""
    states = tuple(
        make_state(rank=rank, pid=pids + rank, step=own[-1].step, data_share=waits if rank == 1 else 0.0)
        for rank, own in marks.items()
    )
    times = tuple(pack_marks(rank, ENQUEUED, own) for rank, own in marks.items())
    return NodeReport("n2", 0, 1, 0, 5.0 * number, number, 5.0, states, collectives=times)


def test_marks_survive_packing_and_damaged_ones_are_refused() -> None:
    for marks in ([], [Mark(7, "0", 40, 1e9 + 0.25), Mark(7, "m[0, 1]", 3, 1e9), Mark(7, STEP_ENDS, 7, 1e9)]):
        assert unpack_marks(pack_marks(3, ENQUEUED, marks)) == tuple(marks)
    packed = pack_marks(0, ENQUEUED, [Mark(1, "0", 1, 1.0), Mark(1, "1", 1, 1.0)])
    with pytest.raises(ValueError, match="unknown group"):
        unpack_marks(replace(packed, groups=("0",)))
    for damaged in ("", "!!", "~" * 9, packed.marks[:-5]):
        with pytest.raises(ValueError):
            unpack_marks(CollectiveTimes(0, ENQUEUED, ("0", "1"), damaged))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_simulated_slow_rank_is_measured_and_found_though_clocks_do_not_agree(program: str) -> None:
    simulation = Simulation(program, ranks=8, slow=3, excess=0.1, noise=0.02, seed=1)
    steps = measure_steps(simulation.run(60), dict.fromkeys(range(8), "n1"))
    mean = {rank: sum(step.excess[rank] / step.seconds for step in steps) / len(steps) for rank in range(8)}
    assert max(mean, key=lambda rank: mean[rank]) == 3
    assert 0.06 < mean.pop(3) < 0.25 and max(mean.values()) < 0.03
    waits = measure_waits(steps)
    assert min(waits, key=lambda rank: waits[rank]) == 3
    if program != "two groups":
        skewed, hosts = (
            replace(simulation, clocks=(0.0, 3.0, -0.2, 0.01)),
            {n: f"n{n // 2}" for n in range(8)},
        )
        found = ExcessHistory().add(measure_steps(skewed.run(100), hosts))
        assert [slow.rank for slow in found] == [3]
        assert ExcessHistory().add(measure_steps(replace(skewed, excess=0.0).run(100), hosts)) == ()


def test_ranks_may_count_a_collective_to_different_steps() -> None:
    """At the end of a step one hook may see the step's end before a collective, and the other after it."""
    marks: dict[int, list[Mark]] = {0: [], 1: []}
    for step in range(1, 11):
        when = float(step)
        marks[0] += [Mark(step, "0", step, when), Mark(step, STEP_ENDS, step, when + 0.1)]
        late = [Mark(step, STEP_ENDS, step, when - 0.1), Mark(step + 1, "0", step, when)]
        marks[1] += late if step == 4 else marks[0][-2:]
    steps = measure_steps(marks, {0: "n1", 1: "n1"})
    assert [step.step for step in steps] == list(range(2, 11))
    assert all(math.isfinite(step.excess[rank]) for step in steps for rank in (0, 1))


def test_shorter_collectives_show_who_came_late() -> None:
    rng = random.Random(1)
    marks: dict[int, list[Mark]] = {rank: [Mark(0, STEP_ENDS, 0, 0.0)] for rank in range(4)}
    for step in range(1, 80):
        for rank, own in marks.items():
            own.append(Mark(step, "0", step, -0.02 - rng.random() * 1e-3 + (0.01 if rank == 2 else 0.0)))
            own.append(Mark(step, STEP_ENDS, step, step * 0.1))
    (slow,) = ExcessHistory().add(measure_steps(marks, dict.fromkeys(marks, "n1"), durations=True))
    assert (slow.rank, round(slow.excess, 2)) == (2, 0.11)


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
    assert history.add(slow) == ()  # known steps
    steps = list(healthy[:100])
    for at in range(5, 100, 10):
        steps[at] = StepExcess(at + 1, 5.0, {**steps[at].excess, 2: 4.0})
    assert ExcessHistory().add(steps) == ()


@pytest.mark.parametrize("case", CAUSES, ids=lambda case: f"{case['cause']} {case['says'][:9]}")
def test_causes(case: dict[str, Any]) -> None:
    facts = [Facts(make_state(**case["rank"]), case.get("pressure"))]
    usual = [Facts(make_state(), None)]
    others = [[Facts(make_state(**case.get("others", {})), None)]] * 2
    found = find_cause(facts, [*others, usual], case.get("excess", 0.1))
    assert found.name == case["cause"] and case["says"] in found.detail
    assert find_cause([], [usual], 0.1).name == "program"


def test_the_finder_names_rank_cause_and_waits() -> None:
    marks = SLOW.run(100)
    finder, report = StragglerFinder(), make_report(marks, 1)
    (found,) = finder.update([report])
    assert (found.rank, found.host, found.cause) == (1, "n2", "data")
    assert finder.told == (found,) and finder.waits[0] > 0.05 > finder.waits[1]
    assert finder.update([report]) == ()
    text = explain_straggler(found)
    assert text.startswith("rank 1 on n2 is a straggler: its own part of a step is 1")
    assert text.endswith("): it waits for data for 10% of the time, the others for 0%")
    worst = list_slow_ranks([found, replace(found, rank=7, excess=0.5)])
    assert worst.startswith("rank 7 on n2 (50%, data), rank 1") and list_slow_ranks([]) == ""
    assert len(finder.update([make_report(marks, 2, pids=500)])) == 1, "started again"
    assert len(finder.told) == 2
    for damage in ({"marks": "!"}, {"measure": DURATION}):
        broken = (replace(report.collectives[0], **damage), *report.collectives[1:])
        assert StragglerFinder().update([replace(report, collectives=broken)]) == ()


@pytest.mark.parametrize(("second", "cause"), [(0.1, "data"), (0.0, "program")])
def test_a_rank_is_blamed_for_its_own_code_after_a_second_report(second: float, cause: str) -> None:
    """The first may be from before it was slow."""
    marks, finder = SLOW.run(100), StragglerFinder()
    assert finder.update([make_report(marks, 1, waits=0.0)]) == () == finder.told
    (found,) = finder.update([make_report(marks, 2, waits=second)])
    assert (found.rank, found.cause) == (1, cause)
    assert finder.update([make_report(marks, 3, waits=second)]) == ()


def make_beat(step: int, seconds: float) -> Heartbeat:
    return Heartbeat(0, 0, 1, "training", 0.0, step, 0.0, 0.0, 0, 0.0, (seconds,) * min(step, 256))


def test_readings_are_often_at_first_then_seldom_and_often_again_if_steps_are_longer() -> None:
    moments = ReadingTimes()
    due = [now for now in range(0, 1200) if moments.is_due([make_beat(now * 5, 0.2)], now, 0.04)]
    assert due[1] - due[0] == QUICK and due[-1] - due[-2] == choose_reading_interval(0.04) == 80
    slower = [now for now in range(1200, 1400) if moments.is_due([make_beat(now * 5, 0.22)], now, 0.04)]
    assert len([now for now in slower if now <= 1262]) >= 10
    assert not ReadingTimes().is_due([make_beat(1, 1.0)], 100.0, 0.0)
    assert not ReadingTimes().is_due([], 100.0, 0.0)
