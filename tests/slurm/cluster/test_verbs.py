"""`launch status`, `logs` and `cancel` of jobs on real clusters."""

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cli.make_runs import make_run, read_manifest, write_log
from tests.seam import LAUNCH, PATIENCE, Result, wait_for, write_program
from tests.slurm.cluster.conftest import Sandbox, demand_programs, start_sandbox
from tests.slurm.cluster.jobs import Run, submit

pytestmark = pytest.mark.slurm
STEPS = """
import os, sys, time
for step in range(1, int(sys.argv[1]) + 1):
    print(f"step {step}/{sys.argv[1]} loss {1 / step:.3f}", flush=True)
    while step == 3 and os.path.exists("wait"):
        time.sleep(0.05)
    time.sleep(0.1)
if os.environ["RANK"] == sys.argv[2]:
    sys.exit("the last words")
"""
SMALL = ("cluster=slurm", "nproc_per_node=1", "cluster.cpus_per_task=1", "cluster.mem=1G")
LIKED = {
    **{"SQUEUE_FORMAT": "%i", "SQUEUE_STATES": "RUNNING", "SQUEUE_USERS": "nobody"},
    **{"SQUEUE_PARTITION": "urgent", "SLURM_TIME_FORMAT": "relative", "LC_ALL": "de_DE.UTF-8"},
}
"""How a user likes what squeue shows, which changes nothing."""


BRIEF = "MinJobAge=2\nMessageTimeout=2\n"
"""In seconds; the defaults are 300 and 10."""


@pytest.fixture(scope="module")
def plain() -> Iterator[Sandbox]:
    """A cluster that forgets jobs soon."""
    demand_programs("--no-accounting")
    with start_sandbox("--no-accounting") as cluster:
        text = cluster.conf.read_text().replace("MinJobAge=3600\n", BRIEF)
        assert BRIEF in text
        cluster.conf.write_text(text)
        cluster.run("scontrol", "reconfigure")
        yield cluster


def ask(cluster: Sandbox, cwd: Path, *names: str, warning: str = "") -> list[dict[str, Any]]:
    """The runs that `launch status` tells of, in their order."""
    result = cluster.launch("status", "format=json", *names, cwd=cwd, env=LIKED)
    assert result.code == 0 and (warning in result.err if warning else not result.err), result
    runs: list[dict[str, Any]] = json.loads(result.out)["runs"]
    return runs


def start(cluster: Sandbox, cwd: Path, name: str, steps: int, *words: str, failing: int = -1) -> Run:
    program = ("--", write_program(cwd, STEPS), str(steps), str(failing))
    return submit(cluster, cwd, *SMALL, f"name={name}", *words, *program)


def make_job(
    cluster: Sandbox, runs: Path, name: str, *options: str, wrap: str, **more: Any
) -> tuple[Path, str]:
    """A run made by hand around a job of the cluster."""
    words = ("sbatch", "--parsable", f"--output={runs}/slurm-%j.out", "--nodes=1", *options, f"--wrap={wrap}")
    job_id = cluster.run(*words).strip()
    now = datetime.now().astimezone().isoformat()
    values = {"started": now, "slurm": {"job_id": job_id}, "state": "submitted", "hosts": [], **more}
    return make_run(runs, name, **values), job_id


def test_a_job_from_the_queue_to_its_failure(sandbox: Sandbox, tmp_path: Path) -> None:
    run = start(sandbox, tmp_path, "held", 5, "nodes=2", "cluster.additional.hold=true", failing=1)
    (found,) = ask(sandbox, tmp_path)
    expected = {"run": f"held/{run.path.name}", "job_id": run.job_id, "state": "queued", "nodes": 2}
    expected |= {"reason": "JobHeldUser", "slurm_state": "PENDING", "partition": "main", "step": None}
    assert {key: found[key] for key in expected} == expected
    assert found["seconds"] < 60 and found["attempts"] == []
    (tmp_path / "wait").touch()
    sandbox.run("scontrol", "release", run.job_id)
    sandbox.wait(run.job_id, "RUNNING")
    wait_for(lambda: ask(sandbox, tmp_path, run.job_id)[0]["step"], "a step")
    (found,) = ask(sandbox, tmp_path, run.job_id)
    assert found["state"] == "running" and found["nodelist"].startswith("n[")
    (tmp_path / "wait").unlink()
    assert run.await_end() == "failed"
    (found,) = ask(sandbox, tmp_path, "held")
    expected = {"state": "failed", "step": 5, "total": 5, "restarts": 0, "exit_code": 1, "nodes": 2}
    assert {key: found[key] for key in expected} == expected
    host = found["first_failure"]["host"]
    assert found["reason"] == f"rank 1 on {host} exited with code 1"
    assert found["first_failure"]["last_lines"][-1] == "the last words"
    shown = sandbox.launch("status", "held", cwd=tmp_path).out
    assert f"rank 1 on {host} (local rank 0) exited with code 1" in shown and "| the last words" in shown
    lines = sandbox.launch("logs", "rank=1", run.job_id, cwd=tmp_path).out.splitlines()
    assert [line for line in lines if line.startswith("step ")] == [
        f"step {n}/5 loss {1 / n:.3f}" for n in range(1, 6)
    ]
    assert lines[-1] == "the last words"


