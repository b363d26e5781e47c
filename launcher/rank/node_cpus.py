"""The CPUs that the ranks of this node have together, where srun or mpirun has bound each to its part.

A rank that plans inside its own part would take a share of a share. Nothing here widens an affinity beyond
the kernel's cpuset, which no process can.
"""

import os

from launcher.cpulist import format_cpulist
from launcher.files import read_stat
from launcher.rank.identity import Identity

DAEMONS = {
    "OMPI_COMM_WORLD_LOCAL_RANK": ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"),
    "MPI_LOCALRANKID": ("hydra_pmi_proxy", "pmi_proxy", "hydra_bstrap_pr", "mpiexec.hydra"),
}
"""What starts ranks on a node, as `comm` has it (15 characters): Open MPI 4 and 5, MPICH and Intel MPI."""
AGENTS = ("TORCHELASTIC_RUN_ID", "LOCAL_SIZE")
"""What torchrun and DeepSpeed set. Their agent is the rank's parent, also where `--numa-binding` or
`--bind_cores_to_rank` has narrowed the rank by numactl.
"""
FIXES = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "mpirun --bind-to none",
    "MPI_LOCALRANKID": "mpiexec -bind-to none",
    "PALS_LOCAL_RANKID": "mpiexec --cpu-bind none",
    "SLURM_LOCALID": "srun --cpu-bind=none",
}
"""How a launcher is told not to bind, by the family of its variables."""
MOST_CPUS = 8192
"""CONFIG_NR_CPUS of the largest kernels."""
MOST_WRAPPERS = 16
"""Processes between a rank and its daemon at most."""


class Room:
    """What a rank may plan on."""

    __slots__ = ("cpus", "is_own", "own", "problem")

    def __init__(self, own: frozenset[int], cpus: frozenset[int], problem: str = "") -> None:
        self.own = own
        """The CPUs that this process was started with."""
        self.cpus = cpus
        """The CPUs of all ranks of the node."""
        self.problem = problem
        """Why `cpus` is this rank's own part alone; empty where it is everybody's."""
        self.is_own = bool(problem)
        """Whether `cpus` is this rank's own part alone."""

    def keep_own(self) -> None:
        """Leave the rank where it is."""
        self.is_own = self.is_own or self.cpus != self.own
        self.cpus, self.problem = self.own, ""


def find_room(identity: Identity, environ: dict[str, str]) -> Room:
    """Return the CPUs to plan on; raises OSError where the kernel does not tell this process's own."""
    own = frozenset(os.sched_getaffinity(0))
    shared = find_shared(identity, environ, own)
    if shared is None:
        bound = identity.local_world_size != 1 and is_bound(environ, own)
        return Room(own, own, describe_bound(identity, own) if bound else "")
    if not own < shared:
        return Room(own, own)
    if try_affinity(shared, own) == shared:
        return Room(own, shared)
    return Room(own, own, describe_bound(identity, own))


def find_shared(identity: Identity, environ: dict[str, str], own: frozenset[int]) -> frozenset[int] | None:
    """Return the CPUs that the launcher has for its ranks; None where it is not known."""
    if identity.family in DAEMONS:
        return read_affinity(find_ancestor(DAEMONS[identity.family]))
    if any(name in environ for name in AGENTS):
        return read_affinity(os.getppid())
    if environ.get("SLURM_LOCALID") == str(identity.local_rank) and "SLURM_STEP_ID" in environ:
        return join_slurm(identity, environ, own)
    return None


def join_slurm(identity: Identity, environ: dict[str, str], own: frozenset[int]) -> frozenset[int] | None:
    """Return the union of the sets that srun bound this node's tasks to; None where it does not tell them.

    SLURM_CPU_BIND_LIST is this node's, an entry for each task, and starts anew where it is too short.
    Masks are hexadecimal, with 0x where srun chose them (TYPE `mask_cpu:`, or `cores,mask_cpu:`), and
    without where the user did. Types that name NUMA nodes, and `rank`, tell no CPUs. Tried with 22.05.
    """
    kind = environ.get("SLURM_CPU_BIND_TYPE", "")
    if kind in ("", "none"):
        return None
    entries = environ.get("SLURM_CPU_BIND_LIST", "").split(",")
    try:
        if kind.endswith("mask_cpu:"):
            sets = [list_bits(int(entry, 16)) for entry in entries]
        elif kind.endswith("map_cpu:"):
            sets = [frozenset({int(entry, 0)}) for entry in entries]
        else:
            return None
    except ValueError:
        return None
    if sets[identity.local_rank % len(sets)] != own:  # bound again since, or not as srun says
        return None
    return frozenset().union(*sets[: identity.local_world_size or len(sets)])


def list_bits(mask: int) -> frozenset[int]:
    """Return the numbers of a mask's bits."""
    return frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def find_ancestor(names: tuple[str, ...]) -> int:
    """Return the nearest ancestor of such a name; 0 where there is none, or procfs hides it."""
    pid = os.getppid()
    for _ in range(MOST_WRAPPERS):
        try:
            name, fields = read_stat(pid)
        except OSError:
            return 0
        if name in names:
            return pid
        pid = int(fields[1])
    return 0


def read_affinity(pid: int) -> frozenset[int] | None:
    """Return another process's CPUs; None where the kernel does not tell. It asks for no privilege."""
    try:
        return frozenset(os.sched_getaffinity(pid)) if pid > 0 else None
    except OSError:
        return None


def is_bound(environ: dict[str, str], own: frozenset[int]) -> bool:
    """Tell whether this rank was bound by itself: it has less than its cpuset, and its parent has more.

    A set that srun was told to bind to counts without the parent, which may be a script of the user's.
    """
    by_srun = environ.get("SLURM_CPU_BIND_TYPE", "none") != "none" and "SLURM_STEP_ID" in environ
    parent = read_affinity(os.getppid())
    if not by_srun and (parent is None or not own < parent):
        return False
    return try_affinity(frozenset(range(MOST_CPUS)), own) != own


def try_affinity(cpus: frozenset[int], own: frozenset[int]) -> frozenset[int]:
    """Return what the kernel would make of an affinity; this process keeps its own."""
    try:
        os.sched_setaffinity(0, cpus)
        took = frozenset(os.sched_getaffinity(0))
        os.sched_setaffinity(0, own)
    except OSError:
        return own
    return took


def describe_bound(identity: Identity, own: frozenset[int]) -> str:
    """Say that this rank keeps the CPUs that it was given, and how to have the whole node planned."""
    fix = FIXES.get(identity.family)
    advice = f"use {fix}" if fix else "start it without taskset or numactl"
    return (
        f"it was bound to CPUs {format_cpulist(own)} already, and the CPUs of the others are not known: "
        f"it keeps them, with memory and threads to match; to have the whole node planned, {advice}"
    )
