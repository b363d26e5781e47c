"""What one device does when it is measured, a GPU or all CPUs that this process may use together.

By itself, and in a group of a node's GPUs or of two nodes' devices: NCCL for GPUs, gloo for CPUs.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from launcher.programs.measurement import GpuIdentity, Measurement

SIZES = (8192, 4096, 2048, 1024)
"""Rows and columns of the matrices on a GPU; the largest of which five take an eighth of the free memory."""
CPU_SIZE = 2048
TILE = 1024
WARM_UP = 0.2
"""Seconds before a GPU's clocks are where they stay."""
WINDOW = 0.1
"""Seconds of a repeat."""
COPY_BYTES, CPU_BYTES = 128 << 20, 512 << 20
COPIES = 4
"""Copies of a repeat on a GPU; the best repeat counts."""
REPEATS = 5
"""Repeats of an all_reduce, the best of which counts."""
GROUP_BYTES, CPU_GROUP_BYTES = 512 << 20, 16 << 20
SIOCGIFADDR = 0x8915
LONGEST = 300
"""Characters of an error."""


class NotMeasuredError(Exception):
    """Why something was not measured, if that says nothing of the device."""


def describe_error(error: Exception) -> str:
    """Return an error on one line, cut off if it is long."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


@dataclass(slots=True)
class Device:
    """A GPU by torch's index, or all CPUs of this process together (None)."""

    index: int | None
    name: str = ""
    """Kind of device, once it is known."""
    store: Any = None
    """Where a group's processes meet, if this one has opened it."""

    @property
    def where(self) -> str:
        """For people."""
        return "CPU" if self.index is None else f"GPU {self.index}"

    @property
    def torch(self) -> torch.device:
        """For torch."""
        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)


def count_torch_gpus(_: object) -> int:
    """Return how many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start_gpu(device: Device) -> GpuIdentity:
    """Make the GPU's context, on the CPUs next to it if those are known, and return what it is."""
    torch.cuda.set_device(device.torch)
    found = torch.cuda.get_device_properties(device.torch)
    numbers = [getattr(found, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    pci = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    # Pinned memory is to be in the GPU's NUMA node.
    with contextlib.suppress(OSError):
        text = Path(f"/sys/bus/pci/devices/{pci}/local_cpulist").read_text().strip()
        ranges = [part.partition("-") for part in text.split(",") if part]
        near = {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)}
        if near := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, near)
    torch.zeros(1, device=device.torch)
    torch.cuda.synchronize()
    device.name = found.name
    uuid = str(getattr(found, "uuid", "")).removeprefix("GPU-")
    return GpuIdentity(device.index or 0, found.name, f"GPU-{uuid}" if uuid else "", pci)


def name_processor() -> str:
    """Return the processor's name, or the machine's kind."""
    name = os.uname().machine
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return name


