"""Types of GPUs: memory, published peaks, bandwidth, and how many NVLink connects.

Memory is what the driver reports (NVML's `total`, which nvidia-smi shows); torch sees about 0.7% less, since
the driver keeps some. Peaks are dense: data sheets give those with sparsity, which are twice as high.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.codec import load

WORD = re.compile(r"\d+gb?|[a-z]+\d+[a-z]*|[a-z]+|\d+")
SLICE = re.compile(r"\b(mig|grid)\b|\d+[abcq]\b(?!\w)", re.IGNORECASE)
"""A part of a GPU (MIG) or a virtual one (vGPU), whose share of the peak the name does not say."""
KIN = {"ti", "super", "laptop", "max", "mobile", "d", "workstation"}
"""Words of other products whose names begin alike."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """A product; TFLOPS are dense, None if the hardware cannot compute so."""

    name: str
    """The words of the driver's name that tell it from others, in lower case; also its short name."""
    memory_mib: int
    fp32: float
    """Without tensor cores, as torch computes fp32 unless it is told otherwise."""
    bf16: float
    """Of fp16 where there is no bf16."""
    nvlink_domain: int
    """GPUs that NVLink connects in the usual server, this one included; 1 without NVLink."""
    source: str
    capability: tuple[int, int]
    """Its compute capability (developer.nvidia.com/cuda-gpus)."""
    tf32: float | None = None
    fp8: float | None = None
    runs: str = ""
    """The GPU whose published runs say how much of the peak is reached; empty if there are none."""

    def find_precision_peak(self, precision: str) -> float:
        """Give the TFLOPS at a precision of `FitConfig`; without fp8, bf16 is what is computed in."""
        if precision == "fp32":
            return self.fp32
        return self.fp8 or self.bf16 if precision == "fp8" else self.bf16


GPU_TYPES = load(tuple[GpuType, ...], Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""The first whose words all occur in a name is meant. bf16 products with sums in fp32."""


def split_words(name: str) -> set[str]:
    """Split a product's name into its words in lower case: `NVIDIA A100-SXM4-40GB`, `rtx4090`."""
    words = WORD.findall(re.sub(r"\b(rtx|pro)(?=\d)", r"\1 ", name.lower()))
    return set(words)


def find_largest_gpu(name: str) -> GpuType | None:
    """Find the GPU that SLURM's type names, of several the largest: `h100` may be an H100 NVL."""
    words = split_words(name)
    found = [find_gpu(name), *(gpu for gpu in GPU_TYPES if words and words <= set(gpu.name.split()))]
    return max(filter(None, found), key=lambda one: one.memory_mib, default=None)


def find_gpu(name: str) -> GpuType | None:
    """Find a GPU by the driver's name or a short one (`H100`, `A100-40GB`); None if it is not in the table.

    An A100 and a V100 without a size have 80 and 32 GB. Another size in the name counts in place of the
    table's. A part of a GPU or a virtual one is not found: the name does not say its peak.
    """
    words = split_words(name)
    if SLICE.search(name):
        return None
    found = next((gpu for gpu in GPU_TYPES if set(gpu.name.split()) <= words), None)
    if found is None or KIN & words - set(found.name.split()):
        return None
    sizes = [int(word.rstrip("gb")) for word in words if re.fullmatch(r"[1-9]\d{0,3}gb", word)]
    # A GH200's name says the memory of its CPU.
    if len(sizes) != 1 or "gh200" in words or abs(sizes[0] * 1024 / found.memory_mib - 1) < 0.1:
        return found
    return replace(found, memory_mib=sizes[0] * 1024)
