"""What becomes of jobs that end in every way there is, on a real SLURM; the programs have no torch."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.config.schema import ClusterConfig, LaunchConfig, ProgressConfig, RequeueConfig
from launcher.runs.manifest import describe_start, write_manifest
from launcher.runs.run_directory import open_run_dir
from launcher.slurm.job_request import JobRequest, write_job_request
from tests.seam import wait_for
from tests.slurm.cluster.conftest import Sandbox

pytestmark = pytest.mark.slurm

SOURCES = Path(__file__).parents[3]
URGENT = ("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
"""A job that takes all nodes of the partition `main`."""
FINAL = ("succeeded", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class SmallJob:
    """A submitted job of `small_first_node`."""

    sandbox: Sandbox
    path: Path
    job_id: str

    def read(self) -> dict[str, Any]:
        """The manifest."""
        found: dict[str, Any] = json.loads((self.path / "manifest.json").read_text())
        return found

    def list_causes(self) -> list[str | None]:
        """Why its attempts ended, oldest first."""
        manifest = self.read()
        return [entry["outcome"].get("cause") for entry in (*manifest["earlier"], manifest)]

    def await_wait(self, attempt: int, nodes: int = 2) -> None:
        """Wait until the tasks of an attempt do nothing but wait."""
        self.wait_for(lambda: len(list(self.path.glob(f"waits-{attempt}-*"))) == nodes, f"attempt {attempt}")

    def await_final(self) -> dict[str, Any]:
        """Wait until the job is over; returns the outcome."""
        self.wait_for(lambda: self.read()["outcome"]["state"] in FINAL, "the end")
        self.sandbox.wait(self.job_id, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED")
        outcome: dict[str, Any] = self.read()["outcome"]
        return outcome

    @property
    def log(self) -> str:
        """What the batch scripts have printed."""
        return (self.path / "job.log").read_text()

    def wait_for(self, check: Callable[[], object], what: str) -> None:
        """Wait until a condition holds: for the time limit, if need be."""
        wait_for(check, what, 240, self.describe)

    def describe(self) -> str:
        """What is known of the job."""
        return f"{self.read()}\n{self.log}\n{self.sandbox.run('scontrol', 'show', 'job', self.job_id)}"


Submit = Callable[..., SmallJob]


@pytest.fixture
def submit(sandbox: Sandbox, tmp_path: Path) -> Submit:
    """Submit `small_first_node` on two nodes: `submit([{"steps": 1, "do": "end"}], {"crash": 2})`."""

    def start(acts: list[dict[str, Any]], policy: Mapping[str, Any] | None = None, *options: str) -> SmallJob:
        run = open_run_dir(tmp_path / "run dir", None)
        config = LaunchConfig(
            cluster=ClusterConfig(requeue=RequeueConfig(**(policy or {}))),
            progress=ProgressConfig(["elsewhere/*"]),
        )
        request = JobRequest(config, {}, ("program",), ("launch", "x"), str(tmp_path), 2, 2)
        write_job_request(request, run.path)
        (run.path / "acts.json").write_text(json.dumps(acts))
        manifest = describe_start(run, ["launch", "x"], {})
        write_manifest(run, {**manifest, "outcome": {"state": "submitted"}, "slurm": {"job_id": None}})
        script = tmp_path / "job.sh"
        words = f'"{sys.executable}" -m tests.slurm.cluster.small_first_node "{run.path}"'
        script.write_text(f'#!/bin/sh\ncd "{SOURCES}" && exec {words}\n')
        log = f"--output={run.path}/job.log"
        job_id = sandbox.run(
            "sbatch", "--parsable", "--requeue", "--open-mode=append", "-N2", log, *options, str(script)
        ).strip()
        return SmallJob(sandbox, run.path, job_id)

    return start


def test_a_success(submit: Submit) -> None:
    job = submit([{"steps": 10, "do": "end"}])
    outcome = job.await_final()
    assert (outcome["state"], outcome["exit_code"], outcome["cause"]) == ("succeeded", 0, None)
    manifest = job.read()
    assert manifest["hosts"] == ["n0", "n1"] and manifest["slurm"] == {"job_id": job.job_id, "restarts": 0}
    assert manifest["earlier"] == [] and outcome["step"] == 10
    assert "ended" not in job.log and "launch: succeeded after " in job.log


def test_a_crash_is_not_requeued_by_default(submit: Submit) -> None:
    job = submit([{"steps": 3, "do": "crash"}])
    outcome = job.await_final()
    assert (outcome["state"], outcome["exit_code"], outcome["cause"]) == ("failed", 7, "crash")
    first = outcome["first_failure"]
    assert (first["rank"], first["host"], first["last_lines"]) == (1, "n1", ["boom"])
    assert "launch: rank 1 on n1 (local rank 0) failed first: it exited with code 7\n" in job.log
    assert "launch:   | boom\n" in job.log
    why = "the program failed: not requeued (cluster.requeue.crash=0)"
    assert f"launch: attempt 1 ended: {why}\n" in job.log
    assert job.sandbox.list_states(job.job_id) == ["FAILED"]


def test_a_crash_that_the_policy_allows_is_requeued_as_often(submit: Submit) -> None:
    job = submit([{"steps": step, "do": "crash"} for step in (1, 2, 3)], {"crash": 2})
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"]) == ("failed", "crash")
    assert job.list_causes() == ["crash"] * 3
    assert "attempt 1 ended: the program failed: requeued (attempt 2 of at most 200)\n" in job.log
    assert (
        "attempt 3 ended: the program failed: not requeued after 2 of them (cluster.requeue.crash=2)\n"
        in job.log
    )
    assert [entry["slurm"]["restarts"] for entry in job.read()["earlier"]] == [0, 1]


def test_one_member_of_an_array_is_requeued(submit: Submit) -> None:
    """The last member has the array's own number, which stands for all of them."""
    job = submit([{"steps": 1, "do": "crash"}, {"steps": 10, "do": "end"}], {"crash": 1}, "--array=3")
    member = replace(job, job_id=f"{job.job_id}_3")
    assert member.await_final()["state"] == "succeeded"
    assert member.list_causes() == ["crash", None]
    assert job.read()["slurm"] == {"job_id": member.job_id, "restarts": 1}


