"""Whether a training fits, what makes it fit, and what is chosen where nothing is set."""

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from typing import Any

from launcher.errors import UsageError
from launcher.fit.advice import Advice, BudgetLine, SpeedEstimate, advise, budget_node, estimate_speed
from launcher.fit.memory import CONTEXT, CUBLAS, NCCL, PROCESS, count_lost, estimate_memory
from launcher.fit.training import (
    NOTHING,
    Device,
    Estimate,
    Learned,
    MemoryPart,
    Range,
    Training,
    check_layout,
    find_framework,
)

GIB, MIB = 1 << 30, 1 << 20
LEAST_SPREAD = 0.02
"""Half of the range that remains of a measured program: what differs from run to run."""
LARGEST_PARTS = 3
Measure = Callable[[Training], Range]
"""Gives the memory of a GPU, corrected by what runs have measured."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a job fit."""

    settings: tuple[str, ...]
    """Overrides for the command line, such as `parallel.zero=3`."""
    why: str
    """What it does and what it costs."""
    total: Range
    """Memory of a GPU with it."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """What comes of a training."""

    request: Training
    estimate: Estimate
    verdict: str
    """`fits`, `tight` or `does_not_fit`; empty if the device's memory is unknown."""
    changes: tuple[Change, ...] = ()
    """At most three, the cheapest first, if it does not fit."""
    budget: tuple[BudgetLine, ...] = ()
    advice: tuple[Advice, ...] = ()
    speed: SpeedEstimate | None = None
    learned: str = ""
    """What earlier runs of the same program have measured, and how it was used; empty if there were none."""


def assess(training: Training, learned: Learned | None = None) -> FitReport:
    """Judge a training: memory, verdict and changes, the node's budget, advice and speed.

    `learned` is what runs of the same program and settings have measured. Raises UsageError for a layout that
    the model or the job cannot have.
    """
    check_layout(training)
    estimate = _estimate_with(training, learned)
    verdict = _judge(estimate.total, training.capacity)

    def measure(one: Training) -> Range:
        return _estimate_with(one, learned).total

    changes = find_changes(training, measure) if verdict == "does_not_fit" else ()
    if verdict in ("tight", "does_not_fit") and training.free.any:
        wider = _find_fewest_nodes(training, measure)
        changes = (*changes, wider) if wider else changes
    said = ""
    if learned:
        runs = "1 run" if learned.runs == 1 else f"{learned.runs} runs"
        source = f" of {learned.source}" if learned.source else ""
        share = f"had {learned.ratio:.0%} of the computed memory"
        said = f"{runs}{source} {share}: the estimate is corrected by that"
    budget, advice, speed = budget_node(training), advise(training), estimate_speed(training)
    return FitReport(training, estimate, verdict, changes, budget, advice, speed, said)


def _judge(total: Range, capacity: int) -> str:
    """Return `fits`, `tight` or `does_not_fit`; empty if the capacity is not known."""
    if capacity <= 0:
        return ""
    if total.high <= capacity:
        return "fits"
    return "does_not_fit" if total.low > capacity else "tight"


def _estimate_with(training: Training, learned: Learned | None) -> Estimate:
    """Return the estimate; with runs, their measured share of what is expected, in the range of the runs."""
    estimate = estimate_memory(training)
    if learned is None:
        return estimate
    parts = tuple(  # max_memory_reserved does not hold the context
        part if part.name == "context" else replace(part, bytes=_correct(part.bytes, learned))
        for part in estimate.parts
    )
    allocated, reserved = _correct(estimate.allocated, learned), _correct(estimate.reserved, learned)
    total = sum((part.bytes for part in parts), NOTHING)
    return replace(estimate, parts=parts, total=total, allocated=allocated, reserved=reserved)


def _correct(found: Range, learned: Learned) -> Range:
    """Return the range about what was measured."""
    middle = found.expected * learned.ratio
    spread = max(LEAST_SPREAD, learned.spread)
    return Range.of(middle * (1 - spread), middle, middle * (1 + spread))


