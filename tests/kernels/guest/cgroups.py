"""Job cgroups, by the kernel's controllers of either version."""

import os
from pathlib import Path

from .scenario import Scenario
from .syscalls import mount

ROOT = Path("/sys/fs/cgroup")
V1 = ("cpuset", "cpu", "memory", "devices")
PERIOD = 100_000


def mount_cgroups(version: int) -> None:
    """Mount the hierarchies where systemd does."""
    if version == 2:
        mount("cgroup2", str(ROOT))
        (ROOT / "cgroup.subtree_control").write_text("+cpuset +cpu +memory")
        return
    mount("tmpfs", str(ROOT))
    for controller in V1:
        mount("cgroup", str(ROOT / controller), controller)


def enter_cgroup(scenario: Scenario, version: int) -> None:
    """Make the job's cgroup and move this process into it."""
    settings = list_settings_v2(scenario) if version == 2 else list_settings_v1(scenario)
    for name, values in settings.items():
        folder = ROOT / name / scenario.name if name else ROOT / scenario.name
        folder.mkdir(parents=True)
        for file, value in values:
            (folder / file).write_text(value)
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def list_settings_v2(scenario: Scenario) -> dict[str, list[tuple[str, str]]]:
    """Files and values of the one hierarchy of version 2."""
    values = [("cpuset.cpus", scenario.cpus), ("cpuset.mems", scenario.mems)]
    if scenario.quota:
        values.append(("cpu.max", f"{int(scenario.quota * PERIOD)} {PERIOD}"))
    if scenario.memory_mib:
        values.append(("memory.max", str(scenario.memory_mib << 20)))
    return {"": [(file, value) for file, value in values if value]}


def list_settings_v1(scenario: Scenario) -> dict[str, list[tuple[str, str]]]:
    """Files and values by controller; a cpuset of version 1 must be filled before it takes a process."""
    cpuset = [
        (file, value or (ROOT / "cpuset" / file).read_text())
        for file, value in (("cpuset.cpus", scenario.cpus), ("cpuset.mems", scenario.mems))
    ]
    cpu = [("cpu.cfs_period_us", str(PERIOD)), ("cpu.cfs_quota_us", str(int((scenario.quota or 0) * PERIOD)))]
    limit = str((scenario.memory_mib or 0) << 20)
    return {
        "cpuset": cpuset,
        "cpu": cpu if scenario.quota else [],
        "memory": [("memory.limit_in_bytes", limit)] if scenario.memory_mib else [],
        "devices": [("devices.deny", f"c 195:{minor} rwm") for minor in scenario.deny_gpus],
    }