def test_no_progress_ends_the_job(submit: Submit) -> None:
    job = submit([{"steps": 4, "do": "crash"}], {"crash": 9, "no_progress": 2})
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"]) == ("failed", "no_progress")
    assert job.list_causes() == ["crash", "crash", "no_progress"]
    assert "attempt 3 ended: no progress in 2 attempts in a row (cluster.requeue.no_progress=2)\n" in job.log


def test_checkpoints_elsewhere_are_progress(submit: Submit) -> None:
    job = submit([{"steps": 4, "do": "crash", "saves": True}], {"crash": 3, "no_progress": 1})
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"]) == ("failed", "crash")
    assert job.list_causes() == ["crash"] * 4


def test_the_limit_on_attempts(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "crash"}, {"steps": 2, "do": "crash"}], {"crash": 9, "limit": 2})
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"]) == ("failed", "limit")
    assert len(job.read()["earlier"]) == 1


def test_scancel_is_not_requeued(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "wait"}])
    job.await_wait(0)
    job.sandbox.run("scancel", job.job_id)
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("stopped", "cancelled", 143)
    assert job.sandbox.list_states(job.job_id) == ["CANCELLED"]
    assert "launch: attempt 1 ended: cancelled\n" in job.log


def test_a_signal_of_the_users_is_not_requeued(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "wait"}])
    job.await_wait(0)
    job.sandbox.run("scancel", "--full", "--signal=TERM", job.job_id)
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"]) == ("stopped", "cancelled")


def test_a_requeue_by_an_administrator(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "wait"}, {"steps": 10, "do": "end"}])
    job.await_wait(0)
    job.sandbox.run("scontrol", "requeue", job.job_id)
    assert job.await_final()["state"] == "succeeded"
    (before,) = job.read()["earlier"]
    assert (before["outcome"]["state"], before["outcome"]["cause"]) == ("requeued", "requeued")
    assert job.read()["slurm"]["restarts"] == 1
    assert "attempt 1 ended: requeued from outside (attempt 2 of at most 200)\n" in job.log


def test_a_job_of_higher_priority_takes_the_nodes(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "wait"}, {"steps": 10, "do": "end"}])
    job.await_wait(0)
    job.sandbox.run(*URGENT)
    assert job.await_final()["state"] == "succeeded"
    assert job.list_causes() == ["preempted", None]


def test_a_preemption_that_the_policy_forbids_ends_the_next_attempt(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "wait"}], {"preempted": 0})
    job.await_wait(0)
    job.sandbox.run(*URGENT)
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("failed", "preempted", 143)
    assert job.read()["earlier"] == [] and not list(job.path.glob("waits-1-*"))
    assert "launch: error: attempt 2 does not begin: attempt 1 ended: preempted: not requeued" in job.log
    assert job.sandbox.list_states(job.job_id) == ["FAILED"]


