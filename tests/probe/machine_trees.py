"""Machines as trees of files: a small one to be spoilt, and where trees are written."""

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.plan.lab_machines import Data, fsroot

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
STATUS = "proc/self/status"
GPUS = "proc/driver/nvidia/gpus"
PCI = "sys/bus/pci/devices"
NICS = "sys/class/infiniband"

ROOM = 1 << 30
"""Bytes that the largest tree needs and some to spare: each of its 40,000 files takes a page."""
SMALL: Data = {
    "name": "small",
    "numa": [
        {"id": 0, "package": 0, "cpus": "0-1,8-9"},
        {"id": 1, "package": 0, "cpus": "2-3,10-11"},
        {"id": 2, "package": 1, "cpus": "4-5,12-13"},
        {"id": 3, "package": 1, "cpus": "6-7,14-15"},
    ],
    "threads": {"offset": 8},
    "gpus": [
        {"bdf": "0000:07:00.0", "numa": 1, "model": "NVIDIA A100-SXM4-40GB"},
        {"bdf": "0000:47:00.0", "numa": 3, "model": "NVIDIA A100-SXM4-40GB"},
    ],
}
"""Two packages of two NUMA nodes, each with two cores of two threads; a GPU in each package."""


def find_path(device: Data) -> tuple[str, ...]:
    """The PCI path that the lab's writer gives a device, without the device itself."""
    domain, bus = device["bdf"].split(":")[:2]
    switch = device.get("switch")
    port = f"{domain}:{bus}:1f.7" if switch is None else f"{domain}:{switch}:00.0"
    return f"pci{domain}:{switch or bus}", port


def write_small(root: Path, **changes: Any) -> Path:
    """Write the small machine below root, with other values for some of its keys."""
    fsroot.materialize({**copy.deepcopy(SMALL), **changes}, root)
    return root


Content = str | bytes | Mapping[str, Any]
"""A file's text, to which a newline is added, or bytes; or one of `link` (a target), `folder`, `pipe`, `raw`
(a text as it is), `hex` (bytes) and `repeat` (texts and how often each)."""


def put(root: Path, path: str, content: Content) -> None:
    """Write one file, or what else there may be."""
    here = root / path
    here.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        content = f"{content}\n".encode()
    if isinstance(content, bytes):
        here.write_bytes(content)
        return
    ((kind, value),) = content.items()
    match kind:
        case "link":
            here.symlink_to(value)
        case "folder":
            here.mkdir()
        case "pipe":
            os.mkfifo(here)
        case "hex":
            here.write_bytes(bytes.fromhex(value))
        case "repeat":
            here.write_text("".join(text * count for text, count in value))
        case _:
            here.write_text(value)


def link(root: Path, path: str, target: str) -> None:
    """Make a link to a path below root, relative as the kernel's are."""
    here = root / path
    here.parent.mkdir(parents=True, exist_ok=True)
    here.symlink_to(os.path.relpath(root / target, here.parent))


def write_device(root: Path, path: str, **files: str) -> str:
    """Write a PCI device below sys/devices, known to the bus by its address; its path."""
    real = f"sys/devices/{path}"
    for name, content in files.items():
        put(root, f"{real}/{name}", content)
    (root / real).mkdir(parents=True, exist_ok=True)
    link(root, f"{PCI}/{path.rpartition('/')[2]}", real)
    return real


def write_nic(root: Path, name: str, device: str, *ports: tuple[str, str, str]) -> str:
    """Write an RDMA device below another as sysfs has it; a port is its state, rate and link layer."""
    real = f"{device}/infiniband/{name}"
    (root / real).mkdir(parents=True)
    link(root, f"{NICS}/{name}", real)
    if device.startswith("sys/devices/pci"):
        link(root, f"{real}/device", device)
    for number, values in enumerate(ports, 1):
        for file, value in zip(("state", "rate", "link_layer"), values, strict=True):
            put(root, f"{real}/ports/{number}/{file}", value)
    return real


