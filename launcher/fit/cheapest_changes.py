"""The cheapest changes with which a job fits, each computed by the same estimate as the job itself.

Costs are shares of a step's time, as far as they are known, and only order the changes:
an extra forward pass is a third of a step (forward 2, backward 4 operations); Korthikanti et al.
(arXiv:2205.05198) measure 2 to 4% for selective recomputation; ZeRO (arXiv:1910.02054) counts half as much
communication again for sharded weights; ZeRO-Offload (arXiv:2101.06840) is bound by PCIe and the CPU's Adam.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from launcher.errors import UsageError
from launcher.fit.batch_arithmetic import check_layout
from launcher.fit.fit_model import Change, FitRequest, ParallelLayout, Range

MOST_CHANGES = 3
MOST_COMBINED = 4
MOST_ESTIMATES = 250
"""Estimates of one search: 0.1 to 0.3 ms each."""
MOST_NODES = 1024
HALVING, TENSOR_SPLIT, MORE_NODES = 0.03, 0.1, 0.4
"""Cost of half the micro-batch, of twice the GPUs that share a layer, of twice the nodes."""
RECOMPUTING = {"none": 0.0, "selective": 0.04, "full": 0.33}
SHARDING = {0: 0.0, 1: 0.02, 2: 0.04, 3: 0.1}
EIGHT_BITS = 0.05
"""No time, but other numbers."""
OFFLOADING = {"none": 0.0, "optimizer": 0.5, "parameters": 1.0}
ACTIVATION_OFFLOAD = 0.05
"""Of what full checkpointing keeps: next to nothing if the copies hide behind recomputation (torchtune's
README)."""
IN_BACKWARD = 0.02
QUANTIZING = 0.3
"""litgpt's nf4 runs take 1.1 to 2 times as long."""
ORDER = (
    *("tp", "nodes", "zero", "offload", "checkpointing", "optimizer", "quantization", "activation_offload"),
    *("micro_batch", "optimizer_in_backward"),
)
"""In which steps are applied; those without a function of their own are `TrainingSettings`'s."""


@dataclass(frozen=True, slots=True)
class Step:
    """One setting that is changed."""

    subject: str
    """One of `ORDER`."""
    value: int | str
    cost: float
    why: str


def find_cheapest_changes(
    request: FitRequest, capacity: int, estimate: Callable[[FitRequest], Range]
) -> tuple[Change, ...]:
    """Return at most three changes with which the high estimate is within the capacity, the cheapest first.

    Single settings come before combinations of them. `estimate` gives the memory of a GPU in bytes.
    """
    search = Search(request, capacity, estimate)
    ladders = [ladder for ladder in list_ladders(request) if ladder]
    found: list[tuple[float, Change]] = []
    enough: list[set[str]] = []  # what fits with these needs no more
    for size in range(1, MOST_COMBINED + 1):
        for chosen in combinations(ladders, size):
            subjects = {ladder[0].subject for ladder in chosen}
            if not any(known <= subjects for known in enough) and (one := search.find_cheapest(chosen)):
                found.append(one)
                enough.append(subjects)
        if len(found) >= MOST_CHANGES or not search.left:
            break
    ordered = sorted(found, key=lambda one: one[0])
    return tuple(change for _, change in ordered[:MOST_CHANGES])


@dataclass(slots=True)
class Search:
    """Estimates that were made, and how many more may be."""

    request: FitRequest
    capacity: int
    estimate: Callable[[FitRequest], Range]
    left: int = MOST_ESTIMATES

    def find_cheapest(self, ladders: Sequence[Sequence[Step]]) -> tuple[float, Change] | None:
        """Return the cheapest of one step of each ladder with which the job fits, and its cost."""
        if self.judge([ladder[-1] for ladder in ladders]) is None:
            return None
        for steps in sorted(product(*ladders), key=add_costs):
            if change := self.judge(steps):
                return add_costs(steps), change
        return None

    def judge(self, steps: Sequence[Step]) -> Change | None:
        """Return the change that steps make, None if the job does not fit with them or cannot have them."""
        if self.left <= 0:
            return None
        changed = apply_steps(self.request, steps)
        if changed is None:
            return None
        self.left -= 1
        total = self.estimate(changed)
        if total.high > self.capacity:
            return None
        return Change(render_change(self.request, changed), "; ".join(step.why for step in steps), total)


def add_costs(steps: Sequence[Step]) -> float:
    """Return the cost of several steps."""
    return sum(step.cost for step in steps)


def list_ladders(request: FitRequest) -> Iterator[tuple[Step, ...]]:
    """Give the steps of each subject, from the one that saves least to the one that saves most."""
    yield tuple(list_micro_batches(request))
    yield tuple(list_checkpointing(request))
    yield tuple(list_sharding(request))
    if not request.free.parallel:  # else the fewest nodes are searched for
        yield tuple(list_nodes(request))
    if not request.is_bundled:
        yield tuple(list_optimizers(request))
        yield tuple(list_offloads(request))
        yield from list_switches(request)
        yield tuple(list_tensor_splits(request))