def test_a_sweep_has_a_row_for_each_and_one_or_all_can_be_cancelled(sandbox: Sandbox, tmp_path: Path) -> None:
    words = ("-m", *SMALL, "name=a,b,c", "cluster.array_parallelism=2", "--", write_program(tmp_path, STEPS))
    assert sandbox.launch(*words, "1000", "-1", cwd=tmp_path).code == 0
    array = str(read_manifest(next(tmp_path.glob("runs/a/*")))["slurm"]["job_id"]).partition("_")[0]
    sandbox.wait(f"{array}_1", "RUNNING")
    rows = [
        (row["run"][0], row["job_id"], row["state"], row["reason"]) for row in ask(sandbox, tmp_path, array)
    ]
    assert [row[:3] for row in rows] == [
        ("a", f"{array}_0", "running"),
        ("b", f"{array}_1", "running"),
        ("c", f"{array}_2", "queued"),
    ]
    assert rows[2][3] == "JobArrayTaskLimit"
    for member in (2, 0):  # one that waits, which SLURM forgets at once, and one that runs
        done = sandbox.launch("cancel", "yes=true", f"{array}_{member}", cwd=tmp_path)
        assert done.code == 0 and f"job {array}_{member}, is cancelled" in done.err
    states = [(row["state"], row["reason"]) for row in ask(sandbox, tmp_path, array)]
    assert states == [("stopped", "cancelled"), ("running", ""), ("stopped", "cancelled")]
    done = sandbox.launch("cancel", "yes=true", array, cwd=tmp_path)
    assert done.code == 0 and done.err.count("has ended already: stopped (cancelled)") == 2
    assert {row["state"] for row in ask(sandbox, tmp_path)} == {"stopped"}
    assert sandbox.list_states(f"{array}_1") == ["CANCELLED"]


def test_what_slurm_says_of_an_end_that_nobody_wrote_down(plain: Sandbox, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ends = {"exits": "exit 3", "killed": "kill -9 $$", "done": "true", "cancelled": "exec sleep 300"}
    make_run(runs, "unknown", state="running", slurm={"job_id": "999999"})
    jobs = {name: make_job(plain, runs, name, wrap=text, state="running")[1] for name, text in ends.items()}
    plain.wait(jobs["cancelled"], "RUNNING")
    plain.run("scancel", jobs["cancelled"])
    for job_id in jobs.values():
        plain.wait(job_id, "FAILED", "COMPLETED", "CANCELLED")
    found = {row["run"].partition("/")[0]: row for row in ask(plain, tmp_path)}
    told = {name: (row["state"], row["exit_code"]) for name, row in found.items()}
    assert told == {
        "exits": ("failed", 3),
        "killed": ("failed", 137),
        "done": ("succeeded", 0),
        "cancelled": ("stopped", 143),
        "unknown": ("lost", None),
    }
    assert found["exits"]["reason"] == "FAILED; exit code 3"
    assert (found["done"]["reason"], found["cancelled"]["reason"]) == ("", "cancelled")
    words = ("squeue", "--noheader", "--states=all", "--format=%A")
    wait_for(lambda: not {*jobs.values()} & {*plain.run(*words).split()}, "all to be forgotten")
    rows = ask(plain, tmp_path)
    assert {row["state"] for row in rows} == {"lost"}
    assert "SLURM no longer knows job" in rows[0]["reason"]


def test_while_the_controller_is_down_the_files_tell(plain: Sandbox, tmp_path: Path) -> None:
    path, job_id = make_job(plain, tmp_path / "runs", "job", wrap="exec sleep 300", state="running")
    write_log(path, 0, "step 3/9 loss 1\n")
    plain.break_it("restart-controller")  # in good order: it saves that the job runs
    with plain.without("slurmctld"):
        (row,) = ask(plain, tmp_path, warning="launch: warning: squeue: ")
        assert (row["state"], row["step"], row["slurm_state"]) == ("running", 3, None)
        plain.launch("cancel", "yes=true", "job", cwd=tmp_path).assert_error(4, "Unable to contact")
        assert plain.launch("logs", "job", cwd=tmp_path) == Result(0, "[?:0] step 3/9 loss 1\n", "")
    done = plain.launch("cancel", "yes=true", "job", cwd=tmp_path)
    assert done.code == 0 and f"job {job_id}, is cancelled" in done.err
    expected = {"state": "stopped", "cause": "cancelled", "reason": "cancelled", "exit_code": 143}
    assert read_manifest(path)["outcome"].items() >= expected.items()


def test_following_from_the_queue_over_a_requeue_to_the_end(sandbox: Sandbox, tmp_path: Path) -> None:
    run = start(sandbox, tmp_path, "job", 20, "cluster.additional.hold=true")
    words = [*LAUNCH, "logs", "-f", "rank=0", "job", "logs.tail=1000"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(words, cwd=tmp_path, env=sandbox.environ, stdout=out, stderr=err)
    try:
        wait_for(lambda: "is queued" in (tmp_path / "err").read_text(), "the wait to be told")
        (tmp_path / "wait").touch()
        sandbox.run("scontrol", "release", run.job_id)
        wait_for(lambda: "step 3/" in (tmp_path / "out").read_text(), "three steps")
        sandbox.run("scontrol", "requeue", run.job_id)
        (tmp_path / "wait").unlink()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    assert run.outcome["state"] == "succeeded"
    name = f"job/{run.path.name}"
    told = (tmp_path / "err").read_text()
    assert told.startswith(f"launch: {name} is queued, job {run.job_id}: JobHeldUser\n")
    assert "launch: attempt 1\n" in told and told.endswith(
        f"launch: {name} has succeeded, job {run.job_id}\n"
    )
    lines = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("step ")]
    assert lines[-20:] == [f"step {n}/20 loss {1 / n:.3f}" for n in range(1, 21)]
    assert lines[:3] == lines[-20:-17] and len(lines) > 22
    (row,) = ask(sandbox, tmp_path, "job")
    assert row["restarts"] == 1
    assert [(one["state"], one["cause"]) for one in row["attempts"]] == [
        ("requeued", "requeued"),
        ("succeeded", ""),
    ]
