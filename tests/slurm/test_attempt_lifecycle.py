"""An attempt's manifest and verdict, where there is no SLURM to ask; tests/slurm has the same with one."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.config.schema import ClusterConfig, LaunchConfig, PreflightConfig, ProgressConfig, RequeueConfig
from launcher.launch.signals import catch_signals
from launcher.runs.attempt_progress import AttemptProgress, measure_attempt
from launcher.runs.manifest import describe_start, read_manifest, write_manifest
from launcher.runs.node_records import NodeRecord, RankFailure
from launcher.runs.progress import Progress, describe_progress
from launcher.runs.run_directory import RunDir, open_run_dir
from launcher.slurm import preflight_step, submission
from launcher.slurm.attempt import Attempt, count_unrecorded, has_advanced, list_requeued_attempts
from launcher.slurm.attempt_end import StepReport, find_first_failure
from launcher.slurm.attempt_lifecycle import AttemptRefusedError, end_attempt, start_attempt
from launcher.slurm.diagnosis import diagnose_end, find_task_ends
from launcher.slurm.first_node import check_before_step, report_step
from launcher.slurm.job_control import choose_excluded_nodes, is_down, name_job, parse_slurm_time
from launcher.slurm.job_request import JobRequest
from launcher.slurm.node_order import NodeOrder
from launcher.slurm.step_monitor import StepMonitor

NOWHERE = {"PATH": "/nonexistent", "SLURM_JOB_ID": "7"}
"""A job's environment in which no command of SLURM's is found."""
HOSTS = ("n0", "n1")


def make_request(nodes: tuple[int, int] = (2, 2), **policy: Any) -> JobRequest:
    config = LaunchConfig(cluster=ClusterConfig(requeue=RequeueConfig(**policy)))
    return JobRequest(config, {}, ("program",), ("launch", "x"), "/somewhere", *nodes)


def submit_run(path: Path) -> RunDir:
    """A run directory as the submission leaves it."""
    run = open_run_dir(path, None)
    manifest = {**describe_start(run, ["launch", "x"], {}), "git": {"commit": "abc"}}
    write_manifest(run, {**manifest, "outcome": {"state": "submitted"}, "slurm": {"job_id": "7"}})
    return run


def begin(path: Path, request: JobRequest | None = None, **environ: str) -> Attempt:
    run = open_run_dir(path, None)
    attempt = start_attempt(request or make_request(), run, {**NOWHERE, **environ}, HOSTS)
    (path / "logs" / str(run.first_attempt)).mkdir()
    return attempt


def print_steps(attempt: Attempt, *lines: str, ending: str = "out") -> None:
    attempt.run.rank_log(0, attempt.run.first_attempt, ending).write_text(
        "".join(f"{line}\n" for line in lines)
    )


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


def fail(rank: int, time: float, exitcode: int, *lines: str) -> RankFailure:
    return RankFailure(rank, 0, time, exitcode, f"exited with code {exitcode}", f"rank-{rank}.err", lines)


def record(
    host: str, state: str, code: int, failure: RankFailure | None = None, srun_lines: str = ""
) -> NodeRecord:
    return NodeRecord(host, int(host[1:]), state, code, None, srun_lines, failure, 0, 0.0, 1.0)


WELL = (record("n0", "succeeded", 0), record("n1", "succeeded", 0))


def end(
    *records: NodeRecord, code: int = 1, srun_lines: tuple[str, ...] = (), signals: tuple[int, ...] = ()
) -> StepReport:
    missing = tuple(host for host in HOSTS if host not in {each.host for each in records})
    return StepReport(code, records, missing, tuple((number, 5.0) for number in signals), False, srun_lines)


def test_the_manifest_of_an_attempt(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    manifest = read(tmp_path)
    assert manifest["outcome"] == {"state": "running"} and manifest["hosts"] == ["n0", "n1"]
    assert manifest["slurm"] == {"job_id": "7", "restarts": 0}
    assert manifest["earlier"] == [] and manifest["git"] == {"commit": "abc"} and manifest["ended"] is None
    print_steps(attempt, "step 1/10 loss 3.0", "step 10/10 loss 2.0")
    assert end_attempt(attempt, end(*WELL, code=0)) == 0
    outcome = read(tmp_path)["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("succeeded", None, 0)
    assert (outcome["step"], outcome["advanced"], outcome["first_failure"]) == (10, True, None)
    assert read(tmp_path)["ended"] >= read(tmp_path)["started"]


def test_a_helper_that_slurm_saw_out_of_memory_costs_no_result(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    srun_lines = ("srun: error: n1: task 1: Out Of Memory",)
    assert end_attempt(attempt, end(*WELL, code=1, srun_lines=srun_lines)) == 0
    assert read(tmp_path)["outcome"]["state"] == "succeeded"


def test_the_first_failure_in_the_manifest_and_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    records = (
        record("n0", "failed", 1, fail(0, 8.0, 1, "lost the connection to another rank")),
        record("n1", "failed", 9, fail(3, 8.1, 9, "Traceback", "boom")),
    )
    assert end_attempt(attempt, end(*records)) == 9
    outcome = read(tmp_path)["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("failed", "crash", 9)
    assert outcome["first_failure"] == {
        "rank": 3,
        "local_rank": 0,
        "host": "n1",
        "attempt": 0,
        "exit_code": 9,
        "reason": "exited with code 9",
        "last_lines": ["Traceback", "boom"],
    }
    stderr = capsys.readouterr().err.splitlines()
    assert stderr[0] == "launch: rank 3 on n1 (local rank 0) failed first: it exited with code 9"
    assert stderr[1:4] == ["launch: the end of rank-3.err:", "launch:   | Traceback", "launch:   | boom"]
    assert stderr[4] == "launch: attempt 1 ended: the program failed: not requeued (cluster.requeue.crash=0)"
    assert stderr[5].startswith("launch: failed after ") and stderr[6] == f"launch: run directory {tmp_path}"


TERM, LOST = -15, "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([], None),
        ([fail(0, 2.0, 1), fail(1, 1.0, 1)], 1),
        ([fail(0, 1.0, TERM), fail(1, 2.0, 1)], 1),
        ([fail(0, 1.0, TERM), fail(1, 2.0, TERM)], 0),
        ([fail(0, 1.0, 1, LOST), fail(1, 2.0, 7)], 1),
        ([fail(0, 1.0, 1, LOST), fail(1, 2.0, 1, LOST)], 0),
        # Killed by a signal is nobody's consequence, whatever was printed before.
        ([fail(0, 1.0, -9, LOST), fail(1, 2.0, 7)], 0),
        ([fail(0, 1.0, 1, LOST), fail(1, 2.0, TERM)], 0),
    ],
)
def test_the_first_failure_over_nodes(failures: list[RankFailure], first: int | None) -> None:
    found = find_first_failure([record(f"n{n}", "failed", 1, failure) for n, failure in enumerate(failures)])
    assert (found[1].rank if found else None) == first


def test_a_lost_node_comes_before_what_its_peers_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    assert end_attempt(attempt, end(record("n0", "failed", 1, fail(0, 8.0, 1, LOST)))) == 3
    outcome = read(tmp_path)["outcome"]
    # It is to be requeued, and there is no scontrol.
    assert (outcome["state"], outcome["cause"], outcome["lost"]) == ("failed", "node_failure", ["n1"])
    assert outcome["first_failure"] is None
    stderr = capsys.readouterr().err
    assert stderr.startswith("launch: n1 was lost: it left no record")
    assert "failed first" not in stderr and "could not be requeued (there is no scontrol on PATH" in stderr


@pytest.mark.parametrize(
    ("srun_lines", "cause"),
    [
        ("srun: error: n1: task 1: Killed", "crash"),
        ("srun: error: n1: task 1: Out Of Memory", "crash"),
        ("srun: error: n[1-3]: tasks 1-3: Exited with exit code 1", "crash"),
        ("srun: error: Node failure on n1", "node_failure"),
        ("srun: error: n0: task 0: Terminated", "node_failure"),
        ("", "node_failure"),
    ],
)
def test_a_task_that_was_killed_is_not_a_lost_node(tmp_path: Path, srun_lines: str, cause: str) -> None:
    submit_run(tmp_path)
    found = diagnose_end(begin(tmp_path), end(record("n0", "stopped", 143), srun_lines=(srun_lines,)))
    assert found.cause == cause


@pytest.mark.parametrize(
    ("before", "spares", "cause"),
    [("node_failure", 1, "node_failure"), ("node_failure", 0, "crash"), ("crash", 1, "crash")],
)
def test_gpus_that_slurm_forgot_after_a_loss(tmp_path: Path, before: str, spares: int, cause: str) -> None:
    submit_run(tmp_path)
    config = LaunchConfig(cluster=ClusterConfig(spares=spares, requeue=RequeueConfig(crash=9)))
    request = JobRequest(config, {}, ("program",), ("launch", "x"), "/somewhere", 2, 2)
    attempt = begin(tmp_path, request)
    earlier = {"outcome": {"state": "requeued", "cause": before}, "slurm": {"job_id": attempt.job_id}}
    attempt.manifest["earlier"] = [earlier]
    refused = record(
        "n0", "failed", 4, srun_lines="srun did not start the step: Invalid generic resource (gres)"
    )
    assert diagnose_end(attempt, end(refused, record("n1", "succeeded", 0))).cause == cause


def test_a_task_that_srun_ended_is_nobodys_failure() -> None:
    told = find_task_ends(end(record("n0", "failed", 7), srun_lines=("srun: error: n1: task 1: Terminated",)))
    assert told == {"n1": "Terminated"}


@pytest.mark.parametrize(
    ("records", "nodes", "cause"),
    [
        (WELL, (2, 2), None),
        (WELL[:1], (2, 2), "node_failure"),
        (WELL[:1], (1, 2), None),
        ((WELL[0], record("n1", "failed", 7, fail(1, 1.0, 7))), (1, 2), "crash"),
        ((), (1, 2), "node_failure"),
    ],
)
def test_an_elastic_job_that_is_left_with_enough_nodes_succeeds(
    tmp_path: Path, records: tuple[NodeRecord, ...], nodes: tuple[int, int], cause: str | None
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path, make_request(nodes))
    assert (
        diagnose_end(attempt, end(*records, code=0 if len(records) == 2 and cause is None else 1)).cause
        == cause
    )


def test_an_agent_that_failed_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    records = (record("n0", "failed", 3, srun_lines="torchrun's agent ended with code 1: no port"), WELL[1])
    assert end_attempt(attempt, end(*records)) == 3
    assert "launch: n0: torchrun's agent ended with code 1: no port\n" in capsys.readouterr().err


def test_a_signal_of_the_users(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    records = (record("n0", "stopped", 130), record("n1", "stopped", 130))
    assert end_attempt(attempt, end(*records, signals=(2,))) == 130
    outcome = read(tmp_path)["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["signal"]) == ("stopped", "cancelled", "SIGINT")


def test_an_allocation_is_never_requeued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = open_run_dir(tmp_path, None)
    write_manifest(run, describe_start(run, ["launch", "x"], {}))
    attempt = start_attempt(make_request(crash=9), run, NOWHERE, HOSTS, requeues=False)
    assert end_attempt(attempt, end(record("n0", "failed", 7, fail(0, 1.0, 7)), WELL[1])) == 7
    assert read(tmp_path)["outcome"]["state"] == "failed" and read(tmp_path)["earlier"] == []
    stderr = capsys.readouterr().err
    assert "requeue" not in stderr and "attempt 1 ended: the program failed\n" in stderr


def test_a_disk_that_is_full_is_told_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("launcher.slurm.attempt.write_manifest", refuse)
    assert end_attempt(attempt, end(record("n0", "failed", 7, fail(0, 1.0, 7)), WELL[1])) == 7
    stderr = capsys.readouterr().err
    assert (
        "launch: warning: the manifest could not be written ([Errno 28] No space left on device)\n" in stderr
    )
    assert "attempt 1 ended: the program failed" in stderr


def test_attempts_that_could_not_be_recorded_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk must not let a job be requeued for ever: SLURM counts too."""
    submit_run(tmp_path / "a")
    attempt = begin(tmp_path / "a", make_request(crash=100), SLURM_RESTART_COUNT="2")
    assert attempt.unrecorded == 2 and read(tmp_path / "a")["earlier"] == []
    print_steps(attempt, "step 1/10 loss 3.0")
    end_attempt(attempt, end(record("n0", "failed", 7, fail(0, 1.0, 7)), WELL[1]))
    assert "attempt 3 ended: the program failed: requeued (attempt 4" in capsys.readouterr().err
    submit_run(tmp_path / "b")
    attempt = begin(tmp_path / "b", make_request(crash=100), SLURM_RESTART_COUNT="2")
    assert end_attempt(attempt, end(record("n0", "failed", 7, fail(0, 1.0, 7)), WELL[1])) == 7
    assert "no progress in 3 attempts in a row (cluster.requeue.no_progress=3)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("known", "restarts", "count"),
    [([], 0, 0), ([], 3, 3), ([0], 1, 0), ([0, 1], 2, 0), ([0], 4, 3), ([3], 2, 0), ([None], 1, 1)],
)
def test_attempts_that_slurm_alone_counts(known: list[int | None], restarts: int, count: int) -> None:
    earlier = [{"slurm": {"job_id": "7", "restarts": number}} for number in known]
    assert count_unrecorded({"earlier": earlier}, "7", restarts) == count