def list_micro_batches(request: FitRequest) -> Iterator[Step]:
    """Give smaller micro-batches with as much more accumulation."""
    now = request.settings.micro_batch
    divisors = [size for size in range(now // 2, 0, -1) if now % size == 0] if now <= 4096 else [1]
    for size in divisors[:7] + divisors[7:][-1:]:
        cost = HALVING * math.log2(now / size)
        why = f"micro-batch {size} in place of {now}, smaller matrices: about {cost:.0%} slower"
        yield Step("micro_batch", size, cost, why)


def list_checkpointing(request: FitRequest) -> Iterator[Step]:
    """Give the ways to recompute more activations."""
    now = RECOMPUTING[request.settings.checkpointing]
    for kind, cost in RECOMPUTING.items():
        if cost > now:
            what = "each block" if kind == "full" else "all but products and attention"
            yield Step(
                "checkpointing",
                kind,
                cost - now,
                f"{what} is computed again in backward: about {cost:.0%} slower",
            )


def list_sharding(request: FitRequest) -> Iterator[Step]:
    """Give the stages that shard more."""
    now = request.layout.zero
    names = {
        1: "optimizer states",
        2: "optimizer states and gradients",
        3: "weights, gradients and optimizer states",
    }
    for stage, what in names.items():
        if stage > now and (stage == 3 or not request.is_bundled):
            cost = SHARDING[stage] - SHARDING[now]
            why = f"{what} are sharded over the replicas: up to {cost:.0%} slower"
            yield Step("zero", stage, cost, why)


def list_nodes(request: FitRequest) -> Iterator[Step]:
    """Give numbers of nodes over which states would be sharded."""
    for doublings in range(1, 6):
        nodes = request.nodes << doublings
        if nodes <= MOST_NODES:
            why = f"states are sharded over {nodes} nodes in place of {request.nodes}"
            yield Step("nodes", nodes, MORE_NODES * doublings, why)


def list_optimizers(request: FitRequest) -> Iterator[Step]:
    """Give AdamW with moments in 8 bits."""
    if request.settings.optimizer == "adamw":
        why = "AdamW's moments in 8 bits (bitsandbytes, torchao): as fast, other rounding"
        yield Step("optimizer", "adamw8bit", EIGHT_BITS, why)


def list_offloads(request: FitRequest) -> Iterator[Step]:
    """Give what can be kept in CPU memory."""
    now = OFFLOADING[request.settings.offload]
    whats = {"optimizer": "optimizer states", "parameters": "weights and optimizer states"}
    for kind, what in whats.items():
        if OFFLOADING[kind] > now:
            why = f"{what} in CPU memory: bound by PCIe and the CPU, often half as fast"
            yield Step("offload", kind, OFFLOADING[kind] - now, why)


def list_switches(request: FitRequest) -> Iterator[tuple[Step]]:
    """Give what is on or off: quantized weights if they are frozen, offload, the step within backward."""
    settings = request.settings
    if settings.lora and settings.quantization == "none":
        yield (
            Step("quantization", "nf4", QUANTIZING, "the frozen weights in 4 bits (QLoRA): slower products"),
        )
    if (
        settings.checkpointing == "full" and not settings.activation_offload
    ):  # all of them are too much to copy
        why = "the blocks' inputs are in CPU memory between forward and backward: bound by PCIe"
        yield (Step("activation_offload", True, ACTIVATION_OFFLOAD, why),)
    if not settings.optimizer_in_backward and settings.accumulation == 1 and not settings.lora:
        why = "each gradient is freed at once: none is clipped by the norm of all"
        yield (Step("optimizer_in_backward", True, IN_BACKWARD, why),)


def list_tensor_splits(request: FitRequest) -> Iterator[Step]:
    """Give sizes of tensor parallelism within a node."""
    now, size = request.layout.tp, request.layout.tp * 2
    while size <= request.gpus_per_node:
        cost = TENSOR_SPLIT * math.log2(size / now)
        yield Step(
            "tp", size, cost, f"each layer is split over {size} GPUs of a node: about {cost:.0%} slower"
        )
        size *= 2


def apply_steps(request: FitRequest, steps: Sequence[Step]) -> FitRequest | None:
    """Return a request with steps applied; None if the job cannot be so."""
    changed: FitRequest | None = request
    for step in sorted(steps, key=lambda one: ORDER.index(one.subject)):
        changed = apply_step(changed, step) if changed else None
    changed = keep_global_batch(changed, request) if changed else None
    return changed if changed and is_possible(changed) else None


def is_possible(request: FitRequest) -> bool:
    """Tell whether the model and the framework can have a layout."""
    try:
        check_layout(request)
    except UsageError:
        return False
    return True


def apply_step(request: FitRequest, step: Step) -> FitRequest | None:
    """Return a request with one setting changed; None if the job cannot be so."""
    match step.subject, step.value:
        case "tp", int(value):
            return split_tensors(request, value)
        case "nodes", int(value):
            return add_nodes(request, value)
        case "zero", int(value):
            return shard_states(request, value)
        case "offload", "parameters" if request.layout.zero < 3:
            return None
    more = {"recompute_modules": ()} if step.subject == "checkpointing" else {}
    changed: dict[str, Any] = {step.subject: step.value, **more}
    return replace(request, settings=replace(request.settings, **changed))


def split_tensors(request: FitRequest, tp: int) -> FitRequest | None:
    """Return a request with as many GPUs for a layer, and as many fewer replicas."""
    layout, factor = request.layout, tp // request.layout.tp
    if layout.dp % factor:
        return None
    changed = replace(layout, tp=tp, dp=layout.dp // factor)
    return with_framework(replace(request, layout=changed))


def add_nodes(request: FitRequest, nodes: int) -> FitRequest:
    """Return a request with more nodes, and as many more replicas."""
    layout = replace(request.layout, dp=request.layout.dp * (nodes // request.nodes))
    return replace(request, layout=layout, nodes=nodes)


def keep_global_batch(changed: FitRequest, request: FitRequest) -> FitRequest | None:
    """Return a changed request with as many micro-steps as the same global batch takes.

    If none gives the same batch, a batch that is set makes the change impossible; else it grows.
    """
    settings = request.settings
    batch = settings.micro_batch * settings.accumulation * request.layout.dp
    step = changed.settings.micro_batch * changed.layout.dp
    if request.global_batch and batch % step:
        return None
    return replace(changed, settings=replace(changed.settings, accumulation=max(1, -(-batch // step))))


def shard_states(request: FitRequest, zero: int) -> FitRequest | None:
    """Return a request with more states sharded; None if there is nobody to share them with."""
    if request.layout.dp * request.layout.cp == 1:
        return None
    return with_framework(replace(request, layout=replace(request.layout, zero=zero)))


def with_framework(request: FitRequest) -> FitRequest:
    """Return a request with the framework of its layout, if nobody has chosen one."""
    if "parallel.framework" in request.fixed:
        return request
    framework = find_framework(request.layout)
    settings = replace(request.settings, framework=framework)
    return replace(request, settings=replace(settings, autocast=settings.autocast and framework == "ddp"))


def find_framework(layout: ParallelLayout) -> str:
    """Return the framework that a layout is most used with."""
    if layout.zero == 3:
        return "fsdp"
    if layout.tp * layout.pp * layout.cp * layout.ep > 1:
        return "megatron"
    return "zero" if layout.zero else "ddp"


def render_change(request: FitRequest, changed: FitRequest) -> tuple[str, ...]:
    """Return the overrides that make one request of another."""
    pairs = list_setting_values(changed, is_bundled=request.is_bundled)
    before = dict(list_setting_values(request, is_bundled=request.is_bundled))
    found = [f"{key}={value}" for key, value in pairs if before[key] != value]
    if "parallel.dp" in request.fixed and changed.layout.dp != request.layout.dp:
        found.append(f"parallel.dp={changed.layout.dp}")
    return tuple(found)


def list_setting_values(request: FitRequest, *, is_bundled: bool) -> list[tuple[str, str]]:
    """Return the keys that a change may set, with their values."""
    settings, layout = request.settings, request.layout
    batch, accumulation = str(settings.micro_batch), str(settings.accumulation)
    if is_bundled:
        return [
            ("nodes", str(request.nodes)),
            ("program.parallel", "fsdp" if layout.zero == 3 else "ddp"),
            ("program.activation_checkpointing", settings.checkpointing),
            ("program.batch_size", batch),
            ("program.grad_accumulation", accumulation),
        ]
    return [
        ("nodes", str(request.nodes)),
        ("parallel.tp", str(layout.tp)),
        ("parallel.zero", str(layout.zero)),
        ("fit.optimizer", settings.optimizer),
        ("fit.offload", settings.offload),
        ("fit.quantization", settings.quantization),
        ("fit.activation_offload", str(settings.activation_offload).lower()),
        ("fit.optimizer_in_backward", str(settings.optimizer_in_backward).lower()),
        ("fit.checkpointing", settings.checkpointing),
        ("fit.recompute_modules", f"[{','.join(settings.recompute_modules)}]"),
        ("fit.micro_batch", batch),
        ("fit.accumulation", accumulation),
    ]
