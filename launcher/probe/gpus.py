"""The machine's GPUs in PCI bus order, each with its place."""

from launcher.plan.model import Gpu
from launcher.probe.nvidia import read_driver
from launcher.probe.nvml import read_nvml
from launcher.probe.pci import parse_pci, read_locality
from launcher.probe.sysfs import Tree

DRIVER_SIGNS = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")
"""What shows a driver: on a host, in a container that hides /proc/driver, and in WSL."""


def read_gpus(
    tree: Tree, nodes: frozenset[int], online: frozenset[int], use_nvml: bool = True
) -> tuple[Gpu, ...]:
    """GPUs in PCI bus order, by NVML on the real root, else by the driver's files."""
    found = {gpu.pci: gpu for gpu in list_gpus(tree, use_nvml)}
    gpus = []
    for index, pci in enumerate(sorted(found, key=parse_pci)):
        node, cpus = read_locality(tree, pci, nodes, online)
        gpus.append(Gpu(index, found[pci].uuid, pci, node, cpus, found[pci].name, found[pci].mig))
    return tuple(gpus)


def list_gpus(tree: Tree, use_nvml: bool) -> tuple[Gpu, ...]:
    """GPUs without their place: NVML's where a driver is there to answer, else the driver's files'."""
    if not tree.is_real:
        return read_driver(tree)
    signs = [f"/{sign}" for sign in DRIVER_SIGNS if tree.has(sign)]
    if not signs:
        return ()
    by_nvml = read_nvml(tree) if use_nvml else None
    if by_nvml is not None:
        return by_nvml
    gpus = read_driver(tree)
    if not gpus:
        tree.note("a GPU driver is there ({items}) but no GPU was found: planned without GPUs", *signs)
    return gpus
