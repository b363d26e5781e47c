"""From reports to a hang: who judges, when it asks, what it makes of the answers, and what follows."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.codec import convert
from launcher.cpulist import parse_cpulist
from launcher.launch.processes import RankProcess
from launcher.launch.watching import WatcherMessage
from launcher.runs.records import NodeRecord
from launcher.watch.hang import (
    HangJudge,
    Pause,
    choose_limit,
    decide,
    is_judge,
    list_orders,
    make_job_view,
)
from launcher.watch.model import Heartbeat, JobState, NodeEvidence, NodeReport, RankEntry
from launcher.watch.procfs import Sample
from launcher.watch.ranks import RankBook
from launcher.watch.run_files import Found, Stored

TABLES = tomllib.loads(Path(__file__).with_name("judge.toml").read_text())
VERDICT = {"kind": "absent", "sentence": "rank 1 on n1 has not joined", "ranks": [1], "hosts": ["n1"]}
HANG = {
    "number": 1,
    "time": 1000.0,
    "stalled_since": 970.0,
    "step": 10,
    "verdict": VERDICT,
    "pids": [[1, 101]],
}


def table(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", TABLES[name], ids=lambda case: case.get("name", ""))


def make_reports(text: str) -> list[NodeReport]:
    """Reports of nodes with a rank each: `IDLE/STEP/ATTEMPT/PHASE …`."""
    reports = []
    for rank, words in enumerate(text.split()):
        idle, step, attempt, phase = (*words.split("/"), "0", "training")[:4]
        if not attempt.isdigit():
            attempt, phase = "0", attempt
        seconds = None if idle == "none" else float(idle)
        who = {
            "rank": rank,
            "local_rank": 0,
            "pid": 100 + rank + 1000 * int(attempt),
            "attempt": int(attempt),
        }
        state = {**who, "phase": phase, "step": int(step), "step_age": seconds, "p50": 1.0, "idle": seconds}
        reports.append(report(rank, state))
    return reports


def report(node: int, *ranks: dict[str, Any], **more: Any) -> NodeReport:
    who = {"host": f"n{node}", "node_rank": node, "nodes": 2, "attempt": 0, "ranks": [*ranks]}
    return convert(NodeReport, {**who, "time": 1000.0, "number": 1, "interval": 5.0, **more})


def job(host: str, **more: Any) -> JobState:
    known = {"time": 1000.0, "attempt": 0, "state": "running", "step": 10, "step_age": 1.0, "p50": 1.0}
    return convert(JobState, {**known, "nodes": 2, "host": host, **more})


@table("judging")
def test_who_judges(case: dict[str, Any]) -> None:
    own = replace(report(case["node"]), stalled_since=900.0 if case.get("stalled") else None)
    told = dict(case.get("job", ()))
    seen = 50.0 - told.pop("age", 0)
    found = Found(
        Stored(job(**told), seen) if told else None,
        (Stored(report(0), 50.0 - case["first"]),) if "first" in case else (),
    )
    assert is_judge(own, found, 50.0 - case.get("began", 999), 50.0) is case["judges"]


@table("story")
def test_what_the_judging_node_tells(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    word = case.get("word", "hang")
    told = {**HANG, "verdict": {**VERDICT, "kind": case.get("kind", "absent")}}
    verdict = job("n0", hangs=[told]).hangs[0].verdict
    decision: Any = SimpleNamespace(word=word, verdict=verdict, seconds=0.0 if word == "hang" else 500.0)
    monkeypatch.setattr("launcher.watch.hang.decide", lambda *_: decision)
    judge, hangs = HangJudge(case.get("on_hang", "report")), case.get("number", 1) - 1
    if number := case.get("adopted"):
        before = {**HANG, "number": number, "pids": []}
        judge.adopt(job("n0", hangs=[before]))
    for now, ranks, hosts, expected, *longest in case["looks"]:
        evidence = {host: NodeEvidence(host, int(host[1:]), 1, 0.0, 1.0, ()) for host in hosts.split()}
        own, *others = make_reports(ranks)
        seen = Found(reports=tuple(Stored(one, now) for one in others), hangs=hangs)
        found = judge.look(make_job_view(own, seen, now), evidence, 20, now)
        assert show(found) == expected, now
        assert longest in ([], [judge.longest_pause]), now
    assert sum(hang.action == "restart" for hang in judge.hangs) == case.get("restarts", 0)


def show(found: Any) -> str:
    if isinstance(found, int):
        return "asks"
    if isinstance(found, str) or found is None:
        return (found or "").partition(":")[0]
    if found.recovered:
        return f"hang {found.number} is over"
    seconds = round(found.time - found.stalled_since)
    pids = " ".join(f"{rank}={pid}" for rank, pid in found.pids)
    return f"hang {found.number} after step {found.step} for {seconds} s: {found.action} {pids}"


@table("orders")
def test_what_a_node_does_about_a_hang(case: dict[str, Any]) -> None:
    pids = {int(rank): pid for rank, pid in case["pids"].items()}
    told = {**HANG, "action": case["action"], "recovered": case.get("recovered")}
    (hang,) = job("n0", hangs=[told]).hangs
    orders = [convert(WatcherMessage, {"event": "act", **order}) for order in list_orders((hang,), 0, pids)]
    assert [" ".join(map(str, (order.action, *order.ranks))) for order in orders] == case["orders"]
    assert list(list_orders((hang,), hang.number, pids)) == [], "each hang once"
    for pending in orders:  # the supervisor drops one that comes after a restart
        ranks = [RankProcess(rank, rank, 0, pid) for rank, pid in pids.items()]
        assert not pending.is_late(ranks) and not pending.is_late(ranks[:1])
        assert pending.is_late([*ranks[:-1], replace(ranks[-1], pid=999)])


@table("limit")
def test_when_ranks_are_looked_at(case: dict[str, Any]) -> None:
    steps = [seconds for value, count in case.get("steps", ()) for seconds in repeat(value, count)]
    limit = choose_limit(case.get("setting", "auto"), [[], steps], case.get("longest", 0.0))
    assert limit == case["seconds"]


@table("stalled")
def test_who_counts_as_stalled(case: dict[str, Any]) -> None:
    own, *others = make_reports(case["ranks"])
    view = make_job_view(own, Found(reports=tuple(Stored(one, 0.0) for one in others)), 0.0)
    assert (HangJudge("report").look(view, {}, 20, 0.0) is not None) is case["stalled"]


def make_book(beat: Heartbeat | None) -> RankBook:
    book = RankBook(Path("/nowhere"), lambda _: beat)
    book.take([RankEntry(0, 0, 0, 9)])
    return book


@table("work")
def test_activity_counts_as_progress_before_the_first_step_alone(case: dict[str, Any]) -> None:
    began = time()
    beat = Heartbeat(0, 0, 9, "starting", began, case["step"], 0.0, began - case["idle"] + 4, 0, 0.0)
    for found in (beat, replace(beat, pid=8), None):  # that of the rank's last start
        book = make_book(found)
        book.look(1000.0)
        book.take_sample(Sample(resting=(9,) if case.get("rests") else ()), {}, counts=True)
        book.now, book.ranks[0].read_at = 1004.0, began + 4
        (rank,) = book.list_ranks(Sample(), {}, {})
        if found != beat:
            assert rank.idle is None
            continue
        assert rank.idle == pytest.approx(case["counts"], abs=0.5)
        assert rank.quiet == pytest.approx(case["quiet"], abs=0.5)


def test_ranks_are_added_while_another_thread_goes_through_them() -> None:
    book = make_book(None)
    others = iter(book.ranks.items())
    book.take([RankEntry(2, 2, 0, 102)])
    assert [rank for rank, _ in others] == [0] and list(book.ranks) == [0, 2]


def test_the_job_as_its_nodes_reports_have_it() -> None:
    """Reports of other attempts do not count, old ones are silent, and a node that has ended has a record."""
    (own,) = make_reports("30/10")
    reports = ((report(1, attempt=3), 1.0), (report(2), 15.5), (report(3), 2.0))
    found = Found(reports=tuple(Stored(one, 50.0 - age) for one, age in reports))
    for now, fresh, silent in ((50.0, ["n0", "n3"], ["n2"]), (65.0, ["n0"], ["n2", "n3"])):
        seen = make_job_view(own, found, now)
        assert [[one.host for one in ones] for ones in (seen.fresh, seen.silent)] == [fresh, silent]
    record = NodeRecord("n1", 1, "succeeded", 0, None, "", None, 0, 0.0, 40.0, 1, ((1, 40.0),))
    for age in (2.0, 99.0):
        seen = make_job_view(own, Found(reports=(Stored(report(1), 50.0 - age),), ended=(record,)), 50.0)
        assert [one.host for one in (*seen.fresh, *seen.silent)] == ["n0"]
        (node,) = seen.ended
        assert [(rank.rank, rank.exit_code, rank.host) for rank in node.ranks] == [(1, 0, "n1")]


# Evidence and reports as data: who holds the others up, and which pauses are hangs. Ranks, processes and
# groups of `tests/data/evidence.json` are as in `hang-N/evidence-HOST.json`, less what is by default (`rank`)
# and what several have alike, which is named (`processes`, `groups`). A frame is `FILE:LINE FUNCTION`. Pauses
# are in `decisions.toml`.

DATA: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "evidence.json").read_text())
TABLE = tomllib.loads(Path(__file__).with_name("decisions.toml").read_text())
PAUSES = [TABLE["defaults"] | row for row in TABLE["pause"]]


def _load_nodes(entries: Sequence[Mapping[str, Any]]) -> list[NodeEvidence]:
    """Return the evidence of each host; an entry is one of several ranks that are alike."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        for number in sorted(parse_cpulist(entry["ranks"])):
            rank = {**DATA["rank"], **entry, "rank": number, "local_rank": number, "pid": 1000 + number}
            rank["process"] = _load_process(entry["process"])
            rank["children"] = [_load_process(child) for child in entry.get("children", ())]
            rank["groups"] = [
                DATA["groups"][group] if isinstance(group, str) else group
                for group in entry.get("groups", ())
            ]
            hosts.setdefault(rank["host"], []).append(rank)
    fixed = {"number": 1, "time": 0.0, "seconds": 1.0}
    return [
        convert(NodeEvidence, {"host": host, "node_rank": number, "ranks": ranks, **fixed})
        for number, (host, ranks) in enumerate(hosts.items())
    ]