def test_records_that_nobody_could_write_are_no_lost_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch script is on the first node, which is there, and left no record either."""
    submit_run(tmp_path)
    assert end_attempt(begin(tmp_path, SLURMD_NODENAME="n0"), end()) == 1
    assert read(tmp_path)["outcome"]["cause"] == "crash" and read(tmp_path)["outcome"]["lost"] == []
    assert "launch: no record came from n0, n1: is the disk full?\n" in capsys.readouterr().err


def leave_running(path: Path, **outcome: object) -> None:
    """The manifest of an attempt whose batch script was killed."""
    manifest = read(path)
    write_manifest(RunDir(path), {**manifest, "outcome": {"state": "running", **outcome}})


def test_a_head_that_left_no_word(tmp_path: Path) -> None:
    submit_run(tmp_path)
    print_steps(begin(tmp_path), "step 4/10 loss 3.0")
    leave_running(tmp_path)
    attempt = begin(tmp_path, SLURM_RESTART_COUNT="1")
    (before,) = read(tmp_path)["earlier"]
    assert (before["outcome"]["state"], before["outcome"]["cause"]) == ("requeued", "preempted")
    assert (before["outcome"]["step"], before["outcome"]["advanced"]) == (4, True)
    assert (before["attempt"], before["hosts"]) == (0, ["n0", "n1"])
    assert read(tmp_path)["slurm"] == {"job_id": "7", "restarts": 1} and attempt.run.first_attempt == 1
    assert len(attempt.earlier) == 1


def test_a_policy_that_forbade_the_attempt_ends_it_at_once(tmp_path: Path) -> None:
    submit_run(tmp_path)
    begin(tmp_path, make_request(preempted=0))
    leave_running(tmp_path, exit_code=143)
    with pytest.raises(
        AttemptRefusedError, match="attempt 2 does not begin: attempt 1 ended: preempted: not"
    ) as caught:
        begin(tmp_path, make_request(preempted=0), SLURM_RESTART_COUNT="1")
    assert caught.value.exit_code == 143
    manifest = read(tmp_path)
    assert (manifest["outcome"]["state"], manifest["outcome"]["cause"]) == ("failed", "preempted")
    assert manifest["earlier"] == [] and manifest["slurm"]["restarts"] == 0
    # What a user then starts by hand begins anew.
    assert begin(tmp_path, make_request(preempted=0), SLURM_RESTART_COUNT="2").earlier == ()


def entry(state: str, job_id: str = "7", **outcome: object) -> dict[str, Any]:
    return {"outcome": {"state": state, **outcome}, "slurm": {"job_id": job_id}}


@pytest.mark.parametrize(
    ("earlier", "length"),
    [
        ([], 0),
        ([entry("requeued"), entry("requeued")], 2),
        ([entry("requeued"), entry("failed"), entry("requeued")], 1),
        ([entry("requeued", "6"), entry("requeued")], 1),
        ([entry("requeued"), entry("succeeded")], 0),
        ([{"outcome": None}, entry("requeued")], 1),
        (["damaged", entry("requeued")], 1),
    ],
)
def test_the_attempts_that_led_here(earlier: list[Any], length: int) -> None:
    assert len(list_requeued_attempts({"earlier": earlier}, "7")) == length


def steps(*numbers: int) -> tuple[Progress, ...]:
    return tuple(Progress(number, 10, ()) for number in numbers)


@pytest.mark.parametrize(
    ("advance", "earlier", "advanced"),
    [
        (AttemptProgress((), None), [], None),
        (AttemptProgress((), None), [entry("requeued")], None),
        (AttemptProgress((), None), [entry("requeued", step=3)], False),
        (AttemptProgress(steps(1, 3), None), [], True),
        (AttemptProgress(steps(1, 3), None), [entry("requeued", step=3)], False),
        (AttemptProgress(steps(1, 4), None), [entry("requeued", step=3), entry("requeued")], True),
        (AttemptProgress(steps(1, 4), None), [entry("requeued", step=5), entry("requeued", step=3)], False),
        (AttemptProgress(steps(1, 3), 9.0), [entry("requeued", step=3, checkpoint=8.0)], True),
        (AttemptProgress(steps(1, 3), 9.0), [entry("requeued", step=3, checkpoint=9.0)], False),
        (AttemptProgress((), 9.0), [], True),
    ],
)
def test_whether_an_attempt_made_progress(
    advance: AttemptProgress, earlier: list[dict[str, Any]], advanced: bool | None
) -> None:
    assert has_advanced(advance, earlier) is advanced


def test_a_job_that_starts_while_its_number_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the submission makes of the manifest that it has read does not replace the job's own."""
    run, read = submit_run(tmp_path / "run"), threading.Event()
    (run.path / "job.json").write_text("{}")

    def read_slowly(path: Path) -> dict[str, Any]:
        found = read_manifest(path)
        read.set()
        time.sleep(0.5)
        return found

    monkeypatch.setattr(submission, "read_manifest", read_slowly)
    staged = submission.StagedRun(run, None, {}, {}, ())  # type: ignore[arg-type]
    writer = threading.Thread(target=staged.write_job_id, args=("7",))
    writer.start()
    assert read.wait(20)
    start_attempt(make_request(), run, NOWHERE, HOSTS)
    writer.join()
    assert read_manifest(run.path)["outcome"] == {"state": "running"}


