"""A machine's description written out as the files that its kernel would show.

A description is JSON, in the lab's form (see tests/lab/fsroot.py) with these keys more:

    product, source     what it is, and where its facts come from
    l3_kib              size of a last-level cache; unknown without it
    gpu_vendor, gpu_model, gpu_memory_mib    of all GPUs
    nic_link            [link layer, Gb/s] of all NICs, which a NIC's own link_layer and rate_gbps replace
    gpus, nics          `path` is the PCI path from the root, without the device itself; unknown without it.
                        A NIC's bdf is null where it is unknown.
"""

import os
from pathlib import Path
from typing import Any

from tests.plan.lab_machines import fsroot

Data = dict[str, Any]
GPUS = {"nvidia": ("0x10de", "0x030200"), "amd": ("0x1002", "0x120000")}
"""PCI vendor and class of a GPU; AMD's accelerators are no display controllers."""
NIC = ("0x15b3", "0x020700")
STAND_IN = "fffe:{:02x}:00.0"
"""Address in the tree of a NIC whose own is unknown."""


def write_tree(data: Data, root: Path) -> None:
    """Write a description below `root`, an empty directory."""
    lab = fsroot.Description({"name": data["product"], **data})
    write_cpus(lab, root)
    fsroot.write_nodes(lab, root)
    fsroot.write_process(lab, root)
    for number, gpu in enumerate(lab.gpus):
        write_gpu(lab, root, gpu, number)
    for number, nic in enumerate(lab.nics):
        write_nic(lab, root, nic, number)


def write_cpus(lab: Any, root: Path) -> None:
    """The online CPUs with their cores, packages and last-level caches: the lab's own has far more files."""
    base = root / "sys/devices/system/cpu"
    online = fsroot.format_cpulist(lab.online)
    for name, cpus in (("possible", online), ("present", online), ("online", online), ("isolated", "")):
        fsroot.put(base / name, cpus)
    for cpu in lab.online:
        here = base / f"cpu{cpu}"
        fsroot.put(here / "topology/thread_siblings_list", fsroot.format_cpulist(lab.siblings(cpu)))
        fsroot.put(here / "topology/physical_package_id", lab.package[lab.node_of(cpu)])
        fsroot.put(here / "cache/index3/level", 3)
        if "l3_kib" in lab.data:
            fsroot.put(here / "cache/index3/size", f"{lab.data['l3_kib']}K")
        fsroot.put(here / "cache/index3/shared_cpu_list", fsroot.format_cpulist(lab.l3(cpu)))


def write_gpu(lab: Any, root: Path, gpu: Data, number: int) -> None:
    """A GPU in PCI, and in the NVIDIA driver's files."""
    vendor = lab.data.get("gpu_vendor", "nvidia")
    real = write_pci(lab, root, gpu, gpu["bdf"], GPUS[vendor])
    if vendor == "nvidia":
        text = f"Model: \t\t {lab.data['gpu_model']}\nGPU UUID: \t GPU-{number:08x}"
        fsroot.put(root / "proc/driver/nvidia/gpus" / gpu["bdf"] / "information", text)
    else:
        link(root / "sys/bus/pci/drivers/amdgpu" / gpu["bdf"], real)


def write_nic(lab: Any, root: Path, nic: Data, number: int) -> None:
    """An RDMA device with one active port."""
    layer, rate = lab.data.get("nic_link", ("", 0))
    real = write_pci(lab, root, nic, nic["bdf"] or STAND_IN.format(number), NIC)
    here = root / "sys/class/infiniband" / nic["name"]
    link(here / "device", real)
    fsroot.put(here / "ports/1/link_layer", nic.get("link_layer", layer) or "Unspecified")
    fsroot.put(here / "ports/1/rate", f"{nic.get('rate_gbps', rate)} Gb/sec")
    fsroot.put(here / "ports/1/state", "4: ACTIVE")


def write_pci(lab: Any, root: Path, device: Data, address: str, ids: tuple[str, str]) -> Path:
    """A PCI device at the end of its path; of an unknown path, on a bus of its own."""
    path = device.get("path") or [f"pci{address[:7]}"]
    real = root.joinpath("sys/devices", *path, address)
    node = device["numa"]
    near = lab.nodes[node] & lab.online if node >= 0 else lab.online
    values = {"vendor": ids[0], "device": "0x0000", "class": ids[1], "numa_node": node}
    for name, value in {**values, "local_cpulist": fsroot.format_cpulist(near)}.items():
        fsroot.put(real / name, value)
    link(root / "sys/bus/pci/devices" / address, real)
    return real


def link(place: Path, target: Path) -> None:
    """A relative link, as sysfs has them."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))
