"""AMD GPUs by sysfs: the compute driver's topology, else the PCI devices."""

from launcher.plan.model import Gpu
from launcher.probe.pci import PCI, format_pci, normalise_pci, parse_pci
from launcher.probe.sysfs import Tree, parse_unsigned

NODES = "sys/class/kfd/kfd/topology/nodes"
VENDOR = "0x1002"
CLASSES = ("0x03", "0x1200")
"""PCI classes of a GPU: display controllers, and processing accelerators as the MI300."""


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