def test_what_is_kept_of_a_start_when_the_run_is_submitted_again(tmp_path: Path) -> None:
    """As with run_dir=, by a job with another number."""
    run = submit_run(tmp_path / "run")
    order = NodeOrder(("n1", "n0"), "topology", "SLURM's switches")
    start_attempt(make_request(), run, NOWHERE, HOSTS, order=order)
    manifest: dict[str, Any] = describe_start(run, ["launch", "x"], {})
    (entry,) = manifest["earlier"]
    assert entry["slurm"]["job_id"] == "7" and entry["attempt"] == 0 and entry["hosts"] == ["n0", "n1"]
    assert entry["node_order"]["hosts"] == ["n1", "n0"]


def test_the_progress_that_is_read(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path, None)
    assert measure_attempt(run) == AttemptProgress((), None)
    for number, text in enumerate(("step 1/9 loss 3\nstep 2/9 loss 2\n", "step 3/9 loss 1\nnoise\n", "")):
        run.rank_log(0, number, "out").parent.mkdir()
        run.rank_log(0, number, "out").write_text(text)
    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    found = measure_attempt(run)
    assert [step.step for step in found.steps] == [1, 3] and found.finished is False
    assert found.newest == (tmp_path / "checkpoints/step-1").stat().st_mtime
    assert measure_attempt(RunDir(tmp_path, 2)).steps == ()
    speed = "step 1/9 loss 9 tokens/s 5\nstep 8/9 loss 2 tokens/s 70\nstep 9/9 loss 1\n"
    (tmp_path / "logs/9").mkdir(parents=True)
    (tmp_path / "logs/9/rank-0.out").write_text(speed)
    steps = measure_attempt(RunDir(tmp_path, 9)).steps
    assert describe_progress(steps) == "loss 9 to 1 over 9 steps, 70 tokens/s"
    shutil.rmtree(tmp_path / "logs/9")
    run.rank_log(0, 2, "err").write_text("step 9/9 loss 0.5\n")
    assert measure_attempt(RunDir(tmp_path, 2)).finished is True


