"""A training before its start: its model, layout, settings and device, and the values that come of it.

Bytes are integers; memory of one GPU unless a field says otherwise. All values are immutable. `check_layout`
and `solve_batch` raise UsageError with the value, the rule, and settings that work.
"""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.fields import one_of, setting
from launcher.fit.settings import LARGEST_BATCH, FitConfig, ParallelConfig

MOST_NEAR = 4096
"""Divisors up to here are proposed."""
SHARDED_BY = {"ddp": (0,), "fsdp": (2, 3), "zero": (0, 1, 2, 3), "megatron": (0, 1, 2, 3)}
"""Stages of `parallel.zero` that a framework has."""
SIZE = {"minimum": 0, "maximum": LARGEST_BATCH}
COUNT = {"minimum": 1, "maximum": LARGEST_BATCH}
LAYERS = {"minimum": 1, "maximum": 10_000}
"""The deepest published models have some hundred."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    count: int = setting(**COUNT)
    per_token: int = setting(**COUNT)
    intermediate_size: int = setting(**COUNT)
    """Width inside one expert."""
    shared: int = setting(0, **SIZE)
    """Experts that every token passes."""
    dense_layers: int = setting(0, **SIZE)
    """First layers with an ordinary MLP."""
    shared_gate: bool = False
    """A gate of one output before the shared experts (Qwen)."""
    router_bias: bool = False
    """A number for each expert beside the router's matrix (DeepSeek-V3's correction of the load)."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    query_rank: int | None = setting(**SIZE)
    """Width of the compressed query; None if queries are not compressed."""
    kv_rank: int = setting(**SIZE)
    rope_width: int = setting(**SIZE)
    """Width of a head's rotary part."""
    plain_width: int = setting(**SIZE)
    """Width of a head's other part."""
    value_width: int = setting(**SIZE)


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """A decoder-only transformer."""

    name: str
    vocab_size: int = setting(**COUNT)
    layers: int = setting(**LAYERS)
    hidden_size: int = setting(**COUNT)
    heads: int = setting(**COUNT)
    kv_heads: int = setting(**COUNT)
    head_width: int = setting(**COUNT)
    intermediate_size: int = setting(**COUNT)
    max_seq_len: int = setting(**COUNT)
    norm: str = one_of("rmsnorm", "layernorm")
    mlp: str = one_of("swiglu", "gelu")
    """`swiglu` (three matrices) or `gelu` (two)."""
    position: str = one_of("rope", "learned")
    bias: bool = False
    """Biases in all linear layers, and in a layernorm."""
    qkv_bias: bool = False
    """Biases in the query, key and value layers alone."""
    qk_norm: bool = False
    """A norm over each head's query and key."""
    tied_embeddings: bool = False
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    out_bias: bool = False
    """A bias in the attention's output layer, without biases everywhere."""
    norms_per_layer: int = setting(2, **SIZE)
    """Norms of the hidden size in a layer: 4 with norms after attention and MLP too (Gemma 2)."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on."""

    name: str
    memory_mib: int
    """As the driver says it; 0 if unknown."""
    kind: str = "gpu"
    """`gpu` or `cpu`; a CPU rank's memory is its share of the node's."""
    nvlink_domain: int = 0
    """GPUs that NVLink connects, this one included; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What the job has of a node; None is not known."""

    cores: int | None = None
    """Physical cores."""
    memory_kib: int | None = None
    shm_kib: int | None = None
    num_workers: int = 0
    """DataLoader workers of each rank."""
    worker_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Training:
    """A training whose memory and speed are asked for."""

    model: ModelDimensions
    layout: ParallelConfig
    settings: FitConfig
    device: Device
    gpus_per_node: int
    nodes: int = 1
    node: NodeResources = field(default_factory=NodeResources)
    is_bundled: bool = False
    """It is the bundled program, whose tensors are known exactly; others are never refused."""
    free: frozenset[str] = frozenset()
    """Keys that were chosen, since the bundled program's options are `auto`, and would be chosen otherwise on
    other nodes."""
    sequences: int | None = None
    """Of an optimizer step, which the choice keeps; None: as many as it comes to."""
    fixed: tuple[str, ...] = ()
    """Keys of `parallel` and `fit` with values of their own, which a change has to set too."""
    expandable_segments: bool = True
    may_autocast: bool = False
    """With DDP it computes in `mixed` by torch.autocast over fp32 weights, as the bundled program does."""

    @property
    def autocast(self) -> bool:
        """Whether it computes by torch.autocast."""
        return self.may_autocast and self.settings.precision == "mixed" and self.layout.framework == "ddp"

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.device.kind == "gpu"

    @property
    def capacity(self) -> int:
        """Bytes of the device; 0 if unknown."""
        return self.device.memory_mib << 20

    @property
    def step_sequences(self) -> int:
        """Sequences of an optimizer step."""
        return int(self.settings.micro_batch * self.settings.accumulation * self.layout.dp)


