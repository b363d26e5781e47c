"""How runs stand by their manifests and by SLURM's word, from values; tests/slurm has a real one."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import SchedulerError
from launcher.runs.manifest import read_manifest, write_manifest
from launcher.runs.run_directory import RunDir
from launcher.runs.run_status import AttemptStatus, RunStatus
from launcher.slurm import run_states
from launcher.slurm.client import JobState
from launcher.slurm.run_states import find_run_states, resolve_run, update_run
from tests.cli.make_runs import make_run

ONCE = (AttemptStatus("", "", "running", "", ""),)
MEMORY = "out of memory: ask for more with cluster.mem"
FORGOTTEN = "SLURM no longer knows job 7"
NEVER = f"{FORGOTTEN}, which never began: it was cancelled in the queue"
UNWRITTEN = f"{FORGOTTEN}, and how it ended was not written down"
BEGAN = datetime.fromisoformat("2026-08-01T12:00:00").timestamp()


def make_status(state: str, job_id: str | None = "7", **values: Any) -> RunStatus:
    return RunStatus("tiny/1", "/nowhere", state, job_id=job_id, **values)


def make_job(state: str, reason: str = "", **values: Any) -> JobState:
    known: dict[str, Any] = {
        "nodes": 2,
        "nodelist": "n[0-1]",
        "start": "",
        "restarts": 0,
        "exit_code": None,
        **values,
    }
    return JobState("7", state, reason, "main", **known)


@pytest.mark.parametrize(
    ("run", "job", "state", "reason"),
    [
        (make_status("queued", None), None, "lost", "it was never submitted"),
        (make_status("running", None), None, "running", ""),
        (make_status("failed", reason="crash"), make_job("RUNNING"), "failed", "crash"),
        (make_status("unknown"), None, "unknown", ""),
        (make_status("unknown"), make_job("RUNNING"), "running", ""),
        (make_status("queued"), make_job("PENDING", "Priority"), "queued", "Priority"),
        (make_status("running"), make_job("REQUEUED"), "queued", ""),
        (make_status("running"), make_job("REQUEUE_HOLD", "JobHeldUser"), "queued", "JobHeldUser"),
        (make_status("queued"), make_job("RUNNING"), "running", ""),
        (make_status("running"), make_job("SUSPENDED"), "running", "suspended"),
        (make_status("running"), make_job("COMPLETING"), "running", "completing"),
        (make_status("queued"), make_job("COMPLETING"), "queued", "completing"),
        (make_status("running"), make_job("COMPLETED"), "succeeded", ""),
        (make_status("running"), make_job("CANCELLED"), "stopped", "cancelled"),
        (make_status("running"), make_job("TIMEOUT", "TimeLimit"), "failed", "time limit; TimeLimit"),
        (make_status("running"), make_job("FAILED", "NonZeroExitCode"), "failed", "FAILED"),
        (make_status("running"), make_job("FAILED", "x", exit_code=3), "failed", "FAILED; x; exit code 3"),
        (make_status("running"), make_job("DEADLINE", exit_code=0), "failed", "DEADLINE"),
        (make_status("running"), make_job("NODE_FAIL", exit_code=137), "failed", "a node was lost"),
        (make_status("running"), make_job("PREEMPTED"), "failed", "preempted"),
        (make_status("running"), make_job("OUT_OF_MEMORY", exit_code=137), "failed", MEMORY),
        (make_status("queued"), None, "lost", NEVER),
        (make_status("queued", attempts=ONCE), None, "lost", UNWRITTEN),
        (make_status("running"), None, "lost", UNWRITTEN),
    ],
)  # fmt: skip
def test_slurms_word_counts_where_the_manifest_tells_no_end(
    run: RunStatus, job: JobState | None, state: str, reason: str
) -> None:
    found = resolve_run(run, job)
    assert (found.state, found.reason) == (state, reason)


def test_a_full_disk_is_told_of_where_nothing_was_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_states, "is_full", lambda run: run.path == Path("/runs/x"))
    run = replace(make_status("running"), path="/runs/x")
    found = resolve_run(run, make_job("FAILED", reason="NonZeroExitCode", exit_code=3))
    assert (found.state, found.reason) == ("failed", "FAILED; exit code 3; the run directory's disk is full")
    assert "full" not in resolve_run(replace(run, path="/runs/y"), make_job("FAILED", exit_code=3)).reason


def test_what_slurm_adds() -> None:
    run = make_status("running", nodes=4, nodelist="n0", restarts=3, seconds=5.0)
    found = resolve_run(
        run, make_job("PENDING", nodes=0, nodelist="", start="2026-08-02T00:00:00", restarts=1)
    )
    assert (found.slurm_state, found.partition, found.nodes) == ("PENDING", "main", 4)
    assert (found.nodelist, found.restarts, found.expected_start) == ("", 3, "2026-08-02T00:00:00")
    found = resolve_run(run, make_job("FAILED", restarts=9, exit_code=7))
    assert (found.nodes, found.nodelist, found.restarts) == (2, "n[0-1]", 9)
    assert (found.exit_code, found.seconds) == (7, None)
    assert resolve_run(run, make_job("RUNNING", restarts=None)).restarts == 3


@pytest.mark.parametrize(
    ("submitted", "restarts", "since", "other"),
    [
        ("2026-08-01T12:10:01", 0, BEGAN, True),
        ("2026-08-01T12:10:00", 0, BEGAN, False),
        ("2026-08-01T11:00:00", 0, BEGAN, False),
        ("2026-08-03T12:00:00", 1, BEGAN, False),
        ("2026-08-03T12:00:00", None, BEGAN, False),
        ("2026-08-03T12:00:00", 0, None, False),
        ("", 0, BEGAN, False),
    ],
)
def test_a_number_that_slurm_has_given_again(
    submitted: str, restarts: int | None, since: float | None, other: bool
) -> None:
    job = make_job("RUNNING", submitted=submitted, restarts=restarts)
    assert (resolve_run(make_status("running", known_since=since), job).state == "lost") is other


def test_a_job_that_ended_before_its_head_began(tmp_path: Path) -> None:
    path = make_run(tmp_path, state="submitted", slurm={"job_id": "7"})
    run = RunStatus("tiny/1", str(path), "queued", job_id="7")
    assert "never began" in resolve_run(run, None).reason
    (path / "logs/slurm-7.out").touch()
    assert resolve_run(run, None).reason.startswith(
        "job 7 ended before it came to the program (cluster.setup?)"
    )


def test_a_manifest_that_was_completed_meanwhile(tmp_path: Path) -> None:
    path = make_run(tmp_path, state="running", slurm={"job_id": "7"})
    run = RunStatus("tiny/1", str(path), "running", job_id="7")
    assert update_run(run, make_job("COMPLETED")).state == "succeeded"
    assert update_run(run, make_job("RUNNING")).run == "tiny/1", "it is not read again"
    outcome = {"state": "failed", "exit_code": 9, "reason": "so it is"}
    write_manifest(RunDir(path), {**read_manifest(path), "outcome": outcome})
    for job in (make_job("COMPLETED"), None):
        found = update_run(run, job)
        assert (found.state, found.exit_code, found.reason) == ("failed", 9, "so it is")
    assert update_run(run, make_job("RUNNING")).state == "running"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """What SLURM is asked about: it knows of two jobs."""
    seen: list[Sequence[str]] = []

    def answer(job_ids: Sequence[str]) -> dict[str, JobState]:
        seen.append(job_ids)
        if "99" in job_ids:
            raise SchedulerError("squeue: away")
        return {"1": make_job("RUNNING"), "2": make_job("PENDING")}

    monkeypatch.setattr(run_states, "ask_queue", answer)
    return seen


def test_slurm_is_asked_once_about_what_has_not_ended(tmp_path: Path, asked: list[Sequence[str]]) -> None:
    states = {"1": "submitted", "2": "running", "3": "failed", "4": "requeued"}
    paths = [make_run(tmp_path, f"run{n}", state=state, slurm={"job_id": n}) for n, state in states.items()]
    paths.append(make_run(tmp_path, "odd", state="?", slurm={"job_id": "5"}))
    paths.append(make_run(tmp_path, "here", state="running"))
    found = find_run_states(paths)
    assert asked == [["1", "2", "4", "5"]] and found.error is None
    assert [run.state for run in found.runs] == ["running", "queued", "failed", "lost", "unknown", "running"]
    assert find_run_states(paths[2:3]).runs[0].state == "failed" and len(asked) == 1


def test_where_slurm_cannot_be_asked_the_manifests_count(tmp_path: Path, asked: list[Sequence[str]]) -> None:
    found = find_run_states([make_run(tmp_path, state="running", slurm={"job_id": "99"})])
    assert len(asked) == 1 and [run.state for run in found.runs] == ["running"]
    assert str(found.error) == "squeue: away"