def test_checkpoints_elsewhere_count_from_the_submission_on(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path / "run", None)
    (run.path / "config.yaml").write_text("")
    places = LaunchConfig(progress=ProgressConfig([f"{tmp_path}/ckpt/step-*", "own/**/*.pt"]))
    request = JobRequest(places, {}, None, (), str(tmp_path), 1, 1)
    patterns = request.progress_patterns
    assert measure_attempt(run, patterns) == AttemptProgress((), None)
    now = (run.path / "config.yaml").stat().st_mtime
    shards = [tmp_path / "ckpt/step-1/rank0.pt", tmp_path / "ckpt/step-2/rank0.pt", tmp_path / "own/a/b/c.pt"]
    for at, shard in enumerate(shards):
        shard.parent.mkdir(parents=True)
        shard.touch()
        for path in (shard, shard.parent):
            os.utime(path, (now - 5 + at * 10,) * 2)
    assert measure_attempt(run, patterns).newest == now + 15
    assert measure_attempt(run, patterns[:1]).newest == now + 5
    shards[1].unlink()
    os.utime(shards[1].parent, (now - 5,) * 2)
    assert measure_attempt(run, patterns[:1]).newest is None
    assert measure_attempt(run).newest is None


def test_attempts_are_judged_by_checkpoints_elsewhere(tmp_path: Path) -> None:
    """The next attempt finds out how one ended whose batch script was killed."""
    request = replace(make_request(), directory=str(tmp_path))
    request.config.progress.paths = ["ckpt/*"]
    (tmp_path / "ckpt").mkdir()
    run = submit_run(tmp_path / "run")
    attempt = begin(run.path, request)
    (tmp_path / "ckpt/step-1").touch()
    assert attempt.measure_progress()[1] is True
    leave_running(run.path)
    begin(run.path, request, SLURM_RESTART_COUNT="1")
    (before,) = read(run.path)["earlier"]
    assert before["outcome"]["checkpoint"] == (tmp_path / "ckpt/step-1").stat().st_mtime


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "12"}, "12"),
        # The last member of an array has the array's own number.
        ({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3"),
    ],
)
def test_the_id_of_a_job(environ: dict[str, str], name: str) -> None:
    assert name_job(environ) == name