# What a report says.


def fit_to_json(report: FitReport) -> dict[str, object]:
    """Return a report as JSON has it; keys are only ever added. Bytes are integers, times are seconds."""
    training, estimate = report.request, report.estimate
    parts = [{"name": part.name, **asdict(part.bytes), "note": part.note} for part in estimate.parts]
    return {
        "verdict": report.verdict,
        "capacity": training.capacity,
        "headroom": training.capacity - estimate.total.expected,
        "memory": {**asdict(estimate), "parts": parts},
        "model": asdict(training.model),
        "layout": {**asdict(training.layout), "world_size": training.layout.world_size},
        "settings": asdict(training.settings),
        "device": asdict(training.device),
        "nodes": training.nodes,
        "ranks_per_node": training.gpus_per_node,
        "is_bundled": training.is_bundled,
        "chosen": describe_choice(training, estimate.total) if training.free.any else "",
        "changes": [asdict(change) for change in report.changes],
        "budget": [asdict(line) for line in report.budget],
        "advice": [asdict(item) for item in report.advice],
        "speed": asdict(report.speed) if report.speed else None,
        "learned": report.learned,
    }


def describe_fit(report: FitReport) -> str:
    """Say in a line how a job stands; of one that does not fit, why, and the changes that make it fit."""
    training, total = report.request, report.estimate.total
    where = f"each GPU ({training.device.name})" if training.on_gpu else "each rank (on CPUs)"
    word = {"tight": "is tight", "does_not_fit": "does not fit"}.get(report.verdict, "fits")
    start = f"{training.model.name} {word}: {where} has {format_bytes(training.capacity)}, and the training"
    if report.verdict != "does_not_fit":
        most = format_bytes(total.high)
        return f"{start} needs about {format_bytes(total.expected)}, at most {most}"
    parts = sorted(report.estimate.parts, key=lambda part: part.bytes.low, reverse=True)[:LARGEST_PARTS]
    shown = ", ".join(f"{part.name} {format_bytes(part.bytes.low)}" for part in parts)
    fixes = "; or ".join(map(describe_change, report.changes)) or "no change that is known here makes it fit"
    return f"{start} needs at least {format_bytes(total.low)} ({shown}): {fixes}"


def describe_change(change: Change) -> str:
    """Return what to type, and the memory with it."""
    return f"{' '.join(change.settings)} (at most {format_bytes(change.total.high)})"


def format_bytes(size: int) -> str:
    """Return a size in GiB, a small one in MiB."""
    value, unit = (size / GIB, "GiB") if abs(size) >= GIB else (size / MIB, "MiB")
    return f"{value:.0f} {unit}" if abs(value) >= 1000 else f"{value:.1f} {unit}"


# What the bundled program computes with if nobody says: the fastest setting whose high estimate fits.

UNKNOWN_MEMORY = 8 * GIB
"""Of a device that does not tell: a small slice of a GPU has it."""
ENOUGH_TOKENS = 8192
"""Of a micro-step: more of them make the matrix products of a GPU little faster."""
MOST_TOKENS = 65536
"""Of a micro-step that is chosen."""
DEFAULT_BATCH = 8
"""Sequences of a micro-step at most, and one micro-step, without a global batch."""
SPARE = 0.02
"""Share of a device's memory that the choice leaves: the driver keeps some of the total that it reports. Of
79.65 GiB of an H100 torch has 79.1, of 40 of an A100 39.4, of 22.5 of an A10G 22.1, as its errors say."""
LADDER = ("none", "selective", "full")
"""From the fastest to the one that keeps least: about 3% and 30% slower (arXiv:2205.05198)."""


