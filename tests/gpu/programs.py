"""What the ranks of the GPU tests run: `programs.py NAME ARGUMENT …`; most print JSON in their last line."""

import json
import os
import pickle
import random
import statistics
import sys
import time
from pathlib import Path
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


def litter(steps: str, micro_steps: str, evaluations: str) -> dict[str, float]:
    """Leave an 8 MB tensor in a cycle in each micro-step, which only the collector frees, and containers."""
    model = torch.nn.Linear(64, 64, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run_batch() -> torch.Tensor:
        activations: dict[str, object] = {"tensor": torch.ones(2_000_000, device=DEVICE)}
        activations["self"] = activations
        alive = [[number] for number in range(2000)]
        loss: torch.Tensor = model(torch.ones(16, 64, device=DEVICE)).square().mean() + 0 * len(alive)
        return loss

    seconds = []
    for _ in range(int(steps)):
        began = time.perf_counter()
        for _ in range(int(micro_steps)):
            run_batch().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if CUDA:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    with torch.no_grad():
        for _ in range(int(evaluations)):
            run_batch()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))
    # The policies begin after 30 steps.
    return {"step_ms": 1e3 * statistics.median(seconds[30:]), "resident_mib": resident, **read_memory()}


def fill(batch: str, steps: str, cap_gib: str) -> dict[str, Any]:
    """Train on sequences of varying length, the same lengths each time, within a cap of the GPU's memory."""
    if CUDA:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, float(cap_gib) * 2**30 / total))
    torch.manual_seed(0)
    chance = random.Random(0)
    fits = True
    try:
        layer = torch.nn.TransformerEncoderLayer(512, 8, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(int(steps)):
            # Most are short, some have 1,024 tokens.
            length = max(64, 32 * round(32 * chance.random() ** 2))
            model(torch.randn(int(batch), length, 512, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError:
        fits = False
    return {"fits": fits, **read_memory()}


def read_memory() -> dict[str, float]:
    """The most that tensors had of the GPU, and that the allocator held for them."""
    if not CUDA:
        return {}
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(("allocated_mib", "reserved_mib"), (peak / 2**20 for peak in peaks), strict=True))


if __name__ == "__main__":
    found = globals()[sys.argv[1]](*sys.argv[2:])
    if found is not None:
        print(json.dumps(found), flush=True)
