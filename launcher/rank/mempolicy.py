"""NUMA memory policy by system call, as numactl sets it: it holds for all threads to come, and over exec."""

import ctypes
import os

SYSCALLS = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "ppc64le": (261, 260),
    "s390x": (270, 269),
}
"""Numbers of set_mempolicy and get_mempolicy for each machine, from the kernel's syscall tables."""
POLICIES = {"default": 0, "preferred": 1, "bind": 2, "interleave": 3, "local": 4, "preferred-many": 5}
"""Modes of set_mempolicy(2), from include/uapi/linux/mempolicy.h."""
MAX_NODES = 4096
WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
NodeMask = ctypes.c_ulong * (MAX_NODES // WORD)


def set_mempolicy(policy: str, nodes: frozenset[int]) -> None:
    """Set the calling thread's memory policy.

    Several preferred nodes are `preferred-many` (Linux 5.15), and the lowest one on older kernels.
    Raises OSError: EPERM where a container forbids it, ENOSYS for a machine without a known number.
    """
    if policy == "preferred" and len(nodes) > 1:
        try:
            call_set("preferred-many", nodes)
        except OSError:
            call_set("preferred", frozenset({min(nodes)}))
        return
    call_set(policy, nodes)


def call_set(policy: str, nodes: frozenset[int]) -> None:
    """One set_mempolicy(2); an empty set of nodes is passed as a null mask."""
    mask = NodeMask()
    for node in nodes:
        mask[node // WORD] |= 1 << node % WORD
    # The kernel reads one bit less than it is told (man page, "maxnode").
    call(0, POLICIES[policy], ctypes.byref(mask) if nodes else None, MAX_NODES + 1 if nodes else 0)


def get_mempolicy() -> tuple[str, frozenset[int]]:
    """Read the calling thread's memory policy and its nodes; raises OSError as set_mempolicy does."""
    mode, mask = ctypes.c_int(), NodeMask()
    call(1, ctypes.byref(mode), ctypes.byref(mask), MAX_NODES, None, 0)
    names = {number: name for name, number in POLICIES.items()}
    set_words = [(word, bits) for word, bits in enumerate(mask) if bits]
    nodes = frozenset(word * WORD + bit for word, bits in set_words for bit in range(WORD) if bits >> bit & 1)
    return names.get(mode.value & 0xFFF, f"mode {mode.value}"), nodes


def call(which: int, *arguments: object) -> None:
    """Make one of the two system calls; raises OSError with the kernel's errno."""
    machine = os.uname().machine
    if machine not in SYSCALLS:
        raise OSError(38, f"no number for the memory policy calls on {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    widened = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if libc.syscall(ctypes.c_long(SYSCALLS[machine][which]), *widened) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
