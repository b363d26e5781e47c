"""Types of GPUs: memory, published peaks, bandwidth, and how many NVLink connects.

Memory is what the driver reports (NVML's `total`, which nvidia-smi shows); torch sees about 0.7% less, since
the driver keeps some. Peaks are dense: data sheets give those with sparsity, which are twice as high.
"""

import re
from dataclasses import dataclass, replace

WORD = re.compile(r"\d+gb?|[a-z]+\d+[a-z]*|[a-z]+|\d+")
SLICE = re.compile(r"\b(mig|grid)\b|\d+[abcq]\b(?!\w)", re.IGNORECASE)
"""A part of a GPU (MIG) or a virtual one (vGPU), whose share of the peak the name does not say."""
KIN = {"ti", "super", "laptop", "max", "mobile", "d", "workstation"}
"""Words of other products whose names begin alike."""


BLACKWELL = ("b200", "b300", "gb200", "gb300")
HOPPER = ("h100", "h200", "h800", "h20", "gh200")
"""First words of names."""


@dataclass(frozen=True, slots=True)
class GpuType:
    """A product; TFLOPS are dense, None if the hardware cannot compute so."""

    name: str
    """The words of the driver's name that tell it from others, in lower case; also its short name."""
    memory_mib: int
    fp32: float
    """Without tensor cores, as torch computes fp32 unless it is told otherwise."""
    tf32: float | None
    bf16: float
    """Of fp16 where there is no bf16."""
    fp8: float | None
    bandwidth: int
    """Of its memory, in GB/s."""
    nvlink_domain: int
    """GPUs that NVLink connects in the usual server, this one included; 1 without NVLink."""
    source: str

    @property
    def capability(self) -> tuple[int, int]:
        """Its generation's compute capability, about (developer.nvidia.com/cuda-gpus)."""
        first = self.name.split()[0]
        if first in BLACKWELL or first in HOPPER:
            return (10, 0) if first in BLACKWELL else (9, 0)
        return (7, 0) if self.tf32 is None else (8, 9) if self.fp8 else (8, 0)

    def find_precision_peak(self, precision: str) -> float:
        """Give the TFLOPS at a precision of `TrainingSettings`; without fp8, bf16 is what is computed in."""
        if precision == "fp32":
            return self.fp32
        return self.fp8 or self.bf16 if precision == "fp8" else self.bf16


