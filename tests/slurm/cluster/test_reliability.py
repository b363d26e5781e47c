"""Jobs of four nodes and eight ranks, and what can befall them: the table in docs/reliability.md.

In each test nothing is left running at the end, and where training was interrupted, its losses are those of
the run that nothing befell.
"""

import contextlib
import json
import re
from pathlib import Path

import pytest

from tests.seam import find_run, mount_disk
from tests.slurm.cluster.conftest import SOON, Sandbox, await_nothing
from tests.slurm.cluster.jobs import SHRUNK, Run, assert_same_losses, submit
from tests.slurm.cluster.test_step import allocate, finish

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

STEPS = 120
"""About ten a second: what befalls a job comes before its end on a busy machine, too."""
CHOSEN = ("program.parallel=ddp", "program.activation_checkpointing=none")
FOUR = (*SHRUNK, *CHOSEN, "nodes=4", "nproc_per_node=2", f"program.steps={STEPS}")
"""Four nodes with two ranks each, which train alike whatever memory an allocation has."""


@pytest.fixture(scope="module")
def undisturbed(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A job that nothing befalls."""
    run = submit(sandbox, tmp_path_factory.mktemp("undisturbed"), *FOUR)
    assert run.await_end() == "succeeded"
    return run


def test_four_nodes_with_two_ranks_each(undisturbed: Run) -> None:
    losses = [float(loss) for loss in undisturbed.read_losses().values()]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    assert undisturbed.outcome["exit_code"] == 0
    assert sorted(undisturbed.manifest["hosts"]) == ["n0", "n1", "n2", "n3"]
    assert {path.name for path in undisturbed.path.glob("plan-*.json")} == {
        f"plan-n{n}.json" for n in range(4)
    }
    assert len(list(undisturbed.path.glob("rank-*.applied.json"))) == 8
    assert len(list(undisturbed.path.parents[1].glob("*/*"))) == 1
    await_nothing(str(undisturbed.path))


def test_inside_salloc(sandbox: Sandbox, tmp_path: Path, undisturbed: Run) -> None:
    words = [word for word in FOUR if not word.startswith("nodes=")]
    options = ("--nodes=4", "--gpus-per-node=2", "--cpus-per-task=1")
    done = finish(allocate(sandbox, tmp_path, f"launch {' '.join(words)}", *options))
    assert done.code == 0, done
    assert_same_losses(Run(find_run(tmp_path), sandbox), undisturbed)
    assert "succeeded" in done.err


def test_requeued_by_an_administrator_and_preempted(
    sandbox: Sandbox, tmp_path: Path, undisturbed: Run
) -> None:
    run = submit(sandbox, tmp_path, *FOUR)
    run.await_step(15)
    sandbox.run("scontrol", "requeue", run.job_id)
    log = run.path / "logs/1/rank-0.out"
    run.wait_for(lambda: log.exists() and "step " in log.read_text(), "a step of the second attempt")
    options = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    urgent = sandbox.run("sbatch", "--parsable", *options)
    sandbox.wait(urgent.strip(), "COMPLETED")
    assert run.await_end() == "succeeded"
    assert run.causes == ["requeued", "preempted", None]
    assert_same_losses(run, undisturbed)


def test_a_rank_is_killed_and_restarted(sandbox: Sandbox, tmp_path: Path, undisturbed: Run) -> None:
    run = submit(sandbox, tmp_path, *FOUR, "torchrun.max_restarts=2")
    run.await_step(15)
    run.find_rank(5).kill()
    assert run.await_end() == "succeeded"
    assert (run.path / "logs" / "1" / "rank-5.out").exists()
    assert_same_losses(run, undisturbed)


def test_a_rank_is_killed_for_good(sandbox: Sandbox, tmp_path: Path) -> None:
    run = submit(sandbox, tmp_path, *FOUR)
    run.await_step(5)
    process = run.find_rank(5)
    host = process.environ()["SLURMD_NODENAME"]
    process.kill()
    assert run.await_end() == "failed"
    failure = run.outcome["first_failure"]
    assert (failure["rank"], failure["host"], failure["exit_code"]) == (5, host, 137)
    assert (run.outcome["exit_code"], run.outcome["cause"]) == (137, "crash")
    assert f"rank 5 on {host}" in run.read_console() and "SIGKILL" in run.read_console()
    status = sandbox.launch("status", run.path.name, cwd=tmp_path)
    assert f"rank 5 on {host}" in status.out, status


def test_scancel(sandbox: Sandbox, tmp_path: Path) -> None:
    run = submit(sandbox, tmp_path, *FOUR, "program.steps=100000")
    run.await_step(5)
    sandbox.run("scancel", run.job_id)
    assert run.await_end() == "stopped"
    assert run.outcome["cause"] == "cancelled"
    run.wait_for(lambda: not run.find_processes(), "the job's processes to end", SOON)
    assert list((run.path / "checkpoints").iterdir())


def test_the_run_directory_s_disk_is_full(sandbox: Sandbox, tmp_path: Path) -> None:
    disk = tmp_path / "runs"
    with mount_disk(disk, 2):
        settings = (*SHRUNK, "nodes=2", "nproc_per_node=1", "program.steps=100000")
        run = submit(sandbox, tmp_path, *settings)
        run.await_step(15)
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        sandbox.wait(run.job_id, "FAILED")
        told = f"the run directory's disk is full ({run.path})"
        outcome, first = run.outcome, run.outcome["first_failure"]
        assert f"\nlaunch: {told}\n" in run.read_console()
        assert (outcome["state"], outcome["cause"]) == ("failed", "crash"), outcome
        assert first["host"] in run.manifest["hosts"] and outcome["exit_code"] == first["exit_code"]
        assert f"launch: rank {first['rank']} on {first['host']}" in run.read_console()
        status = sandbox.launch("status", run.path.name, "format=json", cwd=tmp_path)
        (shown,) = json.loads(status.out)["runs"]
        assert shown["state"] == "failed" and shown["reason"].startswith(told), status
        (disk / "filler").unlink()
        again = (*settings[:-1], "program.steps=30", f"run_dir={run.path}")
        assert sandbox.launch(*again, cwd=tmp_path).code == 0
        assert run.await_end() == "succeeded"
        assert "start   at step 10" in run.read_rank()
        assert sorted(run.read_losses()) == list(range(1, 31))


def test_two_jobs_at_once_on_the_same_nodes(sandbox: Sandbox, tmp_path: Path) -> None:
    settings = ("nodes=2", "nproc_per_node=1", "program.steps=20", "cluster.nodelist=n[0-1]")
    share = ("cluster.gpus_per_node=1", "cluster.cpus_per_task=4", "cluster.mem=1000")
    both = [submit(sandbox, tmp_path, *SHRUNK, *settings, *share) for _ in range(2)]
    assert [run.await_end() for run in both] == ["succeeded"] * 2
    started = [run.manifest["started"] for run in both]
    assert max(started) < min(run.manifest["ended"] for run in both), "they did not run at once"
    assert_same_losses(both[0], both[1])


def test_a_time_limit_shorter_than_the_training(sandbox: Sandbox, tmp_path: Path, undisturbed: Run) -> None:
    # About 50 s of training, at the speed of the job that nothing befell; SLURM's limits are whole minutes.
    speeds = [int(speed) for speed in re.findall(r"tokens/s (\d+)", undisturbed.read_rank())]
    steps = max(100, 50 * sorted(speeds)[len(speeds) // 2] // (8 * 4 * 32))
    settings = (*FOUR[:-1], f"program.steps={steps}")
    whole = submit(sandbox, tmp_path, *settings, "name=whole")
    assert whole.await_end() == "succeeded"
    run = submit(sandbox, tmp_path, *settings, "cluster.time=1", "cluster.signal=USR2@40", "name=limited")
    assert run.await_end(timeout=400) == "succeeded"
    assert run.causes[-1] is None and set(run.causes[:-1]) == {"timeout"}
    assert_same_losses(run, whole)
