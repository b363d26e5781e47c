"""Work of a GPU: a matrix product in bf16, copies to and from main memory, copies to the next GPU."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.programs.cpu_work import hash_tensor, make_matrix, read_cpus
from launcher.programs.work_processes import Measurement

SIZES = (8192, 4096, 2048, 1024)
"""Rows and columns of the matrices; the largest of which five take an eighth of the free memory at most."""
WARM_UP = 0.2
"""Seconds before the clocks are where they stay."""
WINDOW = 0.1
COPY_BYTES, PEER_BYTES = 128 << 20, 256 << 20
COPIES = 4
"""Copies of a repeat; the best repeat counts."""


@dataclass(slots=True)
class GpuState:
    """A GPU, by torch's index."""

    index: int
    device: str = ""
    """Its name, once it is known."""
    store: Any = None

    @property
    def where(self) -> str:
        """For people."""
        return f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """What CUDA says of a GPU."""

    index: int
    name: str
    uuid: str
    pci: str


def count_torch_gpus(_: object) -> int:
    """Return how many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start_gpu(state: GpuState) -> GpuIdentity:
    """Make the GPU's context, next to it if that is known, and return what it is."""
    torch.cuda.set_device(state.index)
    found = torch.cuda.get_device_properties(state.index)
    numbers = [getattr(found, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    pci = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    move_next_to(pci)
    torch.zeros(1, device=f"cuda:{state.index}")
    torch.cuda.synchronize()
    state.device = found.name
    uuid = str(getattr(found, "uuid", "")).removeprefix("GPU-")
    return GpuIdentity(state.index, found.name, f"GPU-{uuid}" if uuid else "", pci)


def move_next_to(pci: str) -> None:
    """Stay on the allowed CPUs of the GPU's NUMA node, so that pinned memory is there."""
    cpus = set(read_cpus(Path(f"/sys/bus/pci/devices/{pci}/local_cpulist"))) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)


def choose_size(free: int) -> int:
    """Return rows and columns of the matrices for so many bytes of free memory."""
    fitting = [size for size in SIZES if 5 * 2 * size * size <= free // 8]
    return fitting[0] if fitting else SIZES[-1]


def measure_gpu_matmul(state: GpuState, seconds: float) -> Measurement:
    """Multiply bf16 matrices; the median of windows, in TFLOPS, since clocks that fall under load count.

    Each window's last product has to have the bits of the first.
    """
    device = torch.device("cuda", state.index)
    size = choose_size(torch.cuda.mem_get_info(device)[0])
    left, right = (make_matrix(size, seed, torch.bfloat16, device) for seed in (12345, 54321))
    first = left @ right
    product = torch.empty_like(first)
    different = torch.zeros((), dtype=torch.int64, device=device)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=product)
        different.add_((product != first).any())

    time_gpu_work(lambda: multiply(3), device)
    count = max(1, int(3 * WINDOW / time_gpu_work(lambda: multiply(3), device)))
    begin, rates = time.monotonic(), []
    while (passed := time.monotonic() - begin) < seconds:
        rate = count / time_gpu_work(lambda: multiply(count), device)
        rates += [rate] if passed >= min(WARM_UP, seconds / 2) else []
    is_same = not int(different.item())
    value = statistics.median(rates or [rate]) * 2 * size**3 / 1e12
    return Measurement(
        "matmul",
        state.where,
        value if is_same else None,
        "TFLOPS",
        hash_tensor(first),
        "" if is_same else "its results differ from one product to the next",
        device=state.device,
    )


def time_gpu_work(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds that a GPU takes for what a function gives it to do."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return max(time.perf_counter() - begin, 1e-9)


def measure_copies(state: GpuState, seconds: float) -> tuple[Measurement, Measurement]:
    """Copy from pinned memory to the GPU and back; the bits have to come back as they were."""
    device = torch.device("cuda", state.index)
    size = min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 16)
    here = torch.arange(size // 8, dtype=torch.int64).pin_memory()
    back = torch.empty_like(here).pin_memory()
    there = torch.empty(here.shape, dtype=here.dtype, device=device)
    to_gpu = copy_for(seconds / 2, device, there, here)
    from_gpu = copy_for(seconds / 2, device, back, there)
    problem = "" if torch.equal(here, back) else "what was copied to it came back with other bits"
    return (
        Measurement("copy_to", state.where, to_gpu, "GB/s", problem=problem, device=state.device),
        Measurement("copy_from", state.where, from_gpu, "GB/s", device=state.device),
    )


def measure_peer_copy(state: GpuState, peer: int, seconds: float) -> Measurement:
    """Copy from this GPU to another one of the node."""
    here, there = torch.device("cuda", state.index), torch.device("cuda", peer)
    free = min(torch.cuda.mem_get_info(device)[0] for device in (here, there))
    source = torch.arange(min(PEER_BYTES, free // 16) // 8, dtype=torch.int64, device=here)
    target = torch.empty(source.shape, dtype=source.dtype, device=there)
    value = copy_for(seconds, here, target, source)
    is_same = bool(torch.equal(source.cpu(), target.cpu()))
    is_direct = torch.cuda.can_device_access_peer(here, there)
    return Measurement(
        "peer_copy",
        f"GPU {state.index}-{peer}",
        value if is_same else None,
        "GB/s",
        problem="" if is_same else "what was copied arrived with other bits",
        device=f"{state.device}, {'peer access' if is_direct else 'by main memory'}",
    )


def copy_for(seconds: float, device: torch.device, target: torch.Tensor, source: torch.Tensor) -> float:
    """Copy for some seconds; return GB/s, the best of repeats."""

    def copy() -> None:
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)

    time_gpu_work(copy, device)
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        best = max(best, COPIES / time_gpu_work(copy, device))
    return best * source.numel() * source.element_size() / 1e9
