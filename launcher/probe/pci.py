"""PCI addresses in sysfs form, and where on the machine a device is."""

from launcher.probe.sysfs import Tree

PCI = "sys/bus/pci/devices/"
Address = tuple[int, int, int, int]
"""Domain, bus, device, function: sorts in PCI bus order."""


def parse_pci(text: str) -> Address:
    """Read an address as sysfs, /proc/driver/nvidia or NVML write it: domains of 4 to 8 digits, any case.

    Raises ValueError for anything else.
    """
    domain, bus, rest = text.split(":")
    device, dot, function = rest.partition(".")
    numbers = (int(domain, 16), int(bus, 16), int(device, 16), int(function, 16) if dot else 0)
    if any(not 0 <= n < limit for n, limit in zip(numbers, (1 << 32, 256, 32, 8), strict=True)):
        raise ValueError(f"{text!r} is not a PCI address")
    return numbers


def normalise_pci(text: str) -> str | None:
    """An address in sysfs form; None for a text that is none."""
    try:
        return format_pci(parse_pci(text))
    except ValueError:
        return None


def format_pci(address: Address) -> str:
    """Write an address as sysfs does: `0000:07:00.0`."""
    domain, bus, device, function = address
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


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
        tree.add_warning(
            "local_cpulist of GPUs {items} is {value}: not used", pci, path=f"{here}local_cpulist"
        )
    node = find_node(tree, "GPUs", pci, text, nodes)
    return node, (cpus or frozenset()) & online, split_path(real)[:-1]


def find_node(tree: Tree, what: str, name: str, text: str | None, nodes: frozenset[int]) -> int | None:
    """The online NUMA node that `numa_node` names; a kernel without NUMA has no such file."""
    named = {str(node): node for node in nodes}
    if text not in named and text not in (None, "-1"):
        tree.add_warning(
            f"numa_node of {what} {{items}} is {{value}}, which is not online: unknown", name, value=text
        )
    return named.get(text or "")
