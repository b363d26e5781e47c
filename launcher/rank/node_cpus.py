"""The CPUs that the ranks of this node have together, also if srun or mpirun has bound each to its part.

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
"""What torchrun and DeepSpeed set. Their agent is the rank's parent, also if `--numa-binding` or
`--bind_cores_to_rank` has narrowed the rank by numactl.
"""
FIXES = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "mpirun --bind-to none",
    "MPI_LOCALRANKID": "mpiexec -bind-to none",
    "PALS_LOCAL_RANKID": "mpiexec --cpu-bind none",
    "SLURM_LOCALID": "srun --cpu-bind=none",
}
"""How a launcher is told not to bind, by the family of its variables."""
MAX_CPUS = 8192
"""CONFIG_NR_CPUS of the largest kernels."""
MAX_WRAPPERS = 16
"""Processes between a rank and its daemon at most."""


class NodeAffinity:
    """The CPUs that a rank plans on."""

    __slots__ = ("cpus", "is_own_alone", "own_cpus", "problem")

    def __init__(self, own_cpus: frozenset[int], cpus: frozenset[int], problem: str = "") -> None:
        self.own_cpus = own_cpus
        """The CPUs that this process was started with."""
        self.cpus = cpus
        """The CPUs of all ranks of the node."""
        self.problem = problem
        """Why `cpus` is this rank's own part alone; empty if it is everybody's."""
        self.is_own_alone = bool(problem)
        """Whether `cpus` is this rank's own part alone."""

    def keep_own_cpus(self) -> None:
        """Leave the rank where it is."""
        self.is_own_alone = self.is_own_alone or self.cpus != self.own_cpus
        self.cpus, self.problem = self.own_cpus, ""


def find_node_affinity(identity: Identity, environ: dict[str, str]) -> NodeAffinity:
    """Return the CPUs to plan on; raises OSError if the kernel does not tell this process's own."""
    own_cpus = frozenset(os.sched_getaffinity(0))
    shared = find_launcher_cpus(identity, environ, own_cpus)
    if shared is None:
        bound = identity.local_world_size != 1 and is_bound(environ, own_cpus)
        return NodeAffinity(own_cpus, own_cpus, describe_kept_cpus(identity, own_cpus) if bound else "")
    if not own_cpus < shared:
        return NodeAffinity(own_cpus, own_cpus)
    if try_affinity(shared, own_cpus) == shared:
        return NodeAffinity(own_cpus, shared)
    return NodeAffinity(own_cpus, own_cpus, describe_kept_cpus(identity, own_cpus))


def find_launcher_cpus(
    identity: Identity, environ: dict[str, str], own_cpus: frozenset[int]
) -> frozenset[int] | None:
    """Return the CPUs that the launcher has for its ranks; None if they are not known."""
    if identity.family in DAEMONS:
        return read_affinity(find_ancestor(DAEMONS[identity.family]))
    if any(name in environ for name in AGENTS):
        return read_affinity(os.getppid())
    if environ.get("SLURM_LOCALID") == str(identity.local_rank) and "SLURM_STEP_ID" in environ:
        return join_srun_bindings(identity, environ, own_cpus)
    return None


def join_srun_bindings(
    identity: Identity, environ: dict[str, str], own_cpus: frozenset[int]
) -> frozenset[int] | None:
    """Return the union of the sets that srun bound this node's tasks to; None if it does not tell them.

    SLURM_CPU_BIND_LIST is this node's, an entry for each task, and starts again if it is too short.
    Masks are hexadecimal, with 0x if srun chose them (TYPE `mask_cpu:`, or `cores,mask_cpu:`), and
    without if the user did. Types that name NUMA nodes, and `rank`, tell no CPUs. Tried with 22.05.
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
    if sets[identity.local_rank % len(sets)] != own_cpus:  # bound again since, or not as srun says
        return None
    return frozenset().union(*sets[: identity.local_world_size or len(sets)])


def list_bits(mask: int) -> frozenset[int]:
    """Return the numbers of a mask's bits."""
    return frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def find_ancestor(names: tuple[str, ...]) -> int:
    """Return the nearest ancestor of such a name; 0 if there is none, or procfs hides it."""
    pid = os.getppid()
    for _ in range(MAX_WRAPPERS):
        try:
            name, fields = read_stat(pid)
        except OSError:
            return 0
        if name in names:
            return pid
        pid = int(fields[1])
    return 0


def read_affinity(pid: int) -> frozenset[int] | None:
    """Return another process's CPUs; None if the kernel does not tell. No privilege is needed."""
    try:
        return frozenset(os.sched_getaffinity(pid)) if pid > 0 else None
    except OSError:
        return None


def is_bound(environ: dict[str, str], own_cpus: frozenset[int]) -> bool:
    """Tell whether this rank alone was bound: it has less than its cpuset, and its parent has more.

    A set that srun was told to bind to counts without the parent, which may be a script of the user's.
    """
    by_srun = environ.get("SLURM_CPU_BIND_TYPE", "none") != "none" and "SLURM_STEP_ID" in environ
    parent = read_affinity(os.getppid())
    if not by_srun and (parent is None or not own_cpus < parent):
        return False
    return try_affinity(frozenset(range(MAX_CPUS)), own_cpus) != own_cpus


def try_affinity(cpus: frozenset[int], own_cpus: frozenset[int]) -> frozenset[int]:
    """Return what the kernel would make of an affinity; this process keeps its own."""
    try:
        os.sched_setaffinity(0, cpus)
        took = frozenset(os.sched_getaffinity(0))
        os.sched_setaffinity(0, own_cpus)
    except OSError:
        return own_cpus
    return took


def describe_kept_cpus(identity: Identity, own_cpus: frozenset[int]) -> str:
    """Say that this rank keeps the CPUs that it has, and how to have the whole node planned."""
    fix = FIXES.get(identity.family)
    advice = f"use {fix}" if fix else "start it without taskset or numactl"
    return (
        f"it was bound to CPUs {format_cpulist(own_cpus)} already, and the CPUs of the others are not known: "
        f"it keeps them, with memory and threads to match; to have the whole node planned, {advice}"
    )
