"""CPU affinity and NUMA memory policy of this process: set as planned, and read back from the kernel.

Both hold for all threads to come, and over exec.
"""

import os

from launcher.cpulist import format_cpulist
from launcher.rank.plan_entry import PlanEntry

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


class AppliedPlacement:
    """What the kernel reports of this process, and how that differs from the plan."""

    __slots__ = ("cpus", "cpus_before", "nodes", "policy", "problems")

    def __init__(self, entry: PlanEntry) -> None:
        """Apply a rank's entry of the plan; what the kernel refuses becomes a problem, never an exception."""
        self.cpus_before = read_own_cpus()
        """The CPU set that this process was started with."""
        self.problems = [
            *entry.problems,
            *bind_cpus(entry.cpus),
            *bind_memory(entry.policy, entry.nodes),
        ]
        self.cpus = read_own_cpus()
        self.policy, self.nodes = read_memory_policy()


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


def read_own_cpus() -> frozenset[int]:
    """Return this process's CPU set; empty if the kernel does not tell."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset()


def bind_memory(policy: str, nodes: frozenset[int]) -> list[str]:
    """Set the memory policy, compare it with what the kernel reports, and return what went wrong.

    `default` leaves the policy as it is inherited.
    """
    if policy == "default":
        return []
    wanted = f"memory policy {policy} of node {format_cpulist(nodes)}"
    try:
        set_mempolicy(policy, nodes)
        found, found_nodes = get_mempolicy()
    except (OSError, KeyError, ImportError) as error:
        return [f"{wanted} was refused ({error}): memory comes from the node that first touches it"]
    if found_nodes != nodes:
        return [f"{wanted} was set, but the kernel reports {found} of node {format_cpulist(found_nodes)}"]
    return []


def read_memory_policy() -> tuple[str, frozenset[int]]:
    """Return this process's memory policy and its nodes; `unknown` if the kernel does not tell."""
    try:
        return get_mempolicy()
    except (OSError, ImportError):
        return "unknown", frozenset()


def set_mempolicy(policy: str, nodes: frozenset[int]) -> None:
    """Set the calling thread's memory policy, as numactl does.

    Several preferred nodes are `preferred-many` (Linux 5.15), and the lowest one on older kernels.
    Raises OSError: EPERM if a container forbids it, ENOSYS for a machine without a known number. Raises
    ImportError in an interpreter without ctypes.
    """
    if policy == "preferred" and len(nodes) > 1:
        try:
            call_set_mempolicy("preferred-many", nodes)
        except OSError:
            call_set_mempolicy("preferred", frozenset({min(nodes)}))
        return
    call_set_mempolicy(policy, nodes)


def call_set_mempolicy(policy: str, nodes: frozenset[int]) -> None:
    """Make one set_mempolicy(2); an empty set of nodes is a null mask."""
    mask = sum(1 << node for node in nodes).to_bytes(MASK_BYTES, "little")
    # The kernel reads one bit less than it is told (man page, "maxnode").
    call_mempolicy(0, POLICIES[policy], mask if nodes else None, MAX_NODES + 1 if nodes else 0)


def get_mempolicy() -> tuple[str, frozenset[int]]:
    """Read the calling thread's memory policy and its nodes; raises OSError and ImportError as the setter."""
    import ctypes

    mode, mask = ctypes.c_int(), ctypes.create_string_buffer(MASK_BYTES)
    call_mempolicy(1, ctypes.byref(mode), mask, MAX_NODES, None, 0)
    names = {number: name for name, number in POLICIES.items()}
    bits = int.from_bytes(mask.raw, "little")
    nodes = frozenset(node for node in range(bits.bit_length()) if bits >> node & 1)
    return names.get(mode.value & MODE_MASK, f"mode {mode.value}"), nodes


def call_mempolicy(index: int, *arguments: object) -> None:
    """Make one of the two system calls; raises OSError with the kernel's errno."""
    import ctypes

    machine = os.uname().machine
    if machine not in SYSCALLS:
        raise OSError(ENOSYS, f"no number for the memory policy calls on {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    widened = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if libc.syscall(ctypes.c_long(SYSCALLS[machine][index]), *widened) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
