"""How much of the job's CPUs others use."""

import os
import resource
import time
from dataclasses import dataclass

from launcher.probe.sysfs import Tree, parse_unsigned

SHORTEST = 0.3
"""Seconds to measure over at least: the kernel counts hundredths."""
IDLE, WAITING, STEAL = 3, 4, 7
"""Columns of /proc/stat that are no work; `guest` (8, 9) is contained in `user`."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU time until a moment, in seconds."""

    moment: float
    busy: float
    """Of the CPUs that are looked at, by everybody; with what a hypervisor took."""
    own: float
    """Of this process and of its children that have ended."""


def read_cpu_times(tree: Tree, cpus: frozenset[int]) -> CpuTimes | None:
    """Read the times of some CPUs; None if the kernel does not show them, or it is another machine."""
    if not tree.is_real:
        return None
    names = {f"cpu{cpu}" for cpu in cpus}
    lines = (line.split() for line in (tree.read("proc/stat", lines=True) or "").splitlines()[: 1 << 16])
    rows = [line[1:] for line in lines if line and line[0] in names]
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    if not rows:
        return None
    ticks = sum(
        parse_unsigned(word) or 0 for row in rows for at, word in enumerate(row[:8]) if is_busy_column(at)
    )
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own)


def is_busy_column(column: int) -> bool:
    """Whether a column of /proc/stat is time that others could not have."""
    return column not in (IDLE, WAITING)


def measure_load(tree: Tree, cpus: frozenset[int], before: CpuTimes | None) -> float | None:
    """Return the share of the CPUs' time since `before` that others used; None if it cannot be told."""
    if before is None:
        return None
    time.sleep(max(0.0, before.moment + SHORTEST - time.monotonic()))
    after = read_cpu_times(tree, cpus)
    if after is None:
        return None
    others = (after.busy - before.busy) - (after.own - before.own)
    return round(min(1.0, max(0.0, others / ((after.moment - before.moment) * len(cpus)))), 3)