def test_a_job_that_ends_with_0_while_it_makes_room_is_not_run_again(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "wait", "ends": True}])
    job.await_wait(0)
    job.sandbox.run(*URGENT)
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("succeeded", None, 0)
    assert job.read()["earlier"] == [] and not list(job.path.glob("waits-1-*"))
    assert "attempt 2 does not begin: attempt 1 ended: all ranks ended with 0" in job.log
    assert job.sandbox.list_states(job.job_id) == ["COMPLETED"]


def test_a_job_with_grace_is_requeued_by_the_head(sandbox: Sandbox, submit: Submit) -> None:
    """With GraceTime SLURM sends SIGTERM to the steps alone, and forgets a job that ends within it."""
    sandbox.run("scontrol", "update", "PartitionName=main", "GraceTime=60")
    try:
        job = submit([{"steps": 1, "do": "wait"}, {"steps": 10, "do": "end"}])
        job.await_wait(0)
        sandbox.run(*URGENT)
        assert job.await_final()["state"] == "succeeded"
    finally:
        sandbox.run("scontrol", "update", "PartitionName=main", "GraceTime=0")
    assert job.list_causes() == ["preempted", None]


def test_the_checkpoint_signal_before_the_time_limit(submit: Submit) -> None:
    """SLURM may send it up to a minute early. The program asks for another start by its exit code."""
    job = submit([{"steps": 1, "do": "wait", "code": 75}], {"timeout": 1}, "--time=1", "--signal=B:USR2@30")
    outcome = job.await_final()
    assert (outcome["state"], outcome["cause"]) == ("stopped", "timeout")
    assert job.list_causes() == ["timeout", "timeout"]
    assert "attempt 1 ended: time limit: requeued (attempt 2 of at most 200)\n" in job.log
    assert (
        "attempt 2 ended: time limit: not requeued after 1 of them (cluster.requeue.timeout=1)\n" in job.log
    )


def test_a_program_that_ends_with_0_on_the_checkpoint_signal_has_finished(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "wait"}], {}, "--time=1", "--signal=B:USR2@30")
    assert job.await_final()["state"] == "succeeded"
    assert job.read()["earlier"] == []
    assert "launch: warning: all ranks ended with 0, which is a success, but after a signal" in job.log


def test_a_checkpoint_that_a_user_asks_for_is_no_time_limit(submit: Submit) -> None:
    job = submit([{"steps": 4, "do": "wait"}], {}, "--time=600")
    job.await_wait(0)
    job.sandbox.run("scancel", "--batch", "--signal=USR2", job.job_id)
    assert job.await_final()["state"] == "succeeded"


def test_the_time_limit_itself(submit: Submit) -> None:
    """SLURM's smallest limit is a minute."""
    job = submit([{"steps": 1, "do": "wait"}, {"steps": 10, "do": "end"}], {}, "--time=1")
    assert job.await_final()["state"] == "succeeded"
    assert job.list_causes() == ["timeout", None]
    assert job.read()["slurm"]["restarts"] == 1


@pytest.mark.parametrize("place", [0, 1], ids=["batch host", "other"])
def test_a_lost_node_is_excluded(submit: Submit, place: int) -> None:
    job = submit([{"steps": 1, "do": "wait"}, {"steps": 10, "do": "end"}])
    job.await_wait(0)
    host = job.read()["hosts"][place]
    job.sandbox.break_it("kill", host)
    try:
        assert job.await_final()["state"] == "succeeded"
    finally:
        job.sandbox.break_it("start", host)
    (before,) = job.read()["earlier"]
    assert (before["outcome"]["cause"], before["outcome"]["lost"]) == ("node_failure", [host])
    assert host not in job.read()["hosts"]
    if place:  # else there is nobody to write it, and none to exclude the node
        assert before["outcome"]["exit_code"] == 3 and before["outcome"]["first_failure"] is None
        assert f"ExcNodeList={host}" in job.sandbox.run("scontrol", "show", "job", job.job_id)


def test_a_task_that_is_killed_is_no_lost_node(submit: Submit) -> None:
    job = submit([{"steps": 1, "do": "die"}])
    outcome = job.await_final()
    assert (outcome["cause"], outcome["lost"]) == ("crash", [])
    assert "n1 is there, but its task left no record, and ended: Killed, probably out of memory\n" in job.log
