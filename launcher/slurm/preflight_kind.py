"""Whether a SLURM job's nodes are checked before its ranks start, and how thoroughly."""

import os
from collections.abc import Mapping

DRIVER_FILES = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/kfd")
"""Signs of a GPU's driver on this node."""


def choose_preflight_kind(kind: str, environ: Mapping[str, str]) -> str:
    """Return `light`, `deep`, or empty for none; `auto` is light for a job with GPUs.

    On a node of the job these have to be GPUs with a driver: what SLURM counts may be something else.
    """
    if kind != "auto":
        return "" if kind == "off" else kind
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    if text in ("", "0"):
        return ""
    here = "SLURMD_NODENAME" in environ
    return "light" if not here or any(map(os.path.exists, DRIVER_FILES)) else ""
