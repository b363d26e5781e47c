"""The snapshots and options of the shipped machines: `python -m tests.machines.build` makes them again."""

import json
import os
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from launcher.plan.model import Gpu, Limits, Machine, Nic, machine_to_json
from launcher.probe.machine import probe
from tests.plan.lab_machines import fsroot
from tests.probe.machine_trees import short_lived

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
    """A GPU in PCI, and in its driver's files."""
    vendor = lab.data.get("gpu_vendor", "nvidia")
    write_pci(root, gpu, gpu["bdf"], GPUS[vendor])
    if vendor == "nvidia":
        text = f"Model: \t\t {lab.data['gpu_model']}\nGPU UUID: \t GPU-{number:08x}"
        fsroot.put(root / "proc/driver/nvidia/gpus" / gpu["bdf"] / "information", text)
    else:
        domain, bus, device = (int(part, 16) for part in gpu["bdf"].partition(".")[0].split(":"))
        text = f"simd_count 8\nlocation_id {bus << 8 | device << 3}\ndomain {domain}\nunique_id 0"
        fsroot.put(root / f"sys/class/kfd/kfd/topology/nodes/{number + 1}/properties", text)


def write_nic(lab: Any, root: Path, nic: Data, number: int) -> None:
    """An RDMA device with one active port."""
    layer, rate = lab.data.get("nic_link", ("", 0))
    real = write_pci(root, nic, nic["bdf"] or STAND_IN.format(number), NIC)
    here = root / "sys/class/infiniband" / nic["name"]
    link(here / "device", real)
    fsroot.put(here / "ports/1/link_layer", nic.get("link_layer", layer) or "Unspecified")
    fsroot.put(here / "ports/1/rate", f"{nic.get('rate_gbps', rate)} Gb/sec")
    fsroot.put(here / "ports/1/state", "4: ACTIVE")


def write_pci(root: Path, device: Data, address: str, ids: tuple[str, str]) -> Path:
    """A PCI device at the end of its path; of an unknown path, on a bus of its own."""
    path = device.get("path") or [f"pci{address[:7]}"]
    real = root.joinpath("sys/devices", *path, address)
    values = {"vendor": ids[0], "device": "0x0000", "class": ids[1], "numa_node": device["numa"]}
    for name, value in values.items():
        fsroot.put(real / name, value)
    link(root / "sys/bus/pci/devices" / address, real)
    return real


def link(place: Path, target: Path) -> None:
    """A relative link, as sysfs has them."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "conf" / "machine"
NAMES = sorted(path.stem for path in HERE.glob("*.json"))


def read_description(name: str) -> Data:
    """The description of a shipped machine."""
    data: Data = json.loads((HERE / f"{name}.json").read_text())
    return data


def build_machine(data: Data) -> Machine:
    """Probe the tree of a description, and set what a tree cannot show or only stands in for."""
    with short_lived() as folder:
        write_tree(data, folder)
        found = probe(folder)
    return replace(
        found,
        gpus=tuple(finish_gpu(gpu, data) for gpu in found.gpus),
        nics=tuple(finish_nic(nic, data) for nic in found.nics),
        limits=Limits(),
        name=data["product"],
        source=" ".join(data["source"]),
    )


def finish_gpu(gpu: Gpu, data: Data) -> Gpu:
    """A GPU without stand-ins: no machine of the kind has the same UUIDs."""
    known = next(entry for entry in data["gpus"] if entry["bdf"] == gpu.pci)
    path = gpu.path if "path" in known else ()
    return replace(gpu, uuid="", name=data["gpu_model"], path=path, memory_mib=data.get("gpu_memory_mib", 0))


def finish_nic(nic: Nic, data: Data) -> Nic:
    """A NIC without stand-ins."""
    known = next(entry for entry in data["nics"] if entry["name"] == nic.name)
    link_layer, rate = data["nic_link"]
    return replace(
        nic,
        pci=known["bdf"] or "",
        path=nic.path if "path" in known else (),
        link_layer=known.get("link_layer", link_layer),
        rate_gbps=known.get("rate_gbps", rate),
    )


def format_snapshot(machine: Machine) -> str:
    """A snapshot with a line for each part, so that a change shows as one."""
    lines = []
    for key, value in machine_to_json(machine).items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {json.dumps(item)}" for item in value)
            lines.append(f" {json.dumps(key)}: [\n{items}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def format_option(name: str, data: Data) -> str:
    """The configuration that chooses a snapshot: `machine=NAME`."""
    comments = [line for text in (data["product"], *data["source"]) for line in wrap(text, 106)]
    return "".join(f"# {line}\n" for line in comments) + f"snapshot: {name}.json\n"


def build_files(name: str) -> dict[str, str]:
    """The shipped files of a machine, by their names in conf/machine/."""
    data = read_description(name)
    machine = build_machine(data)
    return {f"{name}.json": format_snapshot(machine), f"{name}.yaml": format_option(name, data)}


if __name__ == "__main__":
    for name in NAMES:
        for file, text in build_files(name).items():
            (SHIPPED / file).write_text(text)
        print(name)
