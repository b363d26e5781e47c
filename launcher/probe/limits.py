"""What the job's cgroup, mounts and resource limits leave it: CPU time, memory, /dev/shm, descriptors."""

import os

from launcher.plan.model import Limits
from launcher.probe.cgroups import list_cgroups
from launcher.probe.sysfs import Tree, parse_unsigned

UNLIMITED = 1 << 62
"""Bytes from which on a limit is none: version 1 shows 2^63 less a page if nothing was set."""
SHM = "/dev/shm"  # noqa: S108  # its size is asked for, nothing is written
UNSET = ("", "max", "-1")
"""A missing file (the root cgroup, a controller that is off), version 2's and version 1's word for none."""
FILES = "Max open files"
RESOURCES = "proc/self/limits"
UNITS = {"k": 10, "m": 20, "g": 30}


def read_limits(tree: Tree) -> Limits:
    """The tightest limits over the job's cgroup and its ancestors, /dev/shm, and what a process may open."""
    groups = list_cgroups(tree, ("cpu", "memory"))
    version, paths = groups.get("cpu", (2, []))
    quotas = [quota for path in paths if (quota := read_quota(tree, version, path))]
    version, paths = groups.get("memory", (2, []))
    sizes = [size for path in paths if (size := read_memory_limit(tree, version, path))]
    return Limits(
        cpus=min(quotas, default=None),
        memory_kib=min(sizes) >> 10 if sizes else None,
        shm_kib=read_shm_size() if tree.is_real else read_shm_option(tree),
        files=read_files(tree),
    )


def read_quota(tree: Tree, version: int, path: str) -> float | None:
    """CPUs' worth of time that a cgroup may use; None for no limit."""
    text = tree.read(f"{path}/cpu.max" if version == 2 else f"{path}/cpu.cfs_quota_us") or ""
    if text and text not in UNSET and version == 1:
        text = f"{text} {tree.read(f'{path}/cpu.cfs_period_us')}"
    words = text.partition(" ")
    if words[0] in UNSET:
        return None
    quota, period = parse_unsigned(words[0]), parse_unsigned(words[2])
    if quota and period:
        return quota / period
    tree.add_warning(
        "the CPU quota of cgroup {items} is {value}: taken as no limit", clean_path(path), value=text
    )
    return None


def read_memory_limit(tree: Tree, version: int, path: str) -> int | None:
    """Bytes that a cgroup may use; None for no limit."""
    text = tree.read(f"{path}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}") or ""
    if text in UNSET:
        return None
    size = parse_unsigned(text)
    if not size:
        tree.add_warning(
            "the memory limit of cgroup {items} is {value}: taken as no limit", clean_path(path), value=text
        )
    return size if size and size < UNLIMITED else None


def clean_path(path: str) -> str:
    """A path for people."""
    return "".join(char if char.isprintable() else "?" for char in f"/{path}")


def read_files(tree: Tree) -> int | None:
    """The hard limit of descriptors; None for no limit, and if it cannot be read."""
    words = find_resource(tree.read(RESOURCES) or "", FILES).removeprefix(FILES).split()
    return parse_unsigned(words[1]) if len(words) > 1 else None


def find_resource(text: str, name: str) -> str:
    """The line of a resource in proc/PID/limits: its name, the soft limit, the hard one; empty without it."""
    return next((line for line in text.splitlines() if line.startswith(name)), "")


def read_shm_size() -> int | None:
    """Size of this machine's /dev/shm in KiB."""
    try:
        found = os.statvfs(SHM)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize >> 10


def read_shm_option(tree: Tree) -> int | None:
    """Size of /dev/shm in KiB by its mount option; the kernel shows none for the default, half of memory."""
    from launcher.probe.mounts import list_mounts

    found = [mount.options for mount in list_mounts(tree) if (mount.point, mount.kind) == (SHM, "tmpfs")]
    sizes = [option[5:] for option in found[-1] if option.startswith("size=")] if found else []
    if not sizes:
        return None
    shift = UNITS.get(sizes[-1][-1:], 0)
    size = parse_unsigned(sizes[-1][:-1] if shift else sizes[-1])
    return None if size is None else size << shift >> 10
