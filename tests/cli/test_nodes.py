"""`launch nodes`: the table, patterns, JSON, completion, planted files."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.make_runs import make_run
from tests.cli.test_completion import ask
from tests.seam import Launch

FINDING = {
    "host": "n2",
    "level": "error",
    "subject": "limits",
    "what": "/dev/shm has 8 MiB\x1b[2J",
    "fix": "",
}


@pytest.fixture
def runs(here: Path) -> Path:
    """Three runs on nodes n0 to n11."""
    hosts: dict[str, Any] = {"hosts": [f"n{number}" for number in range(12)]}
    make_run(
        here / "runs", "a", "20260801-120001", **hosts, preflight={"findings": [FINDING], "sick": ["n2"]}
    )
    make_run(here / "runs", "a", "20260801-120002", "failed", **hosts, outcome={"lost": ["n11"]})
    make_run(here / "runs", "a", "20260801-120003", **{**hosts, "hosts": ["n11", "login"]})
    return here / "runs"


def test_nodes_with_trouble_come_first(launch: Launch, runs: Path) -> None:
    lines = launch("nodes").out.splitlines()
    assert lines[0].split()[:8] == ["node", "runs", "sick", "lost", "hangs", "slow", "warnings", "seen"]
    assert {lines[1].split()[0], lines[2].split()[0]} == {"n2", "n11"} and len(lines) == 14


def test_nodes_are_named_by_patterns_and_their_events_shown(launch: Launch, runs: Path) -> None:
    shown = launch("nodes", "n[10-11]", "n2*").out
    rows = [line.split()[0] for line in shown.splitlines()[1:4]]
    assert {*rows} == {"n2", "n10", "n11"}
    assert "a/20260801-120002  lost" in shown and "\x1b" not in shown
    launch("nodes", "m*").assert_error(2, "was on a node 'm*'", "login, n0")


def test_the_json_has_everything(launch: Launch, runs: Path) -> None:
    found = json.loads(launch("nodes", "n11", "format=json").out)
    (node,) = found["nodes"]
    assert found["schema"] == 1
    assert (node["host"], node["runs"], node["lost"], node["trouble"]) == ("n11", 3, 1, 1)
    assert node["events"][0]["run"] == "a/20260801-120002"


def test_no_run_is_no_error(launch: Launch, here: Path) -> None:
    assert launch("nodes").out == "no run below runs_dir=runs yet\n"


def test_what_is_no_manifest_is_passed_over(launch: Launch, runs: Path) -> None:
    folder = runs / "b" / "20260801-120004"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("[" * 100_000)
    make_run(runs, "b", "20260801-120005", hosts={"n0": 1}, preflight=[1], hangs="x")
    link = runs / "b" / "20260801-120006"
    link.mkdir()
    (link / "manifest.json").symlink_to("/dev/zero")
    assert len(launch("nodes", "format=json").out) > 1000


def test_nodes_are_completed(runs: Path) -> None:
    assert ask("launch nodes n1")[:1] == ["n11"]