@pytest.mark.parametrize(
    ("state", "down"),
    [
        ("idle", False),
        ("allocated", False),
        ("mixed", False),
        ("draining", False),
        ("completing", False),
        ("planned", False),
        ("down", True),
        ("down*", True),
        ("allocated*", True),
        ("idle*", True),
        ("failing", True),
        ("powered_down", True),
    ],
)
def test_nodes_that_are_not_there(state: str, down: bool) -> None:
    assert is_down(state) is down


def test_times_of_slurm() -> None:
    assert (
        parse_slurm_time("N/A") is None
        and parse_slurm_time("Unknown") is None
        and parse_slurm_time("") is None
    )
    assert parse_slurm_time("2026-01-02T03:04:10") == (parse_slurm_time("2026-01-02T03:04:05") or 0) + 5


@pytest.mark.parametrize(
    ("lost", "nodes", "named", "least", "chosen"),
    [
        (["n3"], {"n0", "n1", "n2", "n3"}, set(), 2, ["n3"]),
        (["n3", "n1"], {"n0", "n1", "n2", "n3"}, set(), 2, ["n3", "n1"]),
        (["n3", "n1", "n0"], {"n0", "n1", "n2", "n3"}, set(), 2, ["n3", "n1"]),
        (["n3"], {"n0", "n1", "n2", "n3"}, set(), 4, []),
        (["n3", "n1"], {"n0", "n1", "n2", "n3"}, {"n3"}, 2, ["n1"]),
        (["n9", "n1"], {"n0", "n1", "n2", "n3"}, set(), 3, ["n1"]),
    ],
)
def test_an_exclusion_leaves_enough_nodes(
    lost: list[str], nodes: set[str], named: set[str], least: int, chosen: list[str]
) -> None:
    assert choose_excluded_nodes(lost, nodes, named, least) == chosen


