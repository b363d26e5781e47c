"""Following a job: what is told of the queue, when and how a job has ended (`followed.toml`), and its log."""

import json
import re
import shutil
import time
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.console import JobConsole
from launcher.report.viewer import ViewOptions
from launcher.runs.run_directory import RunDir
from launcher.slurm import follow as followed
from launcher.slurm.commands import JobState
from launcher.slurm.follow import (
    QUIET,
    Answer,
    FollowedJob,
    JobLog,
    MarkedLines,
    describe_wait,
    explain_reason,
    find_position,
)

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("followed.toml").read_text())


def make_state(state: str, **values: Any) -> JobState:
    nodelist = "" if state == "PENDING" else "n[0-1]"
    usual: dict[str, Any] = {"reason": "", "nodes": 2, "nodelist": nodelist, "start": "", "restarts": 0}
    return JobState(job_id="12", state=state, partition="main", **{**usual, "exit_code": None, **values})


def take_step(job: FollowedJob, step: dict[str, Any]) -> str:
    """Give a job the manifest's outcome, or SLURM's word, and return what it tells."""
    if "outcome" in step:
        manifest = {"slurm": {"job_id": step.get("job_id", "12")}, "outcome": step["outcome"]}
        (job.run_path / "manifest.json").write_text(json.dumps(manifest))
        job.update_outcome()
        return ""
    values = {key: value for key, value in step.items() if key not in ("slurm", "position", "tells")}
    if values.get("restarts") == -1:
        values["restarts"] = None
    jobs = {} if step["slurm"] == "forgotten" else {"12": make_state(step["slurm"], **values)}
    position = tuple(step["position"]) if "position" in step else None
    return job.update_state(Answer(jobs, frozenset({"12"}), position))


@pytest.mark.parametrize("case", TABLES["job"], ids=lambda case: case["about"])
def test_what_is_told_of_a_job(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.get("late"):
        monkeypatch.setattr(followed, "PATIENCE", -1)
    job, told = FollowedJob(tmp_path, "12"), None
    for step in case["steps"]:
        line, expected = take_step(job, step), step.get("tells", "")
        assert line.startswith(expected) and bool(line) == bool(expected), (step, line)
        told = job.find_exit_code()
    assert job.status == case.get("code")
    assert (told is None) == ("ends" not in case)
    assert (told or "").startswith(case.get("ends", "")) and bool(told) == bool(case.get("ends"))


def test_a_run_directory_that_is_gone_is_told_of(tmp_path: Path) -> None:
    job = FollowedJob(tmp_path / "run", "12")
    job.run_path.mkdir()
    take_step(job, {"slurm": "RUNNING"})
    shutil.rmtree(job.run_path)
    take_step(job, {"slurm": "COMPLETED"})
    told = f"job 12 ended: COMPLETED; the run directory was removed during the run ({job.run_path})"
    assert job.use_slurm_state() == told and job.status == 0


def test_why_a_job_waits() -> None:
    for reason, text in TABLES["reasons"].items():
        assert explain_reason(reason) == text
    words = "Resources (the next in line, until enough nodes are free), position 1 of 3 in main"
    for start, text in TABLES["starts"].items():
        state = make_state("PENDING", reason="Resources", start=start)
        assert describe_wait(state, (1, 3), datetime(2026, 8, 1, 12)) == words + text
    for job_id, place in TABLES["places"]["of"].items():
        found = find_position(TABLES["places"]["queue"], job_id)
        assert found == (tuple(place) if place else None), job_id


def test_the_log_is_shown_as_it_grows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    log = JobLog(RunDir(tmp_path), "12", JobConsole(ViewOptions("all")))
    assert log.read_new() == b""
    with log.path.open("a", buffering=1) as file:
        file.write("launch: 2 ranks\n[n0:0] step 3/9 loss 1.5\n[n1:1] step 4/9 loss 1\nlaun")
        log.show(log.read_new())
        assert not log.is_complete(time.monotonic())
        assert log.is_complete(time.monotonic() - QUIET - 1) is False, "a line has just come"
        file.write("ch: succeeded\n")
        log.show(log.read_new())
    assert log.is_complete(time.monotonic())
    assert log.console.progress.steps[-1].step == 3
    shown = capfd.readouterr()
    assert shown.out == "[n0:0] step 3/9 loss 1.5\n[n1:1] step 4/9 loss 1\n"
    assert shown.err == "launch: 2 ranks\nlaunch: succeeded\n"


def test_what_has_no_end_is_shown_at_once_and_all_bytes_as_they_are(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "logs").mkdir()
    log = JobLog(RunDir(tmp_path), "12", JobConsole(ViewOptions("all")))
    data = bytes(range(256)) * 10_000 + b"\nstep 5/9 loss 2\nname? "
    log.path.write_bytes(data)
    while new := log.read_new():
        log.show(new)
    assert capfdbinary.readouterr() == (data, b"")
    assert log.console.progress.steps[-1].step == 5
    with log.path.open("ab") as file:
        file.write(b"\nlaunch: no end")
    log.show(log.read_new())
    log.show_rest()
    assert capfdbinary.readouterr() == (b"\nlaunch: no end", b"")


@given(
    st.lists(
        st.sampled_from([b"launch: a\n", b"launch", b": ", b"x", b"\n", b"launch: ", b"\xff\r"]), max_size=12
    )
)
def test_lines_of_ours_are_told_apart_wherever_the_log_is_cut(pieces: list[bytes]) -> None:
    lines = MarkedLines()
    split = [found for piece in pieces for found in lines.split(piece)]
    whole = b"".join(pieces)
    assert b"".join(piece for _, piece in split) + lines.finish() == whole
    own = [line for line in re.findall(rb"[^\n]*\n", whole) if line.startswith(b"launch: ")]
    assert [piece for is_own, piece in split if is_own] == own
