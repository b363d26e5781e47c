"""What follows a hang on a node: whom it hits, when, and when nothing follows."""

import json
from dataclasses import asdict, replace

import pytest

from launcher.launch.processes import RankProcess
from launcher.launch.watching import decode_order
from launcher.watch.hang_actions import CAUTION, HangActions, choose_action, choose_delay
from launcher.watch.progress_limit import RankProgress
from launcher.watch.watch_model import Hang, NodeEvidence, ProcessState, RankEvidence, Verdict

ABSENT = Verdict("absent", "rank 1 has not joined", (1,))
HANG = Hang(1, 1000.0, 970.0, 10, ABSENT, "restart", pids=((1, 101),))
PIDS = {0: 100, 1: 101}


def progress(idle: float) -> list[RankProgress]:
    return [RankProgress(0, "training", 10, 1.0), RankProgress(1, "training", 10, idle)]


def evidence(process: ProcessState) -> tuple[NodeEvidence, ...]:
    rank = RankEvidence(1, 0, "n0", 101, "training", 10, 30.0, 30.0, process)
    return (NodeEvidence("n0", 0, 1, 0.0, 1.0, (rank,)),)


def test_ranks_that_do_nothing_are_ended_at_once_and_once() -> None:
    actions = HangActions()
    (order,) = actions.list_orders((HANG,), progress(30.0), PIDS, 50.0)
    assert (order.action, order.ranks, order.pids) == ("restart", (1,), (100, 101))
    assert list(actions.list_orders((HANG,), progress(30.0), PIDS, 51.0)) == []


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (ProcessState(101, "S"), 0.0),
        (ProcessState(101, "T"), 0.0),
        (ProcessState(101, "S", cpu=1.0), CAUTION),
        (ProcessState(101, "D", io_bytes=50 << 20), CAUTION),
        (ProcessState(101, "S", stack_changes=True), CAUTION),
    ],
)
def test_ranks_that_work_are_given_time(process: ProcessState, expected: float) -> None:
    assert choose_delay(ABSENT, evidence(process), 20.0) == expected


def test_the_time_grows_with_the_limit_and_what_is_not_known_counts_as_work() -> None:
    assert choose_delay(ABSENT, evidence(ProcessState(101, "R")), 100.0) == 200.0
    assert choose_delay(ABSENT, (), 20.0) == CAUTION


def test_nothing_follows_if_steps_go_on_or_progress_is_made_within_the_time() -> None:
    hang = replace(HANG, delay=60.0)
    actions = HangActions()
    assert list(actions.list_orders((hang,), progress(30.0), PIDS, 50.0)) == []
    assert list(actions.list_orders((hang,), progress(85.0), PIDS, 105.0)) == []
    assert list(actions.list_orders((hang,), progress(20.0), PIDS, 115.0)) == []  # a batch at 95
    assert len(list(actions.list_orders((hang,), progress(65.0), PIDS, 160.0))) == 1
    over = replace(hang, number=2, recovered=1010.0)
    assert list(actions.list_orders((over,), progress(999.0), PIDS, 999.0)) == []
    assert actions.acted == 2


def test_an_order_for_ranks_that_were_started_anew_is_dropped() -> None:
    for action in ("restart", "stop"):
        actions = HangActions()
        hang = replace(HANG, action=action)
        assert list(actions.list_orders((hang,), progress(30.0), {0: 100, 1: 201}, 50.0)) == []
        assert actions.acted == 1


def test_the_supervisor_drops_an_order_that_comes_after_a_restart() -> None:
    (order,) = HangActions().list_orders((HANG,), progress(30.0), PIDS, 50.0)
    found = decode_order(json.loads(json.dumps({"event": "act", **asdict(order)})))
    assert (found.action, found.ranks) == ("restart", (1,))
    assert not found.is_late([RankProcess(0, 0, 0, 100), RankProcess(1, 1, 0, 101)])
    assert not found.is_late([RankProcess(0, 0, 0, 100)])  # the other has ended
    assert found.is_late([RankProcess(0, 0, 0, 100), RankProcess(1, 1, 0, 201)])


def test_a_node_without_them_kills_nobody_and_every_node_stops() -> None:
    for action, count in (("restart", 0), ("stop", 1), ("report", 0)):
        hang = replace(HANG, action=action)
        assert len(list(HangActions().list_orders((hang,), [], {2: 300}, 50.0))) == count


def test_ranks_that_are_not_heard_of_are_only_reported() -> None:
    silent = Verdict("silent", "node n1 is not heard of", (1,), ("n1",))
    assert choose_action("restart", silent) == choose_action("stop", silent) == "report"
    assert choose_action("stop", ABSENT) == "stop"
