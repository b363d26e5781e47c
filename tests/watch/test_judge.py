"""From reports to a hang: who judges, when it asks, what it makes of the answers, and what follows."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from time import time
from typing import Any

import pytest

from launcher.launch.processes import RankProcess
from launcher.launch.watching import decode_order
from launcher.runs.node_records import NodeRecord
from launcher.watch.hang import (
    HangJudge,
    choose_limit,
    find_slow_step,
    find_stall_begin,
    list_orders,
    list_stalled,
)
from launcher.watch.job_view import JobView, SharedView, is_judge, make_job_view
from launcher.watch.model import (
    Decision,
    Hang,
    Heartbeat,
    JobState,
    NodeEvidence,
    NodeReport,
    Rank,
    RankEntry,
    RankSample,
    Verdict,
)
from launcher.watch.node import StepCount
from launcher.watch.ranks import RankBook
from launcher.watch.run_files import Stored
from launcher.watch.samples import Sample

TABLES = tomllib.loads(Path(__file__).with_name("judge.toml").read_text())
ABSENT = Verdict("absent", "rank 1 on n1 has not joined", (1,), ("n1",))
HANG = Hang(1, 1000.0, 970.0, 10, ABSENT, "restart", pids=((1, 101),))


def table(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", TABLES[name], ids=lambda case: case.get("name", ""))


def make_view(text: str) -> JobView:
    """A job of nodes with a rank each: `IDLE/STEP/ATTEMPT/PHASE …`."""
    reports = []
    for rank, words in enumerate(text.split()):
        idle, step, attempt, phase = (*words.split("/"), "0", "training")[:4]
        if not attempt.isdigit():
            attempt, phase = "0", attempt
        pid = 100 + rank + 1000 * int(attempt)
        seconds = None if idle == "none" else float(idle)
        state = Rank(rank, 0, pid, int(attempt), phase, int(step), seconds, p50=1.0, idle=seconds)
        reports.append(report(rank, state))
    return JobView(tuple(reports), ())


def report(node: int, *ranks: Rank, stalled: bool = False, attempt: int = 0) -> NodeReport:
    since = 900.0 if stalled else None
    return NodeReport(f"n{node}", node, 2, attempt, 1000.0, 1, 5.0, ranks, since, limit=20.0)


def shared(
    *reports: tuple[NodeReport, float], job: JobState | None = None, job_age: float = 0.0
) -> SharedView:
    """Reports with their ages in seconds, as they were found just now."""
    stored = tuple(Stored(one, 50.0 - age) for one, age in reports)
    return SharedView(Stored(job, 50.0 - job_age) if job else None, stored)


def job(host: str, attempt: int = 0, **more: Any) -> JobState:
    return replace(JobState(1000.0, host, attempt, "running", 10, 1.0, 1.0, 2), **more)


@table("story")
def test_what_the_judging_node_tells(case: dict[str, Any]) -> None:
    word, verdict = case.get("word", "hang"), replace(ABSENT, kind=case.get("kind", "absent"))

    def decide(*_: object) -> Decision:
        return Decision(word, verdict, 0.0 if word == "hang" else 500.0)

    judge = HangJudge(case.get("on_hang", "report"), decide=decide)
    if told := case.get("adopted"):
        hangs = (Hang(told["number"], 1.0, 0.0, 10, ABSENT),)
        judge.adopt(job("n0", hangs=hangs, restarts=told["restarts"], asks=told["asks"]))
    for now, ranks, hosts, expected, *longest in case["looks"]:
        evidence = [NodeEvidence(host, int(host[1:]), 1, 0.0, 1.0, ()) for host in hosts.split()]
        assert look(judge, make_view(ranks), now, evidence, case.get("number", 1)) == expected, now
        assert longest in ([], [judge.longest_pause]), now
    assert judge.restarts == case.get("restarts", 0)


def look(judge: HangJudge, view: JobView, now: float, evidence: Sequence[NodeEvidence], number: int) -> str:
    """Do what the watcher does at each look, and say what comes of it."""
    fresh, ranks = view.fresh, view.ranks
    judge.note_pauses(ranks, 20)
    if judge.asks and judge.is_answered(fresh, [node.host for node in evidence], now):
        found = judge.conclude(ranks, fresh, evidence, 20, now=now, number=number)
        if isinstance(found, Hang):
            seconds = round(found.time - found.stalled_since)
            pids = " ".join(f"{rank}={pid}" for rank, pid in found.pids)
            return f"hang {found.number} after step {found.step} for {seconds} s: {found.action} {pids}"
        if found:
            return found.partition(":")[0]
    elif not judge.asks and judge.should_ask(ranks, 20, now):
        return f"asks {judge.ask(now, 7)}"
    over = judge.find_recovery(ranks, 20)
    return f"hang {over.number} is over" if over and over.recovered else ""


@table("judging")
def test_who_judges(case: dict[str, Any]) -> None:
    own = report(case["node"], stalled=case.get("stalled", False))
    others = [(report(0), case["first"])] if "first" in case else []
    told = case.get("job")
    view = shared(*others)
    if told:
        view = shared(*others, job=job(told["host"], told["attempt"]), job_age=told["age"])
    stuck = case.get("stuck", False)
    assert is_judge(own, view if case.get("is_read", True) else None, 50.0, stuck=stuck) is case["judges"]


@table("word")
def test_yesterdays_hang_is_nobodys_word(case: dict[str, Any]) -> None:
    hang = Hang(3, 1000.0 - case["hang_age"], 900.0, 10, ABSENT, "stop")
    view = shared(job=job("n1", state=case["state"], hangs=(hang,)), job_age=case["age"])
    found = view.find_word(report(0), 55.0, 55.0 - 100.0)
    assert (found and [one.number for one in found.hangs]) == case.get("hangs")
    assert view.find_word(report(1), 55.0, -45.0) is None  # its own


@table("orders")
def test_what_a_node_does_about_a_hang(case: dict[str, Any]) -> None:
    pids = {int(rank): pid for rank, pid in case["pids"].items()}
    hang = replace(HANG, action=case["action"], recovered=case.get("recovered"))
    orders = [decode_order(order) for order in list_orders((hang,), 0, pids)]
    assert [" ".join(map(str, (order.action, *order.ranks))) for order in orders] == case["orders"]
    assert list(list_orders((hang,), hang.number, pids)) == [], "each hang once"
    for pending in orders:  # the supervisor drops one that comes after a restart
        ranks = [RankProcess(rank, rank, 0, pid) for rank, pid in pids.items()]
        assert not pending.is_late(ranks) and not pending.is_late(ranks[:1])
        assert pending.is_late([*ranks[:-1], replace(ranks[-1], pid=999)])


@table("limit")
def test_when_ranks_are_looked_at(case: dict[str, Any]) -> None:
    steps = [seconds for value, count in case.get("steps", ()) for seconds in repeat(value, count)]
    limit = choose_limit(case.get("setting", "auto"), find_slow_step(steps), case.get("longest", 0.0))
    assert limit == case["seconds"]


@table("stalled")
def test_who_counts_as_stalled(case: dict[str, Any]) -> None:
    found = list_stalled(make_view(case["ranks"]).ranks, 20)
    assert [one.rank for one in found] == case["stalled"]
    assert find_stall_begin(found, 100.0) == case.get("since")


def make_sample(values: dict[str, Any]) -> Sample:
    """A sample of the rank with PID 9."""
    found = dict(values)
    resting = () if found.pop("is_active", True) else (9,)
    return Sample({9: RankSample(**found)}, resting=resting)


@table("work")
def test_activity_counts_as_progress_before_the_first_step_alone(case: dict[str, Any]) -> None:
    began = time()
    beat = Heartbeat(0, 0, 9, "starting", began, case["step"], 0.0, began - case["idle"] + 4, 0, 0.0)
    for found in (beat, None):
        book = RankBook(Path("/nowhere"), {Path("/nowhere/rank-0.beat"): found}.get)
        book.add_ranks([RankEntry(0, 0, 0, 9)])
        book.look(1000.0)
        book.note_activity(make_sample(case["sample"]), {})
        known = book.ranks[0]
        book.now, known.read_at = 1004.0, began + 4
        if found is None:
            assert book.measure_idle(known) is None
            continue
        assert book.measure_idle(known) == pytest.approx(case["counts"], abs=0.5)
        assert book.measure_quiet(known) == pytest.approx(case["quiet"], abs=0.5)


def test_work_in_part_of_an_interval_is_taken_to_have_been_its_beginning() -> None:
    beat = Heartbeat(0, 0, 9, "starting", 0.0, 0, 0.0, time() - 100, 0, 0.0)
    book = RankBook(Path("/nowhere"), lambda _: beat)
    book.add_ranks([RankEntry(0, 0, 0, 9)])
    for now, sample in ((1000.0, RankSample(cpu=1.0)), (1005.0, RankSample(cpu=0.4, run_delay=0.2))):
        book.look(now)
        book.note_activity(Sample({9: sample}), {})
    assert book.measure_idle(book.ranks[0]) == pytest.approx(2.0)


def test_the_job_as_its_nodes_reports_have_it() -> None:
    """Reports of other attempts do not count, old ones are silent, and a node that has ended has a record."""
    (own,) = make_view("30/10").fresh
    view = shared((report(1, attempt=3), 1.0), (report(2), 15.5), (report(3), 2.0))
    for now, fresh, silent in ((50.0, ["n0", "n3"], ["n2"]), (65.0, ["n0"], ["n2", "n3"])):
        seen = make_job_view(own, view, now)
        assert [[one.host for one in ones] for ones in (seen.fresh, seen.silent)] == [fresh, silent]
    record = NodeRecord("n1", 1, "succeeded", 0, None, "", None, 0, 0.0, 40.0, 1, ((1, 40.0),))
    for age in (2.0, 99.0):
        seen = make_job_view(own, replace(shared((report(1), age)), ended=(record,)), 50.0)
        assert [one.host for one in (*seen.fresh, *seen.silent)] == ["n0"]
        (node,) = seen.list_ended_ranks()
        assert [(rank.rank, rank.exit_code, rank.host) for rank in node.ranks] == [(1, 0, "n1")]
    both = JobView((own,), (report(1),))
    state = both.describe(own, hanging=True, hangs=(HANG,), step=10)
    assert (state.state, state.step, state.step_age, state.p50) == ("hanging", 10, 30, 1.0)
    assert (state.silent, state.hangs, state.notes) == (("n1",), (HANG,), ())
    (start,) = make_view("1/0").fresh
    state = JobView((start,)).describe(start, hanging=False, step=0)
    assert state.state == "starting" and "1 of 2 nodes" in state.notes[0]


def test_the_jobs_steps_are_those_of_all_starts_of_its_ranks() -> None:
    """Ranks that are started again count from 0; another node that takes over goes on where one stopped."""
    counts, views = StepCount(), ("1/10 1/12", "1/10 1/12", "1/0/1 1/0/1", "1/5/1 1/4/1", "1/9/2 1/0/2")
    assert [counts.count(make_view(view)) for view in views] == [12, 12, 12, 16, 24]
    counts = StepCount()
    counts.adopt(17)
    assert [counts.count(make_view(view)) for view in ("1/1/2", "1/20/2")] == [17, 20]
