"""Processes that the kernel has killed for want of memory in this process's own cgroup."""

from launcher.probe.cgroups import list_cgroups
from launcher.probe.sysfs import Tree, parse_unsigned


def count_oom_kills(tree: Tree) -> int:
    """The kills since the cgroup was made; 0 where the kernel does not count them.

    Version 1 counts those of the cgroup itself (`oom_kill` in memory.oom_control, since Linux 4.13), version
    2 those below it too (`oom_kill` in memory.events). Source: mem_cgroup_oom_control_read in the kernel's
    mm/memcontrol-v1.c, and Documentation/admin-guide/cgroup-v2.rst.
    """
    version, paths = list_cgroups(tree, ("memory",)).get("memory", (2, []))
    if not paths:
        return 0
    text = tree.read(f"{paths[0]}/{'memory.events' if version == 2 else 'memory.oom_control'}") or ""
    counts = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return parse_unsigned(counts.get("oom_kill", "")) or 0
