"""Finds the processes of a cluster: what is below the nodes' keepers, and the daemons that have none."""

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sandboxed.cgroups import list_members
from sandboxed.cluster import Cluster

DAEMONS = frozenset({"munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd"})
CLIENTS = frozenset({"srun", "salloc", "sbatch"})
KEEPER = "keeper"


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
        return bool(self.node) and self.program not in (KEEPER, "slurmd")

    def read_words(self, name: str) -> list[str]:
        """Return its command line or environment; empty where that is not allowed, or it is gone."""
        try:
            return os.fsdecode(Path(f"/proc/{self.pid}/{name}").read_bytes()).split("\0")[:-1]
        except OSError:
            return []


def list_processes(cluster: Cluster) -> list[Process]:
    """Return the cluster's processes; not zombies, nor this one and those that it was started by.

    A shell with SLURM_CONF set, also one in salloc, is the user's and no part of the cluster.
    """
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    seen = {process.pid: process for process in filter(None, map(_read_process, pids))}
    children: dict[int, list[Process]] = {}
    for process in seen.values():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}

    def add(process: Process) -> None:
        """Add a process, and all below it as of its node."""
        found[process.pid] = process
        for child in children.get(process.pid, ()):
            add(replace(child, node=process.node))

    conf, keepers = f"SLURM_CONF={cluster.path('slurm.conf')}", list[Process]()
    for process in seen.values():
        if process.program in DAEMONS | CLIENTS and conf in process.read_words("environ"):
            if process.program in DAEMONS:
                add(process)
            else:
                found[process.pid] = process  # what is below salloc is a user's
        elif process.program.startswith("python"):
            words = process.read_words("cmdline")
            if len(words) > 6 and words[3].endswith("/keeper.py") and words[4] == cluster.folder:
                keepers.append(replace(process, program=KEEPER, node=words[5]))
    for keeper in keepers:
        add(keeper)
    for pid, node in list_members(cluster):
        if pid not in found and pid in seen:  # its node's keeper was killed
            found[pid] = replace(seen[pid], node=node)
    above: Process | None = seen[os.getpid()]
    while above:
        found.pop(above.pid, None)
        above = seen.get(above.parent)
    return [*found.values()]


def _read_process(pid: int) -> Process | None:
    """Return a live process of any kind; None for a zombie, and for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    head, _, tail = stat.rpartition(")")
    state, parent = tail.split()[:2]
    return None if state in "ZX" else Process(pid, int(parent), head.partition("(")[2])


def find_part(cluster: Cluster, name: str) -> list[Process]:
    """Return a node's slurmd, or the daemon of a name."""
    return [
        process
        for process in list_processes(cluster)
        if process.program == name or (process.program == "slurmd" and process.node == name)
    ]


def kill_processes(cluster: Cluster, choose: Callable[[Process], bool]) -> set[int]:
    """Send SIGKILL until none of the chosen is left, and return their numbers; raises SandboxError.

    A machine's processes end all at once, so they are stopped first: the process that srun leaves behind to
    cancel its step if srun dies would still get that done on another CPU. Children die before their parents:
    those that stay behind, stopped, would be sent SIGHUP and go on.
    A keeper goes once all below it is gone, or what a dying process leaves would get out of sight.
    """
    killed: set[int] = set()

    def sweep() -> bool:
        chosen = [process for process in list_processes(cluster) if choose(process)]
        below = {process.pid: process.node for process in chosen if process.program != KEEPER}
        keepers = {process.pid for process in chosen if process.node not in below.values()}
        pids = [*below, *keepers]
        for number, order in ((signal.SIGSTOP, pids), (signal.SIGKILL, pids[::-1])):
            for pid in order:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        killed.update(below, keepers)
        return not chosen

    cluster.wait_until("its processes to die of SIGKILL", sweep)
    return killed
