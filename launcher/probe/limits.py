"""What the job's cgroup, mounts and resource limits leave it: CPU time, memory, /dev/shm, descriptors.

Cgroups of version 1 and 2, those above the job's own too, as far as they are mounted.
"""

import os
import re
from collections.abc import Iterator

from launcher.plan.model import Limits, Machine
from launcher.probe.sysfs import Tree, parse_number

TOP = "sys/fs/cgroup"
"""Where systemd and container runtimes mount the hierarchies."""
LONGEST = 4096
"""Characters of a path at most (PATH_MAX)."""
UNLIMITED = 1 << 62
"""Bytes from which on a limit is none: version 1 shows 2^63 less a page if nothing was set."""
UNSET = ("", "max", "-1")
"""A missing file (the root cgroup, a controller that is off), version 2's and version 1's word for none."""
OCTAL = re.compile(r"\\([0-7]{3})")
"""White space and backslashes in paths of the mount table."""
SHM = "/dev/shm"  # noqa: S108  # its size is asked for, nothing is written
SHM_SIZE = re.compile(r"size=([0-9]{1,20})([kmg]?)")
UNITS = {"": 0, "k": 10, "m": 20, "g": 30}
RESOURCES = "proc/self/limits"
FILES = "Max open files"
USABLE = 0.95
"""Share of the free memory that may be used."""
LEAST_FREE = 0.03
"""Share of the memory that has to be free: below it, the kernel begins to swap or to kill."""
LEAST_FREE_KIB = 1 << 20
"""KiB that are enough in any case."""
Groups = tuple[int, list[str]]
"""A hierarchy's version, and directories of it below the machine's root, without a leading slash."""
Mount = tuple[str, str, str, list[str]]
"""What of a file system is mounted (`/`, or a directory of it for a bind mount), where, its type (`cgroup2`,
`tmpfs`), and its own options: version 1's controllers, a tmpfs's size."""


def list_cgroups(tree: Tree, controllers: tuple[str, ...], process: int | str = "self") -> dict[str, Groups]:
    """For each controller the cgroup that limits a process, then those above it as far as they are seen."""
    own_paths = _read_own_cgroups(tree, process)
    groups: dict[str, Groups] = {}
    for controller in controllers:
        version = 1 if controller in own_paths else 2
        path = own_paths.get(controller if version == 1 else "")
        if path is not None:
            groups[controller] = version, _find_folders(tree, controller, version, path)
    return groups


def _read_own_cgroups(tree: Tree, process: int | str = "self") -> dict[str, str]:
    """The paths of /proc/PID/cgroup by controller, with version 2's under an empty name (cgroups(7))."""
    paths = {}
    for line in (tree.read(f"proc/{process}/cgroup") or "").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if path.startswith("/") and len(path) <= LONGEST:
            paths.update(dict.fromkeys(names.split(","), path))
    return paths


