"""Whether a training fits: the estimate against the device, what makes it fit, and what is said of it."""

from dataclasses import asdict, replace

from launcher.fit.advice import advise, budget_node
from launcher.fit.batch_arithmetic import check_layout
from launcher.fit.cheapest_changes import find_cheapest_changes
from launcher.fit.choose_settings import describe_choice, find_least_nodes
from launcher.fit.fit_model import (
    Change,
    FitReport,
    FitRequest,
    Learned,
    MemoryEstimate,
    MemoryPart,
    Range,
    make_range,
)
from launcher.fit.memory_estimate import estimate_memory
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
    if capacity <= 0:
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
    return make_range(middle * (1 - spread), middle, middle * (1 + spread))


def sum_parts(parts: tuple[MemoryPart, ...]) -> Range:
    """Return the sum of all parts."""
    return sum((part.bytes for part in parts), Range(0, 0, 0))


def describe_learned(learned: Learned) -> str:
    """Say what was measured, and how it is used."""
    runs = "1 run" if learned.runs == 1 else f"{learned.runs} runs"
    source = f" of {learned.source}" if learned.source else ""
    return f"{runs}{source} had {learned.ratio:.0%} of the computed memory: the estimate is corrected by that"


def fit_to_json(report: FitReport) -> dict[str, object]:
    """Return a report as JSON has it; keys are only ever added. Bytes are integers, times are seconds."""
    request, estimate = report.request, report.estimate
    return {
        "verdict": report.verdict,
        "capacity": report.capacity,
        "headroom": report.capacity - estimate.total.expected,
        "memory": {
            "parts": [
                {"name": part.name, **asdict(part.bytes), "note": part.note} for part in estimate.parts
            ],
            "total": asdict(estimate.total),
            "allocated": asdict(estimate.allocated),
            "reserved": asdict(estimate.reserved),
            "stage": estimate.stage,
        },
        "model": asdict(request.model),
        "layout": {**asdict(request.layout), "world_size": request.layout.world_size},
        "settings": asdict(request.settings),
        "device": asdict(request.device),
        "nodes": request.nodes,
        "ranks_per_node": request.gpus_per_node,
        "is_bundled": request.is_bundled,
        "chosen": describe_choice(request, estimate.total) if request.free.any else "",
        "changes": [asdict(change) for change in report.changes],
        "budget": [asdict(line) for line in report.budget],
        "advice": [asdict(item) for item in report.advice],
        "speed": asdict(report.speed) if report.speed else None,
        "learned": report.learned,
        **({"grid": [asdict(cell) for cell in report.grid]} if report.grid else {}),
    }


GIB, MIB = 1 << 30, 1 << 20
LARGEST_PARTS = 3


def explain_misfit(report: FitReport) -> str:
    """Say why a job does not fit, with the figures and the changes that make it fit."""
    request, total = report.request, report.estimate.total
    parts = sorted(report.estimate.parts, key=lambda part: part.bytes.low, reverse=True)[:LARGEST_PARTS]
    shown = ", ".join(f"{part.name} {format_bytes(part.bytes.low)}" for part in parts)
    fixes = "; or ".join(map(describe_change, report.changes)) or "no change that is known here makes it fit"
    return (
        f"{request.model.name} does not fit: {describe_device(report)}, and the training needs at least"
        f" {format_bytes(total.low)} ({shown}): {fixes}"
    )


def describe_fit(report: FitReport) -> str:
    """Say in a line how a job that is not refused stands."""
    total = report.estimate.total
    word = "is tight" if report.verdict == "tight" else "fits"
    return (
        f"{report.request.model.name} {word}: {describe_device(report)}, and the training needs about"
        f" {format_bytes(total.expected)}, at most {format_bytes(total.high)}"
    )


def describe_device(report: FitReport) -> str:
    """Say what memory there is."""
    device = report.request.device
    where = f"each GPU ({device.name})" if device.kind == "gpu" else "each rank (on CPUs)"
    return f"{where} has {format_bytes(report.capacity)}"


def describe_change(change: Change) -> str:
    """Return what to type, and the memory with it."""
    return f"{' '.join(change.settings)} (at most {format_bytes(change.total.high)})"


def format_bytes(size: int) -> str:
    """Return a size in GiB, a small one in MiB."""
    value, unit = (size / GIB, "GiB") if abs(size) >= GIB else (size / MIB, "MiB")
    return f"{value:.0f} {unit}" if abs(value) >= 1000 else f"{value:.1f} {unit}"
