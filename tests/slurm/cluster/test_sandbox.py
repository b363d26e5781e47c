"""The sandbox cluster, through its command line: what it gives to jobs, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.seam import PATIENCE, clean_environ, drop_powers, find_processes, is_alive, wait_for

from .conftest import (
    COMMAND,
    Sandbox,
    ask_command,
    demand_cgroups,
    demand_programs,
    list_groups,
    read_group,
    submit_script,
)

pytestmark = pytest.mark.slurm
HOSTS = Path("/etc/hosts")


def test_a_job_over_all_nodes_sees_each_nodes_gpus(sandbox: Sandbox, tmp_path: Path) -> None:
    script = "srun --ntasks-per-node=1 sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    job = submit_script(sandbox, tmp_path, script, "--nodes=4", "--gpus-per-node=2")
    sandbox.wait(job, "COMPLETED")
    shown = (tmp_path / f"{job}.out").read_text().splitlines()
    assert sorted(shown) == [f"n{number} 0,1" for number in range(4)]


def test_accounting_is_on_or_off(sandbox: Sandbox, accounted: Sandbox, tmp_path: Path) -> None:
    job = submit_script(accounted, tmp_path, "exit 3")
    accounted.wait(job, "FAILED")
    shown = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode")
    words = ("sacct", *shown, f"--jobs={job}")
    wait_for(lambda: accounted.run(*words).strip() == "FAILED|3:0", "sacct to know the job's end")
    done = subprocess.run(words, env=sandbox.environ, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "accounting storage is disabled" in done.stderr


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


PLAIN = ("--nodes", "1", "--gpus", "0", "--kill-wait", "1", "--no-accounting")
SYS_ADMIN = 21
"""The capability to mount (capabilities(7))."""
STUBBORN = """
srun true || exit
env -i setsid sh -c 'trap "" TERM; echo $$ > {folder}/orphan; kill -STOP $$' &
trap "" TERM
echo $$ > {folder}/batch
while true; do sleep 1; done
"""
"""A job that ends by SIGKILL alone, and a process that has left its session and its environment."""


def start(folder: Path, sandbox: Sandbox) -> Sandbox:
    """Another cluster than the session's."""
    done = ask_command("--folder", folder, "up", *PLAIN)
    assert done.returncode == 0, done.stderr
    return Sandbox(folder, {**sandbox.environ, "SLURM_CONF": str(folder / "slurm.conf")})


def submit_stubborn(cluster: Sandbox, folder: Path) -> list[int]:
    """Submit a job that is hard to end; returns its batch script and the process that it lets go."""
    submit_script(cluster, folder, STUBBORN.format(folder=folder))
    files = [folder / "batch", folder / "orphan"]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "the job's start")
    batch, orphan = (int(file.read_text()) for file in files)
    wait_for(lambda: "T" in Path(f"/proc/{orphan}/stat").read_text().split(")")[1][:3], "its stop")
    return [batch, orphan]


def take_down(cluster: Sandbox) -> bool:
    """Take a cluster down, which leaves nothing, and return whether jobs' processes had to be killed."""
    group = read_group(cluster.folder)
    done = ask_command("--folder", cluster.folder, "down")
    assert done.returncode == 0, done
    assert not list_groups(cluster.folder, group) and not cluster.folder.exists()
    assert not find_processes(str(cluster.folder))
    assert f"# sandbox {cluster.folder}\n" not in HOSTS.read_text()
    return "processes of jobs had to be killed" in done.stdout


