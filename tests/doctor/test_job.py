"""Nodes of a job with faults, as answers of preflight in a run directory, and what is found on them."""

import json
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from launcher.codec import convert
from launcher.doctor.job import judge_nodes
from launcher.doctor.model import Facts
from launcher.doctor.work import plan_pairs
from tests.doctor.healthy import JOBS, change, list_found, make_job, make_node, run_doctor, write_answers
from tests.seam import Launch

STORED = "preflight=deep"
HOSTS = ("n1", "n2", "n3", "n4", "n5", "n6")


@pytest.mark.usefixtures("here")
def test_each_of_many_nodes_with_a_fault_is_found_with_its_values() -> None:
    """All faults in one job: a node of each, among as many healthy ones."""
    faults = {name.replace("_", "-"): fault for name, fault in JOBS["fault"].items()}
    names = [*faults, *(f"healthy-{number}" for number in range(len(faults)))]
    nodes = [make_node(number, host) for number, host in enumerate(names, 1)]
    for node in nodes:
        for path, value in faults.get(node["host"], {}).get("set", {}).items():
            change(node, path, value)
    done, findings = run_doctor(STORED, write_answers(Path("run"), nodes), "cluster.gpus_per_node=8")
    assert done.code == 1
    found: dict[str, list[str]] = {name: [] for name in ("", *names)}
    texts: dict[str, list[str]] = {name: [] for name in names}
    for finding in findings:
        found[finding["host"]].append(f"{finding['rule']} {finding['level']}")
        texts.setdefault(finding["host"], []).extend((finding["what"], finding["fix"]))
    assert {name: sorted(rules) for name, rules in found.items() if rules} == {
        name: sorted(fault["find"]) for name, fault in faults.items() if fault["find"]
    }
    said = {
        name: [part for part in fault.get("says", ()) if part not in "\n".join(texts[name])]
        for name, fault in faults.items()
    }
    assert {name: parts for name, parts in said.items() if parts} == {}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", JOBS["job"])
def test_a_job(name: str) -> None:
    case = JOBS["job"][name]
    run = write_answers(Path("run"), make_job(case), tuple(case.get("silent", ())))
    _, findings = run_doctor(STORED, run, *case.get("words", ()))
    assert sorted(list_found(findings)) == sorted(case.get("find", ()))
    texts = "\n".join(finding[key] for finding in findings for key in ("what", "why", "fix"))
    assert [part for part in case.get("says", ()) if part not in texts] == []


def test_nodes_are_shown_with_their_findings(launch: Launch) -> None:
    nodes = make_job({"nodes": 3, "set": {"n2.load": 0.8, "n2.gpus.0.remap_failed": True}})
    done = launch("doctor", STORED, write_answers(Path("run"), nodes))
    assert done.code == 1 and done.err == "launch: deep checks of 3 nodes in 1 min 20 s: 1 sick (n2)\n"
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert lines[0] == "✗ n2 GPUs: GPU 0 (0000:01:00.0): a defect memory row could not be remapped"
    assert lines[3].startswith("!    load: others use 80%")
    assert lines[-3:] == [
        "✓ n1 checks: all well",
        "✓ n3 checks: all well",
        "1 error, 1 warning; 2 checks passed",
    ]


def test_a_run_whose_nodes_were_not_checked(launch: Launch) -> None:
    launch("doctor", STORED, "run_dir=.").assert_error(2, "run_dir=. holds no preflight/*/report.json")


@pytest.mark.usefixtures("here")
def test_answers_are_judged_without_what_cannot_be_read() -> None:
    """A report of another version may hold findings that nobody knows, or not be one at all."""
    nodes = make_job({"nodes": 2, "set": {"n1.load": 0.8}})
    run = write_answers(Path("run"), nodes, silent=("n3",))
    answered, silent = expected = run_doctor(STORED, run)[1]
    assert [(one["host"], one["rule"]) for one in expected] == [
        ("n1", "load.others"),
        ("n3", "checks.silent"),
    ]
    report = Path("run/preflight/0/report.json")
    told = json.loads(report.read_text())
    report.write_text(json.dumps({**told, "findings": [{"rule": "of.tomorrow", "level": 4}]}))
    assert run_doctor(STORED, run)[1] == expected
    for damaged in ({**told, "kind": 7}, ["hosts"]):
        report.write_text(json.dumps(damaged))
        assert run_doctor(STORED, run)[1] == [answered]
    report.write_text(json.dumps(told))
    Path("run/preflight/0/node-n1.json").write_text('{"host": "n1"}')
    Path("run/preflight/0/node-n2.json").write_text('{"host": ')
    Path("run/preflight/1").mkdir()
    Path("run/preflight/1/report.json").write_text("[" * 100_000)
    assert run_doctor(STORED, run)[1] == [silent]


