"""What the NVIDIA driver says in /proc/driver/nvidia and sysfs, for when NVML is not asked."""

import os

from launcher.plan.model import Gpu
from launcher.probe.pci import PCI, normalise_pci
from launcher.probe.sysfs import Tree

GPUS = "proc/driver/nvidia/gpus/"
CAPABILITIES = "proc/driver/nvidia/capabilities"
BOUND = "sys/bus/pci/drivers/nvidia/"
DEVICE = "/dev/nvidia"
Card = tuple[str, dict[str, str]]
"""PCI address of a GPU, and what its `information` says."""


def read_driver(tree: Tree) -> tuple[Gpu, ...] | None:
    """GPUs of the driver, without their place: /proc's, else the PCI devices bound to the driver.

    MIG instances are not in these files. None where the files show no GPU at all.
    """
    cards = list_cards(tree)
    if cards is None:
        return read_bound(tree) or None
    return tuple(build_nvidia_gpu(tree, pci, fields) for pci, fields in cards if is_open(tree, fields))


def read_ready(tree: Tree) -> tuple[Gpu, ...] | None:
    """GPUs by /proc where that tells as much as NVML: all have a UUID, and there are no MIG instances."""
    cards = None if has_mig(tree) else list_cards(tree)
    if not cards or not all(is_uuid(fields.get("GPU UUID", "")) for _, fields in cards):
        return None
    return tuple(build_nvidia_gpu(tree, pci, fields) for pci, fields in cards if is_open(tree, fields))


def has_mig(tree: Tree) -> bool:
    """Whether a GPU has MIG instances, which are directories `gi0` and so on of its capabilities."""
    gpus = [name for name in tree.list_directory(CAPABILITIES) if name.startswith("gpu")]
    names = (name for gpu in gpus for name in tree.list_directory(f"{CAPABILITIES}/{gpu}/mig"))
    return any(name.startswith("gi") for name in names)


def list_cards(tree: Tree) -> list[Card] | None:
    """The GPUs of /proc/driver/nvidia/gpus but those that the driver leaves out; None where it is missing."""
    names = tree.list_directory(GPUS)
    cards = []
    for name in names:
        pci = normalise_pci(name)
        if pci is None:
            tree.add_warning(f"{GPUS} has {{value}}, which is no PCI address: left out", value=name)
            continue
        fields = tree.read_fields(f"{GPUS}{name}/information")
        if fields.get("GPU Excluded") == "Yes":
            tree.add_warning("the driver excludes the GPUs {items} (NVreg_ExcludedGpus): left out", pci)
            continue
        cards.append((pci, fields))
    return cards if names else None


def is_open(tree: Tree, fields: dict[str, str]) -> bool:
    """Whether this process may open a GPU's device: NVML leaves out those that it may not.

    /proc shows a container or a job of SLURM's ConstrainDevices all GPUs of the node. access(2) asks the
    device cgroup too, of version 1 and 2, and also for root: inode_permission in the kernel's fs/namei.c
    calls devcgroup_inode_permission, which runs both. True where the machine is a written-out one.
    """
    minor = fields.get("Device Minor", "")
    return not tree.is_real or not minor.isdecimal() or os.access(f"{DEVICE}{minor}", os.R_OK | os.W_OK)


def build_nvidia_gpu(tree: Tree, pci: str, fields: dict[str, str]) -> Gpu:
    """A GPU as its `information` has it."""
    uuid = fields.get("GPU UUID")
    if not is_uuid(uuid or ""):
        # The driver writes question marks until something has opened the GPU.
        tree.add_warning(
            "GPU UUID of {items} is {value}: these GPUs can be named by index only", pci, value=uuid
        )
        uuid = ""
    model = "".join(char for char in fields.get("Model", "") if char.isprintable())
    return Gpu(index=0, uuid=uuid or "", pci=pci, node=None, name=model)


def is_uuid(text: str) -> bool:
    """Whether a text has a GPU UUID's form, `GPU-` and hexadecimal groups."""
    return text.startswith("GPU-") and len(text) > 4 and set(text[4:].lower()) <= set("0123456789abcdef-")


def read_bound(tree: Tree) -> tuple[Gpu, ...]:
    """GPUs by the devices that are bound to the driver: some containers hide its /proc files."""
    found = []
    for name in tree.list_directory(BOUND):
        pci = normalise_pci(name)
        # NVSwitches (class 0x0680) are bound to the same driver.
        if pci and (tree.read(f"{PCI}{pci}/class") or "").startswith("0x03"):
            tree.add_warning(f"{GPUS} is not there: the UUIDs of the GPUs {{items}} are unknown", pci)
            found.append(Gpu(index=0, uuid="", pci=pci, node=None))
    return tuple(found)


def read_gpu_memory_nodes(tree: Tree) -> frozenset[int]:
    """NUMA nodes that are memory of a GPU (GH200, GB200, POWER9), online or not yet."""
    states = [tree.read_fields(f"{GPUS}{name}/numa_status") for name in tree.list_directory(GPUS)]
    nodes = [state["Node"] for state in states if state.get("Status") != "disabled" and "Node" in state]
    return frozenset(int(node) for node in nodes if node.isdecimal() and len(node) < 6)
