"""From reports to a hang: who judges, when it asks, and what it makes of the answers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from launcher.runs.node_records import NodeRecord
from launcher.watch.hang_judge import AGAIN, MOST_AT_START, PATIENCE, HangJudge
from launcher.watch.job_view import (
    JobView,
    describe_job_state,
    find_word,
    is_judge,
    list_ended_ranks,
    make_job_view,
)
from launcher.watch.node_reports import StoredReport
from launcher.watch.shared_files import SharedView
from launcher.watch.verdict import Pause
from launcher.watch.watch_model import (
    Decision,
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    Notice,
    RankState,
    Verdict,
)

ABSENT = Verdict("absent", "rank 1 on n1 has not joined", (1,), ("n1",))


def state(rank: int, idle: float, step: int = 10, phase: str = "training", attempt: int = 0) -> RankState:
    return RankState(rank, 0, 100 + rank + 1000 * attempt, attempt, phase, step, idle, p50=1.0, idle=idle)


def report(node: int, *ranks: RankState, stalled: bool = False, attempt: int = 0) -> NodeReport:
    since = 900.0 if stalled else None
    return NodeReport(f"n{node}", node, 2, attempt, 1000.0, 1, 5.0, ranks, since, limit=20.0)


def shared(
    *reports: tuple[NodeReport, float], job: JobState | None = None, job_age: float = 0.0
) -> SharedView:
    """Reports with their ages in seconds, as they were found just now."""
    stored = tuple(StoredReport(one, 500.0 - age) for one, age in reports)
    return SharedView(50.0, 500.0, job, job_age, stored)


def job(host: str, attempt: int = 0) -> JobState:
    return JobState(1000.0, host, attempt, "running", 10, 1.0, 1.0, 2)


def make_judge(verdict: Verdict, on_hang: str = "report", word: str = "hang") -> HangJudge:
    def decide(nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport], pause: Pause) -> Decision:
        return Decision(word, verdict, 0.0 if word == "hang" else 500.0)

    return HangJudge(decide, on_hang)


HUNG = JobView((report(0, state(0, 25)), report(1, state(1, 30))), ())
ONWARD = JobView((report(0, state(0, 1, 11)), report(1, state(1, 1, 11))), ())
HEALTHY = JobView((report(0, state(0, 1)), report(1, state(1, 1))), ())
ANSWERS = tuple(NodeEvidence(host, n, 1, 0.0, 1.0, ()) for n, host in enumerate(("n0", "n1")))


def test_reports_of_earlier_attempts_are_ignored_and_old_ones_are_silent() -> None:
    own = report(0, state(0, 1))
    view = shared((report(1, attempt=3), 1.0), (report(2), 15.5), (report(3), 2.0))
    found = make_job_view(own, view, 50.0)
    assert [one.host for one in found.fresh] == ["n0", "n3"]
    assert [one.host for one in found.silent] == ["n2"]
    assert [one.host for one in make_job_view(own, view, 65.0).silent] == ["n2", "n3"]


@pytest.mark.parametrize(
    ("own", "view", "stuck", "expected"),
    [
        (report(0), None, False, True),
        (report(1, stalled=True), None, False, False),  # nothing is known yet
        (report(1, stalled=True), None, True, True),  # the run directory hangs: what it sees itself
        (report(1, stalled=True), shared(job=job("n0")), False, False),
        (report(1), shared(job=job("n0"), job_age=99), False, False),  # nothing is wrong here
        (report(1, stalled=True), shared((report(0), 99), job=job("n0"), job_age=99), False, True),
        (report(1, stalled=True), shared((report(0), 1), job=job("n0"), job_age=99), False, False),
        (report(1, stalled=True), shared((report(0), 99), job=job("n0", attempt=7)), False, True),
        (report(1, stalled=True), shared(job=job("n1")), False, True),
    ],
)
def test_who_judges(own: NodeReport, view: SharedView | None, stuck: bool, expected: bool) -> None:
    assert is_judge(own, view, 50.0, stuck=stuck) is expected


def test_a_hang_is_told_once_and_is_over_when_steps_go_on() -> None:
    judge = make_judge(ABSENT)
    assert not judge.should_ask(HEALTHY, 20, 100)
    assert judge.should_ask(HUNG, 20, 100)
    assert judge.ask(100, 7) == 7
    assert not judge.should_ask(HUNG, 20, 101)
    assert not judge.is_answered(HUNG, ANSWERS[:1], 101)
    assert judge.is_answered(HUNG, ANSWERS, 101)
    assert judge.is_answered(HUNG, ANSWERS[:1], 101 + PATIENCE)  # the other node is silent
    hang = judge.conclude(HUNG, ANSWERS, 20, now=103, number=4)
    assert isinstance(hang, Hang)
    assert (hang.number, hang.step, hang.verdict, hang.action) == (4, 10, ABSENT, "report")
    assert hang.time - hang.stalled_since == pytest.approx(25)
    assert judge.asks == 0 and not judge.should_ask(HUNG, 20, 200)
    assert judge.find_recovery(HUNG, 20) is None
    assert judge.find_recovery(HEALTHY, 20) is None  # no step was made: the evidence may have woken it
    over = judge.find_recovery(ONWARD, 20)
    assert over and over.recovered and judge.hang is None
    again = JobView((report(0, state(0, 31, 11)), report(1, state(1, 31, 11))), ())
    assert judge.should_ask(again, 20, 300)
    judge.ask(300, 0)
    later = judge.conclude(again, ANSWERS, 20, now=303, number=1)
    assert isinstance(later, Hang) and later.number == 5


def test_a_pause_has_one_notice_and_is_looked_at_later_and_later() -> None:
    judge = make_judge(ABSENT, word="notice")
    judge.note_pauses(HUNG, 20)
    judge.ask(100, 1)
    assert judge.conclude(HUNG, ANSWERS, 20, now=100, number=1) == Notice(25, ABSENT)
    assert not judge.should_ask(HUNG, 20, 100 + AGAIN - 1) and judge.should_ask(HUNG, 20, 100 + AGAIN)
    judge.ask(120, 1)
    assert judge.conclude(HUNG, ANSWERS, 20, now=120, number=1) is None
    assert not judge.should_ask(HUNG, 20, 120 + AGAIN) and judge.should_ask(HUNG, 20, 120 + 1.5 * AGAIN)
    assert judge.hangs == []
    judge.note_pauses(ONWARD, 20)  # it has ended by itself
    assert judge.longest_pause == 30
    judge.note_pauses(HUNG, 20)
    judge.ask(200, 1)
    assert judge.conclude(HUNG, ANSWERS, 20, now=200, number=1) == Notice(25, ABSENT)


def test_pauses_of_the_start_and_of_other_processes_are_not_learned() -> None:
    judge = make_judge(ABSENT)
    table = ((300, 0, 0, 0), (1, 0, 0, MOST_AT_START), (1, 1, 0, 0), (40, 1, 0, 0), (1, 1, 1, 0))
    for idle, step, attempt, expected in table:
        judge.note_pauses(JobView((report(0, state(0, idle, step, attempt=attempt)),), ()), 20)
        assert judge.longest_pause == expected


def test_what_has_gone_on_meanwhile_is_no_hang() -> None:
    judge = make_judge(ABSENT)
    judge.ask(100, 1)
    assert judge.conclude(HEALTHY, ANSWERS, 20, now=103, number=1) is None


def test_a_restart_is_counted_and_over_with_the_first_step_of_the_new_ranks() -> None:
    judge = make_judge(ABSENT, "restart")
    judge.ask(100, 1)
    assert judge.conclude(HUNG, ANSWERS, 20, now=100, number=1)
    assert judge.restarts == 1
    starting = JobView(
        (report(0, state(0, 1, 0, "starting", 1)), report(1, state(1, 1, 0, "starting", 1))), ()
    )
    assert judge.find_recovery(starting, 20) is None
    stepping = JobView((report(0, state(0, 1, 1, attempt=1)), report(1, state(1, 1, 1, attempt=1))), ())
    assert judge.find_recovery(stepping, 20)


def test_another_node_goes_on_with_what_was_told() -> None:
    judge, hang = make_judge(ABSENT), Hang(3, 1.0, 0.0, 10, ABSENT)
    judge.adopt(replace(job("n0"), hangs=(hang,), restarts=2, asks=9))
    assert judge.hang == hang and judge.restarts == 2 and judge.ask(1, 0) == 10


def test_a_second_hang_before_the_first_step_after_a_restart_is_told() -> None:
    judge = make_judge(ABSENT, "restart")
    judge.ask(100, 1)
    first = judge.conclude(HUNG, ANSWERS, 20, now=100, number=1)
    assert isinstance(first, Hang) and first.pids == ((1, 101),)
    anew = report(0, state(0, 40, 0, "joining", 1))
    assert not judge.should_ask(JobView((anew, HUNG.fresh[1]), ()), 20, 200)  # the other's report is old
    both = JobView((anew, report(1, state(1, 40, 0, "joining", 1))), ())
    assert judge.should_ask(both, 20, 200)
    judge.ask(200, 1)
    second = judge.conclude(both, ANSWERS, 20, now=200, number=1)
    assert (
        isinstance(second, Hang)
        and second.number == 2
        and second.pids == ((1, 1101),)
        and judge.restarts == 2
    )


def test_a_hang_that_passes_before_its_restart_is_no_restart() -> None:
    judge = make_judge(ABSENT, "restart")
    judge.ask(100, 1)
    judge.conclude(HUNG, ANSWERS, 20, now=100, number=1)
    assert judge.find_recovery(ONWARD, 20) and judge.restarts == 0


@pytest.mark.parametrize(
    ("state_of_job", "age", "hang_age", "expected"),
    [
        ("hanging", 3.0, 30.0, [3]),
        ("hanging", 3.0, 500.0, []),  # of a job before, whose number of the attempt is the same
        ("ended", 3.0, 30.0, None),
        ("hanging", 86400.0, 30.0, None),
    ],
)
def test_yesterdays_hang_is_nobodys_word(
    state_of_job: str, age: float, hang_age: float, expected: list[int] | None
) -> None:
    hang = Hang(3, 1000.0 - hang_age, 900.0, 10, ABSENT, "stop")
    told = replace(job("n1"), state=state_of_job, hangs=(hang,))
    found = find_word(report(0), shared(job=told, job_age=age), 55.0, 55.0 - 100.0)
    assert (found and [one.number for one in found.hangs]) == expected
    assert find_word(report(1), shared(job=told, job_age=age), 55.0, -45.0) is None  # its own


def test_a_node_that_is_not_heard_of_is_only_reported() -> None:
    judge = make_judge(Verdict("silent", "node n1 is not heard of", (1,), ("n1",)), "restart")
    judge.ask(100, 1)
    hang = judge.conclude(HUNG, ANSWERS[:1], 20, now=100, number=1)
    assert isinstance(hang, Hang) and (hang.action, judge.restarts) == ("report", 0)


def test_a_rank_on_a_node_that_has_ended_is_known_by_the_nodes_record() -> None:
    """Its last report may be there, old or new, or never have been written."""
    record = NodeRecord("n1", 1, "succeeded", 0, None, "", None, 0, 0.0, 40.0, 1, ((1, 40.0),))
    for reports in ((), ((report(1, state(1, 5)), 2.0),), ((report(1, state(1, 5)), 99.0),)):
        view = replace(shared(*reports), ended=(record,))
        seen = make_job_view(report(0, state(0, 30)), view, 50.0)
        assert [one.host for one in seen.reports] == ["n0"]
        (node,) = list_ended_ranks(seen)
        assert [(rank.rank, rank.exit_code, rank.host) for rank in node.ranks] == [(1, 0, "n1")]


def test_the_jobs_state() -> None:
    own = HUNG.fresh[0]
    hang = Hang(1, 1000.0, 900.0, 10, ABSENT)
    found = describe_job_state(own, HUNG, (hang,), hanging=True, restarts=1, asks=0, notes=())
    assert (found.state, found.step, found.step_age, found.p50) == ("hanging", 10, 25, 1.0)
    over = replace(hang, recovered=1001.0)
    assert describe_job_state(own, HUNG, (over,), restarts=1, asks=0, notes=()).state == "running"
    assert describe_job_state(own, HUNG, (hang,), restarts=1, asks=0, notes=()).state == "running"
    alone = JobView((report(0, state(0, 1, 0, "starting")),), ())
    starting = describe_job_state(own, alone, (), restarts=0, asks=0, notes=())
    assert starting.state == "starting" and "1 of 2 nodes" in starting.notes[0]
    lost = JobView((own,), (report(1),))
    assert describe_job_state(own, lost, (), restarts=0, asks=0, notes=()).silent == ("n1",)