def test_hundreds_of_nodes_are_judged_without_comparing_each_with_each() -> None:
    """Three thousand GPUs: pairs of them would take minutes, and the test's time limit would end it."""
    nodes = make_job({"nodes": 400, "set": {"n3.gpus.1.nvlinks": 4}})
    findings = judge_nodes([convert(Facts, node) for node in nodes])
    assert [(one.host, one.rule) for one in findings] == [("n3", "gpu.nvlinks")]


def measure_pairs(
    hosts: tuple[str, ...], bad: set[str], value: float | None = None, where: str = "CPU"
) -> list[Facts]:
    """Nodes that all answered: a pair with a bad node has this value, or failed."""
    nodes: dict[str, dict[str, Any]] = {
        host: {"host": host, "node_rank": 0, "time": 0.0, "boot_id": host, "work": []} for host in hosts
    }
    for pair in chain.from_iterable(plan_pairs(hosts)):
        is_bad = bool({*pair} & bad)
        result = {"measure": "pair", "where": "-".join(pair), "value": value if is_bad else 10.0}
        result["problem"] = "no answer within 9 s" if is_bad and value is None else ""
        for host in pair:
            nodes[host]["work"] += [result, {"measure": "dance", "where": where, "value": 1.0}]
    return [convert(Facts, json.loads(json.dumps(node))) for node in nodes.values()]


def judge(hosts: tuple[str, ...], nodes: list[Facts]) -> list[tuple[str, str, str]]:
    return [(one.host, one.rule, one.level) for one in judge_nodes(nodes, hosts=hosts)]


@pytest.mark.parametrize("count", range(12))
def test_each_node_meets_two_others_once_and_nobody_twice_in_a_round(count: int) -> None:
    hosts = tuple(f"n{number}" for number in range(count))
    rounds = plan_pairs(hosts)
    assert len(rounds) == (0 if count < 2 else 1 if count == 2 else 2 + count % 2)
    assert all(max(Counter(chain.from_iterable(pairs)).values()) == 1 for pairs in rounds)
    met = [frozenset(pair) for pair in chain.from_iterable(rounds)]
    assert len({*met}) == len(met)
    meetings = Counter(chain.from_iterable(chain.from_iterable(rounds)))
    assert {*meetings.values()} == ({1 if count == 2 else 2} if count > 1 else set())
    assert len(meetings) == (count if count > 1 else 0)


@pytest.mark.parametrize("hosts", [HOSTS, HOSTS[:5], HOSTS[:4]], ids=len)
def test_a_bad_node_is_told_from_its_partners(hosts: tuple[str, ...]) -> None:
    assert judge(hosts, measure_pairs(hosts, set())) == []
    for host in hosts:
        for value in (None, 3.0):
            assert judge(hosts, measure_pairs(hosts, {host}, value)) == [(host, "pairs.bad_node", "error")]


def test_bad_pairs() -> None:
    two = [(host, "pairs.bad_node", "error") for host in ("n3", "n4")]
    assert judge(HOSTS, measure_pairs(HOSTS, {"n3", "n4"})) == two
    assert judge(HOSTS[:2], measure_pairs(HOSTS[:2], {"n1"})) == [("", "pairs.bad_pair", "error")]
    # Slow GPUs by the tolerance; CPUs share the network.
    assert judge(HOSTS, measure_pairs(HOSTS, {"n2"}, 9.0)) == []
    assert judge(HOSTS, measure_pairs(HOSTS, {"n2"}, 9.0, "GPU 0")) == [("n2", "pairs.bad_node", "warning")]
    assert judge(HOSTS, measure_pairs(HOSTS, {"n2"}, 5.0)) == [("n2", "pairs.bad_node", "warning")]
    # A node that did not answer does not move the ring: the others report its pairs.
    answered = [node for node in measure_pairs(HOSTS, {"n3"}) if node.host != "n3"]
    assert judge(HOSTS, answered) == [("n3", "pairs.bad_node", "error")]


def test_pairs_that_say_nothing() -> None:
    """Of a port that is taken, and of nodes that are one machine: these may be slow, and may not fail."""
    taken = {"measure": "pair", "where": "n1-n2", "value": None}
    for first, second in (({"reason": "the port is taken"}, {"problem": "no answer"}), ({}, {})):
        work = [{**taken, **first}, {**taken, **second}]
        nodes = [convert(Facts, {"host": "n1", "node_rank": 0, "time": 0.0, "work": work})]
        assert judge(HOSTS, nodes) == []
    for value, expected in ((3.0, []), (None, [("n2", "pairs.bad_node", "error")])):
        nodes = [replace(node, boot_id="same") for node in measure_pairs(HOSTS, {"n2"}, value)]
        assert judge(HOSTS, nodes) == expected
