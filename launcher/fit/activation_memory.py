"""Activations that a layer keeps for its backward pass, by counting its tensors.

The count for GPT-3's layer, 34 + 5as/h bytes for each element of (sequence, batch, hidden), is that of
Korthikanti et al. (arXiv:2205.05198, section 4.1); the same rules count SwiGLU, grouped queries, latent
attention and experts. Widths are in elements a token; a `Layer` in bytes a token.
"""

from collections.abc import Collection
from dataclasses import dataclass

from launcher.fit.fit_model import (
    ATTENTION_MATRICES,
    MLP_MATRICES,
    NOTHING,
    FitRequest,
    Lora,
    ModelDimensions,
    Range,
    make_exact,
    make_range,
    scale_range,
    take_away,
)
from launcher.fit.parameter_counts import (
    LayerRun,
    RankParameters,
    count_largest_matrix,
    divide_up,
    list_attention_matrices,
    list_mlp_matrices,
)

EAGER_NORM = 8
"""Bytes an element that an RMSNorm written in Python keeps more: its input in fp32, and the normalised one
(transformers.models.llama.LlamaRMSNorm)."""


@dataclass(frozen=True, slots=True)
class AttentionWidths:
    """Elements a token of a layer's attention."""

    query: int
    key: int
    value: int
    latent: int
    """Compressed queries, keys and values, of latent attention alone."""
    out: int
    """Of all heads' results."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes a token that one layer keeps, by how they are split."""

    split: float
    """Split by tp always: queries, keys, values, results of heads, the MLP's inner width."""
    sequence: float
    """Split by tp with sequence parallelism alone: norms' and matrices' inputs, dropout of the stream."""
    scores: float
    """Of attention's scores, split by tp: 0 with flash attention, else seq_len for each head."""

    def share(self, tp: int, *, sequence_parallel: bool) -> float:
        """Give the bytes a token on a GPU, with the scores."""
        rest = self.sequence / tp if sequence_parallel else self.sequence
        return (self.split + self.scores) / tp + rest


def find_layer_widths(model: ModelDimensions) -> AttentionWidths:
    """Give the widths of a model's attention; latent attention by arXiv:2405.04434, section 2.1."""
    latent = model.latent_attention
    if latent is None:
        query, key = model.heads * model.head_width, model.kv_heads * model.head_width
        return AttentionWidths(query, key, key, 0, query)
    query = model.heads * (latent.plain_width + latent.rope_width)
    value = model.heads * latent.value_width
    compressed = 2 * (latent.query_rank or 0) + 2 * latent.kv_rank + latent.rope_width
    return AttentionWidths(query, query, value, compressed, value)


def count_attention_bytes(
    model: ModelDimensions, seq_len: int, width: int, *, flash: bool, sdpa: bool = False
) -> float:
    """Count the bytes a token of queries, keys, values and results, without the scores; `width` of a number.

    Flash attention keeps its result and a logarithm in fp32 for each head (arXiv:2205.14135). By torch's
    `scaled_dot_product_attention` (`sdpa`) the result is copied to the order of tokens if queries are
    rotated; in fp32 with grouped queries, keys and values are repeated (torch's sdp_utils.cpp).
    """
    widths = find_layer_widths(model)
    kept = widths.query + widths.key + widths.value + widths.latent + widths.out
    if sdpa and width == 2 and model.position == "rope":
        kept += widths.query
    elif sdpa and has_plain_attention(model, width):
        kept += 2 * widths.query - widths.key - widths.value
    norms = 2 * (widths.query + widths.key) if model.qk_norm else 0
    return width * kept + norms * width / 2 + (4 * model.heads if flash else 0)


def has_plain_attention(model: ModelDimensions, width: int) -> bool:
    """Tell whether torch has no fused kernel for a model's attention: in fp32 with grouped queries."""
    return width == 4 and model.heads != model.kv_heads


def count_scores(model: ModelDimensions, seq_len: int, width: int, *, dropout: bool) -> float:
    """Count the bytes a token of attention's scores without flash attention: 5as, without dropout 2as.

    The softmax's result; with dropout its result and mask too (arXiv:2205.05198, section 4.1).
    """
    each = 2 * width + 1 if dropout else width
    return float(each * model.heads * seq_len)


