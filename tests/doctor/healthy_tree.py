"""A machine as a tree of files with all that the doctor reads, healthy until a test spoils it."""

import json
from pathlib import Path
from typing import Any

from tests.plan.lab_machines import fsroot
from tests.probe.machine_trees import CPU, PCI, put
from tests.seam import Result, run_inside

MACHINE: dict[str, Any] = {
    "name": "two",
    "numa": [
        {"id": 0, "package": 0, "cpus": "0-15,32-47", "gib": 512},
        {"id": 1, "package": 1, "cpus": "16-31,48-63", "gib": 512},
    ],
    "threads": {"offset": 32},
    "gpus": [
        {"bdf": "0000:07:00.0", "numa": 0, "model": "NVIDIA A100-SXM4-40GB"},
        {"bdf": "0000:47:00.0", "numa": 0, "model": "NVIDIA A100-SXM4-40GB"},
        {"bdf": "0000:87:00.0", "numa": 1, "model": "NVIDIA A100-SXM4-40GB"},
        {"bdf": "0000:b7:00.0", "numa": 1, "model": "NVIDIA A100-SXM4-40GB"},
    ],
    "nics": [
        {"name": "mlx5_0", "bdf": "0000:0b:00.0", "numa": 0},
        {"name": "mlx5_1", "bdf": "0000:8b:00.0", "numa": 1},
    ],
}
"""Two packages of 16 cores with two threads each, two GPUs and a NIC next to each."""
NEAR = {0: "0-15,32-47", 1: "16-31,48-63"}
DEVICES = [*MACHINE["gpus"], *MACHINE["nics"]]
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {nproc}                unlimited            processes
Max open files            {files}                {files_hard}                files
Max locked memory         {locked}                unlimited            bytes
"""
SHM = "tmpfs /dev/shm tmpfs rw,nosuid,nodev,size={size} 0 0"
KERNEL = {
    "proc/sys/kernel/numa_balancing": "0",
    "proc/sys/vm/zone_reclaim_mode": "0",
    "proc/sys/vm/swappiness": "10",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise [madvise] never",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "0",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0",
    "proc/2/comm": "kthreadd",
    "proc/900/comm": "irqbalance",
    "proc/mounts": SHM.format(size="536870912k"),
    "proc/self/cgroup": "0::/job",
    "sys/fs/cgroup/cgroup.controllers": "cpuset cpu memory pids",
    "sys/fs/cgroup/pids.max": "max",
    "sys/fs/cgroup/job/pids.max": "max",
    "sys/fs/cgroup/job/cpu.max": "max 100000",
    "sys/fs/cgroup/job/memory.max": "max",
}


def limits(
    nproc: str = "unlimited", files: str = "65536", files_hard: str = "", locked: str = "unlimited"
) -> str:
    """A `/proc/self/limits`."""
    return LIMITS.format(nproc=nproc, files=files, files_hard=files_hard or files, locked=locked)


def meminfo(free_kib: int) -> str:
    """A `/proc/meminfo` with 8 GiB of swap."""
    return f"MemTotal: {1 << 30} kB\nSwapTotal: {8 << 20} kB\nSwapFree: {free_kib} kB"


def clock(driver: str, governor: str, preference: str | None = None) -> dict[str, str]:
    """The cpufreq files of all CPUs."""
    files: dict[str, str] = {}
    for cpu in range(64):
        here = f"{CPU}/cpu{cpu}/cpufreq/"
        files |= {f"{here}scaling_driver": driver, f"{here}scaling_governor": governor}
        files |= {f"{here}energy_performance_preference": preference} if preference else {}
    return files


def list_links(width: str = "16") -> dict[str, str]:
    """The link widths of all devices."""
    return {
        f"{PCI}/{device['bdf']}/{kind}_link_width": width if kind == "current" else "16"
        for device in DEVICES
        for kind in ("current", "max")
    }


def list_irqs() -> dict[str, str]:
    """Two interrupts for each device, on CPUs next to it."""
    files = {}
    for number, device in enumerate(DEVICES):
        for irq in (100 + 2 * number, 101 + 2 * number):
            files[f"{PCI}/{device['bdf']}/msi_irqs/{irq}"] = "msix"
            files[f"proc/irq/{irq}/smp_affinity_list"] = "0-63"
            files[f"proc/irq/{irq}/effective_affinity_list"] = NEAR[device["numa"]].partition("-")[0]
    return files


HEALTHY = {
    **KERNEL,
    **list_links(),
    **list_irqs(),
    **clock("acpi-cpufreq", "performance"),
    "proc/self/limits": limits(),
    "proc/meminfo": meminfo(8 << 20),
}


def write_healthy(root: Path, **changes: Any) -> Path:
    """Write a machine that has nothing to mend, with other values for some keys of its description."""
    fsroot.materialize({**MACHINE, **changes}, root)
    for path, content in HEALTHY.items():
        put(root, path, content)
    return root


def run_doctor(root: Path, *words: str) -> tuple[Result, list[dict[str, str]]]:
    """Run `launch doctor format=json` on a tree; the result and its findings."""
    done = run_inside(["doctor", f"machine.root={root}", "format=json", *words])
    assert done.code in (0, 1), done
    told = json.loads(done.out)
    assert told["schema"] == 1
    return done, told["findings"]


def pick(findings: list[dict[str, str]], *levels: str) -> list[dict[str, str]]:
    """The findings of some levels."""
    return [finding for finding in findings if finding["level"] in levels]