def _find_folders(tree: Tree, controller: str, version: int, path: str) -> list[str]:
    """The directories of a cgroup and of those above it, up to the top of what is mounted.

    The mount table, which can be long, is read only if a cgroup is not at its usual place: on systems
    that mount the hierarchies elsewhere, and in containers that see the host's names for their cgroups.
    """
    if version == 1:
        mount = f"{TOP}/{controller}"
    else:
        mount = TOP if tree.has(f"{TOP}/cgroup.controllers") else f"{TOP}/unified"
    if ".." in path.split("/") or not tree.has(f"{mount}{path}"):
        for root, point, kind, options in _list_mounts(tree):
            is_it = kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options
            below = _make_relative(path, root) if is_it else None
            if below is not None:
                mount, path = point.strip("/"), below
                break
    parts = [part for part in path.split("/") if part]
    if ".." in (*mount.split("/"), *parts) or tree.resolve_links(mount) is None:
        return []
    return ["/".join([mount, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def _make_relative(path: str, root: str) -> str | None:
    """A cgroup's path below a mount of `root`; None if it is not below that.

    Both are as the process's cgroup namespace shows them: what is outside of the namespace begins with
    `/..`, and then the names between are unknown, so that only the mount's top can be read.
    """
    inner, outer = ([part for part in text.split("/") if part] for text in (path, root))
    if inner[: len(outer)] == outer:
        below = inner[len(outer) :]
        return None if ".." in below else "".join(f"/{part}" for part in below)
    return "" if set(outer) == {".."} else None


def _list_mounts(tree: Tree) -> Iterator[Mount]:
    """The mounts in their order, from mountinfo (proc_pid_mountinfo(5)), else from `mounts` (fstab(5))."""
    text = tree.read("proc/self/mountinfo", lines=True)
    for line in (text or "").splitlines():
        head, _, tail = line.partition(" - ")
        place, source = head.split(" "), tail.split(" ")
        if len(place) >= 6 and len(source) >= 3:
            yield _decode_octal(place[3]), _decode_octal(place[4]), source[0], source[-1].split(",")
    if text:
        return
    text = tree.read("proc/self/mounts", lines=True) or tree.read("proc/mounts", lines=True) or ""
    for line in text.splitlines():
        words = line.split(" ")
        if len(words) > 3:
            yield "/", _decode_octal(words[1]), words[2], words[3].split(",")


def _decode_octal(text: str) -> str:
    return OCTAL.sub(lambda found: chr(int(found[1], 8)), text)


def read_cpuset(tree: Tree, kind: str) -> frozenset[int] | None:
    """The `cpus` or `mems` of this process's cpuset by the files of its cgroup; None if none are to be found.

    For trees without proc/self/status, as hwloc-gather-topology captures them. A cgroup that leaves the list
    empty, or that is without the controller, has that of the next one above it. proc/self/cpuset names the
    cgroup if proc/self/cgroup does not. Source: cpuset(7); the kernel's cgroup-v1/cpusets and cgroup-v2.
    """
    names = {1: f"cpuset.effective_{kind}", 2: f"cpuset.{kind}.effective"}
    own_paths, named = _read_own_cgroups(tree), tree.read("proc/self/cpuset")
    for version, path in ((1, own_paths.get("cpuset")), (2, own_paths.get("")), (1, named), (2, named)):
        if not path or not path.startswith("/") or len(path) > LONGEST:
            continue
        for folder in _find_folders(tree, "cpuset", version, path):
            for name in (names[version], f"cpuset.{kind}"):
                if found := tree.read_list(f"{folder}/{name}"):
                    return found
    return None


def count_oom_kills(tree: Tree | None = None) -> int:
    """The kills since the cgroup was made; 0 if the kernel does not count them.

    Version 1 counts those of the cgroup itself (`oom_kill` in memory.oom_control, since Linux 4.13), version
    2 those below it too (`oom_kill` in memory.events). Source: mem_cgroup_oom_control_read in the kernel's
    mm/memcontrol-v1.c, and Documentation/admin-guide/cgroup-v2.rst.
    """
    tree = tree or Tree()
    version, paths = list_cgroups(tree, ("memory",)).get("memory", (2, []))
    if not paths:
        return 0
    text = tree.read(f"{paths[0]}/{'memory.events' if version == 2 else 'memory.oom_control'}") or ""
    counts = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return parse_number(counts.get("oom_kill")) or 0


def read_pids_max(tree: Tree) -> int | None:
    """The lowest `pids.max` of the job's cgroup and those above it; None if nothing limits.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/pids.rst.
    """
    _, paths = list_cgroups(tree, ("pids",)).get("pids", (2, []))
    found = [number for path in paths if (number := parse_number(tree.read(f"{path}/pids.max")))]
    return min(found, default=None)


def read_limits(tree: Tree) -> Limits:
    """The tightest limits over the job's cgroup and its ancestors, /dev/shm, and what a process may open."""
    groups = list_cgroups(tree, ("cpu", "memory"))
    version, paths = groups.get("cpu", (2, []))
    quotas = [quota for path in paths if (quota := _read_quota(tree, version, path))]
    version, paths = groups.get("memory", (2, []))
    sizes = [size for path in paths if (size := _read_memory_limit(tree, version, path))]
    words = find_resource(tree.read(RESOURCES) or "", FILES).removeprefix(FILES).split()
    return Limits(
        cpus=min(quotas, default=None),
        memory_kib=min(sizes) >> 10 if sizes else None,
        shm_kib=_read_shm_size(tree),
        files=parse_number(words[1]) if len(words) > 1 else None,
    )


def _read_quota(tree: Tree, version: int, path: str) -> float | None:
    """CPUs' worth of time that a cgroup may use; None for no limit."""
    text = tree.read(f"{path}/cpu.max" if version == 2 else f"{path}/cpu.cfs_quota_us") or ""
    if version == 1 and text not in UNSET:
        text = f"{text} {tree.read(f'{path}/cpu.cfs_period_us')}"
    words = text.partition(" ")
    if words[0] in UNSET:
        return None
    quota, period = parse_number(words[0]), parse_number(words[2])
    if quota and period:
        return quota / period
    text_of_none = "the CPU quota of cgroup {items} is {value}: taken as no limit"
    tree.add_warning(text_of_none, _clean_path(path), value=text)
    return None


def _read_memory_limit(tree: Tree, version: int, path: str) -> int | None:
    """Bytes that a cgroup may use; None for no limit."""
    text = tree.read(f"{path}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}") or ""
    if text in UNSET:
        return None
    size = parse_number(text)
    if not size:
        text_of_none = "the memory limit of cgroup {items} is {value}: taken as no limit"
        tree.add_warning(text_of_none, _clean_path(path), value=text)
    return size if size and size < UNLIMITED else None


def _clean_path(path: str) -> str:
    """A path for people."""
    return "".join(char if char.isprintable() else "?" for char in f"/{path}")


def find_resource(text: str, name: str) -> str:
    """The line of a resource in proc/PID/limits: its name, the soft limit, the hard one; empty without it."""
    return next((line for line in text.splitlines() if line.startswith(name)), "")


def _read_shm_size(tree: Tree) -> int | None:
    """Size of /dev/shm in KiB; another machine's is told by its mount option, unless that is the default."""
    if tree.is_real:
        try:
            space = os.statvfs(SHM)
        except OSError:
            return None
        return space.f_blocks * space.f_frsize >> 10
    found = [options for _, point, kind, options in _list_mounts(tree) if (point, kind) == (SHM, "tmpfs")]
    sizes = [option for option in found[-1] if option.startswith("size=")] if found else []
    size = SHM_SIZE.fullmatch(sizes[-1]) if sizes else None
    return int(size[1]) << UNITS[size[2]] >> 10 if size else None


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