def count_mlp_bytes(
    model: ModelDimensions, inner: float, width: float, *, fused: bool = False, has_input: bool = True
) -> float:
    """Count the bytes a token inside an MLP: GELU keeps two of the inner width, SwiGLU four.

    A fused SwiGLU keeps no result of its SiLU (Megatron Core's bias_swiglu_fusion, torch.compile): three.
    One is the input of the last matrix, which keeps it if it is trained (`has_input`).
    """
    kept = 2 if model.mlp != "swiglu" else 3 if fused else 4
    return (kept if has_input else kept - 1) * width * inner


def count_layer_activations(
    model: ModelDimensions,
    seq_len: int,
    *,
    mixture: bool = False,
    width: int = 2,
    flash: bool = True,
    dropout: bool = False,
    eager_norms: bool = False,
    fused_mlp: bool = False,
    autocast: bool = False,
    sdpa: bool = False,
    lora: Lora | None = None,
    recomputed: Collection[str] = (),
) -> LayerActivations:
    """Count the bytes a token that a layer keeps for its backward pass.

    `width` is bytes of a number: 2 for bf16. By `autocast` the residual stream is in fp32, and the input of
    each matrix is a copy. `sdpa` is as in `count_attention_bytes`. With dropout, GELU, a key head for each
    query head and an inner width of 4 hidden sizes it is 34 + 5as/h of arXiv:2205.05198, over the hidden
    size. With LoRA a matrix keeps its input only if it has an adapter, whose low-rank result is kept too.
    `recomputed` are modules of Megatron Core's recompute_modules, and `attention`, the whole block but its
    input.
    """
    hidden, experts = model.hidden_size, model.experts if mixture else None
    trained = frozenset(ATTENTION_MATRICES + MLP_MATRICES) if lora is None else lora.matrices
    stream, rising = 4 if autocast else width, 2 if model.mlp == "swiglu" else 1
    # Inputs of the norms with their statistics, of the attention's matrices, and of the MLP's.
    statistics = 4 if model.norm == "rmsnorm" else 8
    sequence: float = model.norms_per_layer * (stream * hidden + statistics) + (2 * hidden if dropout else 0)
    if "layernorm" not in recomputed:
        if trained & {"q_proj", "k_proj", "v_proj"}:
            sequence += (3 if autocast else 1) * width * hidden
        if trained & {"gate_proj", "up_proj"}:
            sequence += (rising if autocast else 1) * width * hidden
        if eager_norms and model.norm == "rmsnorm":  # a frozen weight needs no normalised input
            sequence += model.norms_per_layer * (EAGER_NORM if lora is None else EAGER_NORM / 2) * hidden
    split, scores = 0.0, 0.0
    if "attention" not in recomputed:
        flash = flash or "core_attn" in recomputed
        split = count_attention_bytes(model, seq_len, width, flash=flash, sdpa=sdpa)
        if not flash or (sdpa and has_plain_attention(model, width)):
            scores = count_scores(model, seq_len, width, dropout=dropout)
        if "mla_up_proj" in recomputed and model.latent_attention is not None:
            widths = find_layer_widths(model)
            split -= width * (widths.query + widths.key + widths.value)

    def count_mlp(inner: float) -> float:
        return count_mlp_bytes(model, inner, width, fused=fused_mlp, has_input="down_proj" in trained)

    if lora:
        passes = [times for _, times, _ in list_adapters(model, lora, mixture=mixture)]
        sequence += width * lora.rank * sum(passes)
    if experts is None:
        split += 0 if "mlp" in recomputed else count_mlp(model.intermediate_size)
    elif "moe" not in recomputed:
        routed = experts.per_token * experts.intermediate_size
        split += rising * width * routed if "moe_act" in recomputed else count_mlp(routed)
        if "shared_experts" not in recomputed:
            split += count_mlp(experts.shared * experts.intermediate_size)
        # Each token's copies, sent to and brought back from its experts, and the router's scores in fp32.
        sequence += 2 * width * hidden * experts.per_token + 8 * experts.count
    return LayerActivations(split, sequence, scores)


def list_adapters(model: ModelDimensions, lora: Lora, *, mixture: bool) -> list[tuple[int, int, int]]:
    """Give (inputs, passes of a token, outputs) of each of a layer's matrices with an adapter."""
    inner, passes = model.intermediate_size, 1
    if mixture and model.experts is not None:
        inner, passes = model.experts.intermediate_size, model.experts.per_token + model.experts.shared
    found = [(name, inputs, 1, out) for name, inputs, out in list_attention_matrices(model)]
    found += [(name, inputs, passes, out) for name, inputs, out in list_mlp_matrices(model, inner)]
    return [(inputs, times, out) for name, inputs, times, out in found if name in lora.matrices]


