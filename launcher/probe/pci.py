"""PCI addresses in sysfs form, and where on the machine a device is."""

import re

from launcher.probe.sysfs import Tree

PCI = "sys/bus/pci/devices/"
ADDRESS = re.compile(
    r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([01]?[0-9a-f])(?:\.([0-7]))?", re.ASCII | re.IGNORECASE
)
"""Domain, bus, device, function, as sysfs, /proc/driver/nvidia or NVML write them."""


def normalise_pci(text: str) -> str | None:
    """An address in sysfs form; None for a text that is none."""
    found = ADDRESS.fullmatch(text)
    return format_pci(*(int(digits or "0", 16) for digits in found.groups())) if found else None


def format_pci(domain: int, bus: int, device: int, function: int = 0) -> str:
    """Write an address as sysfs does: `0000:07:00.0`."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def order_pci(pci: str) -> tuple[int, str]:
    """A key that sorts addresses in sysfs form in PCI bus order: domains have four to eight digits."""
    return len(pci), pci


def split_path(real: str) -> tuple[str, ...]:
    """The PCI part of a device's real path in sysfs: the host bridge, each bridge, the device itself.

    The host bridge may be below others (ACPI, VMBus, a platform device), and something that is no PCI
    device (an auxiliary device) may be below the last. Empty if the path has no PCI device.
    """
    parts = real.split("/") if real.isascii() and real.isprintable() else []
    while parts and normalise_pci(parts[-1]) is None:
        parts.pop()
    tops = [at for at, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return tuple(parts[tops[0] :] if tops else parts[-1:])


def read_locality(
    tree: Tree, pci: str, nodes: frozenset[int], online: frozenset[int]
) -> tuple[int | None, frozenset[int], tuple[str, ...]]:
    """A GPU's NUMA node (None for -1 and unknown), its online local CPUs and its PCI path (empty: unknown).

    From sysfs, since NVML masks the first two by the job's cpuset.
    """
    here = f"{PCI}{pci}/"
    real = tree.resolve_links(here)
    if real is None:
        tree.add_warning("sysfs links of GPUs {items} lead out of the root: their NUMA node is unknown", pci)
        return None, frozenset(), ()
    text, cpus = tree.read(f"{here}numa_node"), tree.read_list(f"{here}local_cpulist")
    if text is None and cpus is None:
        tree.add_warning("sysfs has no locality of GPUs {items}: their NUMA node is unknown", pci)
        return None, frozenset(), ()
    if cpus is None:
        warning = "local_cpulist of GPUs {items} is {value}: not used"
        tree.add_warning(warning, pci, path=f"{here}local_cpulist")
    node = find_node(tree, "GPUs", pci, text, nodes)
    return node, (cpus or frozenset()) & online, split_path(real)[:-1]


def find_node(tree: Tree, what: str, name: str, text: str | None, nodes: frozenset[int]) -> int | None:
    """The online NUMA node that `numa_node` names; a kernel without NUMA has no such file."""
    named = {str(node): node for node in nodes}
    if text not in named and text not in (None, "-1"):
        warning = f"numa_node of {what} {{items}} is {{value}}, which is not online: unknown"
        tree.add_warning(warning, name, value=text)
    return named.get(text or "")
