"""CPU affinity and NUMA memory policy: set as planned and read back, and the CPUs that a node's ranks share.

Both hold for all threads to come, and over exec.
"""

import os

from launcher.cpulist import format_cpulist
from launcher.files import read_stat
from launcher.rank.entry import Identity, PlanEntry

SYSCALLS = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "ppc64le": (261, 260),
}
"""Numbers of set_mempolicy and get_mempolicy for each machine, from the kernel's syscall tables."""
POLICIES = {"default": 0, "preferred": 1, "bind": 2, "interleave": 3, "local": 4, "preferred-many": 5}
"""Modes of set_mempolicy(2), from include/uapi/linux/mempolicy.h."""
MODE_MASK = 0xFFF
MAX_NODES = 4096
MASK_BYTES = MAX_NODES // 8
ENOSYS = 38
MAX_CPUS = 8192
"""CONFIG_NR_CPUS of the largest kernels."""
MAX_WRAPPERS = 16
"""Processes between a rank and its daemon at most."""
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
    "OMPI_COMM_WORLD_LOCAL_RANK": "use mpirun --bind-to none",
    "MPI_LOCALRANKID": "use mpiexec -bind-to none",
    "PALS_LOCAL_RANKID": "use mpiexec --cpu-bind none",
    "SLURM_LOCALID": "use srun --cpu-bind=none",
}
"""How a launcher is told not to bind, by the family of its variables."""


class Applied:
    """What the kernel reports of this process after a rank's entry was applied, and how that differs from it.

    What the kernel refuses is a problem, never an exception.
    """

    def __init__(self, entry: PlanEntry) -> None:
        self.cpus_before = _read_affinity(0) or frozenset()
        """The CPU set that this process was started with; empty if the kernel does not tell."""
        self.problems = [*entry.problems, *bind_cpus(entry.cpus), *bind_memory(entry.policy, entry.nodes)]
        self.cpus = _read_affinity(0) or frozenset()
        try:
            self.policy, self.nodes = get_mempolicy()
        except (OSError, ImportError):
            self.policy, self.nodes = "unknown", frozenset()


def bind_cpus(cpus: frozenset[int]) -> list[str]:
    """Set the CPU set, compare it with what the kernel reports, and return what went wrong."""
    try:
        os.sched_setaffinity(0, cpus)
        missing = cpus - os.sched_getaffinity(0)
    except (OSError, ValueError) as error:
        wanted = format_cpulist(cpus) or "(none)"
        return [f"CPUs {wanted} were refused ({error}): this rank runs where it may"]
    if missing:
        return [f"CPUs {format_cpulist(missing)} of the plan are outside this job's cpuset"]
    return []


def bind_memory(policy: str, nodes: frozenset[int]) -> list[str]:
    """Set the memory policy, compare it with what the kernel reports, and return what went wrong.

    `default`, the only policy of a plan beside `preferred`, leaves the policy as it is inherited. The call
    fails with EPERM if a container forbids it.
    """
    if policy == "default":
        return []
    wanted = f"memory policy {policy} of node {format_cpulist(nodes)}"
    mask = sum(1 << node for node in nodes).to_bytes(MASK_BYTES, "little")
    try:
        # The kernel reads one bit less than it is told (man page, "maxnode").
        _call_mempolicy(0, POLICIES[policy], mask, MAX_NODES + 1)
        found, found_nodes = get_mempolicy()
    except (OSError, KeyError, ImportError) as error:
        return [f"{wanted} was refused ({error}): memory comes from the node that first touches it"]
    if found_nodes != nodes:
        return [f"{wanted} was set, but the kernel reports {found} of node {format_cpulist(found_nodes)}"]
    return []


def get_mempolicy() -> tuple[str, frozenset[int]]:
    """Read the calling thread's memory policy and its nodes.

    Raises OSError, and ImportError in an interpreter without ctypes.
    """
    import ctypes

    mode, mask = ctypes.c_int(), ctypes.create_string_buffer(MASK_BYTES)
    _call_mempolicy(1, ctypes.byref(mode), mask, MAX_NODES, None, 0)
    names = {number: name for name, number in POLICIES.items()}
    nodes = _list_bits(int.from_bytes(mask.raw, "little"))
    return names.get(mode.value & MODE_MASK, f"mode {mode.value}"), nodes


