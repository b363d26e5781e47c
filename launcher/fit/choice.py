"""Whether a training fits, what makes it fit, and what is chosen where nothing is set.

Costs of changes are shares of a step's time, as far as they are known, and only order the changes: an extra
forward pass is a third of a step (forward 2, backward 4 operations); Korthikanti et al. (arXiv:2205.05198)
measure 2 to 4% for selective recomputation; ZeRO (arXiv:1910.02054) counts half as much communication again
for sharded weights; ZeRO-Offload (arXiv:2101.06840) is bound by PCIe and the CPU's Adam.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

from launcher.errors import UsageError
from launcher.fit.advice import Advice, BudgetLine, SpeedEstimate, advise, budget_node, estimate_speed
from launcher.fit.memory import estimate_memory, list_others
from launcher.fit.settings import ASKING, ParallelConfig
from launcher.fit.training import (
    Device,
    Estimate,
    Learned,
    MemoryPart,
    Range,
    Training,
    check_layout,
    find_framework,
    read_rules,
)
from launcher.text import clean_text

GIB, MIB = 1 << 30, 1 << 20
LEAST_SPREAD = 0.02
"""Half of the range that remains of a measured program: what differs from run to run."""
Estimator = Callable[[Training], Estimate]
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
    changes: tuple[Change, ...]
    """At most three, the cheapest first, unless it fits."""
    budget: tuple[BudgetLine, ...]
    advice: tuple[Advice, ...]
    speed: SpeedEstimate
    learned: str
    """What earlier runs of the same program have measured, and how it was used; empty if there were none."""
    grid: tuple[GridCell, ...]
    """Micro-batch by checkpointing by sharding, if that was asked for."""


def assess(training: Training, learned: Learned | None = None, *, grid: bool = False) -> FitReport:
    """Judge a training: memory, verdict and changes, the node's budget, advice and speed.

    `learned` is what runs of the same program and settings have measured. Raises UsageError for a layout that
    the model or the job cannot have.
    """
    check_layout(training)

    def estimate(one: Training) -> Estimate:
        return correct_estimate(estimate_memory(one), learned, on_gpu=one.on_gpu)

    found = estimate(training)
    verdict = judge_total(found.total, training.capacity)
    return FitReport(
        training,
        found,
        verdict,
        () if verdict in ("", "fits") else find_changes(training, estimate),
        budget_node(training),
        advise(training),
        estimate_speed(training),
        describe_learned(learned),
        tuple(_list_grid(training, estimate)) if grid else (),
    )


def judge_total(total: Range, capacity: int) -> str:
    """Return `fits`, `tight` or `does_not_fit`; empty if the capacity is not known."""
    if capacity <= 0 or total.high <= capacity:
        return "fits" if capacity > 0 else ""
    return "does_not_fit" if total.low > capacity else "tight"


def correct_estimate(estimate: Estimate, learned: Learned | None, *, on_gpu: bool) -> Estimate:
    """Return an estimate about what runs have measured: torch's memory on a GPU, else the process's."""
    if learned is None:
        return estimate
    spread, parts = max(LEAST_SPREAD, learned.spread), []
    for part in estimate.parts:
        about = Range.about(part.bytes.expected * learned.ratio, spread)
        parts.append(part if part.name == "context" and on_gpu else replace(part, bytes=about))
    return replace(estimate, parts=tuple(parts))


def describe_learned(learned: Learned | None) -> str:
    """Say what earlier runs have measured; nothing if there were none."""
    if learned is None:
        return ""
    runs = f"{learned.runs} run{'s' * (learned.runs != 1)} of {learned.source or 'the same program'}"
    return f"{runs} had {learned.ratio:.0%} of the computed memory: the estimate is corrected by that"


def estimate_step(
    categories: Mapping[str, int], device: Device, world_size: int, *, expandable: bool
) -> Estimate:
    """Return what a program takes whose steps ran on fake tensors: their peak by categories, and the rest."""
    on_gpu, layout = device.kind == "gpu", ParallelConfig(dp=world_size, zero=0)
    others = list_others(Range.of(sum(categories.values())), layout, on_gpu=on_gpu, expandable=expandable)
    parts = [MemoryPart(name, Range.of(size), "from fake tensors") for name, size in categories.items()]
    return Estimate((*parts, *(MemoryPart(name, size) for name, size in others.items() if size.high)))


# What a report says.


def estimate_to_json(estimate: Estimate) -> dict[str, object]:
    """Return an estimate as JSON has it, in bytes."""
    return {
        "parts": [{"name": part.name, **asdict(part.bytes), "note": part.note} for part in estimate.parts],
        "stage": estimate.stage,
        **{name: asdict(getattr(estimate, name)) for name in ("total", "allocated", "reserved")},
    }


def fit_to_json(report: FitReport) -> dict[str, object]:
    """Return a report as JSON has it. Bytes are integers, times are seconds.

    `layout` has the keys of `parallel`, `settings` those of `fit` that describe a training.
    """
    training, estimate, found = report.request, report.estimate, asdict(report)
    del found["estimate"]
    request = found.pop("request")
    if not report.grid:
        del found["grid"]
    shown = ("model", "device", "nodes", "is_bundled", "expandable_segments")
    return {
        **found,
        **{name: request[name] for name in shown},
        "settings": {key: value for key, value in request["settings"].items() if key not in ASKING},
        "layout": {**request["layout"], "world_size": training.layout.world_size},
        "autocast": training.autocast,
        "capacity": training.capacity,
        "headroom": training.capacity - estimate.total.expected,
        "memory": estimate_to_json(estimate),
        "ranks_per_node": training.gpus_per_node,
        "chosen": describe_choice(training, estimate.total) if training.free else "",
    }


def describe_fit(report: FitReport) -> str:
    """Say in a line whether a job fits, and unless it does, the changes with which it fits."""
    found = (
        f"{report.request.model.name} {VERDICTS[report.verdict]}: {describe_device(report.request.device)}"
    )
    found += f"; {describe_need(report.estimate.total, report.verdict)}"
    fixes = "; or ".join(map(describe_change, report.changes)) or "no change that is known here makes it fit"
    return found if report.verdict == "fits" else f"{found}: {fixes}"


VERDICTS = {"fits": "fits", "tight": "tight, it may fit", "does_not_fit": "does not fit", "": "not judged"}


def describe_device(device: Device) -> str:
    """Say what a rank computes on, and its memory."""
    memory = format_bytes(device.memory_mib << 20) if device.memory_mib else "its memory is not known"
    return f"each {'GPU' if device.kind == 'gpu' else 'rank'} ({clean_text(device.name)}, {memory})"


def describe_need(total: Range, verdict: str) -> str:
    """Say the memory that is needed, by a verdict."""
    if verdict == "does_not_fit":
        return f"{format_bytes(total.low)} at least"
    return f"{format_bytes(total.expected)} expected, {format_bytes(total.high)} at most"


def describe_change(change: Change) -> str:
    """Return what to type, and the memory with it."""
    return f"{' '.join(change.settings)} (at most {format_bytes(change.total.high)})"


def format_bytes(size: int) -> str:
    """Return a size in GiB, a small one in MiB."""
    unit, name = choose_unit(size)
    return f"{format_number(size / unit)} {name}"


def choose_unit(size: int) -> tuple[int, str]:
    """Return the bytes of the unit that a size is written in, and its name."""
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def format_number(value: float) -> str:
    """Return a number with what digits it deserves."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}"


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


