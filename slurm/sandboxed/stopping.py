"""Stops a cluster, or parts of it."""

import os
import shutil
import signal
from pathlib import Path

from sandboxed.cgroups import drop_groups, remove_groups, thaw_jobs
from sandboxed.cluster import DESCRIPTION, Cluster
from sandboxed.commands import answers, run, tell, wait_until
from sandboxed.errors import SandboxError
from sandboxed.hosts import drop_names
from sandboxed.processes import Process, kill_processes, list_processes

SLACK = 5.0
"""Seconds that jobs have to end beyond KillWait."""


def stop_all(cluster: Cluster, patient: bool = True) -> int:
    """End jobs and daemons and remove all traces; return how many processes of jobs had to be killed.

    The daemons get SIGKILL as well, since what they would write down goes away.
    """
    if patient and answers(cluster, ["scontrol", "ping"]):
        end_jobs(cluster)
    stuck = len([process for process in list_processes(cluster) if process.of_job])
    for node in cluster.names:
        thaw_jobs(cluster, node)
    kill_processes(cluster, lambda _: True)
    drop_groups(cluster)
    drop_names(cluster)
    remove_files(Path(cluster.folder))
    return stuck


def remove_files(folder: Path) -> None:
    """Remove the folder; what describes the cluster goes last, so that this can be taken up again."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != DESCRIPTION:
            path.unlink()
    shutil.rmtree(folder)


def end_jobs(cluster: Cluster) -> None:
    """Cancel every job, and wait for their ends as long as they may take."""
    jobs = run(cluster, ["squeue", "--noheader", "--format=%A"]).split()
    if not jobs:
        return
    tell(f"cancelling {len(set(jobs))} jobs")
    try:
        run(cluster, ["scancel", *sorted(set(jobs))])
        patience = cluster.kill_wait + SLACK
        wait_until("the jobs' ends", lambda: not has_jobs(cluster), cluster, patience)
    except SandboxError as error:
        tell(f"{error}: what is left is killed")


def has_jobs(cluster: Cluster) -> bool:
    """Whether the controller or this machine knows of jobs that have not ended."""
    queue = run(cluster, ["squeue", "--noheader", "--format=%A"])
    return bool(queue.strip()) or any(process.of_job for process in list_processes(cluster))


def kill_part(cluster: Cluster, name: str) -> int:
    """Kill a node (slurmd and all below it) or a daemon as a crash would, and return how many processes.

    Unlike with a machine that lost its power, the other ends of its connections see them closed.
    """

    def belongs(process: Process) -> bool:
        return name in (process.node, process.program)

    if not find_part(cluster, name):
        raise SandboxError(f"{name} is not running: slurm/sandbox start {name}")
    thaw_jobs(cluster, name)
    killed = kill_processes(cluster, belongs)
    remove_groups(cluster, name)
    return len(killed)


def stop_controller(cluster: Cluster) -> None:
    """End slurmctld in good order: it saves its state."""
    for process in find_part(cluster, "slurmctld"):
        os.kill(process.pid, signal.SIGTERM)
    wait_until("slurmctld to end", lambda: not find_part(cluster, "slurmctld"), cluster)


def find_part(cluster: Cluster, name: str) -> list[Process]:
    """Return a node's slurmd, or the daemon of a name."""
    return [
        process
        for process in list_processes(cluster)
        if process.program == name or (process.program == "slurmd" and process.node == name)
    ]
