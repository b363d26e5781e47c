"""The sandbox cluster, through its command line: what it gives to jobs, and that it leaves nothing behind."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seam import clean_environ, find_processes, is_alive, wait_for

from .conftest import (
    COMMAND,
    STUBBORN,
    Sandbox,
    ask_command,
    demand_cgroups,
    demand_programs,
    list_groups,
    read_group,
    submit_script,
)

pytestmark = pytest.mark.slurm


def test_a_job_over_all_nodes_sees_each_nodes_gpus(sandbox: Sandbox, tmp_path: Path) -> None:
    script = "srun --ntasks-per-node=1 sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    job = submit_script(sandbox, tmp_path, script, "--nodes=4", "--gpus-per-node=2")
    sandbox.wait(job, "COMPLETED")
    shown = (tmp_path / f"{job}.out").read_text().splitlines()
    assert sorted(shown) == [f"n{number} 0,1" for number in range(4)]


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


PLAIN = ("--nodes", "1", "--gpus", "0", "--kill-wait", "1", "--no-accounting")
SYS_ADMIN = 21
"""The capability to mount (capabilities(7))."""


def start(folder: Path, sandbox: Sandbox, *options: str) -> Sandbox:
    """Another cluster than the session's."""
    demand_cgroups(sandbox)
    done = ask_command("--folder", folder, "up", *PLAIN, *options)
    assert done.returncode == 0, done.stderr
    return Sandbox(folder, {**sandbox.environ, "SLURM_CONF": str(folder / "slurm.conf")})


def submit_stubborn(cluster: Sandbox, folder: Path) -> list[int]:
    """Submit a job that is hard to end; returns its batch script and the process that it lets go."""
    submit_script(cluster, folder, STUBBORN.format(folder=folder))
    files = [folder / "batch", folder / "orphan"]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "the job's start")
    return [int(file.read_text()) for file in files]


def read_cgroup(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_clusters_beside_one_another_have_cgroups_of_their_own(
    short: Path, sandbox: Sandbox, tmp_path: Path
) -> None:
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
    assert ask_command("--folder", short, "down").returncode == 0
    assert is_alive(other) and list_groups(sandbox.folder, others)
    assert not list_groups(short, own)
    sandbox.run("scancel", job)
    sandbox.wait_empty()


def test_down_after_every_daemon_and_keeper_was_killed(short: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    cluster, group = start(short, sandbox), read_group(short)
    pids = submit_stubborn(cluster, tmp_path)
    for pid in find_processes(str(short)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not find_processes(str(short)), "the daemons' end")
    assert is_alive(pids[1])
    done = ask_command("--folder", short, "down")
    assert (done.returncode, "processes of jobs had to be killed" in done.stdout) == (0, True), done
    assert not any(map(is_alive, pids))
    assert not list_groups(short, group)
    assert not short.exists()


def drop_mounting() -> None:
    """Take the right to mount from this process for good, as most containers do; between fork and exec."""
    if ctypes.CDLL(None, use_errno=True).prctl(24, SYS_ADMIN, 0, 0, 0):  # PR_CAPBSET_DROP
        raise OSError(ctypes.get_errno(), "a capability cannot be dropped")


def start_without(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run `up` as one who may not mount: root in a container, or an ordinary user."""
    words: list[str | Path] = [sys.executable, COMMAND, "--folder", folder, "up", *PLAIN, *options]
    drop = None if os.geteuid() else drop_mounting
    return subprocess.run(
        words,
        env=clean_environ(),
        preexec_fn=drop,
        capture_output=True,
        text=True,
        check=False,
    )


def explain() -> str:
    refused = "the controller memory cannot be used as version 1 (Operation not permitted)"
    return "only root can mount cgroups" if os.geteuid() else refused


def test_without_cgroups_it_says_why_and_does_without(short: Path, tmp_path: Path) -> None:
    demand_programs("--no-accounting")
    done = start_without(short)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"sandbox: jobs are tracked by process group, not by cgroup: {explain()}")
    assert lines[1:] == ["sandbox: starting slurmctld and 1 slurmd"]
    cluster = Sandbox(short, {**clean_environ(), "SLURM_CONF": str(short / "slurm.conf")})
    assert not cluster.has_cgroups and read_group(short) == ""
    job = submit_script(cluster, tmp_path, "srun echo done")
    cluster.wait(job, "COMPLETED")
    assert (tmp_path / f"{job}.out").read_text() == "done\n"
    assert ask_command("--folder", short, "down").returncode == 0
    assert not list_groups(short, "") and not short.exists()


@pytest.mark.parametrize("moment", ["log/mariadb.log", "log/slurmctld.log"])
def test_an_interrupted_up_leaves_nothing(moment: str, short: Path) -> None:
    demand_programs()
    command: list[str | Path] = [sys.executable, COMMAND, "--folder", short, "up"]
    process = subprocess.Popen(command, env=clean_environ(), stderr=subprocess.PIPE, text=True)
    wait_for((short / moment).exists, moment)
    group = read_group(short)
    process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert not short.exists()
    assert not find_processes(str(short))
    assert not list_groups(short, group)
    assert f"# sandbox {short}\n" not in Path("/etc/hosts").read_text()


def test_a_cluster_is_there_once_dies_and_goes(short: Path) -> None:
    demand_programs("--no-accounting")
    command = ("--folder", short)
    assert ask_command(*command, "up", "--nodes", "1", "--no-accounting").returncode == 0
    done = ask_command(*command, "up")
    assert (done.returncode, done.stderr) == (
        1, f"sandbox: error: there is a cluster in {short} already: slurm/sandbox --folder {short} down\n",
    )  # fmt: skip
    for pid in find_processes(str(short)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not find_processes(str(short)), "the daemons' end")
    for verb in ("up", "status"):
        done = ask_command(*command, verb)
        assert (done.returncode, "has died" in done.stderr) == (1, True), done
    assert ask_command(*command, "down").returncode == 0
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
