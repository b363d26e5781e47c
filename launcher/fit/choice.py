"""Whether a training fits, what makes it fit, and what is chosen where nothing is set.

Costs of changes are shares of a step's time, as far as they are known, and only order the changes: an extra
forward pass is a third of a step (forward 2, backward 4 operations); Korthikanti et al. (arXiv:2205.05198)
measure 2 to 4% for selective recomputation; ZeRO (arXiv:1910.02054) counts half as much communication again
for sharded weights; ZeRO-Offload (arXiv:2101.06840) is bound by PCIe and the CPU's Adam.
"""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

from launcher.errors import UsageError
from launcher.fit.advice import Advice, BudgetLine, SpeedEstimate, advise, budget_node, estimate_speed
from launcher.fit.memory import CUBLAS, PROCESS, count_lost, estimate_context, estimate_memory
from launcher.fit.training import (
    NOTHING,
    Device,
    Estimate,
    Learned,
    MemoryPart,
    ParallelLayout,
    Range,
    Training,
    check_layout,
    find_framework,
)

GIB, MIB = 1 << 30, 1 << 20
LEAST_SPREAD = 0.02
"""Half of the range that remains of a measured program: what differs from run to run."""
UNMEASURED = ("context",)
"""Parts that max_memory_reserved does not hold."""
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
class GridCell:
    """What a combination of settings takes, and how fast it is."""

    micro_batch: int
    checkpointing: str
    framework: str
    total: Range
    tokens_per_second: tuple[float, float] | None
    """Of the whole job; None without a published range."""
    is_chosen: bool
    """It is what the report judges."""


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
    grid: tuple[GridCell, ...] = ()
    """Micro-batch by checkpointing by sharding, if that was asked for."""


def assess(training: Training, learned: Learned | None = None, *, grid: bool = False) -> FitReport:
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
    if verdict in ("tight", "does_not_fit") and training.free:
        wider = _find_least_nodes(training, measure)
        changes = (*changes, wider) if wider else changes
    said = ""
    if learned:
        source = f" of {learned.source}" if learned.source else ""
        said = (
            f"{learned.runs} run{'s' * (learned.runs != 1)}{source} had {learned.ratio:.0%} of the computed"
            " memory: the estimate is corrected by that"
        )
    rest = (budget_node(training), advise(training), estimate_speed(training), said)
    cells = tuple(_list_grid(training, measure)) if grid else ()
    return FitReport(training, estimate, verdict, changes, *rest, cells)


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
    parts = tuple(
        part if part.name in UNMEASURED else replace(part, bytes=_correct(part.bytes, learned))
        for part in estimate.parts
    )
    return replace(
        estimate,
        parts=parts,
        total=sum((part.bytes for part in parts), Range(0, 0, 0)),
        allocated=_correct(estimate.allocated, learned),
        reserved=_correct(estimate.reserved, learned),
    )


def _correct(found: Range, learned: Learned) -> Range:
    """Return the range about what was measured."""
    middle = found.expected * learned.ratio
    spread = max(LEAST_SPREAD, learned.spread)
    return Range.of(middle * (1 - spread), middle, middle * (1 + spread))


# What a report says.


def fit_to_json(report: FitReport) -> dict[str, object]:
    """Return a report as JSON has it; keys are only ever added. Bytes are integers, times are seconds."""
    training, estimate, found = report.request, report.estimate, asdict(report)
    del found["request"], found["estimate"]
    if not report.grid:
        del found["grid"]
    return {
        **found,
        **{name: asdict(getattr(training, name)) for name in ("model", "settings", "device")},
        "capacity": training.capacity,
        "headroom": training.capacity - estimate.total.expected,
        "memory": {
            **asdict(estimate),
            "parts": [
                {"name": part.name, **asdict(part.bytes), "note": part.note} for part in estimate.parts
            ],
        },
        "layout": {**asdict(training.layout), "world_size": training.layout.world_size},
        "nodes": training.nodes,
        "ranks_per_node": training.gpus_per_node,
        "is_bundled": training.is_bundled,
        "chosen": describe_choice(training, estimate.total) if training.free else "",
    }


def explain_misfit(report: FitReport) -> str:
    """Say why a job does not fit, with the figures and the changes that make it fit."""
    total = report.estimate.total
    parts = sorted(report.estimate.parts, key=lambda part: part.bytes.low, reverse=True)[:LARGEST_PARTS]
    shown = ", ".join(f"{part.name} {format_bytes(part.bytes.low)}" for part in parts)
    fixes = "; or ".join(map(describe_change, report.changes)) or "no change that is known here makes it fit"
    return (
        f"{report.request.model.name} does not fit: {_describe_device(report.request)}, and the training"
        f" needs at least {format_bytes(total.low)} ({shown}): {fixes}"
    )