@pytest.mark.parametrize("tracking", ["--cgroups", "--no-cgroups", ""])
def test_down_leaves_nothing(tracking: str, short: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    """With cgroups, without, and where one may not mount them, as in most containers: that is told."""
    if tracking == "--cgroups":
        demand_cgroups(sandbox)
    may_mount = None if tracking else partial(drop_powers, SYS_ADMIN)
    done = ask_command("--folder", short, "up", *PLAIN, *tracking.split(), preexec_fn=may_mount)
    refused = "the controller memory cannot be used as version 1 (Operation not permitted)"
    reason = "only root can mount cgroups" if os.geteuid() else refused
    *told, last = done.stderr.splitlines()
    assert (done.returncode, last) == (0, "sandbox: starting slurmctld and 1 slurmd"), done.stderr
    assert len(told) == (not tracking)
    assert all(f": jobs are tracked by process group, not by cgroup: {reason}" in line for line in told)
    assert f"# sandbox {short}\n" in HOSTS.read_text() or not os.access(HOSTS, os.W_OK)
    cluster = Sandbox(short, {**sandbox.environ, "SLURM_CONF": str(short / "slurm.conf")})
    assert cluster.has_cgroups == bool(read_group(short)) == (tracking == "--cgroups")
    pids = submit_stubborn(cluster, tmp_path)
    # With cgroups, SLURM itself ends what has left the job's process group.
    assert take_down(cluster) == (tracking != "--cgroups")
    assert not any(map(is_alive, pids))
    assert f"# sandbox {sandbox.folder}\n" in HOSTS.read_text() or not os.access(HOSTS, os.W_OK)
    sandbox.run("sinfo")


def read_cgroup(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_clusters_beside_one_another_have_cgroups_of_their_own(
    short: Path, sandbox: Sandbox, tmp_path: Path
) -> None:
    demand_cgroups(sandbox)
    cluster = start(short, sandbox)
    (tmp_path / "other").mkdir()
    job = submit_script(sandbox, tmp_path / "other", "echo $$ > batch; sleep 600", "--nodelist=n0")
    pid, _ = submit_stubborn(cluster, tmp_path)
    wait_for(lambda: sandbox.list_processes("sleep"), "the other job's start")
    other = int((tmp_path / "other" / "batch").read_text())
    own, others = read_group(cluster.folder), read_group(sandbox.folder)
    assert own != others
    for controller in ("memory", "cpuset", "devices", "freezer"):
        assert f":{controller}:/{own}/slurm_n0/uid_{os.geteuid()}/job_1/step_batch" in read_cgroup(pid)
        assert f":{controller}:/{others}/slurm_n0/uid_{os.geteuid()}/job_{job}/step_batch" in read_cgroup(
            other
        )
    cluster.break_it("kill", "n0")
    assert not is_alive(pid) and is_alive(other)
    take_down(cluster)
    assert is_alive(other) and list_groups(sandbox.folder, others)
    sandbox.run("scancel", job)
    sandbox.wait_empty()


@pytest.mark.parametrize("moment", ["log/mariadb.log", "log/slurmctld.log"])
def test_an_interrupted_up_leaves_nothing(moment: str, short: Path) -> None:
    demand_programs()
    command: list[str | Path] = [sys.executable, COMMAND, "--folder", short, "up"]
    process = subprocess.Popen(command, env=clean_environ(), stderr=subprocess.PIPE, text=True)
    wait_for((short / moment).exists, moment)
    group = read_group(short)
    process.terminate()
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert not short.exists()
    assert not find_processes(str(short))
    assert not list_groups(short, group)
    assert f"# sandbox {short}\n" not in HOSTS.read_text()


@pytest.mark.parametrize("has_job", [False, True])
def test_a_cluster_is_there_once_dies_and_goes(
    has_job: bool, short: Path, sandbox: Sandbox, tmp_path: Path
) -> None:
    """What a job has left goes too: its cgroup tells of it."""
    if has_job:
        demand_cgroups(sandbox)
    cluster, command = start(short, sandbox), ("--folder", short)
    pids = submit_stubborn(cluster, tmp_path) if has_job else []
    done = ask_command(*command, "up")
    there = f"sandbox: error: there is a cluster in {short} already: slurm/sandbox --folder {short} down\n"
    assert (done.returncode, done.stderr) == (1, there)
    for pid in find_processes(str(short)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not find_processes(str(short)), "the daemons' end")
    assert all(map(is_alive, pids[1:]))
    for verb in ("up", "status"):
        done = ask_command(*command, verb)
        assert (done.returncode, has_job or "has died" in done.stderr) == (1, True), done
    assert take_down(cluster) == has_job
    assert not any(map(is_alive, pids))
    for verb in ("down", "status", "env", "ps", "restart-controller"):
        done = ask_command(*command, verb)
        expected = f"sandbox: error: there is no cluster in {short}: slurm/sandbox --folder {short} up\n"
        assert (done.returncode, done.stderr, done.stdout) == (1, expected, "")


def test_another_users_folder_is_not_taken_down(short: Path) -> None:
    """Someone else can make a folder under /tmp first; what it says is not to be believed."""
    if os.geteuid():
        pytest.skip("only root can make a folder that is another user's")
    short.mkdir()
    (short / "cluster.json").write_text(json.dumps({"folder": "/etc", "ports": []}))
    os.chown(short, 65534, 65534)
    for verb in ("up", "down", "status"):
        done = ask_command("--folder", short, verb)
        assert (done.returncode, "is not yours, but user 65534's" in done.stderr) == (1, True), done
    assert (short / "cluster.json").exists()
