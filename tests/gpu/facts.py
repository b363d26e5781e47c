"""Prints, as JSON, what this Python's torch is and which GPUs it sees: `python -m tests.gpu.facts`."""

import json
import os
import platform
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path

import torch


def describe_torch() -> dict[str, object]:
    """Return what tells this machine's torch and GPUs from others."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, read_nccl())) if torch.version.cuda else None,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "compiler": shutil.which("cc"),
        "python_headers": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        "gpus": [describe_gpu(index) for index in range(torch.cuda.device_count())] if found else [],
        "why_none": "" if found else explain_lack([str(one.message) for one in said]),
    }


def read_nccl() -> tuple[int, ...]:
    """Return NCCL's version, which torch is built with."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version


def describe_gpu(index: int) -> dict[str, object]:
    """Return a GPU's name, memory in MiB, and compute capability."""
    device = torch.cuda.get_device_properties(index)
    capability = f"{device.major}.{device.minor}"
    return {"name": device.name, "memory_mib": device.total_memory >> 20, "capability": capability}


def explain_lack(said: list[str]) -> str:
    """Say why torch sees no GPU: a CPU build, or what it warns of."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return " ".join(said) or "CUDA_VISIBLE_DEVICES hides it" * (os.environ.get("CUDA_VISIBLE_DEVICES") == "")


if __name__ == "__main__":
    print(json.dumps(describe_torch()))