def describe_fit(report: FitReport) -> str:
    """Say in a line how a job that is not refused stands."""
    total = report.estimate.total
    word = "is tight" if report.verdict == "tight" else "fits"
    return (
        f"{report.request.model.name} {word}: {_describe_device(report.request)}, and the training needs"
        f" about {format_bytes(total.expected)}, at most {format_bytes(total.high)}"
    )


def _describe_device(training: Training) -> str:
    """Say what memory there is."""
    where = f"each GPU ({training.device.name})" if training.on_gpu else "each rank (on CPUs)"
    return f"{where} has {format_bytes(training.capacity)}"


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
MOST_NODES = 4096
"""Of the search for nodes that are enough."""
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
    if "parallel.framework" in free:  # one process has nobody to share with
        frameworks = ["ddp", "fsdp"] if training.layout.world_size > 1 else ["ddp"]
    ladder = LADDER if "fit.checkpointing" in free else (settings.checkpointing,)
    fitting = []
    for checkpointing, framework in product(ladder, frameworks):
        every = (_set_up(training, size, checkpointing, framework) for size in sizes)
        largest = next((one for one in every if measure(one).high <= capacity), None)
        if largest:
            size = largest.settings.micro_batch
            if size == sizes[0] or size * settings.seq_len >= ENOUGH_TOKENS:
                return largest
            fitting.append(largest)
    least = _set_up(training, sizes[-1], ladder[-1], frameworks[-1])
    return max(fitting, key=lambda one: one.settings.micro_batch, default=least)