def choose_settings(training: Training, estimate: Estimator = estimate_memory) -> Training:
    """Return a training with what is free chosen; what is not keeps its value.

    As little recomputation as lets ENOUGH_TOKENS fit, or all that the global batch asks for, with DDP before
    FSDP; if nothing does, the largest micro-batch that fits; if nothing fits, what takes least. What fits
    leaves SPARE of the device.
    """
    free, settings = training.free, training.settings
    capacity = (1 - SPARE) * (training.capacity or UNKNOWN_MEMORY)
    frameworks, sizes = [training.layout.framework], _list_sizes(training)
    if "parallel.framework" in free:  # one process has nobody to share with
        frameworks = ["ddp", "fsdp"] if training.layout.world_size > 1 else ["ddp"]
    ladder = LADDER if "fit.checkpointing" in free else (settings.checkpointing,)
    fitting = []
    for checkpointing, framework in product(ladder, frameworks):
        every = (_set_up(training, size, checkpointing, framework) for size in sizes)
        largest = next((one for one in every if estimate(one).total.high <= capacity), None)
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
    zero = {"ddp": 0, "fsdp": layout.zero or 3}.get(framework, layout.zero)
    return replace(
        training,
        settings=replace(settings, micro_batch=size, accumulation=steps, checkpointing=checkpointing),
        layout=replace(layout, framework=framework, zero=zero),
    )


