"""What the NVIDIA driver says in /proc/driver/nvidia and sysfs, for when NVML cannot be asked."""

from launcher.plan.model import Gpu
from launcher.probe.pci import PCI, normalise_pci
from launcher.probe.sysfs import Tree

GPUS = "proc/driver/nvidia/gpus/"
BOUND = "sys/bus/pci/drivers/nvidia/"


def read_driver(tree: Tree) -> tuple[Gpu, ...]:
    """GPUs of the driver, without their place: /proc's, else the PCI devices bound to the driver.

    MIG instances are not in these files.
    """
    names = tree.list_names(GPUS)
    found = [gpu for name in names if (gpu := read_information(tree, name))]
    return tuple(found) if names else read_bound(tree)


def read_information(tree: Tree, name: str) -> Gpu | None:
    """One GPU of /proc/driver/nvidia/gpus; None for one that the driver leaves out."""
    pci = normalise_pci(name)
    if pci is None:
        tree.note(f"{GPUS} has {{value}}, which is no PCI address: left out", value=name)
        return None
    fields = tree.read_fields(f"{GPUS}{name}/information")
    if fields.get("GPU Excluded") == "Yes":
        tree.note("the driver excludes the GPUs {items} (NVreg_ExcludedGpus): left out", pci)
        return None
    uuid = fields.get("GPU UUID")
    if not is_uuid(uuid or ""):
        # The driver writes question marks until something has opened the GPU.
        tree.note("GPU UUID of {items} is {value}: these GPUs can be named by index only", pci, value=uuid)
        uuid = ""
    model = "".join(char for char in fields.get("Model", "") if char.isprintable())
    return Gpu(index=0, uuid=uuid or "", pci=pci, node=None, name=model)


def is_uuid(text: str) -> bool:
    """Whether a text has a GPU UUID's form, `GPU-` and hexadecimal groups."""
    return text.startswith("GPU-") and len(text) > 4 and set(text[4:].lower()) <= set("0123456789abcdef-")


def read_bound(tree: Tree) -> tuple[Gpu, ...]:
    """GPUs by the devices that are bound to the driver: some containers hide its /proc files."""
    found = []
    for name in tree.list_names(BOUND):
        pci = normalise_pci(name)
        # NVSwitches (class 0x0680) are bound to the same driver.
        if pci and (tree.read(f"{PCI}{pci}/class") or "").startswith("0x03"):
            tree.note(f"{GPUS} is not there: the UUIDs of the GPUs {{items}} are unknown", pci)
            found.append(Gpu(index=0, uuid="", pci=pci, node=None))
    return tuple(found)


def read_gpu_memory_nodes(tree: Tree) -> frozenset[int]:
    """NUMA nodes that are memory of a GPU (GH200, GB200, POWER9), online or not yet."""
    states = [tree.read_fields(f"{GPUS}{name}/numa_status") for name in tree.list_names(GPUS)]
    nodes = [state["Node"] for state in states if state.get("Status") != "disabled" and "Node" in state]
    return frozenset(int(node) for node in nodes if node.isdecimal() and len(node) < 6)
