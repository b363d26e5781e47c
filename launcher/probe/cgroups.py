"""The job's own cgroup and its ancestors, of version 1 and 2, as far as they are mounted."""

from launcher.probe.sysfs import Tree, parse_unsigned

TOP = "sys/fs/cgroup"
"""Where systemd and container runtimes mount the hierarchies."""
LONGEST = 4096
"""Characters of a path at most (PATH_MAX)."""
Groups = tuple[int, list[str]]
"""A hierarchy's version, and directories of it below the machine's root, without a leading slash."""


def list_cgroups(tree: Tree, controllers: tuple[str, ...], process: int | str = "self") -> dict[str, Groups]:
    """For each controller the cgroup that limits a process, then those above it as far as they are seen.

    The mount table, which can be long, is read only if a cgroup is not at its usual place: on systems
    that mount the hierarchies elsewhere, and in containers that see the host's names for their cgroups.
    """
    own_paths = read_own_cgroups(tree, process)
    groups: dict[str, Groups] = {}
    for controller in controllers:
        version = 1 if controller in own_paths else 2
        path = own_paths.get(controller if version == 1 else "")
        if path is not None:
            groups[controller] = version, find_cgroup_folders(tree, controller, version, path)
    return groups


def find_cgroup_folders(tree: Tree, controller: str, version: int, path: str) -> list[str]:
    """The directories of a cgroup and of those above it, as far as they are seen."""
    mount = find_usual_mount(tree, controller, version)
    if ".." in path.split("/") or not tree.has(f"{mount}{path}"):
        from launcher.probe.mounts import find_cgroup

        mount, path = find_cgroup(tree, controller, version, path) or (mount, path)
    return list_ancestors(tree, mount, path)


def read_cpuset(tree: Tree, kind: str) -> frozenset[int] | None:
    """The `cpus` or `mems` of this process's cpuset by the files of its cgroup; None if none are to be found.

    For trees without proc/self/status, as hwloc-gather-topology captures them. A cgroup that leaves the list
    empty, or that is without the controller, has that of the next one above it. proc/self/cpuset names the
    cgroup if proc/self/cgroup does not. Source: cpuset(7); the kernel's cgroup-v1/cpusets and cgroup-v2.
    """
    names = {
        1: (f"cpuset.effective_{kind}", f"cpuset.{kind}"),
        2: (f"cpuset.{kind}.effective", f"cpuset.{kind}"),
    }
    own_paths, named = read_own_cgroups(tree), tree.read("proc/self/cpuset")
    for version, path in ((1, own_paths.get("cpuset")), (2, own_paths.get("")), (1, named), (2, named)):
        if path and path.startswith("/") and len(path) <= LONGEST:
            folders = find_cgroup_folders(tree, "cpuset", version, path)
            lists = (tree.read_list(f"{folder}/{name}") for folder in folders for name in names[version])
            if found := next(filter(None, lists), None):
                return found
    return None


def read_own_cgroups(tree: Tree, process: int | str = "self") -> dict[str, str]:
    """The paths of /proc/PID/cgroup by controller, with version 2's under an empty name (cgroups(7))."""
    paths = {}
    for line in (tree.read(f"proc/{process}/cgroup") or "").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if path.startswith("/") and len(path) <= LONGEST:
            paths.update(dict.fromkeys(names.split(","), path))
    return paths


def find_usual_mount(tree: Tree, controller: str, version: int) -> str:
    """Where a controller's hierarchy is mounted by custom; `unified` where both versions are in use."""
    if version == 1:
        return f"{TOP}/{controller}"
    return TOP if tree.has(f"{TOP}/cgroup.controllers") else f"{TOP}/unified"


def list_ancestors(tree: Tree, mount: str, path: str) -> list[str]:
    """A cgroup and those above it, up to the mount's top; none if it is outside of what is mounted."""
    parts = [part for part in path.split("/") if part]
    if ".." in (*mount.split("/"), *parts) or tree.resolve_links(mount) is None:
        return []
    return ["/".join([mount, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


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
    return parse_unsigned(counts.get("oom_kill", "")) or 0
