"""What a GPU's memory holds beside a program's tensors: libraries, communicators, fragmentation."""

from launcher.fit.fit_model import FitRequest, Range
from launcher.fit.memory_moment import NOTHING, make_range

MIB = 2**20
CUBLAS = Range(0, 32 * MIB, 64 * MIB)
"""Workspaces of cuBLAS, in torch's allocator: 32 MiB for each thread that multiplies on Hopper, 8 before
(CUBLAS_WORKSPACE_CONFIG's defaults; aten/src/ATen/cuda/CublasHandlePool.cpp)."""
CONTEXT = Range(400 * MIB, 700 * MIB, 1024 * MIB)
"""CUDA's context and the kernels of torch and its libraries, outside torch's allocator: 0.5 to 1 GiB."""
NCCL = Range(300 * MIB, 1024 * MIB, 2048 * MIB)
"""Buffers of NCCL's communicators: 1 to 2 GiB; less for one communicator within a node, the low end."""
EXPANDABLE, FIXED = (0.01, 0.03, 0.05), (0.01, 0.08, 0.15)
"""Share of reserved memory that no tensor fills: 3 to 5% with expandable segments, 10 to 15% without
(docs/allocator.md)."""
PROCESS = Range(300 * MIB, 600 * MIB, 1024 * MIB)
"""Resident memory of Python with torch, of a rank that computes on CPUs."""


def estimate_workspaces(request: FitRequest) -> Range:
    """Estimate the workspaces of libraries in torch's allocator."""
    return CUBLAS if request.device.kind == "gpu" else NOTHING


def estimate_context(request: FitRequest) -> Range:
    """Estimate what is outside torch's allocator."""
    if request.device.kind != "gpu":
        return PROCESS
    layout = request.layout
    groups = sum(size > 1 for size in (layout.dp * layout.cp, layout.tp, layout.pp, layout.ep))
    return (
        CONTEXT + Range(min(groups * NCCL.low, NCCL.expected), NCCL.expected, NCCL.high)
        if groups
        else CONTEXT
    )


def estimate_fragmentation(request: FitRequest, allocated: Range) -> Range:
    """Estimate what torch reserves and no tensor fills."""
    if request.device.kind != "gpu":
        return NOTHING
    low, expected, high = EXPANDABLE if request.settings.expandable_segments else FIXED
    return make_range(low * allocated.low, expected * allocated.expected, high * allocated.high)
