"""Following a job: what is told of the queue, and when and how a job has ended."""

import json
import re
import shutil
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.console import JobConsole, make_console
from launcher.runs.run_directory import RunDir
from launcher.slurm import followed_job as followed
from launcher.slurm.client import JobState
from launcher.slurm.followed_job import QUIET, FollowedJob, JobLog, MarkedLines
from launcher.slurm.pending_jobs import Answer, QueuePosition, describe_wait, explain_reason, find_position

NOW = datetime(2026, 8, 1, 12)


def make_state(state: str, reason: str = "", **values: Any) -> JobState:
    usual: dict[str, Any] = {"nodes": 2, "nodelist": "n[0-1]", "start": "", "restarts": 0, "exit_code": None}
    if state == "PENDING":
        usual["nodelist"] = ""
    return JobState(job_id="12", state=state, reason=reason, partition="main", **{**usual, **values})


def answer(state: JobState | None, position: QueuePosition | None = None) -> Answer:
    return Answer({"12": state} if state else {}, frozenset({"12"}), position)


@pytest.fixture
def job(tmp_path: Path) -> FollowedJob:
    return FollowedJob(tmp_path, "12")


def write_outcome(job: FollowedJob, *, job_id: str = "12", **outcome: object) -> None:
    text = json.dumps({"slurm": {"job_id": job_id}, "outcome": outcome})
    (job.run_path / "manifest.json").write_text(text)
    job.update_outcome()


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Priority", "Priority (jobs of higher priority go first)"),
        (
            "QOSMaxJobsPerUserLimit",
            "QOSMaxJobsPerUserLimit (it is above what the QOS allows to one job, user",
        ),
        ("QOSGrpCpuLimit", "QOSGrpCpuLimit (the QOS's jobs together have come to a limit)"),
        ("AssocGrpGRES", "AssocGrpGRES (the account's jobs together have come to a limit)"),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
            "ReqNodeNotAvail, UnavailableNodes:n[1-2] (nodes that it",
        ),
        ("SomethingNew", "SomethingNew"),
        ("", ""),
    ],
)
def test_reasons_have_words(reason: str, text: str) -> None:
    assert explain_reason(reason).startswith(text)
    assert ("(" in explain_reason(reason)) == ("(" in text)


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("2026-08-01T12:00:06", ", expected start 2026-08-01 12:00 (in 6 s)"),
        ("2026-08-01T12:01:30", ", expected start 2026-08-01 12:01 (in 2 min)"),
        ("2026-08-01T14:03:00", ", expected start 2026-08-01 14:03 (in 2 h 3 min)"),
        ("2026-08-09T14:03:00", ", expected start 2026-08-09 14:03"),
        ("2026-08-01T11:59:00", ""),
        ("", ""),
        ("N/A", ""),
    ],
)
def test_the_wait_is_described(start: str, text: str) -> None:
    state = make_state("PENDING", "Resources", start=start)
    wait = describe_wait(state, QueuePosition(1, 3), NOW)
    words = "Resources (the next in line, until enough nodes are free), position 1 of 3 in main"
    assert wait == words + text


@pytest.mark.parametrize(
    ("job_id", "position"),
    [
        ("12", QueuePosition(2, 4)),
        ("10", QueuePosition(1, 4)),
        ("14", None),  # held
        ("13_3", QueuePosition(3, 4)),
        ("15_1", QueuePosition(4, 4)),
        ("99", None),
    ],
)
def test_the_place_counts_who_goes_first(job_id: str, position: QueuePosition | None) -> None:
    lines: Sequence[str] = ["10 900", "12 500", "13_[2-5%2] 400", "14 0", "15_1 300", "", "slurm says"]
    assert find_position(lines, job_id) == position


def test_a_change_is_told_once(job: FollowedJob) -> None:
    waits = make_state("PENDING", "Priority")
    assert job.update_state(answer(make_state("PENDING"))) == ""
    assert job.update_state(answer(waits, QueuePosition(3, 3))).startswith("job 12 waits: Priority (")
    assert job.update_state(answer(waits, QueuePosition(2, 3))) == ""
    assert job.update_state(answer(make_state("PENDING", "Resources"))).startswith(
        "job 12 waits: Resources ("
    )
    assert job.update_state(answer(make_state("RUNNING"))) == "job 12 is running on n[0-1]"
    assert job.update_state(answer(make_state("RUNNING"))) == ""
    assert job.update_state(answer(make_state("COMPLETING"))) == ""


@pytest.mark.parametrize(
    ("restarts", "told"),
    [
        (0, "job 12 ended before it ran: CANCELLED"),
        (1, "job 12 ended in the queue, after 1 attempt: CANCELLED"),
        (2, "job 12 ended in the queue, after 2 attempts: CANCELLED"),
    ],
)
def test_a_job_that_is_cancelled_in_the_queue(job: FollowedJob, restarts: int, told: str) -> None:
    job.update_state(answer(make_state("PENDING", "BeginTime", restarts=restarts)))
    job.update_state(answer(make_state("CANCELLED", nodelist="", restarts=restarts)))
    assert job.find_exit_code() == told
    assert job.status == 1


