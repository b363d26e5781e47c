"""Whether a training fits: the estimate against the device, and what makes it fit if it does not."""

from dataclasses import replace

from launcher.fit.batch_arithmetic import check_layout
from launcher.fit.cheapest_changes import find_cheapest_changes
from launcher.fit.choose_settings import find_least_nodes
from launcher.fit.fit_model import Change, FitReport, FitRequest, Learned, MemoryEstimate, MemoryPart, Range
from launcher.fit.memory_estimate import estimate_memory
from launcher.fit.node_budget import budget_node
from launcher.fit.shape_advice import advise
from launcher.fit.speed_estimate import estimate_speed

LEAST_SPREAD = 0.02
"""Half of the range that remains of a measured program: what differs from run to run."""
UNMEASURED = ("context",)
"""Parts that max_memory_reserved does not hold."""


def assess(request: FitRequest, learned: Learned | None = None) -> FitReport:
    """Judge a training: memory, verdict and changes, the node's budget, advice and speed.

    `learned` is what runs of the same program and settings have measured. Raises UsageError for a layout that
    the model or the job cannot have.
    """
    check_layout(request)
    estimate = estimate_with(request, learned)
    capacity = request.device.memory_mib << 20
    verdict = judge_total(estimate.total, capacity)
    changes: tuple[Change, ...] = ()
    if verdict == "does_not_fit":
        changes = find_cheapest_changes(request, capacity, lambda one: estimate_with(one, learned).total)
    if verdict in ("tight", "does_not_fit") and request.free.any:
        wider = find_least_nodes(request, lambda one: estimate_with(one, learned).total)
        changes = (*changes, wider) if wider else changes
    return FitReport(
        request=request,
        estimate=estimate,
        capacity=capacity,
        verdict=verdict,
        changes=changes,
        budget=budget_node(request),
        advice=tuple(advise(request)),
        speed=estimate_speed(request),
        learned=describe_learned(learned) if learned else "",
    )


def judge_total(total: Range, capacity: int) -> str:
    """Return one of `VERDICTS`; empty if the capacity is not known."""
    if not capacity:
        return ""
    if total.high <= capacity:
        return "fits"
    return "does_not_fit" if total.low > capacity else "tight"


def estimate_with(request: FitRequest, learned: Learned | None) -> MemoryEstimate:
    """Return the estimate, corrected by what runs have measured."""
    estimate = estimate_memory(request)
    return correct_estimate(estimate, learned) if learned else estimate


def correct_estimate(estimate: MemoryEstimate, learned: Learned) -> MemoryEstimate:
    """Return an estimate with the measured share of the expected memory, in the range of the runs."""
    parts = tuple(
        part if part.name in UNMEASURED else replace(part, bytes=correct_range(part.bytes, learned))
        for part in estimate.parts
    )
    return replace(
        estimate,
        parts=parts,
        total=sum_parts(parts),
        allocated=correct_range(estimate.allocated, learned),
        reserved=correct_range(estimate.reserved, learned),
    )


def correct_range(found: Range, learned: Learned) -> Range:
    """Return the range about what was measured."""
    middle = found.expected * learned.ratio
    spread = max(LEAST_SPREAD, learned.spread)
    return Range(round(middle * (1 - spread)), round(middle), round(middle * (1 + spread)))


def sum_parts(parts: tuple[MemoryPart, ...]) -> Range:
    """Return the sum of all parts."""
    return sum((part.bytes for part in parts), Range(0, 0, 0))


def describe_learned(learned: Learned) -> str:
    """Say what was measured, and how it is used."""
    runs = "1 run" if learned.runs == 1 else f"{learned.runs} runs"
    source = f" of {learned.source}" if learned.source else ""
    return f"{runs}{source} had {learned.ratio:.0%} of the computed memory: the estimate is corrected by that"
