"""Evidence and reports as data: who holds the others up, and which pauses are hangs.

Ranks, processes and groups of `tests/data/evidence.json` are as in `hang-N/evidence-HOST.json`, less what is
by default (`rank`) and what several have alike, which is named (`processes`, `groups`). A frame is
`FILE:LINE FUNCTION`. Pauses are in `decisions.toml`.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.codec import convert
from launcher.cpulist import parse_cpulist
from launcher.watch.hang import Pause, decide
from launcher.watch.model import NodeEvidence, NodeReport

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
    report = {"attempt": 0, "time": 0.0, "number": 1, "interval": 5.0}
    return [
        convert(
            NodeReport,
            {
                **report,
                "host": entry["host"],
                "node_rank": number,
                "nodes": entry.get("nodes", len(entries)),
                "ranks": [
                    {**state, "rank": rank, "local_rank": rank}
                    for rank in sorted(parse_cpulist(entry["ranks"]))
                ],
            },
        )
        for number, entry in enumerate(entries)
    ]


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