def _list_sizes(training: Training) -> list[int]:
    """List micro-batches from the largest that makes sense to 1: those that give the global batch, if any
    do.
    """
    settings, sequences = training.settings, training.sequences
    if "fit.micro_batch" not in training.free:
        return [settings.micro_batch]
    most = DEFAULT_BATCH
    if sequences:
        ranks = training.layout.dp * (1 if "fit.accumulation" in training.free else settings.accumulation)
        most = min(max(1, MOST_TOKENS // settings.seq_len), -(-sequences // ranks))
        if sequences % ranks == 0:
            return [size for size in range(most, 0, -1) if sequences // ranks % size == 0]
    return [1 << power for power in reversed(range(most.bit_length()))]


def _set_up(training: Training, size: int, checkpointing: str, framework: str) -> Training:
    """Return a training with these settings, and micro-steps for the global batch."""
    settings, sequences, layout = training.settings, training.sequences, training.layout
    steps = settings.accumulation
    if "fit.accumulation" in training.free:
        steps = max(1, round(sequences / (size * layout.dp))) if sequences else 1
    autocast = settings.precision == "mixed" and framework == "ddp"
    settings = replace(settings, micro_batch=size, accumulation=steps, checkpointing=checkpointing)
    settings = replace(settings, framework=framework, autocast=autocast)
    zero = {"ddp": 0, "fsdp": 3}.get(framework, layout.zero)
    return replace(training, settings=settings, layout=replace(layout, zero=zero))


def _list_grid(training: Training, measure: Measure) -> Iterator[GridCell]:
    """Give micro-batches by checkpointing by sharding, with the global batch of a training."""
    settings, layout = training.settings, training.layout
    frameworks = [settings.framework]
    if 1 < layout.world_size == layout.dp and settings.framework in ("ddp", "fsdp"):
        frameworks = ["ddp", "fsdp"]
    batch = training.step_sequences
    most = min(max(1, MOST_TOKENS // settings.seq_len), max(1, batch // layout.dp))
    sizes = {1 << power for power in range(most.bit_length())} | {settings.micro_batch}
    free = replace(training, free=training.free | {"fit.accumulation"}, sequences=batch)
    current = (settings.micro_batch, settings.checkpointing, settings.framework)
    for size, checkpointing, framework in product(sorted(sizes), LADDER, frameworks):
        cell, one = (size, checkpointing, framework), training
        if cell != current:
            one = _set_up(free, size, checkpointing, framework)
        if framework == settings.framework:
            one = replace(one, layout=layout)
        speed, tokens = estimate_speed(one), None
        if speed.step_seconds:
            low, high = speed.step_seconds
            tokens = (speed.tokens_per_step / high, speed.tokens_per_step / low)
        yield GridCell(size, checkpointing, framework, measure(one), tokens, cell == current)


OPTIONS = {
    "fit.micro_batch": "batch_size",
    "fit.checkpointing": "activation_checkpointing",
    "parallel.framework": "parallel",
    "fit.accumulation": "grad_accumulation",
}
"""The options of the bundled program, by the keys that describe another one."""


def find_value(training: Training, key: str) -> Any:  # noqa: ANN401 - of any setting
    """Return what a training has for a key of `parallel` or `fit`, or `nodes`."""
    section, _, name = key.rpartition(".")
    holder = training.layout if section == "parallel" and name != "framework" else training.settings
    return getattr(holder if section else training, name)


def _name_key(training: Training, key: str) -> str:
    """Return the key that sets a value of the program."""
    return f"program.{OPTIONS[key]}" if training.is_bundled and key in OPTIONS else key


def describe_choice(training: Training, total: Range) -> str:
    """Say in a line what was chosen, and why; `total` is the memory of a GPU with it."""
    capacity, free, settings = training.capacity or UNKNOWN_MEMORY, training.free, training.settings
    why = f"at most {total.high / GIB:.1f} of {capacity / GIB:.1f} GiB"
    if total.high > capacity:
        why = f"nothing takes less; {why}"
    elif "fit.checkpointing" in free and settings.checkpointing != "none":
        most = min(ENOUGH_TOKENS, settings.micro_batch * settings.seq_len)
        fewer = f"fewer than {most:,} tokens fit" if "fit.micro_batch" in free else "it does not fit"
        why += f"; without recomputation {fewer}"
    if not training.capacity:
        why += f"; the memory of {training.device.name} is not known, and taken as {capacity / GIB:.0f} GiB"
    keys = [key for key in OPTIONS if key in free]
    chosen = " ".join(f"{_name_key(training, key)}={find_value(training, key)}" for key in keys)
    batch, length = training.step_sequences, settings.seq_len
    return f"chosen: {chosen} ({batch} sequences of {length}, {batch * length:,} tokens a step): {why}"


def _find_least_nodes(training: Training, measure: Measure) -> Change | None:
    """Return the smallest number of nodes with which a job fits, chosen for them; None if none is known."""
    layout, now = training.layout, math.gcd(training.layout.dp, training.nodes)
    step = training.nodes // now  # a group that splits the model may have several nodes

    def measure_on(count: int) -> Range:
        wider = replace(layout, dp=layout.dp * count // now)
        return measure(choose_settings(replace(training, nodes=count * step, layout=wider), measure))

    def is_enough(count: int) -> bool:
        return measure_on(count).high <= training.capacity

    high = 2 * now
    while not is_enough(high):
        if high * step >= MOST_NODES:
            return None
        high *= 2
    low = max(now, high // 2) + 1
    count = low + bisect_left(range(low, high), True, key=is_enough)
    why = f"states are sharded over {count * step} nodes, the fewest that are enough"
    return Change((f"nodes={count * step}",), why, measure_on(count))


# The cheapest changes with which a job fits, each computed by the same estimate as the job itself.

MOST_CHANGES = 3
MOST_COMBINED = 4
MOST_ESTIMATES = 250
"""Estimates of one search: 0.1 to 0.3 ms each."""
MOST_NODES_CHANGED = 1024
HALVING, TENSOR_SPLIT, MORE_NODES = 0.03, 0.1, 0.4
"""Cost of half the micro-batch, of twice the GPUs that share a layer, of twice the nodes."""
IN_CPU_MEMORY = "in CPU memory: bound by PCIe and the CPU, often half as fast"
CHANGES: dict[str, tuple[tuple[int | str, float, str], ...]] = {
    "fit.checkpointing": (
        ("selective", 0.04, "all but products and attention is computed again in backward: about 4% slower"),
        ("full", 0.33, "each block is computed again in backward: about 33% slower"),
    ),
    "parallel.zero": (
        (1, 0.02, "optimizer states are sharded over the replicas: up to {:.0%} slower"),
        (2, 0.04, "optimizer states and gradients are sharded over the replicas: up to {:.0%} slower"),
        (
            3,
            0.1,
            "weights, gradients and optimizer states are sharded over the replicas: up to {:.0%} slower",
        ),
    ),
    # No time, but other numbers.
    "fit.optimizer": (
        ("adamw8bit", 0.05, "AdamW's moments in 8 bits (bitsandbytes, torchao): as fast, other rounding"),
    ),
    "fit.offload": (
        ("optimizer", 0.5, f"optimizer states {IN_CPU_MEMORY}"),
        ("parameters", 1.0, f"weights and optimizer states {IN_CPU_MEMORY}"),
    ),
    # litgpt's nf4 runs take 1.1 to 2 times as long.
    "fit.quantization": (("nf4", 0.3, "the frozen weights in 4 bits (QLoRA): slower products"),),
    # Next to nothing if the copies hide behind recomputation (torchtune's README).
    "fit.activation_offload": (
        (True, 0.05, "the blocks' inputs are in CPU memory between forward and backward: bound by PCIe"),
    ),
    "fit.optimizer_in_backward": (
        (True, 0.02, "each gradient is freed at once: none is clipped by the norm of all"),
    ),
}
"""Values of a key, the one that saves least first, with cost and reason; in braces the added cost."""
SHOWN = (
    *("nodes", "parallel.tp", "parallel.zero", "fit.optimizer", "fit.offload", "fit.quantization"),
    *("fit.activation_offload", "fit.optimizer_in_backward", "fit.checkpointing", "fit.recompute_modules"),
    *("fit.micro_batch", "fit.accumulation"),
)
SHOWN_BUNDLED = ("nodes", "parallel.framework", "fit.checkpointing", "fit.micro_batch", "fit.accumulation")
"""Keys that a change can set, in the order in which they are shown."""


class _Step(NamedTuple):
    """One setting that is changed."""

    key: str
    value: int | str
    cost: float
    why: str


def find_changes(training: Training, measure: Measure) -> tuple[Change, ...]:
    """Return at most three changes with which the high estimate is within the capacity, the cheapest first.

    Single settings come before combinations of them.
    """
    left = MOST_ESTIMATES

    def judge(steps: Sequence[_Step]) -> Change | None:
        """Return the change that steps make, None if the job does not fit with them or cannot have them."""
        nonlocal left
        changed = _apply_steps(training, steps) if left > 0 else None
        if changed is None:
            return None
        left -= 1
        total = measure(changed)
        if total.high > training.capacity:
            return None
        return Change(_render_change(training, changed), "; ".join(step.why for step in steps), total)

    ladders = [ladder for ladder in _list_ladders(training) if ladder]
    found: list[tuple[float, Change]] = []
    enough: list[set[str]] = []  # what fits with these needs no more
    for size in range(1, MOST_COMBINED + 1):
        for chosen in combinations(ladders, size):
            subjects = {ladder[0].key for ladder in chosen}
            if any(known <= subjects for known in enough) or judge([ladder[-1] for ladder in chosen]) is None:
                continue
            for steps in sorted(product(*chosen), key=_add_costs):
                if change := judge(steps):
                    found.append((_add_costs(steps), change))
                    enough.append(subjects)
                    break
        if len(found) >= MOST_CHANGES or not left:
            break
    return tuple(change for _, change in sorted(found, key=lambda one: one[0])[:MOST_CHANGES])


def _add_costs(steps: Sequence[_Step]) -> float:
    """Return the cost of several steps."""
    return sum(step.cost for step in steps)


def _list_ladders(training: Training) -> list[list[_Step]]:
    """Give the steps of each key, from the one that saves least to the one that saves most."""
    settings, layout, now = training.settings, training.layout, training.settings.micro_batch

    def climb(key: str) -> list[_Step]:
        current, rows = find_value(training, key), CHANGES[key]
        base = next((cost for value, cost, _ in rows if value == current), 0.0)
        costs = [(value, cost - base, why) for value, cost, why in rows if cost > base]
        return [_Step(key, value, cost, why.format(cost)) for value, cost, why in costs]

    divisors = [size for size in range(now // 2, 0, -1) if now % size == 0] if now <= 4096 else [1]
    sizes, more, splits = [], [], []
    for size in divisors[:7] + divisors[7:][-1:]:
        cost = HALVING * math.log2(now / size)
        why = f"micro-batch {size} in place of {now}, smaller matrices: about {cost:.0%} slower"
        sizes.append(_Step("fit.micro_batch", size, cost, why))
    for doublings in range(1, 6):
        nodes, split = training.nodes << doublings, layout.tp << doublings
        # If sharding is free, the fewest nodes are searched for.
        if nodes <= MOST_NODES_CHANGED and "parallel.framework" not in training.free:
            why = f"states are sharded over {nodes} nodes in place of {training.nodes}"
            more.append(_Step("nodes", nodes, MORE_NODES * doublings, why))
        if split <= training.gpus_per_node:
            cost = TENSOR_SPLIT * doublings
            why = f"each layer is split over {split} GPUs of a node: about {cost:.0%} slower"
            splits.append(_Step("parallel.tp", split, cost, why))
    sharding = climb("parallel.zero")
    ladders = [sizes, climb("fit.checkpointing"), sharding[-1:] if training.is_bundled else sharding, more]
    if training.is_bundled:  # it has none of the others
        return ladders
    offloads = settings.checkpointing == "full"  # all activations are too much to copy
    may = {
        "fit.optimizer": settings.optimizer == "adamw",
        "fit.offload": True,
        "fit.quantization": settings.lora and settings.quantization == "none",
        "fit.activation_offload": offloads and not settings.activation_offload,
        "fit.optimizer_in_backward": settings.accumulation == 1 and not settings.lora,
    }
    return [*ladders, *(climb(key) for key, is_possible in may.items() if is_possible), splits]


def _apply_steps(training: Training, steps: Sequence[_Step]) -> Training | None:
    """Return a training with steps applied, and as many micro-steps as the same global batch takes.

    None if the job cannot be so. If no number of micro-steps gives the same batch, a batch that is set makes
    the change impossible; else it grows.
    """
    layout, settings = training.layout, training.settings
    values: dict[str, Any] = {step.key: step.value for step in steps}
    tp, nodes = values.pop("parallel.tp", layout.tp), values.pop("nodes", training.nodes)
    if layout.dp % (tp // layout.tp):
        return None
    dp = layout.dp // (tp // layout.tp) * (nodes // training.nodes)
    zero = values.pop("parallel.zero", layout.zero)
    if zero != layout.zero and dp * layout.cp == 1:  # there is nobody to share with
        return None
    if values.get("fit.offload") == "parameters" and zero < 3:
        return None
    split = replace(layout, tp=tp, zero=zero, dp=dp)
    own = {key.removeprefix("fit."): value for key, value in values.items()}
    if "checkpointing" in own:
        own["recompute_modules"] = ()
    if (tp, zero) != (layout.tp, layout.zero) and "parallel.framework" not in training.fixed:
        own["framework"] = find_framework(split)
        own["autocast"] = settings.autocast and own["framework"] == "ddp"
    settings = replace(settings, **own)
    batch, step_batch = training.step_sequences, settings.micro_batch * dp
    if training.global_batch and batch % step_batch:
        return None
    settings = replace(settings, accumulation=max(1, -(-batch // step_batch)))
    changed = replace(training, layout=split, settings=settings, nodes=nodes)
    try:
        check_layout(changed)
    except UsageError:
        return None
    return changed


def _render_change(training: Training, changed: Training) -> tuple[str, ...]:
    """Return the overrides that make one training of another."""
    found = []
    for key in SHOWN_BUNDLED if training.is_bundled else SHOWN:
        before, after = find_value(training, key), find_value(changed, key)
        if before != after:
            shown = f"[{','.join(after)}]" if isinstance(after, tuple) else str(after).lower()
            found.append(f"{_name_key(training, key)}={shown}")
    if "parallel.dp" in training.fixed and changed.layout.dp != training.layout.dp:
        found.append(f"parallel.dp={changed.layout.dp}")
    return tuple(found)


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
    groups: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for name, own in modules.items():
        key = NUMBER.sub("*", name)
        counts[key] += 1
        groups.setdefault(key, Counter()).update(own)
    shares = [
        ModuleShare(name, counts[name], own.total(), _order_categories(own)) for name, own in groups.items()
    ]
    shares.sort(key=lambda share: (-share.bytes, share.name))
    return StepPeak(total, _order_categories(categories), tuple(shares))


def _order_categories(found: dict[str, int]) -> dict[str, int]:
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
    allocated, lost, context, note = tensors, NOTHING, PROCESS, "Python and torch"
    if is_gpu:
        allocated, lost = tensors + CUBLAS, count_lost(tensors, expandable=expandable)
        context, note = estimate_context(ParallelLayout(dp=world_size)), ""
        parts += [MemoryPart("workspaces", CUBLAS, "of cuBLAS"), MemoryPart("fragmentation", lost)]
    parts.append(MemoryPart("context", context, note))
    reserved = allocated + lost
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
