"""Finds the processes of a cluster: what is below the nodes' keepers, and the daemons that have none."""

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sandboxed.cgroups import list_members
from sandboxed.cluster import Cluster
from sandboxed.commands import wait_until

DAEMONS = frozenset({"munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd"})
CLIENTS = frozenset({"srun", "salloc", "sbatch"})
KEEPER = "keeper"
OF_NODE = frozenset({KEEPER, "slurmd"})


@dataclass(frozen=True, slots=True)
class Process:
    """One process that belongs to a cluster."""

    pid: int
    parent: int
    program: str
    """The kernel's name for it, of at most 15 characters; `keeper` for a node's keeper."""
    node: str = ""
    """The node that it runs on; empty for a daemon of the whole cluster, and for a client outside of jobs."""

    @property
    def of_job(self) -> bool:
        """Whether a job runs here: slurmstepd, and all that it started."""
        return bool(self.node) and self.program not in OF_NODE


def list_processes(cluster: Cluster) -> tuple[Process, ...]:
    """Return the cluster's processes; not zombies, nor this one and those that it was started by.

    A shell with SLURM_CONF set, also one in salloc, is the user's and no part of the cluster.
    """
    seen = tuple(filter(None, map(read_process, list_numbers())))
    children: dict[int, list[Process]] = {}
    for process in seen:
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    for process in seen:
        if is_part(cluster, process):
            below = () if process.program in CLIENTS else descend(process, children)  # a user's, below salloc
            found.update((each.pid, each) for each in (process, *below))
    for process in seen:
        if node := find_kept(cluster, process):
            keeper = replace(process, program=KEEPER, node=node)
            found.update((each.pid, each) for each in (keeper, *descend(keeper, children)))
    for pid, node in list_members(cluster):
        member = None if pid in found else read_process(pid)
        if member:  # its node's keeper was killed
            found[pid] = replace(member, node=node)
    above = list_ancestors({process.pid: process.parent for process in seen})
    return tuple(process for process in found.values() if process.pid not in above)


def list_numbers() -> list[int]:
    """Return the numbers of all processes."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def read_process(pid: int) -> Process | None:
    """Return a live process of any kind; None for a zombie, and for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    head, _, tail = stat.rpartition(")")
    state, parent = tail.split()[:2]
    return None if state in "ZX" else Process(pid, int(parent), head.partition("(")[2])


def read_words(process: Process, name: str) -> list[str]:
    """Return a process's command line or environment; empty where that is not allowed, or it is gone."""
    try:
        data = Path(f"/proc/{process.pid}/{name}").read_bytes()
    except OSError:
        return []
    return os.fsdecode(data).split("\0")[:-1]


def is_part(cluster: Cluster, process: Process) -> bool:
    """Whether a process is a daemon or a client of this cluster, also a slurmd whose keeper was killed."""
    known = process.program in DAEMONS | CLIENTS
    return known and f"SLURM_CONF={cluster.conf}" in read_words(process, "environ")


def find_kept(cluster: Cluster, process: Process) -> str:
    """Return the node that a process is the keeper of; empty for any other process."""
    if not process.program.startswith("python"):
        return ""
    words = read_words(process, "cmdline")
    mine = len(words) > 6 and words[3].endswith("/keeper.py") and words[4] == cluster.folder
    return words[5] if mine else ""


def descend(parent: Process, children: dict[int, list[Process]]) -> Iterable[Process]:
    """Yield all processes below one, as of its node."""
    for process in children.get(parent.pid, ()):
        child = replace(process, node=parent.node)
        yield child
        yield from descend(child, children)


def list_ancestors(parents: dict[int, int]) -> set[int]:
    """Return this process and those above it."""
    above, pid = set[int](), os.getpid()
    while pid:
        above.add(pid)
        pid = parents.get(pid, 0)
    return above


def kill_processes(cluster: Cluster, choose: Callable[[Process], bool]) -> set[int]:
    """Send SIGKILL until none of the chosen is left, and return their numbers; raises SandboxError.

    A keeper goes once all below it is gone, or what a dying process leaves would get out of sight.
    """
    killed: set[int] = set()

    def sweep() -> bool:
        chosen = [process for process in list_processes(cluster) if choose(process)]
        kept = {process.node for process in chosen if process.program != KEEPER}
        for process in chosen:
            if process.program != KEEPER or process.node not in kept:
                kill(process.pid)
                killed.add(process.pid)
        return not chosen

    wait_until("its processes to die of SIGKILL", sweep, cluster)
    return killed


def kill(pid: int) -> None:
    """Send SIGKILL to a process that may be gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