def _load_reports(entries: Sequence[Mapping[str, Any]], step: int = 10) -> list[NodeReport]:
    """Return the last reports of hosts with these ranks."""
    state = {"pid": 1, "attempt": 0, "phase": "training", "step": step, "step_age": 30.0}
    found = []
    for number, entry in enumerate(entries):
        ranks = [{**state, "rank": at, "local_rank": at} for at in sorted(parse_cpulist(entry["ranks"]))]
        nodes = entry.get("nodes", len(entries))
        found.append(report(number, *ranks, host=entry["host"], nodes=nodes, time=0.0))
    return found


def _load_process(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    found = DATA["processes"][entry] if isinstance(entry, str) else entry
    stacks = [
        {**stack, "frames": [_load_frame(frame) for frame in stack["frames"]]}
        for stack in found.get("stacks", ())
    ]
    return {**found, "stacks": stacks}


def _load_frame(text: str) -> dict[str, Any]:
    place, _, function = text.partition(" ")
    file, _, line = place.rpartition(":")
    return {"file": file, "line": int(line), "function": function}


@pytest.mark.parametrize("case", DATA["hangs"], ids=lambda case: case["name"])
def test_who_holds_the_others_up(case: dict[str, Any]) -> None:
    pause = Pause(20.0, 30.0, {}, 0.0, "auto")
    verdict = decide(_load_nodes(case["ranks"]), _load_reports(case.get("reports", ())), pause).verdict
    expected = case["verdict"]
    assert (verdict.kind, list(verdict.ranks), verdict.waiting, verdict.is_final) == (
        expected["kind"],
        expected["ranks"],
        expected["waiting"],
        expected.get("is_final", False),
    )
    number = "" if verdict.sequence is None else f"#{verdict.sequence}"
    assert " ".join(filter(None, (verdict.operation, number, verdict.group))) == expected.get(
        "collective", ""
    )
    frame = verdict.frame
    assert (f"{frame.file}:{frame.line} {frame.function}" if frame else None) == expected.get("line")
    assert verdict.sentence and verdict.sentence.isprintable()
    for words in expected.get("says", ()):
        assert words in verdict.sentence


@pytest.mark.parametrize("row", PAUSES, ids=lambda row: row["name"])
def test_what_follows_from_a_pause(row: dict[str, Any]) -> None:
    waiting = {"host": "n0", "step": row["step"], "idle": row["idle"]}
    ranks = [{"ranks": "0", "process": "in a collective", "groups": ["waits in 1042"], **waiting}]
    if not row["others"]:
        ranks = []
    if row["doing"] != "silent":
        culprit = {"step": row["step"], "phase": row["phase"], "idle": row["own_idle"]}
        ranks.append({"ranks": "1", **DATA["pauses"][row["doing"]], **culprit})
    hosts = [{"host": "n0", "ranks": "0"}] if row["others"] else []
    decision = _decide(row, ranks, [*hosts, {"host": "n1", "ranks": "1"}])
    assert decision.word == row["word"], decision
    assert decision.verdict.sentence.endswith(row.get("sentence", ""))
    assert (decision.seconds > 0) is (decision.word != "hang" and row["doing"] != "debugs")


def _decide(row: dict[str, Any], ranks: list[dict[str, Any]], hosts: list[dict[str, Any]]) -> Any:
    quiet = dict.fromkeys((0, 1) if row["doing"] != "silent" else (0,), row["quiet"])
    pause = Pause(20.0, row["idle"], quiet, row["longest"], row["setting"])
    return decide(_load_nodes(ranks), _load_reports(hosts, row["step"]), pause)
