"""Speed: tokens/s, TFLOPS and MFU, against published or measured peaks."""

import time
from dataclasses import dataclass, field

import torch

from launcher.programs.dimensions import ModelConfig, count_flops

PEAKS = (
    ("GB300", 2500.0),  # NVIDIA GB300 NVL72 data sheet: 5 PFLOPS a GPU with sparsity
    ("B300", 2250.0),  # NVIDIA HGX B300 data sheet: 36 PFLOPS for 8, with sparsity
    ("GB200", 2500.0),  # NVIDIA GB200 NVL72 data sheet: 5 PFLOPS a GPU with sparsity
    ("B200", 2250.0),  # NVIDIA HGX B200 data sheet: 36 PFLOPS for 8, with sparsity
    ("H200 NVL", 835.0),  # NVIDIA H200 NVL data sheet: 1,671 with sparsity
    ("H200", 989.0),  # NVIDIA H200 data sheet: 1,979 with sparsity
    ("GH200", 989.0),  # NVIDIA GH200 data sheet: 1,979 with sparsity
    ("H100 PCIe", 756.0),  # NVIDIA H100 data sheet: 1,513 with sparsity
    ("H100 NVL", 835.0),  # NVIDIA H100 NVL data sheet: 1,671 with sparsity
    ("H100", 989.0),  # NVIDIA H100 data sheet (SXM): 1,979 with sparsity
    ("H800", 989.0),  # the H100 with a slower NVLink
    ("H20", 148.0),  # NVIDIA H20 data sheet
    ("A100", 312.0),  # NVIDIA A100 data sheet
    ("A800", 312.0),  # the A100 with a slower NVLink
    ("A40", 149.7),  # NVIDIA A40 data sheet: 299.4 with sparsity
    ("L40S", 362.0),  # NVIDIA L40S data sheet: 733 with sparsity
    ("L40", 181.0),  # NVIDIA L40 data sheet
    ("A10G", 70.0),  # AWS's data sheet of the A10G: 140 with sparsity
    ("A10", 125.0),  # NVIDIA A10 data sheet
    ("L4", 121.0),  # NVIDIA L4 data sheet: 242 with sparsity
    ("A30", 165.0),  # NVIDIA A30 data sheet
    ("V100 PCIE", 112.0),  # NVIDIA V100 data sheet; fp16, as it has no bf16
    ("V100", 125.0),  # NVIDIA V100 data sheet (SXM2); fp16, as it has no bf16
    ("T4", 65.0),  # NVIDIA T4 data sheet; fp16, as it has no bf16
    ("RTX A6000", 154.8),  # NVIDIA RTX A6000 data sheet: 309.7 with sparsity
    ("RTX 6000 Ada", 364.2),  # NVIDIA RTX 6000 Ada data sheet: 728.5 with sparsity
    ("RTX PRO 6000", 503.8),  # NVIDIA RTX PRO 6000 Blackwell data sheet
    ("RTX 5090", 209.5),  # NVIDIA RTX Blackwell white paper, with sums in fp32
    ("RTX 4090", 165.2),  # NVIDIA Ada white paper, with sums in fp32
    ("RTX 3090", 71.0),  # NVIDIA GA102 white paper, with sums in fp32
    ("MI300X", 1307.4),  # AMD Instinct MI300X data sheet
)
"""Dense bf16 TFLOPS by a part of the device's name; the first whose words all occur."""


def find_peak(name: str) -> float | None:
    """Give the published dense bf16 peak, in TFLOPS, of a GPU by its name; None if unknown."""
    words = name.replace("-", " ").split()
    return next((peak for part, peak in PEAKS if set(part.split()) <= set(words)), None)


def measure_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Measure the TFLOPS of a square matrix product on a GPU, in place of a peak that is not published."""
    size = 8192
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return best


@dataclass(frozen=True, slots=True)
class Peak:
    """What MFU is measured against."""

    tflops: float
    origin: str
    """Where the figure comes from, for people."""


def choose_peak(given: float | None, device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Take the given peak, the published one, or a measured one; None for a CPU if none is given.

    A product of small matrices is no peak of a CPU: training would exceed it.
    """
    if given is not None:
        return Peak(given, "given")
    if device.type != "cuda":
        return None
    published = find_peak(torch.cuda.get_device_name(device))
    if published is not None:
        return Peak(published, "published dense bf16")
    name = str(dtype).removeprefix("torch.")
    return Peak(measure_peak(device, dtype), f"measured by a {name} matrix product")


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed since the last log line."""

    tokens: float
    """Tokens a second, all ranks together."""
    tflops: float
    """TFLOPS of a rank, with what activation checkpointing computes again."""
    mfu: float | None
    """Share of the peak that the model itself needed, without recomputation; None without a peak."""


@dataclass(slots=True)
class SpeedMeter:
    """Counts tokens over time."""

    model: ModelConfig
    seq_len: int
    recompute: bool
    world_size: int
    peak: Peak | None
    tokens: int = 0
    start: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        """Begin a new interval: after a log line, a checkpoint, or the like."""
        self.tokens, self.start = 0, time.perf_counter()

    def read_speed(self) -> Speed:
        """Give the speed of this interval, and begin the next."""
        rate = self.tokens / (time.perf_counter() - self.start)
        self.restart()
        needed = count_flops(self.model, self.seq_len) * rate / self.world_size / 1e12
        done = count_flops(self.model, self.seq_len, recompute=self.recompute) * rate / self.world_size / 1e12
        return Speed(rate, done, needed / self.peak.tflops if self.peak else None)


def describe_gpu_memory(device: torch.device) -> str:
    """Give the most that tensors took of a GPU and that the allocator held, and what the GPU has in use now.

    The last counts what is outside torch's allocator, too: CUDA's context, NCCL's buffers, other processes.
    """
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    peaks = f"{allocated / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} reserved at most"
    return f"memory  {peaks}, {(total - free) / 2**30:.2f} of {total / 2**30:.2f} in use"
