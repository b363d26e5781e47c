"""NVIDIA's GPUs: by NVML through pynvml, and by the driver's files in /proc/driver/nvidia and sysfs."""

import contextlib
import os
from types import ModuleType

from launcher.plan.model import Gpu
from launcher.probe.pci import PCI, format_pci, normalise_pci, parse_pci
from launcher.probe.sysfs import Tree

GPUS = "proc/driver/nvidia/gpus/"
CAPABILITIES = "proc/driver/nvidia/capabilities"
BOUND = "sys/bus/pci/drivers/nvidia/"
DEVICE = "/dev/nvidia"
Card = tuple[str, dict[str, str]]
"""PCI address of a GPU, and what its `information` says."""


def read_driver(tree: Tree) -> tuple[Gpu, ...] | None:
    """GPUs of the driver, without their place: /proc's, else the PCI devices bound to the driver.

    MIG instances are not in these files. None if the files show no GPU at all.
    """
    cards = list_cards(tree)
    if cards is None:
        return read_bound(tree) or None
    return tuple(build_nvidia_gpu(tree, pci, fields) for pci, fields in cards if is_open(tree, fields))


def read_ready(tree: Tree) -> tuple[Gpu, ...] | None:
    """GPUs by /proc if that tells as much as NVML: all have a UUID, and there are no MIG instances."""
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
    """The GPUs of /proc/driver/nvidia/gpus but those that the driver leaves out; None if it is missing."""
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
    calls devcgroup_inode_permission, which runs both. True if the machine is a written-out one.
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


def read_nvml(tree: Tree) -> tuple[Gpu, ...] | None:
    """The GPUs that NVML lists, in its order and without their place; None if it cannot be asked.

    That it fails is noted in `tree`; that it is not installed is not.
    """
    try:
        # Imported here, since it costs 40 ms and most starts need none of it; it ships no types.
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            gpus = [read_gpu(tree, pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        return None
    except pynvml.NVMLError as error:
        text = "NVML fails with {value}: GPUs are taken from /proc/driver/nvidia, without MIG instances"
        tree.add_warning(text, value=str(error))
        return None
    return tuple(gpu for gpu in gpus if gpu)


def read_gpu(tree: Tree, nvml: ModuleType, index: int) -> Gpu | None:
    """One GPU; None if NVML cannot open it, as after it has fallen off the bus."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = format_pci(parse_pci(as_text(nvml.nvmlDeviceGetPciInfo(handle).busId)))
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    except (nvml.NVMLError, ValueError) as error:
        text = (
            "NVML fails with {value} for its GPUs {items}: left out, and CUDA may number the rest otherwise"
        )
        tree.add_warning(text, index, value=str(error))
        return None
    mig = read_mig(tree, nvml, handle, pci)
    size = read_gpu_memory(nvml, handle)
    return Gpu(index, as_text(uuid), pci, None, name=as_text(name), mig=mig, memory_mib=size)


def read_gpu_memory(nvml: ModuleType, handle: object) -> int:
    """A GPU's memory in MiB; 0 if it cannot be told, as when it is the CPU's too (GB10)."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20
    except nvml.NVMLError:
        return 0


def read_mig(tree: Tree, nvml: ModuleType, handle: object, pci: str) -> tuple[str, ...]:
    """UUIDs of a GPU's MIG instances, in NVML's order; none if MIG is off or unknown to the GPU."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        if current != nvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        slots = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
        return tuple(uuid for slot in slots if (uuid := read_instance(nvml, handle, slot)))
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return ()
    except (nvml.NVMLError, ValueError) as error:
        text = "NVML fails with {value} for the MIG instances of GPUs {items}: taken as without"
        tree.add_warning(text, pci, value=str(error))
        return ()


def read_instance(nvml: ModuleType, handle: object, slot: int) -> str | None:
    """UUID of the MIG instance in a slot; None for an empty slot."""
    try:
        return as_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)))
    except nvml.NVMLError_NotFound:
        return None


def as_text(value: bytes | str) -> str:
    """Text of what pynvml gives, which is bytes or str by its version and function."""
    return value.decode() if isinstance(value, bytes) else value


def read_persistence() -> tuple[tuple[str, bool], ...]:
    """Persistence mode of each GPU by PCI address; GPUs that do not tell are left out."""
    try:
        import pynvml
    except ImportError:
        return ()
    found = []
    with contextlib.suppress(pynvml.NVMLError):  # the probe has told why
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError, ValueError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pci = format_pci(parse_pci(as_text(pynvml.nvmlDeviceGetPciInfo(handle).busId)))
                mode = pynvml.nvmlDeviceGetPersistenceMode(handle)
                found.append((pci, mode == pynvml.NVML_FEATURE_ENABLED))
        pynvml.nvmlShutdown()
    return tuple(found)
