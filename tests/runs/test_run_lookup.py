"""What names runs (`lookup.toml`), and what is known of nodes and memory over all of them."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import launcher
from launcher.runs.records import read_measured_runs
from tests.cli.make_runs import make_run
from tests.seam import Launch, clean_environ, run_inside

LOOKUP: dict[str, Any] = tomllib.loads(Path(__file__).with_name("lookup.toml").read_text())


def names(*words: str) -> list[str]:
    result = run_inside(["status", *words, "format=json"])
    assert result.code == 0, result
    return [run["run"] for run in json.loads(result.out)["runs"]]


@pytest.mark.parametrize("case", LOOKUP["case"], ids=lambda case: case["about"])
def test_what_a_text_means(
    case: dict[str, Any], launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in case.get("runs", ()):
        path, _, job = run.partition(" ")
        more: dict[str, Any] = {"slurm": {"job_id": job}} if job else {}
        os.utime(make_run(here / "runs", *path.split("/"), **more), (0, 0))
    for day, text in enumerate(case.get("damaged", ()), 1):
        (make_run(here / "runs", "bad", f"2026080{day}-120000") / "manifest.json").write_text(text)
    make_run(here / "away", "x", "y")
    (here / "runs/empty/20270101-000000").mkdir(parents=True)
    (here / "runs/stray").touch()
    monkeypatch.chdir(here / case.get("cd", "."))
    for text, found in case.get("finds", {}).items():
        assert names(*text.format(here=here).split()) == found, text
    for text, parts in case.get("errors", {}).items():
        launch("status", text.format(long="x" * 300)).assert_error(2, *parts)


def test_of_thousands_of_runs_the_newest_is_found_without_a_look_at_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3000):
        (here / "runs/many" / f"20260801-{number:06}").mkdir(parents=True)
    make_run(here / "runs", "many", "20260802-000000")
    looks: list[Path] = []
    is_file = Path.is_file

    def note(path: Path) -> bool:
        looks.append(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", note)
    assert names("many") == ["many/20260802-000000"]
    assert len([path for path in looks if "runs/many" in str(path)]) < 10


START = "2026-11-22T12:00:00.000+00:00"
SICK = {"host": "n2", "level": "error", "subject": "limits", "what": "/dev/shm has 8 MiB", "fix": ""}
SLOW = {"host": "n1", "rank": 3, "detail": "its core is shared"}
HANG = {"number": 1, "verdict": {"sentence": "rank 1 on n1 has not joined", "hosts": ["n1"]}}


def make_manifest(**parts: Any) -> dict[str, Any]:
    return {"started": START, "hosts": ["n0", "n1", "n2"], "outcome": {}, "earlier": [], **parts}


def make(here: Path, name: str, **parts: Any) -> None:
    """Write a run `NAME/1`."""
    path = make_run(here / "runs", name, "1")
    (path / "manifest.json").write_text(json.dumps(make_manifest(**parts)))


def ask(launch: Launch, *words: str) -> list[dict[str, Any]]:
    result = launch("nodes", *words, "format=json")
    assert result.code == 0, result
    nodes: list[dict[str, Any]] = json.loads(result.out)["nodes"]
    return nodes


def test_what_befell_each_node_is_counted_once_for_an_attempt(launch: Launch, here: Path) -> None:
    first = make_manifest(preflight={"findings": [SICK, SICK], "sick": ["n2"]}, hosts=["n0", "n1"])
    make(
        here,
        "a",
        **{"outcome": {"lost": ["n2"]}, "hangs": [HANG, HANG], "stragglers": [SLOW, SLOW, SLOW]},
        earlier=[first],
    )
    make(here, "b", preflight={"findings": [{**SICK, "level": "warning"}], "sick": []})
    make(here, "silent", preflight={"sick": ["n7"]}, hosts=[])
    keys = ("host", "runs", "sick", "lost", "hang", "slow", "warning", "trouble")
    assert [[node[key] for key in keys] for node in ask(launch)] == [
        ["n2", 2, 1, 1, 0, 0, 1, 2],
        ["n1", 2, 0, 0, 1, 1, 0, 2],
        ["n7", 1, 1, 0, 0, 0, 0, 1],
        ["n0", 2, 0, 0, 0, 0, 0, 0],
    ]
    events = {node["host"]: {(one["kind"], one["run"]) for one in node["events"]} for node in ask(launch)}
    assert events["n2"] == {("sick", "a/1"), ("lost", "a/1"), ("warning", "b/1")} and not events["n0"]


def test_the_newest_events_are_kept(launch: Launch, here: Path) -> None:
    for hour in range(24):
        make(here, f"a{hour:02}", outcome={"lost": ["n0"]}, started=START.replace("12:", f"{hour:02}:"))
    (node,) = ask(launch, "n0")
    assert node["lost"] == 24 and 2 <= len(node["events"]) < 24
    assert [event["run"] for event in node["events"]][:2] == ["a23/1", "a22/1"]
    assert node["last_run"] == "a23/1"


def test_names_that_are_no_hosts_are_left_out(launch: Launch, here: Path) -> None:
    strange = ["n0", "\x1b[31mn1", "", "-x", "a b", 7, None, "x" * 300, "../n"]
    make(here, "a", hosts=strange, outcome={"lost": strange})
    assert [node["host"] for node in ask(launch)] == ["n0"]


KEYS = (
    "preflight outcome hosts findings sick lost hangs verdict stragglers earlier started host level sentence"
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(manifest=st.dictionaries(st.sampled_from(("preflight", "outcome", "hosts", "hangs")), ANYTHING))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_manifest_is_read(launch: Launch, here: Path, manifest: dict[str, Any]) -> None:
    path = here / "runs/a/1"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(json.dumps(manifest))
    ask(launch)


INPROCESS = Path(launcher.__file__).parent / "inprocess"


def make_measured(
    runs_dir: Path, number: int, *, expected: int, reserved: int, fingerprint: str = "f"
) -> Path:
    folder = runs_dir / "train" / f"20260801-12000{number}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    prediction = {"schema": 1, "fingerprint": fingerprint, "expected": expected, "device": "gpu"}
    (folder / "prediction.json").write_text(json.dumps(prediction))
    devices = [{"index": 0, "name": "x", "reserved": reserved, "allocated": reserved - 1}]
    record = {"schema": 1, "rank": 0, "resident": 5, "steps": 3, "devices": devices}
    (folder / "rank-0.memory.json").write_text(json.dumps(record))
    return folder


NONE: tuple[list[str], float, float] = ([], 0.0, 0.0)


def test_runs_of_the_same_program_count(tmp_path: Path) -> None:
    make_measured(tmp_path, 1, expected=100, reserved=110)
    make_measured(tmp_path, 2, expected=0, reserved=60)
    make_measured(tmp_path, 3, expected=100, reserved=90, fingerprint="other")
    make_measured(tmp_path, 4, expected=100, reserved=10_000)  # of something else
    names, ratio, spread = read_measured_runs(tmp_path, "f", "gpu", 100)
    assert names == ["train/20260801-120002", "train/20260801-120001"]
    assert abs(ratio - 0.85) < 1e-9 and abs(spread - 0.25 / 0.85) < 1e-9
    assert read_measured_runs(tmp_path, "f", "cpu", 50) == NONE


def test_records_that_make_no_sense_or_are_links_are_left_out(tmp_path: Path) -> None:
    folder = make_measured(tmp_path, 1, expected=100, reserved=110)
    record = folder / "rank-0.memory.json"
    for text in ("", "[]", '{"rank": 0}', '{"rank": 0, "resident": "many"}', "[" * 100_000):
        record.write_text(text)
        assert read_measured_runs(tmp_path, "f", "gpu", 50) == NONE
    real = folder / "real"
    real.write_text(json.dumps({"rank": 0, "resident": 1, "devices": []}))
    record.unlink()
    record.symlink_to(real)
    assert read_measured_runs(tmp_path, "f", "gpu", 50) == NONE
    record.unlink()
    os.mkfifo(record)
    assert read_measured_runs(tmp_path, "f", "gpu", 50) == NONE


def test_a_rank_leaves_its_peak(tmp_path: Path) -> None:
    """The hook writes it at the end of the process that has the variable, and of no child of it."""
    script = """
import os, subprocess, sys
import torch.version
held = bytearray(200 << 20)
held[::4096] = b"x" * len(held[::4096])
del held
assert "LAUNCH_MEMORY" not in os.environ
child = "import sys; sys.path.insert(0, 'quick'); import torch.version"
subprocess.run([sys.executable, "-c", child], check=True)
assert not os.path.exists("rank-3.memory.json")
"""
    (tmp_path / "quick/torch").mkdir(parents=True)
    (tmp_path / "quick/torch/version.py").touch()
    environ = {**clean_environ(), "PYTHONPATH": str(INPROCESS), "LAUNCH_MEMORY": str(tmp_path), "RANK": "3"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, check=True, timeout=120)
    record = json.loads((tmp_path / "rank-3.memory.json").read_text())
    assert record["rank"] == 3 and record["devices"] == []
    assert 200 << 20 < record["resident"] < 2 << 30
    assert (tmp_path / "rank-3.memory.json").stat().st_mode & 0o777 == 0o600