def count_selected(
    model: ModelDimensions, *, mixture: bool, width: int, stream: int, every: int
) -> LayerActivations:
    """Count the bytes a token that a layer keeps with selective checkpointing by operator.

    The layer's input (`stream` bytes an element), attention's result, and the result of each matrix (`every`
    1, the bundled program's) or of every second one (2, torchtitan's); of routed experts half of what is
    sent to them and back.
    """
    widths, hidden = find_layer_widths(model), model.hidden_size
    inner = 2 if model.mlp == "swiglu" else 1
    results = widths.query + widths.key + widths.value + widths.latent
    if mixture and model.experts is not None:
        results += inner * model.experts.shared * model.experts.intermediate_size
        sent = hidden * model.experts.per_token
    else:
        results, sent = results + inner * model.intermediate_size, 0
    split = width * (widths.out + results / every) + 4 * model.heads
    return LayerActivations(split, stream * hidden + width * (2 * hidden / every + sent), 0.0)


def count_in_flight(request: FitRequest, stage: int) -> float:
    """Give how many micro-batches' activations a pipeline stage holds at most.

    1F1B: as many as stages from this one to the last; interleaved stages 1 + (pp - 1) / (pp * v) times the
    first one's pp (arXiv:2104.04473, section 2.2; arXiv:2205.05198, section 4.2.3).
    """
    layout, steps = request.layout, max(1, request.settings.accumulation)
    if layout.pp == 1:
        return 1.0
    held = float(layout.pp - stage)
    if layout.virtual_stages > 1:
        held *= 1 + (layout.pp - 1) / (layout.pp * layout.virtual_stages)
    return min(held, float(steps))