GPU_TYPES = (
    GpuType("gb300", 284208, 80, 1250, 2500, 5000, 8000, 72, "NVIDIA GB300 NVL72 data sheet"),
    GpuType("b300", 275040, 75, 1125, 2250, 4500, 8000, 8, "NVIDIA HGX B300 data sheet"),
    GpuType("gb200", 189471, 80, 1250, 2500, 5000, 8000, 72, "NVIDIA GB200 NVL72 data sheet"),
    GpuType("b200", 183359, 75, 1125, 2250, 4500, 7700, 8, "NVIDIA HGX B200 data sheet"),
    GpuType("gh200 144g", 147456, 67, 494, 989, 1979, 4900, 1, "NVIDIA GH200 data sheet"),
    GpuType("gh200", 97871, 67, 494, 989, 1979, 4000, 1, "NVIDIA GH200 data sheet"),
    GpuType("h200 nvl", 143771, 60, 417, 835, 1671, 4800, 4, "NVIDIA H200 data sheet"),
    GpuType("h200", 143771, 67, 494, 989, 1979, 4800, 8, "NVIDIA H200 data sheet"),
    GpuType("h100 pcie", 81559, 51, 378, 756, 1513, 2000, 2, "NVIDIA H100 data sheet"),
    GpuType("h100 nvl", 95830, 60, 417, 835, 1671, 3900, 2, "NVIDIA H100 NVL data sheet"),
    GpuType("h100", 81559, 67, 494, 989, 1979, 3350, 8, "NVIDIA H100 data sheet (SXM)"),
    GpuType("h800", 81559, 67, 494, 989, 1979, 3350, 8, "the H100 with a slower NVLink"),
    GpuType("h20", 97871, 44, 74, 148, 296, 4000, 8, "NVIDIA H20 data sheet"),
    GpuType("a100 pcie 40gb", 40960, 19.5, 156, 312, None, 1555, 2, "NVIDIA A100 data sheet"),
    GpuType("a100 pcie", 81920, 19.5, 156, 312, None, 1935, 2, "NVIDIA A100 data sheet"),
    GpuType("a100 40gb", 40960, 19.5, 156, 312, None, 1555, 8, "NVIDIA A100 data sheet"),
    GpuType("a100", 81920, 19.5, 156, 312, None, 2039, 8, "NVIDIA A100 data sheet"),
    GpuType("a800", 81920, 19.5, 156, 312, None, 2039, 8, "the A100 with a slower NVLink"),
    GpuType("a40", 46068, 37.4, 74.8, 149.7, None, 696, 2, "NVIDIA A40 data sheet"),
    GpuType("a30", 24576, 10.3, 82, 165, None, 933, 2, "NVIDIA A30 data sheet"),
    GpuType("a10g", 23028, 35, 35, 70, None, 600, 1, "AWS's data sheet of the A10G"),
    GpuType("a10", 23028, 31.2, 62.5, 125, None, 600, 1, "NVIDIA A10 data sheet"),
    GpuType("l40s", 46068, 91.6, 183, 362, 733, 864, 1, "NVIDIA L40S data sheet"),
    GpuType("l40", 46068, 90.5, 90.5, 181, 362, 864, 1, "NVIDIA L40 data sheet"),
    GpuType("l4", 23034, 30.3, 60, 121, 242, 300, 1, "NVIDIA L4 data sheet"),
    GpuType("t4", 15360, 8.1, None, 65, None, 320, 1, "NVIDIA T4 data sheet; fp16"),
    GpuType("v100 pcie 32gb", 32768, 14, None, 112, None, 900, 1, "NVIDIA V100 data sheet; fp16"),
    GpuType("v100 pcie", 16384, 14, None, 112, None, 900, 1, "NVIDIA V100 data sheet; fp16"),
    GpuType("v100 16gb", 16384, 15.7, None, 125, None, 900, 8, "NVIDIA V100 data sheet (SXM2); fp16"),
    GpuType("v100", 32768, 15.7, None, 125, None, 900, 8, "NVIDIA V100 data sheet (SXM2); fp16"),
    GpuType("rtx pro 6000", 97887, 125, 252, 503.8, 1007.6, 1792, 1, "NVIDIA RTX PRO 6000 data sheet"),
    GpuType("rtx 6000 ada", 49140, 91.1, 182.1, 364.2, 728.5, 960, 1, "NVIDIA RTX 6000 Ada data sheet"),
    GpuType("rtx a6000", 49140, 38.7, 77.4, 154.8, None, 768, 2, "NVIDIA RTX A6000 data sheet"),
    GpuType("rtx 5090", 32607, 104.8, 104.8, 209.5, 419, 1792, 1, "NVIDIA RTX Blackwell white paper"),
    GpuType("rtx 4090", 24564, 82.6, 82.6, 165.2, 330.3, 1008, 1, "NVIDIA Ada white paper"),
    GpuType("rtx 3090", 24576, 35.6, 35.6, 71, None, 936, 2, "NVIDIA GA102 white paper"),
    GpuType("mi300x", 196592, 163.4, 653.7, 1307.4, 2614.9, 5300, 8, "AMD Instinct MI300X data sheet"),
)
"""The first whose words all occur in a name is meant. bf16 products with sums in fp32."""


def split_words(name: str) -> set[str]:
    """Split a product's name into its words in lower case: `NVIDIA A100-SXM4-40GB`, `rtx4090`."""
    words = WORD.findall(re.sub(r"\b(rtx|pro)(?=\d)", r"\1 ", name.lower()))
    return set(words)


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