def choose_settings(
    training: Training, measure: Measure = lambda one: estimate_memory(one).total
) -> Training:
    """Return a training with what is free chosen; what is not keeps its value.

    As little recomputation as lets ENOUGH_TOKENS fit, or all that the global batch asks for, with DDP before
    FSDP; if nothing does, the largest micro-batch that fits; if nothing fits, what takes least. What fits
    leaves SPARE of the device.
    """
    free, settings = training.free, training.settings
    capacity = (1 - SPARE) * (training.capacity or UNKNOWN_MEMORY)
    frameworks, sizes = [settings.framework], _list_sizes(training)
    if free.parallel:  # one process has nobody to share with
        frameworks = ["ddp", "fsdp"] if training.layout.world_size > 1 else ["ddp"]
    ladder = LADDER if free.checkpointing else (settings.checkpointing,)
    best: Training | None = None
    for checkpointing, framework in product(ladder, frameworks):
        for size in sizes:
            one = _set_up(training, size, checkpointing, framework)
            if measure(one).high > capacity:
                continue
            if size == sizes[0] or size * settings.seq_len >= ENOUGH_TOKENS:
                return one
            if best is None or size > best.settings.micro_batch:
                best = one
            break
    return best or _set_up(training, sizes[-1], ladder[-1], frameworks[-1])


