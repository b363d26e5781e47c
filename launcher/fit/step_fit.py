"""Whether a program fits whose steps ran on fake tensors: the tracked peak, and what comes on top."""

import re
from dataclasses import astuple, dataclass

from launcher.fit.fit_decision import correct_range, judge_total
from launcher.fit.fit_model import Device, Learned, MemoryEstimate, MemoryPart, Range, make_range
from launcher.fit.memory_estimate import CONTEXT, CUBLAS, EXPANDABLE, FIXED, NCCL, PROCESS

CATEGORIES = ("weights", "buffers", "gradients", "optimizer", "activations", "temporary")
"""In the order in which they are shown."""
EARLIER_RUNS = "earlier runs"
"""The part of the estimate by which earlier runs correct the sum of the others."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """What belongs to a module, or to all that differ by a number alone, at the peak."""

    name: str
    """Such as `blocks.*.mlp`; empty for what is no module's."""
    count: int
    bytes: int
    categories: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The peak of a program's tensors over its first steps, in bytes."""

    total: int
    categories: tuple[tuple[str, int], ...]
    modules: tuple[ModuleShare, ...]
    """The largest first."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """What comes of it."""

    peak: StepPeak
    device: Device
    estimate: MemoryEstimate
    verdict: str
    """One of `VERDICTS`; empty if the device's memory is unknown."""
    learned: str = ""


def make_step_peak(total: int, categories: dict[str, int], modules: dict[str, dict[str, int]]) -> StepPeak:
    """Return a peak from what the program's interpreter has recorded; numbered modules are added up."""
    groups: dict[str, dict[str, int]] = {}
    counts: dict[str, int] = {}
    for name, own in modules.items():
        key = NUMBER.sub("*", name)
        counts[key] = counts.get(key, 0) + 1
        group = groups.setdefault(key, {})
        for category, size in own.items():
            group[category] = group.get(category, 0) + size
    shares = [
        ModuleShare(name, counts[name], sum(own.values()), order_categories(own))
        for name, own in groups.items()
    ]
    shares.sort(key=lambda share: (-share.bytes, share.name))
    return StepPeak(total, order_categories(categories), tuple(shares))


def order_categories(found: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Return sizes in the order of CATEGORIES, those that are not among them last."""
    names = [*CATEGORIES, *sorted(set(found) - set(CATEGORIES))]
    return tuple((name, found[name]) for name in names if found.get(name))


def fit_step(
    peak: StepPeak, device: Device, world_size: int, *, expandable: bool, learned: Learned | None = None
) -> StepFit:
    """Say whether a tracked peak fits a device, with what the allocator and the libraries add.

    The tracked peak is exact for the tensors; libraries' workspaces are in the allocator beside them.
    `learned` is what earlier runs have measured over what was expected.
    """
    parts = [MemoryPart(name, Range(size, size, size), "from fake tensors") for name, size in peak.categories]
    tensors = Range(peak.total, peak.total, peak.total)
    if device.kind != "gpu":
        return conclude_fit(peak, device, parts, (tensors, tensors, PROCESS), learned)
    allocated = tensors + CUBLAS
    low, expected, high = EXPANDABLE if expandable else FIXED
    lost = make_range(low * peak.total, expected * peak.total, high * peak.total)
    context = CONTEXT + NCCL if world_size > 1 else CONTEXT
    parts += [MemoryPart("workspaces", CUBLAS, "of cuBLAS"), MemoryPart("fragmentation", lost)]
    return conclude_fit(peak, device, parts, (allocated, allocated + lost, context), learned)


def conclude_fit(
    peak: StepPeak,
    device: Device,
    parts: list[MemoryPart],
    sums: tuple[Range, Range, Range],
    learned: Learned | None,
) -> StepFit:
    """Add up, correct by what was measured, and judge; `sums` are allocated, reserved and context."""
    allocated, reserved, context = sums
    parts.append(MemoryPart("context", context, "" if device.kind == "gpu" else "Python and torch"))
    is_gpu, told = device.kind == "gpu", ""
    total = reserved + context
    if learned is not None:
        # On a GPU the allocator's memory is measured, on CPUs that of the process.
        expected = reserved if is_gpu else total
        reserved = correct_range(expected, learned)
        total = reserved + context if is_gpu else reserved
        ends = zip(astuple(reserved), astuple(expected), strict=True)
        parts.append(MemoryPart(EARLIER_RUNS, Range(*(after - before for after, before in ends))))
        told = f"{learned.source or 'earlier runs'} took {learned.ratio:.0%} of what was expected"
    estimate = MemoryEstimate(tuple(parts), total, allocated, reserved)
    return StepFit(peak, device, estimate, judge_total(total, device.memory_mib << 20), told)


def predict_reserved(fit: StepFit) -> int:
    """Return the bytes that the hook is expected to measure: reserved by torch, or resident on CPUs.

    What earlier runs have measured is left out, so that it is not learned twice.
    """
    left_out = ("context", EARLIER_RUNS) if fit.device.kind == "gpu" else (EARLIER_RUNS,)
    parts = [part for part in fit.estimate.parts if part.name not in left_out]
    return sum(part.bytes.expected for part in parts)
