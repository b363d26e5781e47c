"""PCI links and interrupts of the GPUs and NICs."""

from launcher.plan.model import Machine
from launcher.probe.health import Device
from launcher.probe.pci import PCI
from launcher.probe.sysfs import Tree

WIDEST = 32
"""Lanes of the widest PCI Express link; a virtual machine may show 0, 63 or 255 for unknown."""


def read_device_links(tree: Tree, machine: Machine) -> tuple[Device, ...]:
    """The GPUs, then the NICs, as far as sysfs has them."""
    found = [(f"GPU {gpu.index}", gpu.pci, gpu.node, False) for gpu in machine.gpus]
    found += [(nic.name, nic.pci, nic.node, True) for nic in machine.nics]
    return tuple(
        read_device_link(tree, *entry)
        for entry in found
        if entry[1] and tree.resolve_links(f"{PCI}{entry[1]}")
    )


def read_device_link(tree: Tree, name: str, pci: str, node: int | None, nic: bool) -> Device:
    """One device's link and interrupts."""
    here = f"{PCI}{pci}/"
    width, most = read_width(tree, f"{here}current_link_width"), read_width(tree, f"{here}max_link_width")
    return Device(name, node, nic, width, most, read_interrupts(tree, here))


def read_width(tree: Tree, path: str) -> int | None:
    """Lanes of a link; None where unknown."""
    lanes = tree.read_int(path)
    return lanes if lanes is not None and 1 <= lanes <= WIDEST else None


def read_interrupts(tree: Tree, here: str) -> tuple[frozenset[int], ...]:
    """CPUs of each message-signalled interrupt: those it really goes to, else those it may go to.

    Source: the kernel's Documentation/core-api/irq/irq-affinity.rst.
    """
    found = []
    for number in tree.list_numbers(f"{here}msi_irqs", ""):
        irq = f"proc/irq/{number}/"
        cpus = tree.read_list(f"{irq}effective_affinity_list") or tree.read_list(f"{irq}smp_affinity_list")
        found += [cpus] if cpus else []
    return tuple(found)