def make_matrix(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a square matrix of values in [-1, 1) that follow from whole numbers, the same on any machine.

    A large one is made of equal blocks of TILE rows and columns.
    """
    side = min(size, TILE)
    numbers = torch.arange(side * side, dtype=torch.int64) * 1103515245 + seed
    tile = (((numbers >> 8) % 4099).to(torch.float32) / 2049.5 - 1).to(dtype).reshape(side, side)
    return tile.to(device).repeat(size // side, size // side)


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return a checksum of a tensor's bits, with its size: `512:9f86d081884c7d65`."""
    here = tensor.detach().cpu().contiguous()
    size = here.numel() * here.element_size()
    data = (ctypes.c_char * size).from_address(here.data_ptr())  # torch needs numpy for its own ways
    return f"{tensor.shape[0]}:{hashlib.sha256(data).hexdigest()[:16]}"


def choose_size(free: int) -> int:
    """Return rows and columns of a GPU's matrices for so many bytes of free memory."""
    return next((size for size in SIZES if 5 * 2 * size * size <= free // 8), SIZES[-1])


def measure_matmul(device: Device, seconds: float) -> list[Measurement]:
    """Multiply matrices, bf16 on a GPU and fp32 on CPUs, in TFLOPS by the clock on the wall.

    The median of windows counts on a GPU, since clocks that fall under load count; the best on CPUs, which
    others use for moments. On a GPU each window's last product has to have the bits of the first; on CPUs the
    order of the sums depends on the threads.
    """
    is_gpu = device.index is not None
    size = choose_size(torch.cuda.mem_get_info(device.index)[0]) if is_gpu else CPU_SIZE
    dtype = torch.bfloat16 if is_gpu else torch.float32
    left, right = (make_matrix(size, seed, dtype, device.torch) for seed in (12345, 54321))
    first = left @ right
    product = torch.empty_like(first)
    different = torch.zeros((), dtype=torch.int64, device=device.torch)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=product)
        if is_gpu:
            different.add_((product != first).any())

    warm = 3 if is_gpu else 1
    _time_work(lambda: multiply(warm), device)
    count = max(1, int(warm * WINDOW / _time_work(lambda: multiply(warm), device)))
    rates: list[float] = []
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < seconds or not rates:
        rate = count / _time_work(lambda: multiply(count), device)
        if not is_gpu or passed >= min(WARM_UP, seconds / 2):
            rates.append(rate)
    is_same = not int(different.item())
    value = (statistics.median(rates) if is_gpu else max(rates)) * 2 * size**3 / 1e12
    checksum = hash_tensor(first) if is_gpu else ""
    problem = "" if is_same else "its results differ from one product to the next"
    found = value if is_same else None
    return [Measurement("matmul", device.where, found, "TFLOPS", checksum, problem, device=device.name)]


def measure_memory(device: Device, seconds: float) -> list[Measurement]:
    """Copy between two buffers that no cache holds, by all CPUs; GB/s read and written, the best of repeats.

    Both take a tenth of the available memory at most.
    """
    available = 1 << 30
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    source = torch.ones(min(CPU_BYTES, available // 20) // 4)
    value = 2 * _copy_for(seconds, device, torch.zeros_like(source), source)
    return [Measurement("memory", device.where, value, "GB/s", device=device.name)]


def measure_copies(device: Device, seconds: float) -> list[Measurement]:
    """Copy from pinned memory to the GPU and back; the bits have to come back as they were."""
    size = min(COPY_BYTES, torch.cuda.mem_get_info(device.index)[0] // 16)
    here = torch.arange(size // 8, dtype=torch.int64).pin_memory()
    back = torch.empty_like(here).pin_memory()
    there = torch.empty(here.shape, dtype=here.dtype, device=device.torch)
    to_gpu = _copy_for(seconds / 2, device, there, here)
    from_gpu = _copy_for(seconds / 2, device, back, there)
    problem = "" if torch.equal(here, back) else "what was copied to it came back with other bits"
    return [
        Measurement("copy_to", device.where, to_gpu, "GB/s", problem=problem, device=device.name),
        Measurement("copy_from", device.where, from_gpu, "GB/s", device=device.name),
    ]


def _copy_for(seconds: float, device: Device, target: torch.Tensor, source: torch.Tensor) -> float:
    """Copy for some seconds; return GB/s, the best of repeats."""
    copies = 1 if device.index is None else COPIES  # on busy CPUs one takes long enough

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source, non_blocking=True)

    _time_work(copy, device)
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end or not best:
        best = max(best, copies / _time_work(copy, device))
    return best * source.numel() * source.element_size() / 1e9


def _time_work(work: Callable[[], None], device: Device) -> float:
    """Return the seconds that a device takes for what a function gives it to do."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return max(time.perf_counter() - begin, 1e-9)


def synchronize(device: Device) -> None:
    """Wait until a GPU has done what it was told."""
    if device.index is not None:
        torch.cuda.synchronize(device.index)


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that measure together, and where they meet."""

    size: int
    host: str
    port: int
    seconds: float
    """To measure."""
    limit: float
    """Seconds for an operation of the group, and to meet."""
    is_pair: bool = False
    """The group is that of two nodes, whose rank 0 opens the store."""


def open_store(device: Device, size: int) -> int:
    """Open the node's store for a group, and return its port."""
    device.store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    return int(device.store.port)


def measure_all_reduce(device: Device, group: Group, rank: int) -> float:
    """Return the bus bandwidth of all_reduce in GB/s: 2 (n - 1) / n of the bytes over the time.

    The best of REPEATS counts, by the process that is slowest in it. Source: NVIDIA's nccl-tests,
    doc/PERFORMANCE.md. Raises ValueError for wrong sums.
    """
    is_gpu, is_server = device.index is not None, group.is_pair and rank == 0
    limit = timedelta(seconds=group.limit)
    try:
        store = device.store or TCPStore(
            group.host, group.port, group.size, is_master=is_server, wait_for_workers=False, timeout=limit
        )
    except dist.DistNetworkError as error:
        if is_server:  # somebody else has the port
            raise NotMeasuredError(describe_error(error)) from None
        raise
    if not is_gpu and (interface := _find_interface(store, group.host, rank)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend, prefixed = "nccl" if is_gpu else "gloo", PrefixStore("group", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=group.size, timeout=limit)

    def find_largest(number: float) -> float:
        value = torch.tensor([number], dtype=torch.float64, device=device.torch)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value.item())

    def run(count: int) -> float:
        """Return the seconds of some all_reduces of zeros, begun together, on the slowest process."""
        dist.barrier(device_ids=[device.index]) if is_gpu else dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        synchronize(device)
        return find_largest(time.perf_counter() - begin)

    try:
        size = CPU_GROUP_BYTES
        if is_gpu:
            # The same size on all processes: a sixteenth of the smallest free memory at most.
            size = min(GROUP_BYTES, int(-find_largest(-torch.cuda.mem_get_info(device.index)[0])) // 16)
        tensor = torch.zeros(size // 4, device=device.torch)
        run(2)
        once = run(1)
        count = max(1, min(200, int(group.seconds / REPEATS / max(once, 1e-6))))
        best = min(run(count) for _ in range(REPEATS)) / count
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
        wrong = int((tensor != float(group.size)).sum())
        if wrong:
            raise ValueError(f"all_reduce gave {wrong} wrong sums of {tensor.numel()}")
    finally:
        dist.destroy_process_group()
    return 2 * (group.size - 1) / group.size * tensor.numel() * tensor.element_size() / best / 1e9


def _find_interface(store: TCPStore, host: str, rank: int) -> str:
    """Return the network interface towards the peer's node for gloo; empty if there is none.

    gloo by itself takes the address of the host's name, which may be that of loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        mine = ""
        with contextlib.suppress(OSError):
            probe.connect((host if rank else store.get("address").decode(), 9))  # sends nothing
            mine = str(probe.getsockname()[0])
        if rank:
            store.set("address", mine)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == mine:
                    return name
    return ""