def _list_grid(training: Training, estimate: Estimator) -> Iterator[GridCell]:
    """Give micro-batches by checkpointing by sharding, with the global batch of a training."""
    settings, layout, batch = training.settings, training.layout, training.step_sequences
    frameworks = [layout.framework]
    if 1 < layout.world_size == layout.dp and layout.framework in ("ddp", "fsdp"):
        frameworks = ["ddp", "fsdp"]
    most = min(max(1, MOST_TOKENS // settings.seq_len), max(1, batch // layout.dp))
    sizes: set[int] = {1 << power for power in range(most.bit_length())} | {settings.micro_batch}
    free = replace(training, free=training.free | {"fit.accumulation"}, sequences=batch)
    current = (settings.micro_batch, settings.checkpointing, layout.framework)
    for cell in product(sorted(sizes), LADDER, frameworks):
        one, tokens = training if cell == current else _set_up(free, *cell), None
        speed = estimate_speed(one)
        if speed.step_seconds:
            low, high = speed.step_seconds
            tokens = (speed.tokens_per_step / high, speed.tokens_per_step / low)
        yield GridCell(*cell, estimate(one).total, tokens, cell == current)


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
    holders = {"": training, "parallel": training.layout, "fit": training.settings}
    return getattr(holders[section], name)


def _show_setting(training: Training, key: str) -> str:
    """Return what sets a key as it is in a training, for the bundled program by its option."""
    name = f"program.{OPTIONS[key]}" if training.is_bundled and key in OPTIONS else key
    value = find_value(training, key)
    shown = f"[{','.join(value)}]" if isinstance(value, list) else str(value).lower()
    return f"{name}={shown}"


def describe_choice(training: Training, total: Range) -> str:
    """Say in a line what was chosen, and why; `total` is the memory of a GPU with it."""
    capacity, settings = training.capacity or UNKNOWN_MEMORY, training.settings
    why = f"at most {total.high / GIB:.1f} of {capacity / GIB:.1f} GiB"
    if total.high > capacity:
        why = f"nothing takes less; {why}"
    if not training.capacity:
        why += f"; the memory of {training.device.name} is not known, and taken as {capacity / GIB:.0f} GiB"
    chosen = " ".join(_show_setting(training, key) for key in OPTIONS if key in training.free)
    batch, length = training.step_sequences, settings.seq_len
    return f"chosen: {chosen} ({batch} sequences of {length}, {batch * length:,} tokens a step): {why}"


# The cheapest changes with which a job fits, each computed by the same estimate as the job itself.

MOST_CHANGES = 3
MOST_COMBINED = 4
MOST_ESTIMATES = 1000
"""Estimates of one search: 0.1 to 0.3 ms each."""
MOST_NODES = 4096
HALVING, TENSOR_SPLIT, MORE_NODES = 0.03, 0.1, 0.4
"""Cost of half the micro-batch, of twice the GPUs that share a layer, of twice the nodes."""
SHOWN = (
    *("nodes", "parallel.tp", "parallel.dp", "parallel.framework", "parallel.zero", "fit.optimizer"),
    *("fit.offload", "fit.quantization", "fit.activation_offload", "fit.optimizer_in_backward"),
    *("fit.checkpointing", "fit.recompute_modules", "fit.micro_batch", "fit.accumulation"),
)
"""Keys that a change can set, in the order in which they are shown."""


class _Step(NamedTuple):
    """One setting that is changed."""

    key: str
    value: Any
    cost: float
    why: str


def find_changes(training: Training, estimate: Estimator) -> tuple[Change, ...]:
    """Return at most three changes with which the high estimate is within the capacity, the cheapest first.

    Single settings come before combinations of them.
    """
    left = MOST_ESTIMATES

    def estimate_one(one: Training) -> Estimate:
        nonlocal left
        left -= 1
        return estimate(one)

    def judge(steps: Sequence[_Step]) -> Change | None:
        """Return the change that steps make, None if the job does not fit with them or cannot have them."""
        changed = _apply_steps(training, steps) if left > 0 else None
        if changed and changed.free:
            changed = choose_settings(changed, estimate_one)
        if changed is None or (total := estimate_one(changed).total).high > training.capacity:
            return None
        why = "; ".join(step.why.format(step.cost) for step in steps)
        return Change(_render_change(training, changed), why, total)

    def add_costs(steps: Sequence[_Step]) -> float:
        return sum(step.cost for step in steps)

    ladders = _list_ladders(training)
    found: list[tuple[float, Change]] = []
    enough: list[set[str]] = []  # what fits with these needs no more
    for size in range(1, MOST_COMBINED + 1):
        for chosen in combinations(ladders, size):
            subjects = {ladder[0].key for ladder in chosen}
            if any(known <= subjects for known in enough) or judge([ladder[-1] for ladder in chosen]) is None:
                continue
            for steps in sorted(product(*chosen), key=add_costs):
                if change := judge(steps):
                    if subjects == {"nodes"}:  # the ladder has wide steps, and a set batch refuses numbers
                        numbers = range(training.nodes + 1, steps[0].value)
                        fewer = [steps[0]._replace(value=nodes) for nodes in numbers]
                        fewer = [step for step in fewer if _apply_steps(training, [step])]
                        index = bisect_left(fewer, True, key=lambda step: judge([step]) is not None)
                        change = judge([[*fewer, *steps][index]]) or change
                    found.append((add_costs(steps), change))
                    enough.append(subjects)
                    break
        if len(found) >= MOST_CHANGES or left <= 0:
            break
    return tuple(change for _, change in sorted(found, key=lambda one: one[0])[:MOST_CHANGES])


def _list_ladders(training: Training) -> list[list[_Step]]:
    """Give the steps of each key, from the one that saves least to the one that saves most.

    What is free was chosen, and is chosen again after a step.
    """
    settings, free, now = training.settings, training.free, training.settings.micro_batch
    tp, nodes, is_bundled = training.layout.tp, training.nodes, training.is_bundled
    may = {
        "fit.checkpointing": "fit.checkpointing" not in free,
        "parallel.zero": "parallel.framework" not in free,
        "fit.optimizer": not is_bundled and settings.optimizer == "adamw",
        "fit.offload": not is_bundled,
        "fit.quantization": settings.lora.rank and settings.quantization == "none",
        # All activations are too much to copy.
        "fit.activation_offload": not is_bundled and settings.checkpointing == "full",
        "fit.optimizer_in_backward": not is_bundled and settings.accumulation == 1 and not settings.lora.rank,
    }
    ladders = []
    for key, rows in read_rules()["changes"].items():
        current = find_value(training, key)
        base = next((cost for value, cost, _ in rows if value == current), 0.0)
        steps = [_Step(key, value, cost - base, why) for value, cost, why in rows if cost > base and may[key]]
        ladders.append(steps[-1:] if is_bundled and key == "parallel.zero" else steps)  # it has no others
    sizes = [size for size in range(min(now // 2, MOST_TOKENS), 0, -1) if now % size == 0]
    why = f"smaller matrices than of {now} sequences: up to {{:.0%}} slower"
    ladders.append(
        [
            _Step("fit.micro_batch", size, HALVING * math.log2(now / size), why)
            for size in sizes[:7] + sizes[7:][-1:]
            if "fit.micro_batch" not in free
        ]
    )
    more = sorted(nodes * times << power for power in range(12) for times in (2, 3))
    why = f"states are sharded over more than {nodes} node{'s' * (nodes > 1)}"
    costs = [(many, MORE_NODES * math.log2(many / nodes)) for many in more if many <= MOST_NODES]
    rungs = [_Step("nodes", many, cost, why) for many, cost in costs]
    ladders.append([step for step in rungs if _apply_steps(training, [step])])  # a set batch refuses some
    doublings = range(1, 0 if is_bundled else (training.gpus_per_node // tp).bit_length())
    why = "each layer is split over GPUs of a node: up to {:.0%} slower"
    ladders.append([_Step("parallel.tp", tp << power, TENSOR_SPLIT * power, why) for power in doublings])
    return list(filter(None, ladders))


def _apply_steps(training: Training, steps: Sequence[_Step]) -> Training | None:
    """Return a training with steps applied, and as many micro-steps as the same global batch takes.

    None if the job cannot be so. If no number of micro-steps gives the same batch, a batch that is set makes
    the change impossible; else it grows.
    """
    layout, settings = training.layout, training.settings
    values: dict[str, Any] = {step.key: step.value for step in steps}
    tp, nodes = values.pop("parallel.tp", layout.tp), values.pop("nodes", training.nodes)
    zero, offload = values.pop("parallel.zero", layout.zero), values.get("fit.offload")
    dp, rest = divmod(layout.dp * layout.tp * nodes, tp * training.nodes)
    is_alone = zero != layout.zero and dp * layout.cp == 1  # there is nobody to share with
    batch, step_batch = training.step_sequences, values.get("fit.micro_batch", settings.micro_batch) * dp
    if rest or is_alone or (offload == "parameters" and zero < 3):
        return None
    if settings.global_batch and batch % step_batch:
        return None
    split = replace(layout, tp=tp, zero=zero, dp=dp)
    own = {key.removeprefix("fit."): value for key, value in values.items()}
    if "checkpointing" in own:
        own["recompute_modules"] = []
    if (tp, zero) != (layout.tp, layout.zero) and "parallel.framework" not in training.fixed:
        split = replace(split, framework=find_framework(split))
    settings = replace(settings, **own, accumulation=max(1, -(-batch // step_batch)))
    changed = replace(training, layout=split, settings=settings, nodes=nodes)
    try:
        check_layout(changed)
    except UsageError:
        return None
    return changed


def _render_change(training: Training, changed: Training) -> tuple[str, ...]:
    """Return the overrides that make one training of another; what follows from others is left out."""
    hidden = {"parallel.dp", "parallel.framework"} - {*training.fixed}
    if training.is_bundled:
        hidden = {*SHOWN} - {*OPTIONS, "nodes"}
    return tuple(
        _show_setting(changed, key)
        for key in SHOWN
        if key not in hidden | training.free and find_value(training, key) != find_value(changed, key)
    )
