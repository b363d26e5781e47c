"""GPUs by NVML, the driver's own library, through pynvml."""

import contextlib
from types import ModuleType

from launcher.plan.model import Gpu
from launcher.probe.pci import format_pci, parse_pci
from launcher.probe.sysfs import Tree


def read_nvml(tree: Tree) -> tuple[Gpu, ...] | None:
    """The GPUs that NVML lists, in its order and without their place; None where it cannot be asked.

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
    """One GPU; None where NVML cannot open it, as after it has fallen off the bus."""
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
    """A GPU's memory in MiB; 0 where it cannot be told, as where it is the CPU's too (GB10)."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20
    except nvml.NVMLError:
        return 0


def read_mig(tree: Tree, nvml: ModuleType, handle: object, pci: str) -> tuple[str, ...]:
    """UUIDs of a GPU's MIG instances, in NVML's order; none where MIG is off or unknown to the GPU."""
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
