"""Jobs of four nodes and eight ranks, and what can befall them: the table in docs/reliability.md.

In each test nothing is left running at the end, and where training was interrupted, its losses are those of
the run that nothing befell.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster.conftest import Sandbox, await_nothing
from tests.slurm.cluster.jobs import SHRUNK, Run, assert_same_losses, submit

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

STEPS = 60
FOUR = (*SHRUNK, "nodes=4", "nproc_per_node=2", f"program.steps={STEPS}")
"""Four nodes with two ranks each."""


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
    words = ["salloc", "--quiet", "--nodes=4", "--gpus-per-node=2", "--cpus-per-task=1"]
    settings = [word for word in FOUR if not word.startswith("nodes=")]
    command = [*words, sys.executable, "-m", "launcher", *settings]
    done = subprocess.run(
        command, cwd=tmp_path, env=sandbox.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("runs/*/*")
    assert_same_losses(Run(path, sandbox), undisturbed)
    assert "succeeded" in done.stderr


def test_requeued_by_an_administrator(sandbox: Sandbox, tmp_path: Path, undisturbed: Run) -> None:
    run = submit(sandbox, tmp_path, *FOUR)
    run.await_step(15)
    sandbox.run("scontrol", "requeue", run.job_id)
    assert run.await_end() == "succeeded"
    assert run.causes == ["requeued", None]
    assert_same_losses(run, undisturbed)


def test_preempted_by_a_job_of_higher_priority(sandbox: Sandbox, tmp_path: Path, undisturbed: Run) -> None:
    run = submit(sandbox, tmp_path, *FOUR)
    run.await_step(15)
    options = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    urgent = sandbox.run("sbatch", "--parsable", *options)
    sandbox.wait(urgent.strip(), "COMPLETED")
    assert run.await_end() == "succeeded"
    assert run.causes == ["preempted", None]
    assert_same_losses(run, undisturbed)


def test_a_rank_is_killed_and_restarted(sandbox: Sandbox, tmp_path: Path, undisturbed: Run) -> None:
    run = submit(sandbox, tmp_path, *FOUR, "torchrun.max_restarts=2")
    run.await_step(15)
    os.kill(find_rank(run, 5), signal.SIGKILL)
    assert run.await_end() == "succeeded"
    assert (run.path / "logs" / "1" / "rank-5.out").exists()
    assert_same_losses(run, undisturbed)


def test_a_rank_is_killed_for_good(sandbox: Sandbox, tmp_path: Path) -> None:
    run = submit(sandbox, tmp_path, *FOUR)
    run.await_step(5)
    pid = find_rank(run, 5)
    host = psutil.Process(pid).environ()["SLURMD_NODENAME"]
    os.kill(pid, signal.SIGKILL)
    assert run.await_end() == "failed"
    failure = run.outcome["first_failure"]
    assert (failure["rank"], failure["host"], failure["exit_code"]) == (5, host, 137)
    assert (run.outcome["exit_code"], run.outcome["cause"]) == (137, "crash")
    assert f"rank 5 on {host}" in run.read_console() and "SIGKILL" in run.read_console()
    status = sandbox.launch("status", run.path.name, cwd=tmp_path)
    assert f"rank 5 on {host}" in status.out, status


def find_rank(run: Run, rank: int) -> int:
    """The process of a rank."""
    return int(json.loads((run.path / f"rank-{rank}.applied.json").read_text())["pid"])


def test_a_dead_node_under_a_fixed_job(sandbox: Sandbox, tmp_path: Path) -> None:
    run = submit(sandbox, tmp_path, *SHRUNK, "nodes=2", "nproc_per_node=1", f"program.steps={STEPS}")
    run.await_step(15)
    lost = run.manifest["hosts"][1]
    sandbox.break_it("kill", lost)
    try:
        assert run.await_end() == "succeeded"
    finally:
        sandbox.break_it("start", lost)
    assert run.causes == ["node_failure", None]
    assert lost not in run.manifest["hosts"]
    assert sorted(run.read_losses()) == list(range(1, STEPS + 1))


def test_a_dead_node_under_an_elastic_job(sandbox: Sandbox, tmp_path: Path) -> None:
    run = submit(sandbox, tmp_path, *SHRUNK, "nodes=2:3", "nproc_per_node=1", f"program.steps={STEPS}")
    run.await_step(15)
    assert len(run.manifest["hosts"]) == 3
    lost = run.manifest["hosts"][2]
    sandbox.break_it("kill", lost)
    try:
        assert run.await_end() == "succeeded"
    finally:
        sandbox.break_it("start", lost)
    assert run.causes == [None]
    assert sorted(run.read_losses()) == list(range(1, STEPS + 1))


def test_scancel(sandbox: Sandbox, tmp_path: Path) -> None:
    run = submit(sandbox, tmp_path, *FOUR, "program.steps=100000")
    run.await_step(5)
    sandbox.run("scancel", run.job_id)
    assert run.await_end() == "stopped"
    assert run.outcome["cause"] == "cancelled"
    run.wait_for(lambda: not run.find_processes(), "the job's processes to end", 20)
    assert list((run.path / "checkpoints").iterdir())


def test_the_run_directory_s_disk_is_full(sandbox: Sandbox, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("mounting a small filesystem needs root")
    disk = tmp_path / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    try:
        settings = (*SHRUNK, "nodes=2", "nproc_per_node=1", "program.steps=100000")
        run = submit(sandbox, tmp_path, *settings)
        run.await_step(15)
        filler = disk / "filler"
        with filler.open("wb") as file:
            while file_grows(file.fileno()):
                pass
        sandbox.wait(run.job_id, "FAILED", timeout=60)
        told = f"the run directory's disk is full ({run.path})"
        outcome, first = run.outcome, run.outcome["first_failure"]
        assert f"\nlaunch: {told}\n" in run.read_console()
        assert (outcome["state"], outcome["cause"]) == ("failed", "crash"), outcome
        assert first["host"] in run.manifest["hosts"] and outcome["exit_code"] == first["exit_code"]
        assert f"launch: rank {first['rank']} on {first['host']}" in run.read_console()
        status = sandbox.launch("status", run.path.name, "format=json", cwd=tmp_path)
        (shown,) = json.loads(status.out)["runs"]
        assert shown["state"] == "failed" and shown["reason"].startswith(told), status
        filler.unlink()
        again = (*settings[:-1], "program.steps=30", f"run_dir={run.path}")
        assert sandbox.launch(*again, cwd=tmp_path).code == 0
        assert run.await_end() == "succeeded"
        assert "start   at step 10" in run.read_rank()
        assert sorted(run.read_losses()) == list(range(1, 31))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def file_grows(descriptor: int) -> bool:
    """Write a little; False where the disk is full."""
    try:
        return os.write(descriptor, bytes(4096)) > 0
    except OSError:
        return False


def own_lines(run: Run) -> list[str]:
    """What the job's console has from the launcher, rather than from ranks."""
    return [line for line in run.read_console().splitlines() if not line.startswith("[")]


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
