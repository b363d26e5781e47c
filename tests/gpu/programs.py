"""What the ranks of the GPU tests run: `programs.py NAME ARGUMENT …`; most print JSON in their last line."""

import json
import os
import pickle
import sys
import time
from typing import Any

WAS_IMPORTED = "torch" in sys.modules

import torch  # noqa: E402  # whether it is there before is what `start` says
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EXIT_CODE = 7


def show() -> dict[str, Any]:
    """Count and name the GPUs that CUDA itself shows; `torch.cuda.device_count` asks NVML if it can."""
    try:
        count = torch._C._cuda_getDeviceCount() if torch.version.cuda else 0
    except RuntimeError as error:  # "No CUDA GPUs are available" and the like
        print(error)
        count = 0
    if count:
        torch.ones(1, device="cuda").sum().item()
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return {
        "counted": torch.cuda.device_count(),
        "devices": [describe_device(index) for index in range(count)],
        "cpus": sorted(os.sched_getaffinity(0)),
        "environ": {name: os.environ.get(name) for name in names},
    }


def describe_device(index: int) -> dict[str, Any]:
    device: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks some of its attributes
    pci = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    return {
        "name": device.name,
        "uuid": str(device.uuid),
        "pci": pci,
        "memory_mib": device.total_memory >> 20,
    }


def start() -> dict[str, Any]:
    """What a rank's start has left of the GPU and the allocator, and the loss of ten steps."""
    found: dict[str, Any] = {
        "was_imported": WAS_IMPORTED,
        "initialized_before": bool(torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(128, 64).to(DEVICE)
    for _ in range(10):
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found["loss"] = loss.item().hex()
    if CUDA:
        found["device"] = torch.cuda.get_device_name()
        found["backend"] = torch.cuda.memory.get_allocator_backend()
        found["allocator"] = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return found


def leave() -> None:
    """End with an exit code of the program's own."""
    torch.ones(8, device=DEVICE).sum().item()
    sys.exit(EXIT_CODE)


def fail() -> None:
    """Index beyond the end: on a GPU a device-side assert, which every later call reports."""
    values = torch.arange(4, device=DEVICE)
    values[torch.tensor([9], device=DEVICE)].sum().item()


def exhaust() -> None:
    """Ask for more memory than there is."""
    torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)


def collect() -> dict[str, Any]:
    """Join a group of one rank, add up, and return what the flight recorder has seen."""
    dist.init_process_group("nccl" if CUDA else "gloo")
    value = torch.full((1024,), 3.0, device=DEVICE)
    dist.all_reduce(value)
    total, backend = value.sum().item(), dist.get_backend()
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None) if CUDA else None
    recorded = len(pickle.loads(dump()).get("entries", ())) if dump else None
    dist.destroy_process_group()
    return {"total": total, "backend": backend, "recorded": recorded, "environ": dict(os.environ)}


def first_use() -> dict[str, Any]:
    """Use CUDA for the first time, which is when torch reads the allocator's settings."""
    values, pinned = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 10).pin_memory()
    assert (values[: 1 << 10] + pinned.to("cuda", non_blocking=True)).sum().item() == 2 << 10
    return {"backend": torch.cuda.get_allocator_backend()}


class Slow(Dataset[torch.Tensor]):
    """Samples that come from a slow place."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.full((4096,), float(index % 7))


def load(steps: str) -> None:
    """Train from slow samples; with a GPU they are pinned, and copied while it works for 30 ms a step."""
    model = torch.nn.Linear(4096, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = iter(DataLoader(Slow(), batch_size=16, pin_memory=CUDA))
    matrix = torch.ones(4096, 4096, device="cuda") if CUDA else None
    for _ in range(int(steps)):
        batch = next(batches)
        assert batch.is_pinned() == CUDA
        optimizer.zero_grad()
        model(batch.to(DEVICE, non_blocking=True)).mean().backward()
        end = time.perf_counter() + 0.03
        while matrix is not None and time.perf_counter() < end:
            matrix = torch.mm(matrix, matrix).clamp_(max=1)
            torch.cuda.synchronize()
        time.sleep(max(0.0, end - time.perf_counter()))
        optimizer.step()


if __name__ == "__main__":
    found = globals()[sys.argv[1]](*sys.argv[2:])
    if found is not None:
        print(json.dumps(found), flush=True)