def _call_mempolicy(index: int, *arguments: object) -> None:
    """Make one of the two system calls; raises OSError: with ENOSYS for a machine without a known number."""
    import ctypes

    machine = os.uname().machine
    if machine not in SYSCALLS:
        raise OSError(ENOSYS, f"no number for the memory policy calls on {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    widened = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if libc.syscall(ctypes.c_long(SYSCALLS[machine][index]), *widened) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _list_bits(mask: int) -> frozenset[int]:
    return frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def find_node_cpus(identity: Identity, environ: dict[str, str]) -> tuple[frozenset[int], frozenset[int], str]:
    """Return the CPUs of this process, those to plan on, and why these are its own alone if they are.

    Where srun or mpirun has bound each rank to its part, a rank that plans inside its own part would take a
    share of a share: it plans on the CPUs of all ranks of the node. Nothing here widens an affinity beyond
    the kernel's cpuset, which no process can. Raises OSError if the kernel does not tell this process's own.
    """
    own = frozenset(os.sched_getaffinity(0))
    shared = _find_launcher_cpus(identity, environ, own)
    if shared is not None and own < shared and try_affinity(shared, own) == shared:
        return own, shared, ""
    is_alone = identity.local_world_size == 1 if shared is None else not own < shared
    if is_alone or (shared is None and not _is_bound(environ, own)):
        return own, own, ""
    fix = FIXES.get(identity.family, "start it without taskset or numactl")
    return own, own, (
        f"it was bound to CPUs {format_cpulist(own)} already, and the CPUs of the others are not known: "
        f"it keeps them, with memory and threads to match; to have the whole node planned, {fix}"
    )  # fmt: skip


def _find_launcher_cpus(
    identity: Identity, environ: dict[str, str], own: frozenset[int]
) -> frozenset[int] | None:
    """Return the CPUs that the launcher has for its ranks; None if they are not known."""
    if identity.family in DAEMONS:
        daemon = _find_ancestor(DAEMONS[identity.family])
        return _read_affinity(daemon) if daemon else None
    if any(name in environ for name in AGENTS):
        return _read_affinity(os.getppid())
    if environ.get("SLURM_LOCALID") == str(identity.local_rank) and "SLURM_STEP_ID" in environ:
        return join_srun_bindings(identity, environ, own)
    return None


def join_srun_bindings(
    identity: Identity, environ: dict[str, str], own: frozenset[int]
) -> frozenset[int] | None:
    """Return the union of the sets that srun bound this node's tasks to; None if it does not tell them.

    SLURM_CPU_BIND_LIST is this node's, an entry for each task, and starts again if it is too short.
    Masks are hexadecimal, with 0x if srun chose them (TYPE `mask_cpu:`, or `cores,mask_cpu:`), and
    without if the user did. Types that name NUMA nodes, and `rank`, tell no CPUs. Tried with 22.05.
    """
    kind = environ.get("SLURM_CPU_BIND_TYPE", "")
    entries = environ.get("SLURM_CPU_BIND_LIST", "").split(",")
    try:
        if kind.endswith("mask_cpu:"):
            sets = [_list_bits(int(entry, 16)) for entry in entries]
        elif kind.endswith("map_cpu:"):
            sets = [frozenset({int(entry, 0)}) for entry in entries]
        else:
            return None
    except ValueError:
        return None
    if sets[identity.local_rank % len(sets)] != own:  # bound again since, or not as srun says
        return None
    return frozenset().union(*sets[: identity.local_world_size or len(sets)])


def _find_ancestor(names: tuple[str, ...]) -> int:
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


def _read_affinity(pid: int) -> frozenset[int] | None:
    """Return a process's CPUs, its own for 0; None if the kernel does not tell. No privilege is needed."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return None


def _is_bound(environ: dict[str, str], own: frozenset[int]) -> bool:
    """Tell whether this rank alone was bound: it has less than its cpuset, and its parent has more.

    A set that srun was told to bind to counts without the parent, which may be a script of the user's.
    """
    by_srun = environ.get("SLURM_CPU_BIND_TYPE", "none") != "none" and "SLURM_STEP_ID" in environ
    parent = _read_affinity(os.getppid())
    if not by_srun and (parent is None or not own < parent):
        return False
    return try_affinity(frozenset(range(MAX_CPUS)), own) != own


def try_affinity(cpus: frozenset[int], own: frozenset[int]) -> frozenset[int]:
    """Return what the kernel would make of an affinity; this process keeps its own."""
    try:
        os.sched_setaffinity(0, cpus)
        took = frozenset(os.sched_getaffinity(0))
        os.sched_setaffinity(0, own)
    except OSError:
        return own
    return took
