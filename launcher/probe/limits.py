"""What the job's cgroup, mounts and resource limits leave it: CPU time, memory, /dev/shm, descriptors.

Cgroups of version 1 and 2 at their usual place, those above the job's own too.
"""

import os
import re

from launcher.plan.model import Limits, Machine
from launcher.probe.sysfs import Tree, parse_number

TOP = "sys/fs/cgroup"
"""Where systemd and container runtimes mount the hierarchies."""
UNLIMITED = 1 << 62
"""Bytes from which on a limit is none: version 1 shows 2^63 less a page if nothing was set."""
SHM = "/dev/shm"  # noqa: S108  # its size is asked for, nothing is written
SHM_SIZE = re.compile(r".*[ ,]size=([0-9]{1,20})([kmg]?)(?![^ ,])")
UNITS = {"": 0, "k": 10, "m": 20, "g": 30}
STATUS = "proc/self/status"
RESOURCES = "proc/self/limits"
FILES = "Max open files"
CAPABILITIES = re.compile(r"[0-9a-fA-F]{1,16}")
USABLE = 0.95
"""Share of the free memory that may be used."""
LEAST_FREE = 0.03
"""Share of the memory that has to be free: below it, the kernel begins to swap or to kill."""
LEAST_FREE_KIB = 1 << 20
"""KiB that are enough in any case."""
Groups = tuple[int, list[str]]
"""A hierarchy's version, and directories of it below the machine's root, without a leading slash."""


def list_cgroups(tree: Tree, controllers: tuple[str, ...], process: int | str = "self") -> dict[str, Groups]:
    """For each controller the cgroup that limits a process, then those above it as far as they are seen.

    /proc/PID/cgroup names them by controller, version 2's under an empty name (cgroups(7)). There are no
    directories if it does not.
    """
    own_paths: dict[str, str] = {}
    for line in (tree.read(f"proc/{process}/cgroup") or "").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if path.startswith("/"):
            own_paths.update(dict.fromkeys(names.split(","), path))
    groups: dict[str, Groups] = {}
    for controller in controllers:
        version = 1 if controller in own_paths else 2
        own_path = own_paths.get(controller if version == 1 else "")
        folders = _find_folders(tree, controller, version, own_path) if own_path else []
        groups[controller] = version, folders
    return groups


def _find_folders(tree: Tree, controller: str, version: int, path: str) -> list[str]:
    """The directories of a cgroup and of those above it, up to the top of the hierarchy.

    In a container that sees the host's names for its cgroups, what stands for the container is the top. What
    is outside of the process's cgroup namespace (`/..`) is not known.
    """
    top = TOP
    if version == 1:  # a container may lack the link `cpu` to `cpu,cpuacct`
        names = (name for name in tree.list_directory(TOP) if controller in name.split(","))
        top = f"{TOP}/{next(names, controller)}"
    parts = [part for part in path.split("/") if part]
    if ".." in parts or tree.resolve_links(top) is None:
        return []
    while parts and not tree.has("/".join([top, *parts])):
        del parts[0]
    return ["/".join([top, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def count_oom_kills(tree: Tree | None = None) -> int:
    """The kills since the cgroup was made; 0 if the kernel does not count them.

    Version 1 counts those of the cgroup itself (`oom_kill` in memory.oom_control, since Linux 4.13), version
    2 those below it too (`oom_kill` in memory.events). Source: mem_cgroup_oom_control_read in the kernel's
    mm/memcontrol-v1.c, and Documentation/admin-guide/cgroup-v2.rst.
    """
    tree = tree or Tree()
    version, paths = list_cgroups(tree, ("memory",))["memory"]
    if not paths:
        return 0
    text = tree.read(f"{paths[0]}/{'memory.events' if version == 2 else 'memory.oom_control'}") or ""
    counts = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return parse_number(counts.get("oom_kill")) or 0


def read_pids_max(tree: Tree) -> int | None:
    """The lowest `pids.max` of the job's cgroup and those above it; None if nothing limits.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/pids.rst.
    """
    _, paths = list_cgroups(tree, ("pids",))["pids"]
    found = [number for path in paths if (number := parse_number(tree.read(f"{path}/pids.max")))]
    return min(found, default=None)


def read_capabilities(tree: Tree) -> int:
    """`CapEff` of this process as a mask; 0 if it is not shown."""
    text = tree.read_fields(STATUS).get("CapEff", "")
    return int(text, 16) if CAPABILITIES.fullmatch(text) else 0


def read_limits(tree: Tree) -> Limits:
    """The tightest limits over the job's cgroup and its ancestors, /dev/shm, and what a process may open.

    A limit that is no number is none.
    """
    groups = list_cgroups(tree, ("cpu", "memory"))
    version, paths = groups["cpu"]
    quotas = []
    for path in paths:
        words = (tree.read(f"{path}/cpu.max") or "").split()
        if version == 1:
            words = [tree.read(f"{path}/cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        quota, period = (parse_number(word) for word in (*words, "", "")[:2])
        quotas += [quota / period] if quota and period else []
    version, paths = groups["memory"]
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    sizes = [size for path in paths if (size := tree.read_number(f"{path}/{name}")) and size < UNLIMITED]
    hard = read_resource(tree, FILES)[1:]
    return Limits(
        cpus=min(quotas, default=None),
        memory_kib=min(sizes) >> 10 if sizes else None,
        shm_kib=_read_shm_size(tree),
        files=hard[0] if hard else None,
    )


def read_resource(tree: Tree, name: str) -> tuple[int | None, ...]:
    """The soft and the hard limit of a resource in proc/self/limits, None for unlimited; empty without it."""
    lines = (tree.read(RESOURCES) or "").splitlines()
    line = next((line for line in lines if line.startswith(name)), "")
    return tuple(parse_number(word) for word in line.removeprefix(name).split()[:2])


def _read_shm_size(tree: Tree) -> int | None:
    """Size of /dev/shm in KiB; another machine's is told by its mount option, unless that is the default."""
    if tree.is_real:
        try:
            space = os.statvfs(SHM)
        except OSError:
            return None
        return space.f_blocks * space.f_frsize >> 10
    lines = (tree.read("proc/self/mounts") or "").splitlines()
    sizes = [found for line in lines if f" {SHM} tmpfs " in line and (found := SHM_SIZE.match(line))]
    return int(sizes[-1][1]) << UNITS[sizes[-1][2]] >> 10 if sizes else None


def find_usable_memory(machine: Machine) -> int:
    """Return in KiB what all ranks together may use here: free memory, within the cgroup's limit.

    0 if it is unknown.
    """
    found = (Tree().read_meminfo().get("MemAvailable"), machine.limits.memory_kib)
    return int(USABLE * min((kib for kib in found if kib), default=0))


def is_memory_low() -> bool:
    """Tell whether less memory is free than this machine needs (proc_meminfo(5))."""
    memory = Tree().read_meminfo()
    needed = min(LEAST_FREE * memory.get("MemTotal", 0), LEAST_FREE_KIB)
    return 0 < memory.get("MemAvailable", 0) < needed