def _list_sizes(training: Training) -> list[int]:
    """List micro-batches from the largest that makes sense to 1: those that give the global batch, if any
    do.
    """
    settings, sequences = training.settings, training.free.sequences
    if not training.free.micro_batch:
        return [settings.micro_batch]
    most = DEFAULT_BATCH
    if sequences:
        ranks = training.layout.dp * (1 if training.free.accumulation else settings.accumulation)
        most = min(max(1, MOST_TOKENS // settings.seq_len), -(-sequences // ranks))
        if sequences % ranks == 0:
            return [size for size in range(most, 0, -1) if sequences // ranks % size == 0]
    return [1 << power for power in reversed(range(most.bit_length()))]


def _set_up(training: Training, size: int, checkpointing: str, framework: str) -> Training:
    """Return a training with these settings, and micro-steps for the global batch."""
    settings, sequences = training.settings, training.free.sequences
    steps = settings.accumulation
    if training.free.accumulation:
        steps = max(1, round(sequences / (size * training.layout.dp))) if sequences else 1
    settings = replace(
        settings,
        micro_batch=size,
        accumulation=steps,
        checkpointing=checkpointing,
        framework=framework,
        autocast=settings.precision == "mixed" and framework == "ddp",
    )
    zero = {"ddp": 0, "fsdp": 3}.get(framework, training.layout.zero)
    return replace(training, settings=settings, layout=replace(training.layout, zero=zero))


def describe_choice(training: Training, total: Range) -> str:
    """Say in a line what was chosen, and why; `total` is the memory of a GPU with it."""
    capacity, free, settings = training.capacity or UNKNOWN_MEMORY, training.free, training.settings
    why = f"at most {total.high / GIB:.1f} of {capacity / GIB:.1f} GiB"
    if total.high > capacity:
        why = f"nothing takes less; {why}"
    elif free.checkpointing and settings.checkpointing != "none":
        most = min(ENOUGH_TOKENS, settings.micro_batch * settings.seq_len)
        fewer = f"fewer than {most:,} tokens fit" if free.micro_batch else "it does not fit"
        why += f"; without recomputation {fewer}"
    if not training.capacity:
        why += f"; the memory of {training.device.name} is not known, and taken as {capacity / GIB:.0f} GiB"
    names = ("fit.micro_batch", "fit.checkpointing", "parallel.framework", "fit.accumulation")
    if training.is_bundled:
        options = ("batch_size", "activation_checkpointing", "parallel", "grad_accumulation")
        names = tuple(f"program.{name}" for name in options)  # type: ignore[assignment]
    values = (settings.micro_batch, settings.checkpointing, settings.framework, settings.accumulation)
    is_free = (free.micro_batch, free.checkpointing, free.parallel, free.accumulation)
    found = zip(names, values, is_free, strict=True)
    chosen = " ".join(f"{name}={value}" for name, value, may in found if may)
    batch, length = training.step_sequences, settings.seq_len
    return f"chosen: {chosen} ({batch} sequences of {length}, {batch * length:,} tokens a step): {why}"


# Changes with which a job fits, each computed by the same estimate as the job itself.

MOST_CHANGES = 3
MOST_NODES = 4096
OFFLOADED = "in CPU memory: bound by PCIe and the CPU, often half as fast"
KNOBS: dict[str, dict[Any, str]] = {
    "zero": {
        1: "optimizer states are sharded over the replicas: up to 2% slower",
        2: "optimizer states and gradients are sharded over the replicas: up to 4% slower",
        3: "weights, gradients and optimizer states are sharded over the replicas: up to 10% slower",
    },
    "micro_batch": {},
    "checkpointing": {
        "selective": "all but products and attention is computed again in backward: about 4% slower",
        "full": "each block is computed again in backward: about 33% slower",
    },
    "optimizer": {"adamw8bit": "AdamW's moments in 8 bits (bitsandbytes, torchao): other rounding"},
    "tp": {},
    "quantization": {"nf4": "the frozen weights in 4 bits (QLoRA): slower products"},
    "offload": {
        "optimizer": f"optimizer states {OFFLOADED}",
        "parameters": f"weights and optimizer states {OFFLOADED}",
    },
}
"""What may be changed, in the order of its cost, with values from the one that saves least, and why.

Costs: an extra forward pass is a third of a step; Korthikanti et al. (arXiv:2205.05198) measure 2 to 4% for
selective recomputation; ZeRO (arXiv:1910.02054) counts half as much communication again for sharded weights;
ZeRO-Offload (arXiv:2101.06840) is bound by PCIe and the CPU's Adam."""


def find_changes(training: Training, measure: Measure) -> tuple[Change, ...]:
    """Return at most three changes with which the high estimate is within the capacity, the cheapest first.

    Of single settings the weakest value that is enough. Then one combination of the others: the cheapest at
    their strongest, one after the other until that is enough, and each as weak as the others allow.
    """

    def try_out(values: Mapping[str, Any]) -> Change | None:
        """Return the change, None if the job does not fit with it or cannot have it."""
        changed = _change(training, values)
        if changed is None or (total := measure(changed)).high > training.capacity:
            return None
        why = "; ".join(knobs[name][value] for name, value in values.items())
        return Change(_render_change(training, changed), why, total)

    knobs = dict(_list_knobs(training))
    found, rest = list[Change](), dict[str, dict[Any, str]]()
    for name, values in knobs.items():
        if change := next(filter(None, (try_out({name: value}) for value in values)), None):
            found.append(change)
        else:
            rest[name] = values
    if len(found) >= MOST_CHANGES:
        return tuple(found[:MOST_CHANGES])
    chosen: dict[str, Any] = {}
    for name, values in (*rest.items(), *rest.items()):  # on more nodes, one rank has somebody to share with
        for value in values:
            if _change(training, {**chosen, name: value}):
                chosen[name] = value
        if len(chosen) > 1 and try_out(chosen):
            break
    for name in reversed(list(chosen)):
        others = {each: value for each, value in chosen.items() if each != name}
        weaker = [others, *({**others, name: value} for value in knobs[name])]
        chosen = next((values for values in weaker if try_out(values)), chosen)
    change = try_out(chosen)
    return (*found, change) if change else tuple(found)


def _list_knobs(training: Training) -> Iterator[tuple[str, dict[Any, str]]]:
    """Give what this training may change, each with stronger values than its own."""
    settings, layout, now = training.settings, training.layout, training.settings.micro_batch
    sizes = [size for size in range(min(now // 2, 4096), 0, -1) if now % size == 0]
    sizes = sizes[:7] + sizes[7:][-1:]
    splits = [1 << power for power in range(1, 11) if layout.tp < 1 << power <= training.gpus_per_node]
    own: dict[str, dict[Any, str]] = {
        "micro_batch": {
            size: f"micro-batch {size} in place of {now}: about {0.03 * math.log2(now / size):.0%} slower"
            for size in sizes
        },
        "tp": {
            size: f"each layer is split over {size} GPUs of a node: about"
            f" {0.1 * math.log2(size / layout.tp):.0%} slower"
            for size in splits
        },
    }
    for name, table in KNOBS.items():
        if training.is_bundled and name not in ("zero", "micro_batch", "checkpointing"):
            continue
        if name == "quantization" and not (settings.lora and settings.quantization == "none"):
            continue
        current = layout.zero if name == "zero" else getattr(settings, name, None)
        values = list(own.get(name, table))
        values = values[values.index(current) + 1 :] if current in values else values
        values = values[-1:] if name == "zero" and training.is_bundled else values
        yield name, {value: {**table, **own.get(name, {})}[value] for value in values}
    if not training.free.parallel:  # else the fewest nodes are searched for
        more = [nodes for power in range(1, 6) if (nodes := training.nodes << power) <= MOST_NODES]
        yield "nodes", {nodes: f"states are sharded over {nodes} nodes" for nodes in more}


def _change(training: Training, values: Mapping[str, Any]) -> Training | None:
    """Return a training with other values, and as many micro-steps as the same global batch takes.

    None if the job cannot be so. If no number of micro-steps gives the same batch, a batch that is set makes
    the change impossible; else it grows.
    """
    layout, settings, nodes = training.layout, training.settings, values.get("nodes", training.nodes)
    factor = values.get("tp", layout.tp) // layout.tp
    zero, dp = values.get("zero", layout.zero), layout.dp * nodes // training.nodes
    if dp % factor or (zero > layout.zero and dp * layout.cp == factor):  # with nobody to share with
        return None
    layout = replace(layout, zero=zero, tp=layout.tp * factor, dp=dp // factor)
    settings = replace(settings, **{key: values[key] for key in values if key not in ("zero", "tp", "nodes")})
    if "parallel.framework" not in training.fixed and ("zero" in values or "tp" in values):
        framework = find_framework(layout)
        settings = replace(settings, framework=framework, autocast=settings.autocast and framework == "ddp")
    batch, step_batch = training.step_sequences, settings.micro_batch * layout.dp
    if (training.global_batch and batch % step_batch) or (settings.offload == "parameters" and zero < 3):
        return None
    settings = replace(settings, accumulation=max(1, -(-batch // step_batch)))
    changed = replace(training, layout=layout, settings=settings, nodes=nodes)
    try:
        check_layout(changed)
    except UsageError:
        return None
    return changed


def _find_fewest_nodes(training: Training, measure: Measure) -> Change | None:
    """Return the fewest nodes with which a job fits, all that is free chosen anew; None if none is known."""

    def measure_on(nodes: int) -> Range:
        dp = training.layout.dp // training.nodes * nodes
        wider = replace(training, nodes=nodes, layout=replace(training.layout, dp=dp))
        return measure(choose_settings(wider, measure))

    def is_enough(nodes: int) -> bool:
        return measure_on(nodes).high <= training.capacity

    high = 2 * training.nodes
    while not is_enough(high):
        high *= 2
        if high > MOST_NODES:
            return None
    between = range(max(training.nodes, high // 2) + 1, high)
    nodes = between.start + bisect_left(between, True, key=is_enough)
    return Change((f"nodes={nodes}",), f"states are sharded over {nodes} nodes", measure_on(nodes))


def _render_change(training: Training, changed: Training) -> tuple[str, ...]:
    """Return the overrides that make one training of another."""
    before = _list_values(training)
    found = [f"{key}={value}" for key, value in _list_values(changed).items() if before[key] != value]
    if "parallel.dp" in training.fixed and changed.layout.dp != training.layout.dp:
        found.append(f"parallel.dp={changed.layout.dp}")
    return tuple(found)


def _list_values(training: Training) -> dict[str, object]:
    """Return the keys that a change may set, with their values."""
    settings, layout = training.settings, training.layout
    if training.is_bundled:
        return {
            "nodes": training.nodes,
            "program.parallel": "fsdp" if layout.zero == 3 else "ddp",
            "program.activation_checkpointing": settings.checkpointing,
            "program.batch_size": settings.micro_batch,
            "program.grad_accumulation": settings.accumulation,
        }
    names = ("optimizer", "offload", "quantization", "checkpointing", "micro_batch", "accumulation")
    return {
        "nodes": training.nodes,
        "parallel.tp": layout.tp,
        "parallel.zero": layout.zero,
        **{f"fit.{name}": getattr(settings, name) for name in names},
    }


# A program whose steps ran on fake tensors: the tracked peak, and what comes on top.

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
    categories: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The peak of a program's tensors over its first steps, in bytes."""

    total: int
    categories: dict[str, int]
    modules: tuple[ModuleShare, ...]
    """The largest first."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """What comes of it."""

    peak: StepPeak
    device: Device
    estimate: Estimate
    verdict: str
    """`fits`, `tight` or `does_not_fit`; empty if the device's memory is unknown."""
    learned: str = ""

    @property
    def predicted(self) -> int:
        """Bytes that the hook is expected to measure: reserved by torch, or resident on CPUs.

        What earlier runs have measured is left out, so that it is not learned twice.
        """
        left_out = ("context", EARLIER_RUNS) if self.device.kind == "gpu" else (EARLIER_RUNS,)
        return sum(part.bytes.expected for part in self.estimate.parts if part.name not in left_out)


def make_step_peak(total: int, categories: dict[str, int], modules: dict[str, dict[str, int]]) -> StepPeak:
    """Return a peak from what the program's interpreter has recorded; numbered modules are added up."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    counts: Counter[str] = Counter()
    for name, own in modules.items():
        key = NUMBER.sub("*", name)
        counts[key] += 1
        groups[key].update(own)
    shares = [ModuleShare(key, counts[key], own.total(), _order(own)) for key, own in groups.items()]
    shares.sort(key=lambda share: (-share.bytes, share.name))
    return StepPeak(total, _order(categories), tuple(shares))


def _order(found: Mapping[str, int]) -> dict[str, int]:
    """Return sizes in the order of CATEGORIES, those that are not among them last."""
    names = [*CATEGORIES, *sorted(set(found) - set(CATEGORIES))]
    return {name: found[name] for name in names if found.get(name)}


def fit_step(
    peak: StepPeak, device: Device, world_size: int, *, expandable: bool, learned: Learned | None = None
) -> StepFit:
    """Say whether a tracked peak fits a device, with what the allocator and the libraries add.

    The tracked peak is exact for the tensors; libraries' workspaces are in the allocator beside them.
    `learned` is what earlier runs have measured over what was expected: on a GPU of the allocator's memory,
    on CPUs of the process's.
    """
    is_gpu, tensors, told = device.kind == "gpu", Range.of(peak.total), ""
    parts = [MemoryPart(name, Range.of(size), "from fake tensors") for name, size in peak.categories.items()]
    allocated = reserved = tensors
    context, note = PROCESS, "Python and torch"
    if is_gpu:
        lost = count_lost(tensors, expandable=expandable)
        allocated = tensors + CUBLAS
        reserved = allocated + lost
        context, note = CONTEXT + NCCL if world_size > 1 else CONTEXT, ""
        parts += [MemoryPart("workspaces", CUBLAS, "of cuBLAS"), MemoryPart("fragmentation", lost)]
    parts.append(MemoryPart("context", context, note))
    total = reserved + context
    if learned is not None:
        expected = reserved if is_gpu else total
        reserved = _correct(expected, learned)
        total = reserved + context if is_gpu else reserved
        ends = zip(astuple(reserved), astuple(expected), strict=True)
        parts.append(MemoryPart(EARLIER_RUNS, Range(*(after - before for after, before in ends))))
        told = f"{learned.source or 'earlier runs'} took {learned.ratio:.0%} of what was expected"
    estimate = Estimate(tuple(parts), total, allocated, reserved)
    return StepFit(peak, device, estimate, _judge(total, device.memory_mib << 20), told)
