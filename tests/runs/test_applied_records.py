"""The ranks' records as the supervisor reads them while they come."""

import json
import os
from dataclasses import replace
from pathlib import Path

from launcher.plan.model import Memory
from launcher.runs.records import Applied, AppliedReader
from tests.strangers import give_away

RECORD = {
    "rank": 4,
    "local_rank": 0,
    "attempt": 1,
    "pid": 77,
    "agent": 70,
    "host": "h",
    "cpus": "0-3",
    "memory": {"policy": "preferred", "nodes": "0"},
    "problems": ["p"],
    "more": None,
}
APPLIED = Applied(4, 0, 1, 77, 70, "h", "0-3", Memory("preferred", frozenset({0})), ("p",))


def test_the_reader_gives_what_is_new(tmp_path: Path) -> None:
    reader = AppliedReader(tmp_path)
    path = tmp_path / "rank-4.applied.json"
    assert reader.read_new() == []
    path.write_text("{")
    (tmp_path / "rank-4.applied.json.77").write_text(json.dumps(RECORD))
    assert reader.read_new() == []
    path.write_text(json.dumps(RECORD))
    assert reader.read_new() == [APPLIED]
    assert reader.read_new() == []
    path.write_text(json.dumps({**RECORD, "attempt": 2}))
    os.utime(path, ns=(1, 1))
    assert reader.read_new() == [replace(APPLIED, attempt=2)]
    path.unlink()
    assert reader.read_new() == []


def test_records_of_another_user_are_shown_but_not_acted_upon(tmp_path: Path) -> None:
    path = tmp_path / "rank-4.applied.json"
    path.write_text(json.dumps(RECORD))
    give_away(path)
    assert AppliedReader(tmp_path).read_new() == []
    assert AppliedReader(tmp_path, own=False).read_new() == [APPLIED]
