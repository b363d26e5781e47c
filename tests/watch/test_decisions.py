"""Evidence and reports as data: who holds the others up, and which pauses are hangs."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from launcher.watch.verdict import Pause, decide
from launcher.watch.watch_model import Decision
from tests.watch.evidence_data import DATA, load_nodes, load_reports

TABLE = tomllib.loads(Path(__file__).with_name("decisions.toml").read_text())
PAUSES = [TABLE["defaults"] | row for row in TABLE["pause"]]


@pytest.mark.parametrize("case", DATA["hangs"], ids=lambda case: case["name"])
def test_who_holds_the_others_up(case: dict[str, Any]) -> None:
    pause = Pause(20.0, 30.0, {}, 0.0, "auto")
    verdict = decide(load_nodes(case["ranks"]), load_reports(case.get("reports", ())), pause).verdict
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


def _decide(row: dict[str, Any], ranks: list[dict[str, Any]], hosts: list[dict[str, Any]]) -> Decision:
    quiet = dict.fromkeys((0, 1) if row["doing"] != "silent" else (0,), row["quiet"])
    pause = Pause(20.0, row["idle"], quiet, row["longest"], row["setting"])
    return decide(load_nodes(ranks), load_reports(hosts, row["step"]), pause)
