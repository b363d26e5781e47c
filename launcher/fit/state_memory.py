"""Weights, gradients and optimizer states: bytes a parameter by precision, optimizer and framework.

Published totals: 16 bytes a parameter of mixed-precision Adam (ZeRO, arXiv:1910.02054, section 3.1), 18 with
fp32 gradients (Megatron-LM's distributed optimizer: 6 + 12 / dp), 16 in fp32, 8 in bf16 alone.
"""

from dataclasses import dataclass, replace

from launcher.fit.fit_model import NOTHING, FitRequest, Range, TrainingSettings, make_exact, make_range
from launcher.fit.parameter_counts import RankParameters, count_trained, divide_up

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0, "adamw8bit": 0}
"""Moments of a parameter in the type of the optimizer's states. AdamW (arXiv:1711.05101) 2; Lion
(arXiv:2302.06675), SGD with momentum and Muon (Jordan et al., 2024) 1; Adafactor (arXiv:1804.04235) keeps
rows and columns, AdamW in 8 bits (arXiv:2110.02861) one byte for each of two moments."""
QUANTIZED = {"nf4": (0.516, 0.55, 0.5625), "int8": (1.0, 1.002, 1.1)}
"""Low, expected and high bytes of a frozen weight. NF4: 4 bits and a scale for each 64, in fp32
(bitsandbytes), or in 8 bits too (double quantization, arXiv:2305.14314, section 3; torchao); LLM.int8: 8
bits and a scale for each row (arXiv:2208.07339)."""
EIGHT_BIT_STATE = 2 + 2 * 4 / 256
"""Bytes a parameter of two moments of 8 bits, each block of 256 with a scale in fp32."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes a parameter."""

    weights: float
    gradients: float
    optimizer: float
    """Moments, and fp32 master weights if the weights are in 16 bits."""
    cast: float
    """Of the copy in which layers compute, while they compute; 0 if they compute with the weights."""

    @property
    def total(self) -> float:
        """Of a parameter that nothing shards."""
        return self.weights + self.gradients + self.optimizer


def has_fp32_weights(settings: TrainingSettings) -> bool:
    """Tell whether the weights that are trained are fp32 parameters, and not 16 bits beside masters."""
    return settings.precision == "fp32" or (
        settings.precision in ("mixed", "fp8")
        and settings.framework in ("ddp", "fsdp")
        and settings.lora is None
    )


def count_moment_bytes(settings: TrainingSettings, hidden_size: int) -> float:
    """Give the optimizer's bytes a parameter, without master weights.

    Adafactor: a row and a column in fp32 of each matrix, at least hidden_size long.
    """
    width = 2 if settings.precision == "bf16" else 4
    if settings.optimizer == "adamw8bit":
        return EIGHT_BIT_STATE
    if settings.optimizer == "adafactor":
        return 2 * width / max(1, hidden_size)
    return float(MOMENTS[settings.optimizer] * width)


def count_state_bytes(settings: TrainingSettings, hidden_size: int) -> StateBytes:
    """Give the bytes of a parameter by what holds them.

    `mixed` with DDP or FSDP2 is fp32 weights and gradients (torch.autocast, MixedPrecisionPolicy), and 16-bit
    copies while layers compute; DeepSpeed keeps weights and gradients of 16 bits beside fp32 masters
    (arXiv:1910.02054); Megatron-LM accumulates gradients in fp32. fp8 keeps a copy of 8 bits of each weight
    and of its transpose beside (Transformer Engine).
    """
    each = count_usual_bytes(settings, hidden_size)
    if settings.gradients == "auto":
        return each
    return replace(each, gradients=2 if settings.gradients == "bf16" else 4)


def count_usual_bytes(settings: TrainingSettings, hidden_size: int) -> StateBytes:
    """Give the bytes of a parameter with the framework's own type of gradients."""
    moments = count_moment_bytes(settings, hidden_size)
    fp8 = 2.0 if settings.precision == "fp8" else 0.0
    if settings.precision == "fp32":
        return StateBytes(4, 4, moments, 0)
    if settings.precision == "bf16":
        return StateBytes(2, 2, moments, 0)
    if settings.lora:  # adapters in fp32, as peft casts them: they are small
        return StateBytes(4, 4, moments, 2)
    if has_fp32_weights(settings):
        return StateBytes(4, 4, moments, 2 + fp8)
    gradients = 4 if settings.framework == "megatron" else 2
    return StateBytes(2 + fp8, gradients, 4 + moments, 0)


@dataclass(frozen=True, slots=True)
class Shards:
    """Over how many GPUs each kind of state is split: (dense parameters, experts)."""

    weights: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]


