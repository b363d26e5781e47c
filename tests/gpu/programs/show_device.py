"""Prints, as JSON, which GPUs CUDA shows this process: by torch, which starts CUDA to tell."""

import json
import os
from typing import Any

import torch

NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "OMP_NUM_THREADS",
)


def count_devices() -> int:
    """Devices that CUDA itself counts; `torch.cuda.device_count` asks NVML where it can."""
    if torch.version.cuda is None:
        return 0
    try:
        return torch._C._cuda_getDeviceCount()
    except RuntimeError as error:  # none: "No CUDA GPUs are available" and the like
        print(error)
        return 0


def describe_device(index: int) -> dict[str, Any]:
    """A device's name, UUID and PCI address."""
    device: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks some of its attributes
    pci = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    memory = device.total_memory >> 20
    return {"name": device.name, "uuid": str(device.uuid), "pci": pci, "memory_mib": memory}


def main() -> None:
    """Print one line, the last."""
    counted = torch.cuda.device_count() if torch.version.cuda else 0
    count = count_devices()
    current = int(os.environ.get("LOCAL_RANK", "0"))
    if count:
        torch.ones(1, device=f"cuda:{current if current < count else 0}").sum().item()
    found = {
        "count": count,
        "device_count": counted,
        "devices": [describe_device(index) for index in range(count)],
        "cpus": sorted(os.sched_getaffinity(0)),
        "environ": {name: os.environ.get(name) for name in NAMES},
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
