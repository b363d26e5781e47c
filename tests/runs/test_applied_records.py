"""The ranks' records, and where they differ from the plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.decode import DecodeError, decode
from launcher.plan.model import Memory, RankPlan
from launcher.runs.applied_records import Applied, AppliedReader, compare_applied
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
PLANNED = RankPlan(
    0, None, frozenset(range(4)), frozenset(range(8)), Memory("preferred", frozenset({0})), 1, 4
)


def test_a_record_is_read() -> None:
    assert decode(Applied, json.dumps(RECORD)) == APPLIED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"rank": "x"}',
        json.dumps({**RECORD, "pid": None}),
        json.dumps({**RECORD, "memory": "default"}),
    ],
)
def test_what_is_no_record_is_an_error(text: str) -> None:
    with pytest.raises(DecodeError):
        decode(Applied, text)


def test_the_reader_gives_what_is_new(tmp_path: Path) -> None:
    import os

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


def test_what_was_applied_as_planned_needs_no_words() -> None:
    assert compare_applied([PLANNED], [APPLIED]) == []
    free = replace(PLANNED, memory=Memory("default"))
    assert compare_applied([free], [replace(APPLIED, memory=Memory("bind", frozenset({1})))]) == []


def test_differences_are_named() -> None:
    assert compare_applied([PLANNED], []) == ["local rank 0 left no record of its placement"]
    assert compare_applied([PLANNED], [replace(APPLIED, cpus="0-7")]) == [
        "rank 4 runs on CPUs 0-7, planned 0-3"
    ]
    wrong = replace(APPLIED, memory=Memory("default"))
    assert compare_applied([PLANNED], [wrong]) == ["rank 4 has memory policy default, planned preferred 0"]
    other = replace(APPLIED, memory=Memory("preferred", frozenset({1})))
    assert compare_applied([PLANNED], [other]) == [
        "rank 4 has memory policy preferred 1, planned preferred 0"
    ]


def test_records_of_another_user_are_shown_but_not_acted_upon(tmp_path: Path) -> None:
    path = tmp_path / "rank-4.applied.json"
    path.write_text(json.dumps(RECORD))
    give_away(path)
    assert AppliedReader(tmp_path).read_new() == []
    assert AppliedReader(tmp_path, own=False).read_new() == [APPLIED]
