"""`tests/data/evidence.json` as the judge takes it: the only place that knows its types.

Ranks, processes and groups are as in `hang-N/evidence-HOST.json`, less what is by default (`rank`) and what
several have alike, which is named (`processes`, `groups`). A frame is `FILE:LINE FUNCTION`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.codec import convert
from launcher.cpulist import parse_cpulist
from launcher.watch.watch_model import NodeEvidence, NodeReport

DATA: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "evidence.json").read_text())


def load_nodes(entries: Sequence[Mapping[str, Any]]) -> list[NodeEvidence]:
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


def load_reports(entries: Sequence[Mapping[str, Any]], step: int = 10) -> list[NodeReport]:
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
