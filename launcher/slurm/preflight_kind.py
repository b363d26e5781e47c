"""Whether a SLURM job's nodes are checked before its ranks start, and how thoroughly."""

import os
from collections.abc import Mapping
from pathlib import Path

DRIVER_FILES = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/kfd")
"""Signs of a GPU's driver on this node."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
GPU_VENDORS = ("0x10de", "0x1002")
"""NVIDIA and AMD."""
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Beginnings of PCI classes: VGA, 3D and other display controllers, processing accelerators."""


def choose_preflight_kind(kind: str, environ: Mapping[str, str]) -> str:
    """Return `light`, `deep`, or empty for none; `auto` is light for a job with GPUs.

    On a node of the job there has to be a GPU, if without its driver: SLURM may count something else.
    """
    if kind != "auto":
        return "" if kind == "off" else kind
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    if text in ("", "0"):
        return ""
    here = "SLURMD_NODENAME" in environ
    return "light" if not here or has_gpu() else ""


def has_gpu() -> bool:
    """Tell whether this node has a GPU's driver, or a GPU whose driver is gone."""
    return any(map(os.path.exists, DRIVER_FILES)) or any(map(is_gpu, PCI_DEVICES.glob("*")))


def is_gpu(device: Path) -> bool:
    """Tell whether a PCI device is a GPU, by its vendor and class."""
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except (OSError, UnicodeDecodeError):
        return False
    return vendor in GPU_VENDORS and kind.startswith(GPU_CLASSES)
