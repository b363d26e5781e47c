"""The machine's GPUs in the order that their runtime numbers them, each with its place."""

from dataclasses import replace

from launcher.plan.model import Gpu
from launcher.probe.amd import read_amd
from launcher.probe.nvidia_driver import read_driver, read_ready
from launcher.probe.nvml import read_nvml
from launcher.probe.pci import parse_pci, read_locality
from launcher.probe.sysfs import Tree

NVIDIA_SIGNS = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")
"""What shows a driver: on a host, in a container that hides /proc/driver, and in WSL."""
AMD_SIGN = "dev/kfd"
"""The compute driver's device: without it an AMD GPU is for the screen."""


def probe_gpus(
    tree: Tree, nodes: frozenset[int], online: frozenset[int], quick: bool = False
) -> tuple[Gpu, ...]:
    """NVIDIA's GPUs in PCI bus order; where there are none AMD's, in the compute driver's order.

    A build of torch serves one vendor, so that an AMD GPU beside NVIDIA's is for the screen.
    """
    gpus = []
    for index, gpu in enumerate(list_gpus(tree, quick)):
        node, cpus, path = read_locality(tree, gpu.pci, nodes, online)
        gpus.append(replace(gpu, index=index, node=node, local_cpus=cpus, path=path))
    return tuple(gpus)


def list_gpus(tree: Tree, quick: bool) -> tuple[Gpu, ...]:
    """GPUs in order and without their place."""
    if not tree.is_real:
        return sort_gpus(read_driver(tree)) or read_amd(tree)
    signs = [f"/{sign}" for sign in NVIDIA_SIGNS if tree.has(sign)]
    nvidia = list_nvidia(tree, quick) if signs else ()
    gpus = sort_gpus(nvidia) or (read_amd(tree) if tree.has(AMD_SIGN) else ())
    if nvidia is None and not gpus:
        tree.add_warning("a GPU driver is there ({items}) but no GPU was found: planned without GPUs", *signs)
    return gpus


def list_nvidia(tree: Tree, quick: bool) -> tuple[Gpu, ...] | None:
    """NVIDIA's GPUs by NVML, else by the driver's files, which `quick` asks first; None where none tell."""
    found = read_ready(tree) if quick else None
    if found is None:
        found = read_nvml(tree)
    return read_driver(tree) if found is None else found


def sort_gpus(gpus: tuple[Gpu, ...] | None) -> tuple[Gpu, ...]:
    """GPUs in PCI bus order, each once."""
    found = {gpu.pci: gpu for gpu in gpus or ()}
    return tuple(found[pci] for pci in sorted(found, key=parse_pci))
