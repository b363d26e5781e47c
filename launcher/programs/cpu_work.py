"""Work of a CPU: a matrix product and copies in memory, by a process that is pinned to one physical core."""

import ctypes
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.programs.work_processes import Measurement

SIZE = 512
"""Rows and columns of the matrices: 1 MiB each in fp32, about the second-level cache."""
TILE = 1024
WINDOW = 0.1
"""Seconds of a repeat: many of the scheduler's slices, so that a process on the same CPU shows in each."""
COPY_WINDOW = 0.05
SMALLEST, LARGEST = 8 << 20, 64 << 20
"""Bytes of each of a core's two buffers."""
SYS = Path("/sys/devices/system")


@dataclass(slots=True)
class CpuState:
    """A physical core."""

    cpu: int
    device: str
    buffer: int
    """Bytes of each of its two buffers for copies."""
    store: Any = None
    """Where a group's processes meet, if this one has opened it."""

    @property
    def where(self) -> str:
        """For people."""
        return f"CPU {self.cpu}"


def pin_to_cpu(state: CpuState) -> None:
    """Stay on the core's CPU, with one thread; raises OSError."""
    os.sched_setaffinity(0, {state.cpu})
    torch.set_num_threads(1)


def make_matrix(size: int, seed: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return a square matrix of values in [-1, 1) that follow from whole numbers, the same on any machine.

    A large one is made of equal blocks of TILE rows and columns.
    """
    side = min(size, TILE)
    numbers = torch.arange(side * side, dtype=torch.int64) * 1103515245 + seed
    tile = (((numbers >> 8) % 4099).to(torch.float32) / 2049.5 - 1).to(dtype).reshape(side, side)
    return tile.to(device or "cpu").repeat(size // side, size // side)


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return a checksum of a tensor's bits, with its size: `512:9f86d081884c7d65`."""
    here = tensor.detach().cpu().contiguous()
    size = here.numel() * here.element_size()
    data = (ctypes.c_char * size).from_address(here.data_ptr())  # torch needs numpy for its own ways
    return f"{tensor.shape[0]}:{hashlib.sha256(data).hexdigest()[:16]}"


def measure_cpu_matmul(state: CpuState, seconds: float) -> Measurement:
    """Multiply fp32 matrices; the best of repeats of WINDOW seconds, in TFLOPS of the wall clock."""
    left, right = (make_matrix(SIZE, seed, torch.float32) for seed in (12345, 54321))
    first, product = left @ right, torch.empty(SIZE, SIZE)
    best, is_same, end = (0.0, 0.0), True, time.monotonic() + seconds
    while time.monotonic() < end:
        begin, used = time.monotonic(), time.thread_time()
        rate = repeat_for(WINDOW, lambda: torch.mm(left, right, out=product))
        best = max(best, (rate, (time.thread_time() - used) / (time.monotonic() - begin)))
        is_same = is_same and torch.equal(first, product)
    problem = "" if is_same else "its results differ from one product to the next"
    return Measurement(
        "matmul",
        state.where,
        best[0] * 2 * SIZE**3 / 1e12 if is_same else None,
        "TFLOPS",
        hash_tensor(first),
        problem,
        device=state.device,
        share=round(min(best[1], 1.0), 3),
    )


def measure_memory_bandwidth(state: CpuState, seconds: float) -> float:
    """Copy between two buffers that no cache holds; bytes read and written each second, best of repeats."""
    source = torch.ones(state.buffer // 4)
    target = torch.zeros(state.buffer // 4)
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        best = max(best, repeat_for(COPY_WINDOW, lambda: target.copy_(source)))
    return best * 2 * state.buffer


def repeat_for(seconds: float, work: Callable[[], object]) -> float:
    """Call a function for some seconds; return calls each second."""
    count, begin = 0, time.monotonic()
    while (passed := time.monotonic() - begin) < seconds:
        work()
        count += 1
    return count / passed


def list_work_cores() -> list[int]:
    """Return one allowed CPU of each physical core."""
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = read_line(SYS / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        first.setdefault(siblings or str(cpu), cpu)
    return sorted(first.values())


def group_by_numa_node(cores: list[int]) -> list[list[int]]:
    """Return the cores of each NUMA node; one group if that cannot be read."""
    groups: dict[int, list[int]] = {}
    nodes = {
        cpu: int(path.parent.name[4:]) for path in SYS.glob("node/node*/cpulist") for cpu in read_cpus(path)
    }
    for core in cores:
        groups.setdefault(nodes.get(core, -1), []).append(core)
    return [groups[node] for node in sorted(groups)]


def choose_buffer(cores: list[int]) -> int:
    """Return bytes of each of a core's two buffers: together four times its share of the last-level cache.

    All cores' buffers take a tenth of the free memory at most.
    """
    cache = SYS / f"cpu/cpu{cores[0]}/cache/index3"
    digits = read_line(cache / "size").removesuffix("K")
    sharing = len(read_cpus(cache / "shared_cpu_list")) or 1
    share = int(digits) * 1024 // sharing if digits.isdecimal() else 0
    return max(1 << 20, min(max(2 * share, SMALLEST), LARGEST, read_available_bytes() // 20 // len(cores)))


def read_available_bytes() -> int:
    """Return bytes that are available; 1 GiB if that cannot be read."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else 1 << 30


def name_cpu(cpu: int) -> str:
    """Return the processor's name; a hybrid one's small cores are a kind of their own."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    small = cpu in read_cpus(SYS.parent / "cpu_atom/cpus")
    return f"{names[0] if names else os.uname().machine}{', efficiency core' if small else ''}"


def read_cpus(path: Path) -> list[int]:
    """Read a file with a list of CPUs, as `0-3,8`; empty if there is none."""
    ranges = (part.partition("-") for part in read_line(path).split(",") if part)
    return [cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)]


def read_line(path: Path) -> str:
    """Return a file's text without spaces around it; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def format_cpus(cpus: list[int]) -> str:
    """Return ascending CPUs as a list of ranges: `0-3,8`."""
    pieces: list[list[int]] = []
    for cpu in cpus:
        if pieces and cpu == pieces[-1][1] + 1:
            pieces[-1][1] = cpu
        else:
            pieces.append([cpu, cpu])
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in pieces)
