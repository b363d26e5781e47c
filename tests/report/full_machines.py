"""The lab's machines with everything that the topology shows, and some that the lab has not.

`hybrid` is a desktop: 8 performance cores of two PUs, 8 efficiency cores, a GPU of unknown place; `huge` has
1,024 PUs in 16 packages; `odd` is a container on two sockets: part of the CPUs, isolated CPUs, a CXL node.
"""

from dataclasses import replace
from pathlib import Path

from launcher.plan.model import Cache, Machine, Nic, parse_machine
from tests.plan.lab_machines import convert, load
from tests.probe.machine_trees import find_path

SNAPSHOTS = Path(__file__).parents[1] / "data/snapshots"


def read(name: str) -> Machine:
    """A machine of a snapshot."""
    return parse_machine((SNAPSHOTS / f"{name}.json").read_text())


def lab(name: str) -> Machine:
    """One of the lab's machines with its caches, NICs, PCI paths and memory."""
    data = load(name)
    machine = convert(data)
    gpus = tuple(
        replace(gpu, path=find_path(entry), memory_mib=40960)
        for gpu, entry in zip(machine.gpus, data.get("gpus", []), strict=True)
    )
    nics = tuple(
        Nic(
            entry["name"],
            entry["bdf"],
            entry["numa"] if entry["numa"] >= 0 else None,
            find_path(entry),
            "InfiniBand",
            200,
        )
        for entry in data.get("nics", [])
    )
    return replace(
        machine,
        gpus=gpus,
        nics=nics,
        caches=tuple(Cache(l3, 3, 32768) for l3 in sorted({cpu.l3 for cpu in machine.cpus})),
        memory_kib=sum(node.memory_kib for node in machine.nodes if node.normal),
        name=data["name"],
    )
