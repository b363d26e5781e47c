"""Peak memory of the fullest GPU of a training job: `estimate_memory`."""

from launcher.fit.activation_memory import count_in_flight
from launcher.fit.device_overhead import estimate_context, estimate_fragmentation, estimate_workspaces
from launcher.fit.fit_model import FitRequest, MemoryEstimate, MemoryPart, Range
from launcher.fit.framework_memory import estimate_activations, list_moments, scale_range
from launcher.fit.memory_moment import Moment, add_ranges, choose_peak_moment, list_parts
from launcher.fit.rank_parameters import count_stage, list_stages

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


def estimate_moment(request: FitRequest, peak: Moment, stage: int) -> MemoryEstimate:
    """Make the estimate of a moment: with the libraries' workspaces, fragmentation and the context."""
    parts = list_parts(peak, list_notes(request, peak))
    workspaces = estimate_workspaces(request)
    parts = tuple(
        MemoryPart(part.name, part.bytes + workspaces, part.note) if part.name == "temporary" else part
        for part in parts
    )
    allocated = add_ranges([part.bytes for part in parts])
    fragmentation = estimate_fragmentation(request, allocated)
    context, is_gpu = estimate_context(request), request.device.kind == "gpu"
    reserved = allocated + fragmentation
    more = (
        MemoryPart("context", context, "CUDA's context, kernels, NCCL" if is_gpu else "Python and torch"),
        MemoryPart("fragmentation", fragmentation, "reserved and not filled"),
    )
    return MemoryEstimate((*parts, *more), reserved + context, allocated, reserved, stage)


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