def write_fake(folder: Path, name: str, text: str) -> None:
    """A command of SLURM's that a real one cannot be made to act like at will."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("restarts", "state"), [(1, "requeued"), (0, "failed")])
def test_a_requeue_whose_answer_was_lost(tmp_path: Path, restarts: int, state: str) -> None:
    """A busy slurmctld does it, and answers to the next try alone, with a complaint."""
    asked = tmp_path / "asked"
    write_fake(tmp_path, "scontrol", f": > {asked}; echo 'Unexpected message received for job 7' >&2; exit 1")
    after = f"echo 'COMPLETING|{restarts}|N/A|N/A|1:00|None|'"
    write_fake(
        tmp_path, "squeue", f"if [ -e {asked} ]; then {after}; else echo 'RUNNING|0|N/A|N/A|1:00|None|'; fi"
    )
    submit_run(tmp_path / "run")
    attempt = begin(tmp_path / "run", make_request(crash=1), PATH=str(tmp_path))
    assert (
        end_attempt(attempt, end(record("n0", "failed", 7, fail(0, 1.0, 7)), record("n1", "failed", 7))) == 7
    )
    outcome = read(tmp_path / "run")["outcome"]
    assert (outcome["state"], outcome["cause"]) == (state, "crash")


def test_the_manifest_tells_what_was_in_the_way_where_no_rank_failed(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    end_attempt(attempt, end(*(record(host, "failed", 3, srun_lines="no such file") for host in HOSTS)))
    outcome = read(tmp_path)["outcome"]
    assert outcome["reason"].startswith("n0, n1: no such file; the program failed: not")
    assert outcome["first_failure"] is None


def test_of_many_nodes_words_the_manifest_has_the_first(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    end_attempt(attempt, end(*(record(f"n{n}", "failed", 3, srun_lines="full") for n in range(500))))
    assert "n0, n1, n2 and 497 more: full; the program" in read(tmp_path)["outcome"]["reason"]
    others = (record(f"n{n}", "failed", 3, srun_lines=f"no {n}") for n in range(500))
    end_attempt(attempt, end(*others))
    assert "n0: no 0; n1: no 1; n2: no 2 (and 497 more); the" in read(tmp_path)["outcome"]["reason"]


def test_a_step_whose_srun_was_killed(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    with catch_signals() as inbox:
        seen = report_step(attempt, StepMonitor(attempt, inbox), -9, [], ["srun: error: n0: task 0: Killed"])
    assert end_attempt(attempt, seen) == 137
    outcome = read(tmp_path)["outcome"]
    assert outcome["reason"].startswith("n0: srun was ended by SIGKILL, and its step; the program failed")


@pytest.mark.parametrize("records", [(), WELL[:1]])
def test_a_success_whose_records_could_not_be_written(
    tmp_path: Path, records: tuple[NodeRecord, ...]
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path, make_request(crash=9))
    assert end_attempt(attempt, end(*records, code=0)) == 0
    assert read(tmp_path)["outcome"]["state"] == "succeeded"


@pytest.mark.parametrize("odd", [("stopped", 0), ("failed", 0), ("succeeded", 1)])
@pytest.mark.parametrize("nodes", [(2, 2), (1, 2)])
def test_a_node_that_did_not_end_well_is_no_success(
    tmp_path: Path, odd: tuple[str, int], nodes: tuple[int, int]
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path, make_request(nodes))
    found = diagnose_end(attempt, end(WELL[0], record("n1", *odd), code=0))
    assert found.cause == "crash"


def test_a_stop_without_records_is_no_success(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    assert end_attempt(attempt, end(code=0, signals=(15,))) != 0
    assert read(tmp_path)["outcome"]["state"] != "succeeded"


def test_checks_that_fail_after_a_stop_do_not_start_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("a mistake of the checks' own")

    submit_run(tmp_path)
    attempt = begin(tmp_path)
    config = replace(attempt.request.config, preflight=PreflightConfig(kind="light"))
    attempt.request = replace(attempt.request, config=config)
    monkeypatch.setattr(preflight_step, "run_preflight", fail)
    with catch_signals() as inbox:
        report = check_before_step(attempt, StepMonitor(attempt, inbox))
    assert report and report.srun_exitcode == 128 + signal.SIGTERM
    assert [number for number, _ in report.signals] == [signal.SIGTERM]