def write_rich(root: Path, vendor: str) -> Path:
    """Write the small machine with all that the probe reads: NVIDIA's GPUs and cgroups 2, or AMD's and 1."""
    write_small(root, **({"gpus": []} if vendor == "amd" else {}))
    for bus in (18, 57):
        device = write_device(root, f"pci0000:{bus - 1}/0000:{bus - 1}:01.0/0000:{bus}:00.0", numa_node="1")
        write_nic(root, f"mlx5_{bus}", device, ("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"))
    put(root, "sys/devices/virtual/dmi/id/product_name", "Small")
    link(root, "sys/class/dmi/id", "sys/devices/virtual/dmi/id")
    put(root, "sys/firmware/devicetree/base/model", b"Small\0")
    if vendor == "amd":
        write_amd(root)
        return root
    put(root, f"{GPUS}/0000:07:00.0/numa_status", "Node: 3\nStatus: online")
    for cpu in range(16):
        put(root, f"{CPU}/cpu{cpu}/cpu_capacity", "1024")
    put(root, "proc/self/cgroup", "0::/job/step")
    put(root, "proc/self/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\nshm /dev/shm tmpfs rw,size=64m 0 0")
    put(root, "sys/fs/cgroup/cgroup.controllers", "cpu memory")
    for path in ("job", "job/step"):
        put(root, f"sys/fs/cgroup/{path}/cpu.max", "max 100000")
        put(root, f"sys/fs/cgroup/{path}/memory.max", str(8 << 30))
    return root


def write_amd(root: Path) -> None:
    """Write AMD's GPUs with their compute driver's topology, version 1 of cgroups, and hybrid cores."""
    files = {"vendor": "0x1002", "device": "0x74a1", "class": "0x120000", "mem_info_vram_total": str(1 << 36)}
    for node, bus in enumerate((6, 7), 1):
        place = {"numa_node": "1", "local_cpulist": "2-3", "product_name": "X"}
        write_device(root, f"pci0000:05/0000:05:01.0/0000:0{bus}:00.0", **files, **place)
        fields = f"simd_count 8\nlocation_id {bus << 8}\ndomain 0\nunique_id {node}"
        put(root, f"sys/devices/virtual/kfd/kfd/topology/nodes/{node}/properties", fields)
    link(root, "sys/class/kfd/kfd", "sys/devices/virtual/kfd/kfd")
    put(root, "proc/self/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0")
    put(root, "proc/self/cgroup", "3:cpu,cpuacct:/job\n4:memory:/job")
    put(root, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "800000")
    put(root, "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    put(root, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(8 << 30))
    put(root, "sys/devices/cpu_core/cpus", "0-3,8-11")
    put(root, "sys/devices/cpu_atom/cpus", "4-7,12-15")


@contextmanager
def spoilt(root: Path, edits: Mapping[str, Content | None]) -> Iterator[Path]:
    """A tree with other contents for a while; None takes away a file, a link or a directory.

    A tree has a thousand files, so one serves many tests.
    """
    made, kept = [], []
    try:
        for path, content in edits.items():
            here = root / path
            if os.path.lexists(here):
                kept.append(here.rename(f"{here}.kept"))
            if content is not None:
                made.append(next(top for top in (*reversed(here.parents), here) if not os.path.lexists(top)))
                put(root, path, content)
        yield root
    finally:
        for top in made:
            shutil.rmtree(top) if top.is_dir() and not top.is_symlink() else top.unlink(missing_ok=True)
        for before in kept:
            before.rename(str(before).removesuffix(".kept"))


@contextmanager
def short_lived() -> Iterator[Path]:
    """A folder that goes at once, in memory as sysfs is: a disk takes seconds for 10,000 files.

    On disk where /dev/shm has no room: some containers have 64 MB of it.
    """
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= ROOM
    with TemporaryDirectory(dir=memory if roomy else None) as folder:
        yield Path(folder)
