"""The machine's GPUs in the order in which their runtime numbers them; AMD's are read here."""

from dataclasses import replace

from launcher.plan.model import Gpu
from launcher.probe.nvidia_gpus import read_driver, read_nvml, read_ready
from launcher.probe.pci import PCI, format_pci, normalise_pci, parse_pci, read_locality
from launcher.probe.sysfs import Tree, parse_unsigned

NODES = "sys/class/kfd/kfd/topology/nodes"
VENDOR = "0x1002"
CLASSES = ("0x03", "0x1200")
"""PCI classes of a GPU: display controllers, and processing accelerators as the MI300."""
NVIDIA_SIGNS = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")
"""What shows a driver: on a host, in a container that hides /proc/driver, and in WSL."""
AMD_SIGN = "dev/kfd"
"""The compute driver's device: without it an AMD GPU is for the screen."""


def read_amd(tree: Tree) -> tuple[Gpu, ...]:
    """The GPUs that HIP would number, in its order and without their place.

    The runtime takes the compute driver's (KFD's) nodes that have SIMD units, in the order of their
    numbers. Nodes that the device cgroup keeps from the job cannot be read (kfd_devcgroup_check_permission
    in kfd_topology.c), and are not the runtime's either.
    """
    numbers = tree.list_numbers(NODES, "")
    if not numbers:
        return list_amd_devices(tree)
    if tree.resolve_links(NODES) is None:
        tree.add_warning(f"links of {NODES} lead out of the root: planned without AMD GPUs")
        return ()
    found = [gpu for number in numbers if (gpu := read_node(tree, number))]
    uuids = [gpu.uuid for gpu in found]
    # The partitions of a device may all have its own id, which then names none of them.
    return tuple(
        build_amd_gpu(tree, gpu.pci, gpu.uuid if uuids.count(gpu.uuid) == 1 else "") for gpu in found
    )


def read_node(tree: Tree, number: int) -> Gpu | None:
    """A node's GPU by address and UUID alone; None for a CPU, and for what the job may not see."""
    lines = (tree.read(f"{NODES}/{number}/properties") or "").splitlines()
    fields = {key: parse_unsigned(text) for key, _, text in (line.partition(" ") for line in lines)}
    if not fields.get("simd_count"):
        return None
    location, domain = fields.get("location_id"), fields.get("domain") or 0
    if location is None or domain >= 1 << 32:
        tree.add_warning("KFD's nodes {items} have no PCI address: left out", number)
        return None
    # Bits 28 to 31 number a device's partition; the rest is bus, device and function.
    place = (domain, location >> 8 & 0xFF, location >> 3 & 0x1F)
    pci, first = format_pci((*place, location & 7)), format_pci((*place, 0))
    if not tree.has(f"{PCI}{pci}") and tree.has(f"{PCI}{first}"):
        # Kernels about 6.6 have the partition's number in the function's place.
        pci = first
    unique = fields.get("unique_id") or 0
    return Gpu(index=0, uuid=f"GPU-{unique:016x}" if 0 < unique < 1 << 64 else "", pci=pci, node=None)


def list_amd_devices(tree: Tree) -> tuple[Gpu, ...]:
    """AMD's GPUs among the PCI devices, in PCI order."""
    found = []
    for name in tree.list_directory(PCI):
        if tree.read(f"{PCI}{name}/vendor") != VENDOR or not (pci := normalise_pci(name)):
            continue
        if (tree.read(f"{PCI}{name}/class") or "").startswith(CLASSES):
            found.append(pci)
    return tuple(build_amd_gpu(tree, pci, "") for pci in sorted(found, key=parse_pci))


def build_amd_gpu(tree: Tree, pci: str, uuid: str) -> Gpu:
    """A GPU with its name and memory."""
    here = f"{PCI}{pci}/"
    if tree.resolve_links(here) is None:
        return Gpu(index=0, uuid=uuid, pci=pci, node=None, vendor="amd")
    name = "".join(filter(str.isprintable, tree.read(f"{here}product_name") or ""))
    if not name:
        device = (tree.read(f"{here}device") or "").removeprefix("0x")
        name = f"AMD GPU 1002:{device}" if device.isalnum() and len(device) == 4 else "AMD GPU"
    size = parse_unsigned(tree.read(f"{here}mem_info_vram_total")) or 0
    return Gpu(index=0, uuid=uuid, pci=pci, node=None, name=name[:100], vendor="amd", memory_mib=size >> 20)


def probe_gpus(
    tree: Tree, nodes: frozenset[int], online: frozenset[int], quick: bool = False
) -> tuple[Gpu, ...]:
    """NVIDIA's GPUs in PCI bus order; if there are none AMD's, in the compute driver's order.

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
    """NVIDIA's GPUs by NVML, else by the driver's files, which `quick` asks first; None if none tell."""
    found = read_ready(tree) if quick else None
    if found is None:
        found = read_nvml(tree)
    return read_driver(tree) if found is None else found


def sort_gpus(gpus: tuple[Gpu, ...] | None) -> tuple[Gpu, ...]:
    """GPUs in PCI bus order, each once."""
    found = {gpu.pci: gpu for gpu in gpus or ()}
    return tuple(found[pci] for pci in sorted(found, key=parse_pci))
