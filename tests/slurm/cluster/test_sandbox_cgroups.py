"""The sandbox's cgroups: each cluster's own, which go whatever has happened; or why there are none."""

import ctypes
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


def test_a_killed_nodes_cgroups_go_with_it(short: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    cluster = start(short, sandbox)
    submit_stubborn(cluster, tmp_path)
    groups = [path for path in (short / "cgroup").glob("*/slurm_n0/uid_*/job_*") if path.is_dir()]
    assert {path.parts[-4] for path in groups} == {"memory", "cpuset", "devices", "freezer", "cpuacct"}
    cluster.break_it("kill", "n0")
    assert not list((short / "cgroup").glob("*/slurm_n0"))
    cluster.run("scancel", "1")
    cluster.break_it("start", "n0")
    assert cluster.run("srun", "--immediate=60", "echo", "again") == "again\n"


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


def test_suspended_jobs_do_not_stop_down(short: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    cluster, group = start(short, sandbox), read_group(short)
    pids = submit_stubborn(cluster, tmp_path)
    cluster.run("scontrol", "suspend", "1")
    (state,) = (short / "cgroup").glob("freezer/slurm_n0/uid_*/job_*/step_batch/freezer.state")
    wait_for(lambda: state.read_text() == "FROZEN\n", "the job to be suspended")
    assert ask_command("--folder", short, "down", "--now").returncode == 0
    assert not any(map(is_alive, pids))
    assert not list_groups(short, group)


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


def test_cgroups_that_are_asked_for_and_cannot_be_had_are_an_error(short: Path) -> None:
    demand_programs("--no-accounting")
    done = start_without(short, "--cgroups")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
    assert done.stderr.startswith(f"sandbox: error: --cgroups: {explain()}")
    assert done.stderr.endswith(": leave the option out, or give --no-cgroups\n")
    assert not short.exists() and not list_groups(short, "")