def find_shards(request: FitRequest) -> Shards:
    """Give the GPUs over which states are sharded (ZeRO's stages 1 to 3, arXiv:1910.02054).

    Over dp * cp replicas, or `shard_size` of them (hybrid sharding); experts over the replicas that hold the
    same ones, dp * cp / ep.
    """
    layout = request.layout
    replicas = max(1, layout.dp * layout.cp)
    wide = min(replicas, layout.shard_size or replicas)
    held = replicas if layout.ep <= replicas else replicas * layout.tp  # Megatron folds ep over tp
    both = (wide, max(1, min(wide, held // max(1, layout.ep))))
    none = (1, 1)
    # FSDP2 shards its weights always: with zero=2 it keeps the gathered ones (reshard_after_forward=False).
    sharded = 2 if request.settings.framework == "fsdp" else 3
    return Shards(
        both if layout.zero >= sharded else none,
        both if layout.zero >= 2 else none,
        both if layout.zero >= 1 else none,
    )


def count_shard(parameters: RankParameters, shards: tuple[int, int]) -> int:
    """Give the parameters of a GPU's shard."""
    return divide_up(parameters.dense, shards[0]) + divide_up(parameters.experts, shards[1])


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Bytes on the GPU."""

    weights: Range
    gradients: int
    """At the end of the backward pass."""
    optimizer: Range
    step: Range
    """Temporaries of the optimizer's step."""
    all_gradients: int
    """What DDP's buckets hold, which stays if the gradients themselves are freed at once."""


def estimate_states(request: FitRequest, parameters: RankParameters) -> StateMemory:
    """Estimate what a GPU holds of weights, gradients and optimizer, and what a step of it takes.

    Offloaded parameters are on the GPU while they compute alone (ZeRO-Infinity, arXiv:2104.07857), as are
    their sharded gradients; offloaded optimizer states never are (ZeRO-Offload, arXiv:2101.06840).
    """
    settings, shards = request.settings, find_shards(request)
    each, trained = count_state_bytes(settings, request.model.hidden_size), count_trained(request, parameters)
    weights = make_exact(each.weights * count_shard(trained, shards.weights))
    if settings.lora:
        weights += count_frozen(request, parameters)
    gradients = whole = round(each.gradients * count_shard(trained, shards.gradients))
    local = count_shard(trained, shards.optimizer)
    optimizer = count_optimizer(request, trained, local, each.optimizer)
    step = estimate_step(request, local)
    if settings.optimizer_in_backward:  # those of a layer or a table
        largest = max(trained.largest_layer, trained.tables)
        gradients = min(whole, round(each.gradients * divide_up(largest, shards.gradients[0])))
        step = make_range(0, min(step.expected, gradients), min(step.high, gradients))
    if settings.offload != "none":
        optimizer, step = NOTHING, NOTHING
    if settings.offload != "none" and settings.framework == "zero" and request.layout.zero >= 2:
        gradients = 0  # they leave the GPU by buckets in the backward pass (arXiv:2101.06840, section 4.2)
    if settings.offload == "parameters":
        weights, gradients = NOTHING, gradients if request.layout.zero < 2 else 0
    return StateMemory(weights, gradients, optimizer, step, whole)


def count_frozen(request: FitRequest, parameters: RankParameters) -> Range:
    """Count what a GPU holds of the frozen model; the tables and norms are not quantized.

    High: peft's prepare_model_for_kbit_training casts them to fp32. Low: the output layer is quantized too
    (litgpt).
    """
    settings, shards = request.settings, find_shards(request).weights
    width = 4 if settings.precision == "fp32" else 2
    if settings.quantization == "none":
        return make_exact(width * count_shard(parameters, shards))
    low, expected, high = QUANTIZED[settings.quantization]
    layers = replace(parameters, tables=0, norm=0)
    quantized = count_shard(layers, shards)
    rest = divide_up(parameters.tables + parameters.norm, shards[0])
    head = 0 if request.model.tied_embeddings else rest / 2
    return make_range(
        low * (quantized + head) + width * (rest - head),
        expected * quantized + width * rest,
        high * quantized + 4 * rest,
    )


def count_optimizer(request: FitRequest, parameters: RankParameters, local: int, each: float) -> Range:
    """Give the optimizer's bytes; Muon leaves tables and norms to AdamW, which keeps a second moment.

    Muon: github.com/KellerJordan/Muon, "embeddings, classifier heads and scalars by AdamW".
    """
    expected = round(each * local)
    if request.settings.optimizer == "muon":
        width = 2 if request.settings.precision == "bf16" else 4
        share = parameters.tables / max(1, parameters.total)
        expected += round(width * local * share)
    if request.settings.optimizer == "adafactor":
        # A first moment is an option; small matrices have longer rows and columns for their size.
        return Range(expected, expected, expected + 4 * local // 50)
    return Range(expected, expected, expected)


def estimate_step(request: FitRequest, local: int) -> Range:
    """Estimate the temporaries of an optimizer's step over `local` parameters.

    A fused or compiled step has none; torch's default for CUDA, `foreach`, takes a list of temporaries of all
    gradients: for AdamW the root of the second moment (torch.optim._multi_tensor_adamw), for Adafactor
    the squares and the updates.
    """
    settings = request.settings
    width = 2 if settings.precision == "bf16" else 4
    whole = width * local
    if settings.optimizer == "adafactor":
        return Range(0, 2 * whole, 3 * whole)
    if (
        settings.optimizer_fused
        or settings.bundled
        or settings.framework in ("zero", "megatron")
        or settings.optimizer != "adamw"
    ):
        return NOTHING
    return Range(0 if settings.optimizer_fused is None else whole, whole, whole)
