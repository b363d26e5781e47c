"""The values that the estimates take and give: a model, its training, a device, and what comes of them.

Bytes are integers; memory of one GPU unless a field says otherwise. All values are immutable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

VERDICTS = ("fits", "tight", "does_not_fit")


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    count: int
    per_token: int
    intermediate_size: int
    """Width inside one expert."""
    shared: int = 0
    """Experts that every token passes."""
    dense_layers: int = 0
    """First layers with an ordinary MLP."""
    shared_gate: bool = False
    """A gate of one output before the shared experts (Qwen)."""
    router_bias: bool = False
    """A number for each expert beside the router's matrix (DeepSeek-V3's correction of the load)."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    query_rank: int | None
    """Width of the compressed query; None if queries are not compressed."""
    kv_rank: int
    rope_width: int
    """Width of a head's rotary part."""
    plain_width: int
    """Width of a head's other part."""
    value_width: int


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """A decoder-only transformer."""

    name: str
    vocab_size: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate_size: int
    max_seq_len: int
    norm: str = "rmsnorm"
    """`rmsnorm` or `layernorm`."""
    mlp: str = "swiglu"
    """`swiglu` (three matrices) or `gelu` (two)."""
    position: str = "rope"
    """`rope` or `learned`."""
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
    norm_bias: bool | None = None
    """Biases in a layernorm; None is as `bias`."""
    norms_per_layer: int = 2
    """Norms of the hidden size in a layer: 4 with norms after attention and MLP too (Gemma 2)."""


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How a job is split over its GPUs: tp * pp * cp * dp of them; ep divides dp * cp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    """0: replicas; 1: optimizer states sharded; 2: gradients too; 3: weights too (FSDP)."""
    shard_size: int | None = None
    """GPUs over which states are sharded (hybrid sharding); None is all of dp * cp."""
    sequence_parallel: bool = True
    """With tp above 1: norms and dropout split along the sequence too."""
    virtual_stages: int = 1
    """Model chunks of each pipeline stage (interleaved schedule)."""

    @property
    def world_size(self) -> int:
        """GPUs of the job."""
        return self.tp * self.pp * self.dp * self.cp


ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""A layer's matrices by the names of Hugging Face's models; GELU has no gate_proj."""
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters, which are trained in place of the model (arXiv:2106.09685)."""

    rank: int
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Matrices that have an adapter; `all-linear` is all of a layer's, as in peft, without `lm_head`."""

    @property
    def matrices(self) -> frozenset[str]:
        """The targets by name."""
        every = ATTENTION_MATRICES + MLP_MATRICES if ALL_LINEAR in self.targets else ()
        return frozenset({*every, *self.targets} - {ALL_LINEAR})


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What decides memory and speed beside the model and the layout, in words of `FitConfig`'s."""

    framework: str = "ddp"
    """Who holds the states: torch's DDP or FSDP2, DeepSpeed's ZeRO (`zero`), or Megatron's distributed
    optimizer. It decides copies and buffers, `ParallelLayout.zero` what is sharded."""
    precision: str = "mixed"
    """`fp32`: all in 32 bits; `bf16`: weights, gradients and moments in bf16; `mixed`: computes in bf16 with
    fp32 master weights; `fp8`: as `mixed`, matrix products in 8 bits."""
    optimizer: str = "adamw"
    checkpointing: str = "none"
    offload: str = "none"
    micro_batch: int = 1
    """Sequences for each data-parallel rank and micro-step."""
    accumulation: int = 1
    """Micro-steps for each optimizer step."""
    seq_len: int = 2048
    flash_attention: bool = True
    autocast: bool = False
    """`mixed` by torch.autocast over fp32 weights, as the bundled program does with DDP."""
    bundled: bool = False
    """It is the bundled program, whose tensors are known exactly."""
    expandable_segments: bool = True
    loss: str = "auto"
    """`plain`: all logits at once; `chunked`: some at a time; `fused`: in one kernel with the output layer
    (Liger, cut cross-entropy); `auto`: not known, which makes the range wide."""
    compile: bool | None = None
    """By torch.compile; None is not known."""
    optimizer_fused: bool | None = None
    """The optimizer's step makes no list of temporaries; None is not known."""
    gradients: str = "auto"
    """`fp32` or `bf16`; `auto` is the framework's."""
    lora: Lora | None = None
    """With it the model's weights are frozen: in fp32 if `precision` is, else in 16 bits."""
    quantization: str = "none"
    """Of the frozen weights: `nf4` (4 bits and a scale for each 64; arXiv:2305.14314) or `int8`."""
    optimizer_in_backward: bool = False
    """Each parameter is updated, and its gradient freed, as soon as it has one."""
    activation_offload: bool = False
    """Activations are in CPU memory between forward and backward."""
    recompute_modules: tuple[str, ...] = ()
    """What selective checkpointing computes again, by the names of Megatron Core and `attention`; empty: by
    operator, or as Megatron's own default."""


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
class Free:
    """Which settings of the bundled program are `auto`, and may be chosen."""

    micro_batch: bool = False
    accumulation: bool = False
    checkpointing: bool = False
    parallel: bool = False
    sequences: int | None = None
    """Of an optimizer step, which the choice keeps; None: as many as it comes to."""

    @property
    def any(self) -> bool:
        """Whether there is anything to choose."""
        return self.micro_batch or self.accumulation or self.checkpointing or self.parallel


