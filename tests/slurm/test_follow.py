"""Following a job: what is told of it, by a made-up squeue (`followed.toml`), and its log."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.report.console import JobConsole
from launcher.report.viewer import ViewOptions
from launcher.slurm import follow, run_states
from launcher.slurm.follow import JobLog, follow_jobs
from tests.cli.make_runs import make_run
from tests.seam import Launch

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("followed.toml").read_text())
SQUEUE = """#!/bin/sh
cd {folder}
echo >> calls
n=$(wc -l < calls)
[ -e row-$n ] || n={last}
[ -e outcome-$n ] && cp outcome-$n {manifest}
cat row-$n
"""


@pytest.mark.parametrize("case", TABLES["job"], ids=lambda case: case["about"])
def test_what_is_told_of_a_job(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "runs", state="submitted", slurm={"job_id": "12"})
    manifest = json.loads((path / "manifest.json").read_text())
    rows = [row.split("|") for row in case["squeue"]]
    for number, row in enumerate(rows, 1):
        text = ""
        if len(row) == 4:
            state, restarts, nodelist, reason = row
            start = "2026-08-02T00:00:00" if state == "PENDING" else "N/A"
            status = 5 << 8 if state == "FAILED" else 0
            text = f"12|{state}|main|2|{nodelist}|{start}|{restarts}|{status}|N/A|N/A|N/A|{reason}|\n"
        (tmp_path / f"row-{number}").write_text(text)
    for number, outcome in case.get("outcomes", {}).items():
        (tmp_path / f"outcome-{number}").write_text(json.dumps({**manifest, "outcome": outcome}))
    squeue = tmp_path / "squeue"
    squeue.write_text(SQUEUE.format(folder=tmp_path, last=len(rows), manifest=path / "manifest.json"))
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(run_states, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(run_states, "STATE_SECONDS", 0.01)
    monkeypatch.setattr(follow, "PATIENCE", 1.0)
    assert follow_jobs([(path, "12")]) == case["code"]
    told = [line.removeprefix("launch: ") for line in capfd.readouterr().err.splitlines()]
    assert len(told) == len(case["says"]), told
    for line, expected in zip(told, case["says"], strict=True):
        assert line.startswith(expected), told


def test_why_a_job_waits(here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(here / "runs", state="submitted", slurm={"job_id": "12"})
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "300")
    (here / "squeue").write_text("#!/bin/sh\ncat rows\n")
    (here / "squeue").chmod(0o755)
    for reason, text in TABLES["reasons"].items():
        (here / "rows").write_text(f"12|PENDING|main|2||N/A|0|0|N/A|N/A|N/A|{reason}|\n")
        shown = launch("status", "tiny").out
        (line,) = (line for line in shown.splitlines() if line.startswith("reason "))
        assert line.split(None, 1)[1].strip() == text


def make_log(folder: Path) -> JobLog:
    return JobLog(folder / "slurm-12.out", JobConsole(ViewOptions("all")))


def test_all_bytes_are_shown_as_they_are(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = make_log(tmp_path)
    assert not log.show_new()
    data = bytes(range(256)) * 10_000 + b"\n[n0:0] step 5/9 loss 2\n[n1:1] step 6/9 loss 1\n"
    log.path.write_bytes(data + b"name? ")
    while log.show_new():
        pass
    assert capfdbinary.readouterr() == (data, b"")
    assert log.console.progress.steps[-1].step == 5
    with log.path.open("ab") as file:
        file.write(b"\nbar\rlaunch: no end")
    log.show_new()
    assert not log.is_whole and capfdbinary.readouterr() == (b"name? \nbar\r", b"")
    log.show_new(final=True)
    assert capfdbinary.readouterr() == (b"launch: no end", b"")


PIECES = st.sampled_from(
    [b"launch: a\n", b"launch: run directory /r\n", b"launch", b": ", b"x", b"\n", b"launch: ", b"\xff\r"]
)


@given(pieces=st.lists(PIECES, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_of_ours_are_told_apart_wherever_the_log_is_cut(
    pieces: list[bytes], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = make_log(tmp_path)
    log.path.write_bytes(b"")
    for piece in pieces:
        with log.path.open("ab") as file:
            file.write(piece)
        log.show_new()
    log.show_new(final=True)
    whole = b"".join(pieces)
    lines = re.findall(rb"[^\r\n]*(?:[\r\n]|\Z)", whole)
    own = [line for line in lines if line.startswith(b"launch: ") and line.endswith(b"\n")]
    others = b"".join(line for line in lines if line not in own)
    assert capfdbinary.readouterr() == (others, b"".join(own))
    last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    assert log.is_whole == (last.startswith(b"launch: run directory ") and last.endswith(b"\n"))