def count_tokens(request: FitRequest) -> int:
    """Give the tokens of a micro-batch on a GPU: cp splits the sequence."""
    settings = request.settings
    return settings.micro_batch * -(-settings.seq_len // max(1, request.layout.cp))


def count_logit_bytes(request: FitRequest) -> tuple[float, float, float]:
    """Give the bytes of a logit at the loss: (low, expected, high).

    A plain loss has the 16-bit logits, their fp32 copy, the logarithms, two gradients: 14 by torch's
    cross_entropy, 16 by torchtitan's Qwen3 32B (its pull request 1690), 18.7 to 21 there with tensor
    parallelism (DTensor's parallel loss). Compiled, or in flash-attention's kernel, the 16-bit logits and
    their gradient: 4 (torchtitan's mxfp8.md and nvfp4.md), at most 6.7 in llm-foundry's 350m rows. If the
    model is compiled, the loss may not be. Megatron's works in place.
    """
    settings = request.settings
    match settings.loss:
        case "fused":
            return 0.0, 0.5, 1.5
        case "chunked":
            return 0.3, 1.2, 2.5
        case "compiled":
            return 4.0, 5.0, 7.0
    if settings.framework == "megatron":
        return 6.0, 8.0, 12.0
    if request.layout.tp > 1 and not settings.compile:
        return 15.0, 18.5, 22.0
    if settings.loss == "plain" or settings.compile is False:
        return 10.0, 14.0, 18.0
    if settings.compile:
        return 4.0, 6.0, 14.0
    # Whoever checkpoints by operator (torchtitan) often compiles, the loss too.
    return 4.0 if settings.checkpointing == "selective" else 6.0, 11.0, 17.5


SELECTED = {True: (0.94, 1.03, 1.12), False: (1.15, 1.25, 1.57), None: (0.94, 1.1, 1.57)}
"""Low, expected and high of what selective checkpointing keeps by operator, if compiled, eager or not known.
torchtitan's Llama 3.1 8B keeps 60 to 70 KB a token and layer compiled, 74 to 85 eager, 100 with norms in
Python (its commits 2271b6386, 5940ddeb5, 40f8fd007); counted are 64. By layer it is half of all."""


MEGATRON_SELECTIVE = 0.5
"""Least share with Megatron, where attention's scores alone are not kept, unless norms, latent attention's
up-projection or the MLP's activation are recomputed too (Megatron Core's recompute_modules)."""


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes of a micro-batch on a GPU of one stage."""

    kept: Range
    """By all layers of the stage between forward and backward."""
    again: Range
    """What the layer that is computed again has beside what it kept, with checkpointing."""
    working: Range
    """Gradients of activations inside a layer."""
    stream: int
    """One tensor of the hidden size."""
    outer: int
    """Tokens, rotary angles, inputs of the final norm and of the output layer."""


def keep_on_gpu(kept: Range, layer: Range) -> Range:
    """Give what of offloaded activations is still on the GPU: of one layer, of two, of five at most.

    torchtune's OffloadActivations copies on a stream of its own and holds at most five tensors meanwhile.
    """
    each = make_range(layer.low, 2 * layer.expected, 5 * layer.high)
    return make_range(min(kept.low, each.low), min(kept.expected, each.expected), min(kept.high, each.high))


def count_dequantized(request: FitRequest, parameters: RankParameters) -> Range:
    """Count the 16-bit weights that quantized ones are computed with: of a matrix, of a layer at most."""
    if request.settings.quantization == "none":
        return NOTHING
    matrix = 2 * divide_up(count_largest_matrix(request.model), request.layout.tp)
    return make_range(matrix, 2 * matrix, max(2 * matrix, 2 * parameters.largest_layer))


def find_width(request: FitRequest) -> int:
    """Give the bytes of a number in the computation."""
    return 4 if request.settings.precision == "fp32" else 2


def count_run(
    request: FitRequest, run: LayerRun, recomputed: Collection[str] = ()
) -> tuple[float, float, float]:
    """Give the bytes a token that a layer keeps on a GPU: (low, expected, high).

    Low: fused norms, and no dropout; compiled a fused SwiGLU too. High: norms written in Python, and dropout
    if positions are learned (GPT-2, GPT-3; MPT has none), and before LoRA's adapters: the mask and what is
    left of their inputs. Expected: norms as Hugging Face's, unless compiled or Megatron's. Functions on
    quantized weights keep each matrix's input (bitsandbytes' MatMul4Bit), torchao's do not; litgpt's nf4 runs
    keep about as much as the inputs and half of the results more than its LoRA runs.
    """
    model, settings, layout = request.model, request.settings, request.layout
    width = find_width(request)
    # Selective checkpointing computes the scores again (arXiv:2205.05198, section 5).
    is_default = settings.checkpointing == "selective" and not settings.recompute_modules
    flash = settings.flash_attention or is_default
    if settings.bundled:
        layer = count_layer_activations(
            model, settings.seq_len, width=width, autocast=settings.autocast, sdpa=True
        )
        each = layer.share(1, sequence_parallel=False)
        return 0.98 * each, each, 1.02 * each
    eager = settings.framework != "megatron" and not settings.compile
    old, fused = model.position == "learned", bool(settings.compile) or settings.framework == "megatron"

    def count(*, dropout: bool, eager_norms: bool, fused_mlp: bool) -> LayerActivations:
        return count_layer_activations(
            model,
            settings.seq_len,
            mixture=run.mixture,
            width=width,
            flash=flash,
            dropout=dropout,
            eager_norms=eager_norms,
            fused_mlp=fused_mlp,
            lora=settings.lora,
            recomputed=recomputed,
        )

    low, expected, high = (
        count(dropout=dropout, eager_norms=norms, fused_mlp=thin).share(
            layout.tp, sequence_parallel=layout.sequence_parallel
        )
        for dropout, norms, thin in (
            (False, False, fused),
            (False, eager, not eager),
            (old, eager, fused and not eager),
        )
    )
    if settings.precision == "fp8":
        # Inputs of matrices may be kept in 8 bits (Transformer Engine).
        low *= 0.6
    if settings.lora:
        adapters = list_adapters(model, settings.lora, mixture=run.mixture)
        high += (width + 1) * sum(inputs * times for inputs, times, _ in adapters)
    if settings.quantization != "none":
        every = list_adapters(model, Lora(1), mixture=run.mixture)
        inputs = width * sum(inputs * times for inputs, times, _ in every)
        expected, high = (
            expected + inputs,
            high + inputs + width * sum(out * times for _, times, out in every),
        )
    return low, expected, 1.05 * high


def estimate_activations(request: FitRequest, parameters: RankParameters) -> StageActivations:
    """Estimate the activations of a micro-batch on a GPU.

    With full checkpointing a layer keeps its input, 2 sbh (arXiv:2205.05198, section 5), and one layer at a
    time all of its tensors. Experts may get more than their share of tokens: the high end has half as
    much again.
    """
    settings, layout, model = request.settings, request.layout, request.model
    tokens, width = count_tokens(request), find_width(request)
    stream = tokens * (4 if settings.autocast else width) * model.hidden_size
    local = stream // layout.tp if layout.sequence_parallel else stream
    kept, again, working = NOTHING, NOTHING, NOTHING

    def count(run: LayerRun, recomputed: Collection[str] = ()) -> Range:
        low, expected, high = count_run(request, run, recomputed)
        return make_range(tokens * low, tokens * expected, tokens * high * (1.5 if run.mixture else 1.0))

    for run in parameters.layers:
        one = layer = count(run)
        if settings.checkpointing == "full":
            one = make_exact(local)
        elif settings.checkpointing == "selective" and settings.recompute_modules:
            one = count(run, settings.recompute_modules)
        elif settings.checkpointing == "selective":
            one = keep_selected(request, run, layer, tokens)
        kept += scale_range(one, run.count)
        again = max(again, take_away(layer, one), key=lambda each: each.expected)
        if settings.checkpointing == "selective" and not settings.recompute_modules:
            again += count_again(request, tokens)
        working = max(working, count_working(request, run, local), key=lambda each: each.expected)
    angles = settings.seq_len * model.head_width * 4 if model.position == "rope" else 0
    outer = local + tokens * (width * model.hidden_size // layout.tp + 16) + angles
    return StageActivations(kept, again + count_dequantized(request, parameters), working, local, outer)


def keep_selected(request: FitRequest, run: LayerRun, layer: Range, tokens: int) -> Range:
    """Give what selective checkpointing keeps of a layer's activations, without attention's scores."""
    settings, layout = request.settings, request.layout
    if settings.framework == "megatron":
        return make_range(MEGATRON_SELECTIVE * layer.low, layer.expected, layer.high)
    stream, every = (4 if settings.autocast else find_width(request)), 1 if settings.bundled else 2
    kept = count_selected(
        request.model, mixture=run.mixture, width=find_width(request), stream=stream, every=every
    )
    each = tokens * kept.share(layout.tp, sequence_parallel=layout.sequence_parallel)
    if settings.bundled:
        return make_range(0.98 * each, each, 1.02 * each)
    low, expected, high = (share * each for share in SELECTED[settings.compile])
    if run.mixture:
        low, high = 0.5 * low, 1.5 * high
    if settings.precision == "fp8" and settings.compile is False:
        # torchao's eager fp8 took 81.8 GiB where bf16 took 49.6 (torchtitan's 2271b6386), compiled 47.8.
        expected, high = 0.8 * layer.expected, layer.high
    return make_range(low, expected, high)


def count_again(request: FitRequest, tokens: int) -> Range:
    """Count the scores of one layer that selective checkpointing computes again."""
    if request.settings.flash_attention:
        return NOTHING
    layer = count_layer_activations(request.model, request.settings.seq_len, flash=False, dropout=True)
    return make_exact(tokens * layer.scores / request.layout.tp)


def count_working(request: FitRequest, run: LayerRun, stream: int) -> Range:
    """Count the bytes of gradients of activations inside a layer: in its MLP, half of what that keeps.

    torch's plain attention has gradients of its scores and of their softmax. The high end has what flash
    attention's backward takes inside its kernel: the query's gradient in fp32, and repeated keys.
    """
    model, settings, tokens = request.model, request.settings, count_tokens(request)
    width, inner = find_width(request), float(model.intermediate_size)
    if run.mixture and model.experts is not None:
        inner = (model.experts.per_token + model.experts.shared) * model.experts.intermediate_size
    kept = tokens * count_mlp_bytes(model, inner, width) / request.layout.tp
    if not settings.bundled:
        crowd = 1.5 if run.mixture else 1.0
        return make_range(0.25 * kept, 0.5 * kept + stream, 0.75 * kept * crowd + 2 * stream)
    found = 0.5 * kept + stream + tokens * width * model.hidden_size
    if has_plain_attention(model, width):
        found = max(found, 2 * tokens * width * model.heads * settings.seq_len - kept + stream)
    matrix = (4 + 2 * settings.autocast if settings.framework == "ddp" else width) * model.hidden_size * inner
    groups = 2 * width if model.heads != model.kv_heads else 0
    kernel = tokens * (4 + groups) * model.heads * model.head_width
    return make_range(0.9 * found, found + matrix, 1.1 * found + matrix + kernel)