@dataclass(frozen=True, slots=True)
class FitRequest:
    """What is asked."""

    model: ModelDimensions
    layout: ParallelLayout
    settings: TrainingSettings
    device: Device
    gpus_per_node: int
    nodes: int = 1
    node: NodeResources = field(default_factory=NodeResources)
    tokens: float | None = None
    """Tokens to train on in all, for time and GPU-hours."""
    step_seconds: float | None = None
    """Measured seconds of an optimizer step."""
    has_model: bool = True
    is_bundled: bool = True
    """False: a program of the user's, or settings that the bundled one does not have; never refused."""
    global_batch: int | None = None
    """Sequences of an optimizer step, if that is set."""
    free: Free = field(default_factory=Free)
    """What was chosen, and would be chosen otherwise on other nodes."""
    fixed: tuple[str, ...] = ()
    """Keys of `parallel` and `fit` with values of their own, which a change has to set too."""


@dataclass(frozen=True, slots=True)
class Range:
    """An estimate, in bytes."""

    low: int
    expected: int
    high: int

    def __add__(self, other: "Range") -> "Range":
        """Add both ends."""
        return Range(self.low + other.low, self.expected + other.expected, self.high + other.high)


NOTHING = Range(0, 0, 0)


def add_ranges(ranges: Sequence[Range]) -> Range:
    """Add both ends and the middle of ranges."""
    total = NOTHING
    for one in ranges:
        total += one
    return total


def make_exact(value: float) -> Range:
    """Make a range of one value, never negative."""
    number = max(0, round(value))
    return Range(number, number, number)


def make_range(low: float, expected: float, high: float) -> Range:
    """Make a range of bytes, never negative and in order."""
    middle = max(0, round(expected))
    return Range(min(middle, max(0, round(low))), middle, max(middle, round(high)))


def take_away(value: Range, one: Range, times: int = 1) -> Range:
    """Subtract a range, never to less than nothing."""
    return make_range(
        value.low - times * one.low, value.expected - times * one.expected, value.high - times * one.high
    )


def scale_range(value: Range, factor: float) -> Range:
    """Multiply a range."""
    return make_range(value.low * factor, value.expected * factor, value.high * factor)


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
class MemoryEstimate:
    """Peak memory of the fullest GPU of the job."""

    parts: tuple[MemoryPart, ...]
    total: Range
    """Of all parts: what the device has in use."""
    allocated: Range
    """What torch.cuda.max_memory_allocated shows: without context and fragmentation."""
    reserved: Range
    """What torch.cuda.max_memory_reserved shows: with fragmentation, without the context."""
    stage: int = 0
    """Pipeline stage of that GPU."""


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
class Advice:
    """Something about the settings that a person should know."""

    level: str
    """`warning` (it will cost) or `note`."""
    what: str
    fix: str = ""
    gain: str = ""
    """Expected gain, with its source."""


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """A resource of the node: what the job needs and has."""

    name: str
    """`CPU cores`, `CPU memory`, `/dev/shm`."""
    needed: float
    available: float | None
    unit: str
    """`cores` or `GiB`."""
    enough: bool
    note: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Speed of one optimizer step and of the whole training; ranges are (low, high)."""

    parameters: int
    active_parameters: int
    tokens_per_step: int
    flops_per_step: float
    """Of the model, all GPUs: without recomputation."""
    peak_tflops: float | None
    """Dense, of one GPU at the precision; None if unknown."""
    peak_source: str
    step_seconds: tuple[float, float] | None
    """Expected; both ends are the measured one if there is one."""
    mfu: tuple[float, float] | None
    hfu: tuple[float, float] | None
    tflops: tuple[float, float] | None
    """Of one GPU, without recomputation."""
    total_seconds: tuple[float, float] | None = None
    """To the token budget."""
    gpu_hours: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Learned:
    """What earlier runs of the same program and settings have measured."""

    ratio: float
    """Measured over expected: the median of max_memory_reserved over `MemoryEstimate.reserved.expected`."""
    spread: float
    """Half of the range of the runs' ratios over their median; 0 for one run."""
    runs: int
    source: str = ""
    """Where from, for people: a run, a program."""


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
    """What comes of a request."""

    request: FitRequest
    estimate: MemoryEstimate
    capacity: int
    """Bytes of the device; 0 if unknown."""
    verdict: str
    """One of `VERDICTS`; empty if the device's memory is unknown."""
    changes: tuple[Change, ...] = ()
    """At most three, the cheapest first, if it does not fit."""
    budget: tuple[BudgetLine, ...] = ()
    advice: tuple[Advice, ...] = ()
    speed: SpeedEstimate | None = None
    learned: str = ""
    """What earlier runs of the same program have measured, and how it was used; empty if there were none."""
    grid: tuple[GridCell, ...] = ()
    """Micro-batch by checkpointing by sharding, if that was asked for."""
