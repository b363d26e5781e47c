"""The lab's machines with everything that the topology shows, and some that the lab has not."""

from dataclasses import replace

from launcher.plan.model import Cache, Cpu, Gpu, Limits, Machine, Nic, NumaNode
from tests.plan.lab_machines import Data, convert, load
from tests.probe.machine_trees import find_path


def furnish(data: Data) -> Machine:
    """The machine of a description, with its caches, NICs, PCI paths and memory."""
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


def lab(name: str) -> Machine:
    """One of the lab's machines."""
    return furnish(load(name))


def hybrid() -> Machine:
    """A desktop: 8 performance cores of two PUs, 8 efficiency cores, a GPU of unknown place."""
    big = [Cpu(at, at // 2 * 2, 0, 0, 0, 1024) for at in range(16)]
    small = [Cpu(at, at, 0, 0, 0, 640) for at in range(16, 24)]
    node = NumaNode(0, 64 << 20, normal=True, distances=((0, 10),))
    return Machine(
        cpus=(*big, *small),
        nodes=(node,),
        gpus=(Gpu(0, "GPU-0", "0000:01:00.0", None, name="NVIDIA GeForce RTX 4090", memory_mib=24564),),
        allowed_cpus=frozenset(range(24)),
        allowed_mems=frozenset({0}),
        memory_kib=64 << 20,
        caches=(Cache(0, 3, 36864),),
        name="Desktop",
    )


def huge() -> Machine:
    """1,024 PUs: 16 packages of 32 cores with two PUs each, 16 cores to a cache."""
    cores = [(core, core // 32, core // 16 * 16) for core in range(512)]
    cpus = [
        Cpu(core + 512 * thread, core, package, package, l3)
        for thread in (0, 1)
        for core, package, l3 in cores
    ]
    nodes = [
        NumaNode(
            at,
            256 << 20,
            normal=True,
            distances=tuple((b, 10 if at == b else 16 + 6 * (at // 4 != b // 4)) for b in range(16)),
        )
        for at in range(16)
    ]
    gpus = [Gpu(at, f"GPU-{at}", f"{at:04x}:01:00.0", at, name="NVIDIA H100") for at in range(16)]
    return Machine(
        cpus=tuple(cpus),
        nodes=tuple(nodes),
        gpus=tuple(gpus),
        allowed_cpus=frozenset(range(1024)),
        allowed_mems=frozenset(range(16)),
        memory_kib=4 << 30,
        caches=tuple(Cache(l3, 3, 65536) for l3 in range(0, 512, 16)),
        name="Superdome",
    )


def odd() -> Machine:
    """A container on a two-socket machine: part of the CPUs and memory, isolated CPUs, limits, a CXL node."""
    data = load("a100-slurm-32of112")
    machine = furnish({**data, "isolated": "4-7"})
    far = NumaNode(2, 256 << 20, normal=True, distances=((0, 14), (1, 24), (2, 10)))
    nodes = [replace(node, distances=(*node.distances, (2, 14 + 10 * node.id))) for node in machine.nodes]
    nics = (
        Nic("mlx5_0", "0000:17:00.0", 0, (), "Ethernet", 100, active=False),
        Nic("mlx5_1", "0000:17:00.1", None),
    )
    return replace(
        machine,
        nodes=(*nodes, far),
        nics=nics,
        name="R750 <&> 'quoted' \x1b[31m \u4e2d",
        limits=Limits(16, 64 << 20, 64 << 10),
        warnings=("numa_node of 0000:17:00.1 is -1",),
    )