def test_a_job_whose_end_accounting_alone_remembers_has_run_if_that_was_seen(job: FollowedJob) -> None:
    job.update_state(answer(make_state("RUNNING")))
    job.update_state(answer(make_state("CANCELLED", nodelist="", restarts=None)))
    assert job.find_exit_code() == "job 12 ended in the queue, after 1 attempt: CANCELLED"


def test_a_run_directory_that_is_gone_is_told_of(job: FollowedJob) -> None:
    job.update_state(answer(make_state("RUNNING")))
    shutil.rmtree(job.run_path)
    job.update_state(answer(make_state("COMPLETED")))
    told = f"job 12 ended: COMPLETED; the run directory was removed during the run ({job.run_path})"
    assert job.use_slurm_state() == told and job.status == 0


def test_a_requeue_is_told_with_its_cause(job: FollowedJob) -> None:
    job.update_state(answer(make_state("RUNNING")))
    write_outcome(job, state="requeued", cause="node_failure")
    text = job.update_state(answer(make_state("PENDING", "BeginTime", restarts=1)))
    assert text.startswith("job 12 is back in the queue (node_failure): BeginTime (")
    again = job.update_state(answer(make_state("RUNNING", restarts=2)))
    assert again == "job 12 is running on n[0-1], after 2 requeues"


@pytest.mark.parametrize("state", ["submitted", "running", "requeued"])
def test_a_job_that_goes_on_has_no_end(job: FollowedJob, state: str) -> None:
    write_outcome(job, state=state)
    job.update_state(answer(make_state("RUNNING")))
    assert job.find_exit_code() is None and job.status is None


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ({"state": "succeeded", "exit_code": 0}, 0),
        ({"state": "failed", "exit_code": 137}, 137),
        ({"state": "stopped", "exit_code": 143}, 143),
        ({"state": "failed"}, 1),
        ({"state": "succeeded"}, 0),
    ],
)
@pytest.mark.parametrize("slurm", ["COMPLETED", "COMPLETING", "FAILED", None])
def test_the_manifest_has_the_last_word(
    job: FollowedJob, outcome: dict[str, Any], status: int, slurm: str | None
) -> None:
    write_outcome(job, **outcome)
    job.update_state(answer(make_state(slurm, exit_code=1) if slurm else None))
    assert job.find_exit_code() == ""
    assert job.status == status


def test_another_jobs_manifest_tells_nothing(job: FollowedJob) -> None:
    write_outcome(job, job_id="11", state="failed", exit_code=9)
    job.update_state(answer(make_state("RUNNING")))
    assert job.find_exit_code() is None


@pytest.mark.parametrize(
    ("state", "status", "text"),
    [
        (make_state("COMPLETED", exit_code=0), 0, "job 12 ended: COMPLETED"),
        (make_state("FAILED", "NonZeroExitCode", exit_code=5), 5, "job 12 ended: FAILED (NonZeroExitCode)"),
        (make_state("CANCELLED", exit_code=0), 1, "job 12 ended: CANCELLED"),
        (make_state("NODE_FAIL"), 1, "job 12 ended: NODE_FAIL"),
        (None, 1, "SLURM has forgotten job 12, and "),
    ],
)
def test_slurm_has_the_word_where_the_head_died(
    job: FollowedJob, monkeypatch: pytest.MonkeyPatch, state: JobState | None, status: int, text: str
) -> None:
    write_outcome(job, state="running")
    job.update_state(answer(state))
    assert job.find_exit_code() is None, "the manifest's end may still come, over a network filesystem"
    monkeypatch.setattr(followed, "PATIENCE", -1)
    said = job.find_exit_code()
    assert said is not None and said.startswith(text)
    assert job.status == status


def test_a_job_that_never_ran_is_not_waited_for(job: FollowedJob) -> None:
    write_outcome(job, state="submitted")
    job.update_state(answer(make_state("CANCELLED", nodelist="", exit_code=0)))
    assert job.find_exit_code() == "job 12 ended before it ran: CANCELLED"
    assert job.status == 1


def test_an_end_that_was_none_is_forgotten(job: FollowedJob) -> None:
    job.update_state(answer(make_state("NODE_FAIL")))
    assert job.find_exit_code() is None and job.ending is not None
    job.update_state(answer(make_state("PENDING", "BeginTime", restarts=1)))
    assert job.find_exit_code() is None and job.ending is None


def test_the_log_is_shown_as_it_grows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    log = JobLog(RunDir(tmp_path), "12", JobConsole("all", make_console()))
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
    log = JobLog(RunDir(tmp_path), "12", JobConsole("all", make_console()))
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
    lines = MarkedLines((b"launch: ",))
    split = [found for piece in pieces for found in lines.split(piece)]
    whole = b"".join(pieces)
    assert b"".join(piece for _, piece in split) + lines.finish() == whole
    own = [line for line in re.findall(rb"[^\n]*\n", whole) if line.startswith(b"launch: ")]
    assert [piece for is_own, piece in split if is_own] == own