@dataclass(frozen=True, slots=True)
class Range:
    """An estimate, in bytes."""

    low: int
    expected: int
    high: int

    @classmethod
    def of(cls, low: float, expected: float | None = None, high: float | None = None) -> "Range":
        """Make a range of whole bytes, never negative and in order; of one number, an exact one."""
        middle = max(0, round(low if expected is None else expected))
        least, most = max(0, round(low)), max(0, round(middle if high is None else high))
        return cls(min(middle, least), middle, max(middle, most))

    @classmethod
    def about(cls, middle: float, share: float) -> "Range":
        """Make a range of a number and a share of it to either side."""
        return cls.of((1 - share) * middle, middle, (1 + share) * middle)

    def __add__(self, other: "Range | float") -> "Range":
        """Add both ends and the middle, or an exact number to each."""
        other = other if isinstance(other, Range) else Range.of(other)
        return Range(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def __sub__(self, other: "Range") -> "Range":
        """Subtract low from low and high from high: what is left of the same estimate without a part."""
        return Range.of(self.low - other.low, self.expected - other.expected, self.high - other.high)

    def __mul__(self, factor: float) -> "Range":
        """Multiply both ends and the middle."""
        return Range.of(self.low * factor, self.expected * factor, self.high * factor)


NOTHING = Range(0, 0, 0)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One kind of memory of a GPU."""

    name: str
    """`weights`, `gradients`, `optimizer`, `activations`, `logits`, `temporary`, `communication`, `context`
    or `fragmentation`."""
    bytes: Range
    note: str = ""
    """How it comes about, in a few words."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Peak memory of the fullest GPU of the job."""

    parts: tuple[MemoryPart, ...]
    stage: int = 0
    """Pipeline stage of that GPU."""

    def _add(self, *left_out: str) -> Range:
        return sum((part.bytes for part in self.parts if part.name not in left_out), NOTHING)

    @property
    def total(self) -> Range:
        """Of all parts: what the device has in use."""
        return self._add()

    @property
    def reserved(self) -> Range:
        """What torch.cuda.max_memory_reserved shows."""
        return self._add("context")

    @property
    def allocated(self) -> Range:
        """What torch.cuda.max_memory_allocated shows."""
        return self._add("context", "fragmentation")


@dataclass(frozen=True, slots=True)
class Learned:
    """What earlier runs of the same program and settings have measured."""

    ratio: float
    """Measured over expected: the median of max_memory_reserved over `Estimate.reserved.expected`."""
    spread: float
    """Half of the range of the runs' ratios over their median; 0 for one run."""
    runs: int
    source: str = ""
    """Where from, for people: a run, a program."""


def find_framework(layout: ParallelConfig) -> str:
    """Return the framework that a layout is most used with."""
    if layout.zero == 3:
        return "fsdp"
    if layout.tp * layout.pp * layout.cp * layout.ep > 1:
        return "megatron"
    return "zero" if layout.zero else "ddp"


def solve_batch(
    micro_batch: int | None, dp: int, accumulation: int | None, global_batch: int | None = None
) -> tuple[int, int]:
    """Return (micro-batch, accumulation), in sequences and micro-steps; what is None is solved, else 1.

    Raises UsageError if `global_batch = micro_batch * dp * accumulation` cannot hold.
    """
    product = (micro_batch or 1) * dp * (accumulation or 1)
    is_whole = micro_batch is not None and accumulation is not None
    if global_batch is None or (is_whole and product == global_batch):
        return micro_batch or 1, accumulation or 1
    if not is_whole and global_batch % product == 0:
        rest = global_batch // product
        return (micro_batch or 1, rest) if accumulation is None else (rest, accumulation)
    sizes = {"fit.micro_batch": micro_batch, "dp": dp, "fit.accumulation": accumulation}
    given = " * ".join(f"{key}={value}" for key, value in sizes.items() if value is not None)
    below = global_batch // product * product
    fixes = [product] if is_whole else [one for one in (below, below + product) if one]
    raise UsageError(
        f"fit.global_batch={global_batch} is not {'' if is_whole else 'divisible by '}{given} ({product}):"
        f" set {' or '.join(f'fit.global_batch={one}' for one in fixes)}"
    )


@cache
def read_rules() -> dict[str, Any]:
    """Return rules.toml: `layout`, `advice`, `changes` that make a job fit, and `speed` of published runs."""
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def _propose_divisors(key: str, value: int, number: int) -> str:
    """Return settings of a key of `parallel` with the divisors of a number that are nearest to a value."""
    divisors = [one for one in range(1, min(number, MOST_NEAR) + 1) if number % one == 0]
    near = sorted(divisors, key=lambda one: abs(one - value))[:2]
    return " or ".join(f"parallel.{key}={one}" for one in near)


def check_layout(training: Training) -> None:
    """Raise UsageError for a layout that the model or the job cannot have, with settings that work.

    Under a causal mask each GPU takes two pieces of a sequence, one from either end, for equal work
    (Megatron-LM and torchtitan alike), so 2 * cp divides it. Sequence parallelism splits that further over
    tp. Megatron Core folds ep over tp: the experts' GPUs are those of a pipeline stage.
    """
    model, layout, settings, each = training.model, training.layout, training.settings, training.gpus_per_node
    experts, ranks, size = model.experts, each * training.nodes, layout.world_size
    tp, pp, ep, zero, replicas = layout.tp, layout.pp, layout.ep, layout.zero, layout.replicas
    framework, length, group = layout.framework, settings.seq_len, layout.shard_size
    widths = {"heads": model.heads}
    if model.latent_attention is None:
        widths["kv_heads"] = model.kv_heads
    if experts is None or experts.dense_layers:
        widths["intermediate_size"] = model.intermediate_size
    is_folded = framework == "megatron" and replicas * tp % ep == 0
    pieces = {"2 * parallel.cp": 2 * layout.cp if layout.cp > 1 else 1}
    pieces["parallel.tp"] = tp if layout.sequence_parallel else 1
    step = prod(pieces.values())
    broken = {
        "ranks": size != ranks,
        **{name: width % tp for name, width in widths.items()},
        "stages": pp * layout.virtual_stages > model.layers,
        "no_experts": ep > 1 and experts is None,
        "experts": experts and (experts.count % ep or (replicas % ep and not is_folded)),
        "positions": model.position == "learned" and length > model.max_seq_len,
        "pieces": length % step,
        "zero": zero not in SHARDED_BY[framework],
        "pipeline": framework == "zero" and pp > 1 and zero > 1,
        "not_sharded": group is not None and zero == 0,
        "shard_size": group is not None and replicas % group,
        "in_backward": settings.optimizer_in_backward and settings.accumulation > 1,
    }
    for rule in (name for name, is_broken in broken.items() if is_broken):
        sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "dp")}
        split = size // layout.dp
        fixes = [] if size % each else [f"nodes={size // each}"]
        fixes.append("others of these" if ranks % split else f"parallel.dp={ranks // split}")
        lengths = (length // step * step, length // step * step + step)
        key, most = ("virtual_stages", model.layers // pp) if pp <= model.layers else ("pp", model.layers)
        values = {
            "given": " * ".join(f"{name} {value}" for name, value in sizes.items() if value > 1) or "one GPU",
            "fixes": " or ".join(fixes),
            "tp": _propose_divisors("tp", tp, gcd(*widths.values())),
            "ep": _propose_divisors("ep", ep, gcd(experts.count, replicas) if experts else 1),
            "shard_size": _propose_divisors("shard_size", group or 1, replicas),
            "stages": f"parallel.{key}={most}",
            "product": " * ".join(name for name, number in pieces.items() if number != 1),
            "lengths": " or ".join(f"fit.seq_len={one}" for one in lengths if one),
            "zero": min(SHARDED_BY[framework], key=lambda one: abs(one - zero)),
        }
        parts = {"model": model, "layout": layout, "settings": settings, "ranks": ranks, "step": step}
        raise UsageError(read_rules()["layout"][rule].format(**parts, **values))
    solve_batch(settings.micro_batch, layout.dp, settings.accumulation, settings.global_batch)
