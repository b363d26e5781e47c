"""What follows a hang on a node: whom it hits, when, and when nothing follows."""

import json
from dataclasses import asdict, replace

from launcher.launch.processes import RankProcess
from launcher.launch.watching import decode_order
from launcher.watch.hang_actions import HangActions, choose_action
from launcher.watch.watch_model import Hang, Verdict

ABSENT = Verdict("absent", "rank 1 has not joined", (1,))
HANG = Hang(1, 1000.0, 970.0, 10, ABSENT, "restart", pids=((1, 101),))
PIDS = {0: 100, 1: 101}


def test_ranks_are_ended_once() -> None:
    actions = HangActions()
    (order,) = actions.list_orders((HANG,), PIDS)
    assert (order.action, order.ranks, order.pids) == ("restart", (1,), (100, 101))
    assert list(actions.list_orders((HANG,), PIDS)) == []


def test_nothing_follows_a_hang_that_is_over() -> None:
    actions, over = HangActions(), replace(HANG, recovered=1010.0)
    assert list(actions.list_orders((over,), PIDS)) == [] and actions.acted == 1


def test_an_order_for_ranks_that_were_started_anew_is_dropped() -> None:
    for action in ("restart", "stop"):
        actions = HangActions()
        hang = replace(HANG, action=action)
        assert list(actions.list_orders((hang,), {0: 100, 1: 201})) == []
        assert actions.acted == 1


def test_the_supervisor_drops_an_order_that_comes_after_a_restart() -> None:
    (order,) = HangActions().list_orders((HANG,), PIDS)
    found = decode_order(json.loads(json.dumps({"event": "act", **asdict(order)})))
    assert (found.action, found.ranks) == ("restart", (1,))
    assert not found.is_late([RankProcess(0, 0, 0, 100), RankProcess(1, 1, 0, 101)])
    assert not found.is_late([RankProcess(0, 0, 0, 100)])  # the other has ended
    assert found.is_late([RankProcess(0, 0, 0, 100), RankProcess(1, 1, 0, 201)])


def test_a_node_without_them_kills_nobody_and_every_node_stops() -> None:
    for action, count in (("restart", 0), ("stop", 1), ("report", 0)):
        hang = replace(HANG, action=action)
        assert len(list(HangActions().list_orders((hang,), {2: 300}))) == count


def test_ranks_that_are_not_heard_of_are_only_reported() -> None:
    silent = Verdict("silent", "node n1 is not heard of", (1,), ("n1",))
    assert choose_action("restart", silent) == choose_action("stop", silent) == "report"
    assert choose_action("stop", ABSENT) == "stop"
