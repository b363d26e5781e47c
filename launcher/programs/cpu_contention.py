"""Who else used a CPU while it was measured: processes by /proc/PID/stat, a hypervisor by its steal time."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
NOTABLE = 0.15
"""Share of a CPU's time from which somebody is named."""
UTIME, STIME, PROCESSOR = 11, 12, 36
"""Fields of /proc/PID/stat (14, 15 and 39 of proc(5)) after the name."""
STEAL = 8


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Who has used the CPUs until a moment."""

    processes: Mapping[int, tuple[str, int, float]] = field(default_factory=dict)
    """Name, last CPU and CPU time in seconds, by PID."""
    steal: Mapping[int, float] = field(default_factory=dict)
    """Seconds that the hypervisor took, by CPU."""


def read_cpu_use() -> CpuUse:
    """Read what there is; what cannot be read is left out."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names alone
    found = {pid: use for pid in pids if (use := read_process(pid))}
    return CpuUse(found, read_steal())


def read_process(pid: int) -> tuple[str, int, float] | None:
    """Return a process's name, last CPU and CPU time; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        seconds = (int(fields[UTIME]) + int(fields[STIME])) * TICK
        return text.partition("(")[2].rpartition(")")[0], int(fields[PROCESSOR]), seconds
    except (OSError, ValueError, IndexError):
        return None


def read_steal() -> dict[int, float]:
    """Return each CPU's steal time."""
    found = {}
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *values = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and len(values) >= STEAL:
                found[int(name[3:])] = int(values[STEAL - 1]) * TICK
    except (OSError, ValueError):
        return {}
    return found


def describe_contention(cpu: int, before: CpuUse, after: CpuUse, seconds: float, own: Collection[int]) -> str:
    """Name who took a notable part of a CPU's time: `python3 (PID 4211) took 49% of it`; empty if nobody did.

    `own` are the PIDs of the measurement itself.
    """
    shares = []
    for pid, (name, last, used) in after.processes.items():
        share = (used - before.processes.get(pid, (name, last, used))[2]) / seconds
        if last == cpu and pid not in own and share >= NOTABLE:
            shares.append((share, f"{name} (PID {pid})"))
    stolen = (after.steal.get(cpu, 0.0) - before.steal.get(cpu, 0.0)) / seconds
    if stolen >= NOTABLE:
        shares.append((stolen, "the hypervisor"))
    return ", ".join(
        f"{who} took {min(share, 1):.0%} of it" for share, who in sorted(shares, reverse=True)[:3]
    )
