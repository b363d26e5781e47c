"""The sandbox cluster, through its command line."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.seam import find_processes, is_alive, wait_for

from .conftest import (
    STUBBORN,
    Sandbox,
    ask_command,
    demand_cgroups,
    demand_programs,
    list_groups,
    read_group,
    start_sandbox,
    submit_script,
)

pytestmark = pytest.mark.slurm


def test_a_job_over_all_nodes_sees_each_nodes_gpus(sandbox: Sandbox, tmp_path: Path) -> None:
    script = "srun --ntasks-per-node=1 sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    job = submit_script(sandbox, tmp_path, script, "--nodes=4", "--gpus-per-node=2")
    sandbox.wait(job, "COMPLETED")
    shown = (tmp_path / f"{job}.out").read_text().splitlines()
    assert sorted(shown) == [f"n{number} 0,1" for number in range(4)]


def test_the_nodes_names_are_known(sandbox: Sandbox) -> None:
    lines = sandbox.run("getent", "hosts", "n0", "n3").splitlines()
    assert {line.split()[0] for line in lines} == {"127.0.0.1"}


def test_accounting_is_on_or_off(sandbox: Sandbox, accounted: Sandbox, tmp_path: Path) -> None:
    job = submit_script(accounted, tmp_path, "exit 3")
    accounted.wait(job, "FAILED")
    words = (
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={job}",
        "--format=State,ExitCode",
    )
    wait_for(lambda: accounted.run(*words).strip() == "FAILED|3:0", "sacct to know the job's end")
    done = subprocess.run(words, env=sandbox.environ, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "accounting storage is disabled" in done.stderr


def test_an_urgent_job_preempts_and_requeues(sandbox: Sandbox, tmp_path: Path) -> None:
    script = "trap 'echo told; exit' TERM; echo start $SLURM_RESTART_COUNT; sleep 600 & wait"
    low = submit_script(sandbox, tmp_path, script, "--nodes=4", "--exclusive", "--open-mode=append")
    sandbox.wait(low, "RUNNING")
    wait_for((tmp_path / f"{low}.out").exists, "the job's output")
    high = submit_script(sandbox, tmp_path, "true", "--nodes=4", "--exclusive", "--partition=urgent")
    sandbox.wait(high, "COMPLETED")
    wait_for(lambda: "start 1" in (tmp_path / f"{low}.out").read_text(), "the job's next start")
    assert (tmp_path / f"{low}.out").read_text().splitlines()[0] == "start"
    assert "told" in (tmp_path / f"{low}.out").read_text()
    sandbox.run("scancel", low)
    sandbox.wait(low, "CANCELLED")
    sandbox.wait_empty()


def test_a_preempted_job_gets_its_signal_and_its_grace(tmp_path: Path) -> None:
    demand_programs("--no-accounting")
    options = ("--nodes", "1", "--gpus", "0", "--no-accounting", "--grace-time", "60", "--preempt-signal")
    script = "trap 'echo saved; exit' USR2; sleep 600 & wait; wait"
    with start_sandbox(*options) as sandbox:
        low = submit_script(sandbox, tmp_path, script, "--exclusive", "--signal=B:USR2@1")
        sandbox.wait(low, "RUNNING")
        wait_for(lambda: sandbox.list_processes("sleep"), "the job's start")
        high = submit_script(sandbox, tmp_path, "true", "--exclusive", "--partition=urgent")
        sandbox.wait(high, "COMPLETED", timeout=50)  # less than the grace: the signal came first
        assert (tmp_path / f"{low}.out").read_text().splitlines()[0] == "saved"


def test_a_killed_node_goes_down_and_comes_back(sandbox: Sandbox, tmp_path: Path) -> None:
    script = "srun --ntasks-per-node=1 --kill-on-bad-exit=0 sh -c 'env -i setsid sleep 600 & sleep 600'"
    job = submit_script(sandbox, tmp_path, script, "--nodes=2", "--nodelist=n2,n3", "--no-requeue")
    wait_for(lambda: len(sandbox.list_processes("sleep")) == 4, "the step's start")
    sandbox.break_it("kill", "n3")
    nodes = {line.split()[1] for line in sandbox.list_processes()}
    assert nodes == {"n2"}
    sandbox.wait(job, "NODE_FAIL", "COMPLETING")
    state = ("sinfo", "--noheader", "--nodes=n3", "--partition=main", "--format=%t")
    assert "down*" in sandbox.run(*state)
    done = ask_command("--folder", sandbox.folder, "status")
    assert (done.returncode, "n3 not running" in done.stderr) == (1, True)
    sandbox.break_it("start", "n3")
    wait_for(lambda: sandbox.run(*state).strip() == "idle", "n3 to come back")
    for line in sandbox.list_processes("sleep"):
        os.kill(int(line.split()[0]), signal.SIGKILL)
    sandbox.wait_empty()
    assert ask_command("--folder", sandbox.folder, "status").returncode == 0


def test_the_controller_restarts_and_dies_while_a_job_goes_on(sandbox: Sandbox, tmp_path: Path) -> None:
    job = submit_script(sandbox, tmp_path, "until [ -e go ]; do sleep 0.1; done; echo done", "--nodes=1")
    sandbox.wait(job, "RUNNING")
    sandbox.break_it("restart-controller")
    assert sandbox.list_states(job) == ["RUNNING"]
    sandbox.break_it("kill", "slurmctld")
    assert "slurmctld not running" in ask_command("--folder", sandbox.folder, "status").stderr
    (tmp_path / "go").touch()
    sandbox.break_it("start", "slurmctld")
    sandbox.wait(job, "COMPLETED")
    assert (tmp_path / f"{job}.out").read_text() == "done\n"


@pytest.mark.parametrize("tracking", ["--cgroups", "--no-cgroups"])
def test_down_leaves_nothing(tracking: str, short: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    if tracking == "--cgroups":
        demand_cgroups(sandbox)
    hosts = Path("/etc/hosts")
    options = ("--nodes", "2", "--gpus", "0", "--kill-wait", "1", "--no-accounting", tracking)
    done = ask_command("--folder", short, "up", *options)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert f"# sandbox {short}\n" in hosts.read_text() or not os.access(hosts, os.W_OK)
    cluster = Sandbox(short, {**sandbox.environ, "SLURM_CONF": str(short / "slurm.conf")})
    submit_script(cluster, tmp_path, STUBBORN.format(folder=tmp_path))
    wait_for(lambda: all((tmp_path / name).exists() for name in ("orphan", "batch")), "the job's start")
    pids = [int((tmp_path / name).read_text()) for name in ("orphan", "batch")]
    wait_for(lambda: "T" in Path(f"/proc/{pids[0]}/stat").read_text().split(")")[1][:3], "its stop")
    group = read_group(short)
    done = ask_command("--folder", short, "down")
    # With cgroups, SLURM itself ends what has left the job's process group.
    stuck = tracking == "--no-cgroups"
    assert (done.returncode, "processes of jobs had to be killed" in done.stdout) == (0, stuck), done
    assert not list_groups(short, group)
    assert not any(map(is_alive, pids))
    assert not short.exists()
    assert not find_processes(str(short))
    assert f"# sandbox {short}\n" not in hosts.read_text()
    assert f"# sandbox {sandbox.folder}\n" in hosts.read_text() or not os.access(hosts, os.W_OK)
    sandbox.run("sinfo")
