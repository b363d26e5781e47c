"""Peak memory of the fullest GPU of a training job: `estimate_memory`."""

from collections.abc import Sequence
from dataclasses import replace

from launcher.fit.activation_memory import count_in_flight, estimate_activations
from launcher.fit.fit_model import (
    NOTHING,
    FitRequest,
    MemoryEstimate,
    MemoryPart,
    ParallelLayout,
    Range,
    make_range,
    scale_range,
)
from launcher.fit.framework_memory import PART_NAMES, Moment, list_moments
from launcher.fit.parameter_counts import count_stage, list_stages

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
MOST_STAGES = 3
"""Stages that are estimated: the first, the second and the last; those between hold less than the second."""


def estimate_memory(request: FitRequest) -> MemoryEstimate:
    """Estimate the peak memory of the fullest GPU, by parts.

    Of every pipeline stage, moments of a training step are estimated; the highest one of the fullest stage is
    the answer. Low and high ends bound what the formulas leave open; `allocated` of the bundled program is
    held against torch's memory tracker (docs/fit.md). Bytes; raises nothing for dimensions above zero.
    """
    estimates = [estimate_stage(request, *stage) for stage in choose_stages(request)]
    return max(estimates, key=lambda estimate: estimate.total.expected)


def count_kept(request: FitRequest) -> Range:
    """Count the activations between forward and backward of a GPU of the first stage, wherever they are."""
    _, first, count = choose_stages(request)[0]
    kept = estimate_activations(request, count_stage(request, first, count, 0)).kept
    return scale_range(kept, count_in_flight(request, 0))


def choose_stages(request: FitRequest) -> list[tuple[int, int, int]]:
    """Give (stage, first layer, layers) of the stages that can be the fullest."""
    stages = max(1, min(request.layout.pp, request.model.layers))
    every = [(stage, *layers) for stage, layers in enumerate(list_stages(request.model.layers, stages))]
    if len(every) <= MOST_STAGES:
        return every
    return [every[0], every[1], every[-1]]


def estimate_stage(request: FitRequest, stage: int, first: int, count: int) -> MemoryEstimate:
    """Estimate the peak memory of a GPU of one pipeline stage."""
    parameters = count_stage(request, first, count, stage)
    peak = choose_peak_moment(list_moments(request, parameters, stage))
    return estimate_moment(request, peak, stage)


def choose_peak_moment(moments: Sequence[Moment]) -> Moment:
    """Give the moment with the highest expected total.

    Another one's high end may be higher: what it has more is added to the high end of `temporary`, so that
    the high ends together bound all moments.
    """
    peak = max(moments, key=lambda moment: moment.total.expected)
    more = max(moment.total.high for moment in moments) - peak.total.high
    temporary = peak.temporary
    return replace(peak, temporary=Range(temporary.low, temporary.expected, temporary.high + more))


def estimate_moment(request: FitRequest, peak: Moment, stage: int) -> MemoryEstimate:
    """Make the estimate of a moment: with the libraries' workspaces, fragmentation and the context."""
    is_gpu, notes = request.device.kind == "gpu", list_notes(request, peak)
    peak = replace(peak, temporary=peak.temporary + CUBLAS) if is_gpu else peak
    allocated, lost = peak.total, NOTHING
    if is_gpu:
        low, expected, high = EXPANDABLE if request.settings.expandable_segments else FIXED
        lost = make_range(low * allocated.low, expected * allocated.expected, high * allocated.high)
    context = estimate_context(request.layout) if is_gpu else PROCESS
    parts = (
        *(MemoryPart(name, getattr(peak, name), notes.get(name, "")) for name in PART_NAMES),
        MemoryPart("context", context, "CUDA's context, kernels, NCCL" if is_gpu else "Python and torch"),
        MemoryPart("fragmentation", lost, "reserved and not filled"),
    )
    reserved = allocated + lost
    return MemoryEstimate(parts, reserved + context, allocated, reserved, stage)


def estimate_context(layout: ParallelLayout) -> Range:
    """Estimate what is outside torch's allocator on a GPU: NCCL has buffers for each group of ranks."""
    groups = sum(size > 1 for size in (layout.dp * layout.cp, layout.tp, layout.pp, layout.ep))
    if not groups:
        return CONTEXT
    return CONTEXT + Range(min(groups * NCCL.low, NCCL.expected), NCCL.expected, NCCL.high)


def list_notes(request: FitRequest, peak: Moment) -> dict[str, str]:
    """Give what is said of each part."""
    settings, layout = request.settings, request.layout
    sharded = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, weights")
    frozen = "" if settings.quantization == "none" else f", frozen in {settings.quantization}"
    modules = f" of {', '.join(settings.recompute_modules)}" if settings.recompute_modules else ""
    return {
        "weights": f"{settings.precision}{frozen}, sharded: {sharded[min(3, max(0, layout.zero))]}",
        "gradients": f"at the peak: {peak.name}",
        "optimizer": settings.optimizer + (" in the backward pass" if settings.optimizer_in_backward else ""),
        "activations": f"checkpointing: {settings.checkpointing}{modules}"
        + ("; in CPU memory" if settings.activation_offload else ""),
        "temporary": "gradients of activations, workspaces",
    }
