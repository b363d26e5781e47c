"""Pairs of nodes: who meets whom, and who is at fault."""

from collections import Counter
from itertools import chain

import pytest

from launcher.doctor.node_facts import WorkResult
from launcher.doctor.pair_checks import judge_meetings, judge_pairs, name_pair, plan_pairs
from tests.doctor.test_work_checks import cpus, node

HOSTS = ("n-1", "n-2", "n-3", "n-4", "n-5", "n-6")


def measure(hosts: tuple[str, ...], bad: set[str], value: float | None = None) -> list[WorkResult]:
    """Both nodes' results: a pair with a bad node has this value, or failed."""
    found = []
    for pair in chain.from_iterable(plan_pairs(hosts)):
        is_bad = bool({*pair} & bad)
        problem = "no answer within 9 s" if is_bad and value is None else ""
        result = WorkResult("pair", name_pair(pair), value if is_bad else 10.0, "GB/s", problem=problem)
        found += [result, result]
    return found


@pytest.mark.parametrize("count", range(2, 12))
def test_each_node_meets_two_others_once_and_nobody_twice_in_a_round(count: int) -> None:
    hosts = tuple(f"n{number}" for number in range(count))
    rounds = plan_pairs(hosts)
    assert len(rounds) == (1 if count == 2 else 2 + count % 2)
    for pairs in rounds:
        assert max(Counter(chain.from_iterable(pairs)).values()) == 1
    met = [frozenset(pair) for pair in chain.from_iterable(rounds)]
    assert len({*met}) == len(met)
    meetings = Counter(chain.from_iterable(chain.from_iterable(rounds)))
    assert {*meetings.values()} == {1 if count == 2 else 2} and len(meetings) == count


def test_one_node_has_nobody_to_meet() -> None:
    assert plan_pairs(("a",)) == plan_pairs(()) == ()
    assert judge_pairs(("a",), (), 0.93) == ()


def test_good_pairs_are_told_of() -> None:
    (found,) = judge_pairs(HOSTS, measure(HOSTS, set()), 0.93)
    assert (found.host, found.finding.level) == ("", "ok")


@pytest.mark.parametrize("hosts", [HOSTS, HOSTS[:5], HOSTS[:4]], ids=len)
@pytest.mark.parametrize("value", [None, 3.0], ids=["fails", "slow"])
@pytest.mark.parametrize("number", range(4))
def test_a_bad_node_is_told_from_its_partners(
    hosts: tuple[str, ...], value: float | None, number: int
) -> None:
    found = judge_pairs(hosts, measure(hosts, {hosts[number]}, value), 0.93)
    assert [(one.host, one.finding.level) for one in found] == [(hosts[number], "error")]
    assert f"cluster.exclude={hosts[number]}" in found[0].finding.fix


def test_two_bad_neighbours_are_both_found() -> None:
    found = judge_pairs(HOSTS, measure(HOSTS, {"n-3", "n-4"}), 0.93)
    assert [one.host for one in found] == ["n-3", "n-4"]


def test_of_two_nodes_neither_is_blamed() -> None:
    (found,) = judge_pairs(HOSTS[:2], measure(HOSTS[:2], {"n-1"}), 0.93)
    assert (found.host, found.finding.level) == ("", "error")
    assert "n-1 and n-2" in found.finding.what


def test_a_pair_without_a_port_or_an_answer_says_nothing() -> None:
    taken = WorkResult("pair", "n-1-n-2", None, reason="the port is taken")
    failed = WorkResult("pair", "n-1-n-2", None, problem="no answer within 9 s")
    assert judge_pairs(HOSTS, (taken, failed), 0.93) == ()


def test_slow_gpu_links_by_the_tolerance() -> None:
    slow = measure(HOSTS, {"n-2"}, 9.0)
    assert judge_pairs(HOSTS, slow, 0.93)[0].finding.level == "ok"
    (found,) = judge_pairs(HOSTS, slow, 0.93, with_gpus=True)
    assert (found.host, found.finding.level) == ("n-2", "warning")


def test_nodes_of_one_machine_are_not_compared_but_may_not_fail() -> None:
    assert (
        judge_pairs(HOSTS, measure(HOSTS, {"n-2"}, 3.0), 0.93, incomparable={"n-2"})[0].finding.level == "ok"
    )
    (found,) = judge_pairs(HOSTS, measure(HOSTS, {"n-2"}), 0.93, incomparable={"n-2"})
    assert (found.host, found.finding.level) == ("n-2", "error")


def test_a_node_that_did_not_answer_does_not_move_the_ring() -> None:
    """The others report its pairs as failed: it is the one that is named."""
    results = measure(HOSTS, {"n-3"})
    nodes = [node(host, cpus(), *pick(results, host)) for host in HOSTS if host != "n-3"]
    found = judge_meetings(HOSTS, nodes, 0.93)
    assert [(one.host, one.finding.level) for one in found] == [("n-3", "error")]


def pick(results: list[WorkResult], host: str) -> list[WorkResult]:
    """A node's results of pairs, each once."""
    pairs = [name_pair(pair) for pair in chain.from_iterable(plan_pairs(HOSTS)) if host in pair]
    return [one for one in dict.fromkeys(results) if one.where in pairs]
