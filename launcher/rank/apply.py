"""Apply a rank's share to this process, and read back what the kernel made of it."""

import os

from launcher.cpulist import format_cpulist
from launcher.rank.assignment import Share


class Applied:
    """What the kernel says this process has, and where that is not what was planned."""

    __slots__ = ("cpus", "cpus_before", "nodes", "policy", "problems")

    def __init__(self, share: Share) -> None:
        """Apply the share; what the kernel refuses becomes a problem, never an exception."""
        self.cpus_before = read_cpus()
        """The CPU set that this process was started with."""
        self.problems = [
            *share.problems,
            *bind_cpus(share.cpus),
            *bind_memory(share.policy, share.nodes),
        ]
        self.cpus = read_cpus()
        self.policy, self.nodes = read_memory()


def bind_cpus(cpus: frozenset[int]) -> list[str]:
    """Set the CPU set, compare what took, and return what went wrong."""
    try:
        os.sched_setaffinity(0, cpus)
        missing = cpus - os.sched_getaffinity(0)
    except (OSError, ValueError) as error:
        wanted = format_cpulist(cpus) or "(none)"
        return [f"CPUs {wanted} were refused ({error}): this rank runs where it may"]
    if missing:
        return [f"CPUs {format_cpulist(missing)} of the plan are outside this job's cpuset"]
    return []


def read_cpus() -> frozenset[int]:
    """Return the CPU set as the kernel has it; empty where it does not tell."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset()


def bind_memory(policy: str, nodes: frozenset[int]) -> list[str]:
    """Set the memory policy (`default`: as inherited), compare what took, and return what went wrong."""
    if policy == "default":
        return []
    wanted = f"memory policy {policy} of node {format_cpulist(nodes)}"
    try:
        # Here and below: an interpreter that was built without libffi has no ctypes.
        from launcher.rank.mempolicy import get_mempolicy, set_mempolicy

        set_mempolicy(policy, nodes)
        took = get_mempolicy()
    except (OSError, KeyError, ImportError) as error:
        return [f"{wanted} was refused ({error}): memory comes from the node that first touches it"]
    if took[1] != nodes:
        return [f"{wanted} was set, but the kernel reports {took[0]} of node {format_cpulist(took[1])}"]
    return []


def read_memory() -> tuple[str, frozenset[int]]:
    """Return the memory policy as the kernel has it; `unknown` where it does not tell."""
    try:
        from launcher.rank.mempolicy import get_mempolicy

        return get_mempolicy()
    except (OSError, ImportError):
        return "unknown", frozenset()
