"""What a model has: parameters, operations of a token, and the activations that a layer keeps.

The count of activations for GPT-3's layer, 34 + 5as/h bytes for each element of (sequence, batch, hidden), is
that of Korthikanti et al. (arXiv:2205.05198, section 4.1); the same rules count SwiGLU, grouped queries,
latent attention and experts. Widths are in elements a token.
"""

from collections.abc import Collection
from typing import NamedTuple

from launcher.fit.settings import ATTENTION_MATRICES, MLP_MATRICES
from launcher.fit.training import NOTHING, Experts, ModelDimensions, Range, Training

EAGER_NORM = 8
"""Bytes an element that an RMSNorm written in Python keeps more: its input in fp32, and the normalised one
(transformers.models.llama.LlamaRMSNorm); a frozen weight needs no normalised input."""
CROWD = 1.5
"""Of the high end for experts: they may get more than their share of tokens."""


def divide_up(total: int, parts: int) -> int:
    """Divide, and round up: the fullest of `parts` shares."""
    return -(-total // max(1, parts))


class Matrix(NamedTuple):
    """A linear layer, or several equal ones."""

    name: str
    """As Hugging Face's models have it; latent attention has two for most names."""
    inputs: int
    outputs: int
    has_bias: bool
    held: str = "split"
    """`split` by tp, `whole` on each GPU of a tp group, or `routed`, split over the experts' GPUs."""
    copies: int = 1
    passes: int = 1
    """How many of the copies a token passes."""

    @property
    def parameters(self) -> int:
        """Of one copy."""
        return self.inputs * self.outputs + self.outputs * self.has_bias


def find_widths(model: ModelDimensions) -> tuple[int, int, int, int, int]:
    """Give attention's widths: queries, keys, values, what is compressed, and all heads' results.

    With latent attention, compressed are queries, keys and values (arXiv:2405.04434, section 2.1).
    """
    latent, query = model.latent_attention, model.heads * model.head_width
    if latent is None:
        key = model.kv_heads * model.head_width
        return query, key, key, 0, query
    query = model.heads * (latent.plain_width + latent.rope_width)
    value = model.heads * latent.value_width
    compressed = 2 * (latent.query_rank or 0) + 2 * latent.kv_rank + latent.rope_width
    return query, query, value, compressed, value


def list_matrices(model: ModelDimensions, experts: Experts | None) -> list[Matrix]:
    """List the matrices of a layer: attention's, and those of the MLP, or of shared and routed experts.

    Down-projections of latent attention are whole on each GPU (arXiv:2405.04434, appendix C).
    """
    hidden, latent, bias = model.hidden_size, model.latent_attention, model.bias
    query, key, value, _, out = find_widths(model)
    if latent is None:
        widths = {"q_proj": query, "k_proj": key, "v_proj": value}
        of_input = bias or model.qkv_bias
        found = [Matrix(name, hidden, width, of_input) for name, width in widths.items()]
    else:
        rank, down = latent.query_rank, latent.kv_rank + latent.rope_width
        found = [
            Matrix("q_proj", rank or hidden, query, False),
            Matrix("k_proj", hidden, down, model.qkv_bias, "whole"),
            Matrix("v_proj", latent.kv_rank, model.heads * latent.plain_width + value, False),
        ]
        if rank:
            found.append(Matrix("q_proj", hidden, rank, model.qkv_bias, "whole"))
    found.append(Matrix("o_proj", out, hidden, bias or model.out_bias))
    kinds = [(model.intermediate_size, "split", 1, 1)]
    if experts:
        width, shared = experts.intermediate_size, experts.shared
        kinds = [(width, "split", shared, shared), (width, "routed", experts.count, experts.per_token)]
    for width, held, copies, passes in kinds:
        rising = MLP_MATRICES[:-1] if model.mlp == "swiglu" else ("up_proj",)
        found += [Matrix(name, hidden, width, bias, held, copies, passes) for name in rising]
        found.append(Matrix("down_proj", width, hidden, bias, held, copies, passes))
    return found


def list_runs(
    model: ModelDimensions, first: int = 0, count: int | None = None
) -> list[tuple[int, Experts | None]]:
    """List equal layers from one on: how many, and their experts, which the last ones of a mixture have."""
    last = model.layers if count is None else first + count
    dense = model.experts.dense_layers if model.experts else model.layers
    middle = max(first, min(last, dense))
    return [
        (size, experts) for size, experts in ((middle - first, None), (last - middle, model.experts)) if size
    ]


def _count_norm(model: ModelDimensions) -> int:
    """Count the parameters of one norm of the hidden size: an RMSNorm has no bias."""
    return model.hidden_size * (2 if model.norm == "layernorm" and model.bias else 1)


def _count_layer(model: ModelDimensions, experts: Experts | None) -> dict[str, int]:
    """Count the parameters of a layer as `Matrix.held` names them; norms and the router are whole."""
    latent = model.latent_attention
    norms = model.norms_per_layer * _count_norm(model)
    if latent:
        norms += latent.kv_rank + (latent.query_rank or 0)
    elif model.qk_norm:
        norms += 2 * model.head_width
    found = {"split": 0, "whole": norms, "routed": 0}
    for one in list_matrices(model, experts):
        found[one.held] += one.copies * one.parameters
    if experts:
        outputs = experts.count + experts.shared_gate
        found["whole"] += model.hidden_size * outputs + experts.count * experts.router_bias
    return found


def _count_tables(model: ModelDimensions) -> tuple[int, int, int]:
    """Count (embedding, learned positions, output layer), the last 0 if it is the embedding."""
    table = model.vocab_size * model.hidden_size
    positions = model.max_seq_len * model.hidden_size if model.position == "learned" else 0
    return table, positions, 0 if model.tied_embeddings else table


def count_model_parameters(model: ModelDimensions) -> int:
    """Count all parameters of a model; tied embeddings count once."""
    layers = [count * sum(_count_layer(model, experts).values()) for count, experts in list_runs(model)]
    return sum(_count_tables(model)) + _count_norm(model) + sum(layers)


def count_active_parameters(model: ModelDimensions) -> int:
    """Count the parameters that a token passes: of the routed experts those that it is sent to."""
    idle = sum(
        count * max(0, one.copies - one.passes) * one.parameters
        for count, experts in list_runs(model)
        for one in list_matrices(model, experts)
    )
    return count_model_parameters(model) - idle


def count_token_flops(
    model: ModelDimensions,
    seq_len: int,
    checkpointing: str = "none",
    *,
    early_stop: bool = False,
    is_frozen: bool = False,
) -> int:
    """Count the operations of training on one token, forward and backward.

    PaLM's convention (arXiv:2204.02311, appendix B), as the bundled program has it: 6 for each multiplying
    parameter, no look-up tables, active experts alone, and attention's products thrice, the masked half
    included. `checkpointing` adds what is computed again, for HFU: `full` the layers' forward, with
    `early_stop` without each layer's last product, as torch.utils.checkpoint does; `selective` attention's
    two products (arXiv:2205.05198, section 5). A frozen model's matrices (`is_frozen`) need no gradients of
    their own: 4 for each parameter.
    """
    head, latent = model.vocab_size * model.hidden_size, model.latent_attention
    widths = latent.plain_width + latent.rope_width + latent.value_width if latent else 2 * model.head_width
    attention = 2 * model.layers * seq_len * model.heads * widths
    forward = 2 * (count_active_parameters(model) - sum(_count_tables(model)) + head) + attention
    again, last = 0, 0
    if checkpointing == "selective":
        again = attention
    elif checkpointing == "full":
        for count, experts in list_runs(model) if early_stop else ():
            downs = [one for one in list_matrices(model, experts) if one.name == "down_proj"]
            last += count * sum(one.passes * one.inputs * one.outputs for one in downs)
        again = forward - 2 * head - 2 * last
    return (2 * forward + attention if is_frozen else 3 * forward) + again


class StageParameters(NamedTuple):
    """What a GPU of one pipeline stage holds before anything is sharded over its replicas."""

    dense: int
    """All parameters but the routed experts'."""
    experts: int
    largest_layer: int
    tables: int
    """Embedding, positions and output layer."""
    root: int
    """What is in no layer: the tables and the final norm."""

    @property
    def total(self) -> int:
        """All of this GPU."""
        return self.dense + self.experts

    @classmethod
    def of(cls, layers: list[tuple[int, int, int]], tables: int, norm: int = 0) -> "StageParameters":
        """Add up layers: how many, and the dense parameters and the experts' of each."""
        dense, experts = (sum(one[0] * one[kind] for one in layers) for kind in (1, 2))
        largest = max((one[1] + one[2] for one in layers), default=0)
        return cls(tables + norm + dense, experts, largest, tables, tables + norm)


def count_stage(
    training: Training, first: int, count: int, stage: int
) -> tuple[StageParameters, StageParameters]:
    """Count the parameters of a GPU of the stage that has `count` layers from layer `first` on: all of them,
    and those that are trained, which with LoRA are its adapters.

    Matrices are split by tp, experts by ep and tp; norms, router and down-projections of latent attention
    are whole on each GPU (Megatron-LM, arXiv:1909.08053; Megatron Core's MoE). tp splits the embedding too,
    and a tied one is on both ends of a pipeline. An adapter is two matrices, of `rank` by a matrix's inputs
    and by its outputs; tp does not split it here.
    """
    model, layout, lora = training.model, training.layout, training.settings.lora
    folded = layout.ep > layout.replicas  # over tp, as Megatron Core does: then tp does not split them
    layers, adapters, rank = [], [], lora.rank or 0
    for size, experts in list_runs(model, first, count):
        parts = _count_layer(model, experts)
        routed = divide_up(parts["routed"], layout.ep if folded else layout.tp * layout.ep)
        layers.append((size, divide_up(parts["split"], layout.tp) + parts["whole"], routed))
        added = [0, 0]
        for one in (one for one in list_matrices(model, experts) if one.name in lora.matrices):
            copies = divide_up(one.copies, layout.ep) if one.held == "routed" else one.copies
            added[one.held == "routed"] += copies * rank * (one.inputs + one.outputs)
        adapters.append((size, added[0], added[1]))
    embedding, positions, head = _count_tables(model)
    is_first, is_last = stage == 0, stage == layout.pp - 1
    tables = divide_up(embedding, layout.tp) + positions if is_first else 0
    if is_last:
        is_copied = model.tied_embeddings and not is_first
        tables += divide_up(embedding if is_copied else head, layout.tp)
    every = StageParameters.of(layers, tables, is_last * _count_norm(model))
    if not rank:
        return every, every
    has_head = is_last and "lm_head" in lora.matrices
    return every, StageParameters.of(adapters, has_head * rank * (model.hidden_size + model.vocab_size))


def count_layer_bytes(
    training: Training, tokens: int, experts: Experts | None = None, recomputed: Collection[str] = ()
) -> Range:
    """Count the bytes that a layer keeps on a GPU of some tokens for its backward pass.

    By autocast the residual stream is in fp32, and the input of each matrix is a copy. With dropout, GELU, a
    key head for each query head and an inner width of 4 hidden sizes it is 34 + 5as/h of arXiv:2205.05198,
    over the hidden size. With LoRA a matrix keeps its input only if it has an adapter, whose low-rank result
    is kept too. Flash attention keeps its result and a logarithm in fp32 for each head (arXiv:2205.14135). By
    torch's `scaled_dot_product_attention`, as in the bundled program, the result is copied to the order of
    tokens if queries are rotated; in fp32 with grouped queries, keys and values are repeated (torch's
    sdp_utils.cpp). Without flash attention the scores are kept, with dropout its result and mask too. Inside
    an MLP GELU keeps two tensors of the inner width, SwiGLU four, three if it is fused (Megatron Core's
    bias_swiglu_fusion, torch.compile); one is the input of the last matrix.

    Each row is a tensor with the modules that compute it again if they are among `recomputed`: those of
    Megatron Core's recompute_modules, and `attention`, the whole block but its input. tp splits queries,
    keys, values, results, scores and the MLP's inner width; with sequence parallelism the inputs of norms and
    matrices too.

    Low: fused norms, and no dropout. High: norms written in Python, and dropout if positions are learned
    (GPT-2, GPT-3; MPT has none), and before LoRA's adapters: the mask and what is left of their inputs.
    Expected: norms as Hugging Face's, unless compiled or Megatron's. Functions on quantized weights keep each
    matrix's input (bitsandbytes' MatMul4Bit), torchao's do not; litgpt's nf4 runs keep about as much as the
    inputs and half of the results more than its LoRA runs.
    """
    model, layout, settings, lora = training.model, training.layout, training.settings, training.settings.lora
    hidden, heads, width, is_bundled = model.hidden_size, model.heads, settings.width, training.is_bundled
    query, key, value, latent, out = find_widths(model)
    matrices = list_matrices(model, experts)
    trained = {one.name for one in matrices} if lora.rank is None else lora.matrices
    adapters = [one for one in matrices if lora.rank and one.name in trained]
    autocast, rising = training.autocast and is_bundled, 2 if model.mlp == "swiglu" else 1
    fused, again = bool(settings.compile) or layout.framework == "megatron", {*recomputed}
    # Selective checkpointing computes the scores again (arXiv:2205.05198, section 5).
    is_default = settings.checkpointing == "selective" and not settings.recompute_modules
    flash = settings.flash_attention or is_default or "core_attn" in again
    plain = is_bundled and has_plain_attention(training)
    dropout = model.position == "learned" and not is_bundled
    statistics = 4 if model.norm == "rmsnorm" else 8
    norm, copies = 4 if autocast else width, 3 if autocast else 1
    eager = model.norm == "rmsnorm" and not fused and not is_bundled
    norms = eager * model.norms_per_layer * (EAGER_NORM if lora.rank is None else EAGER_NORM // 2) * hidden
    scores = width * heads * settings.seq_len * (plain or not flash)
    up = "attention mla_up_proj" if model.latent_attention else "attention"
    of_inputs = bool(trained & {*ATTENTION_MATRICES[:-1]}) * copies
    of_rising = bool(trained & {*MLP_MATRICES[:-1]}) * (rising if autocast else 1)
    inner = width * ((4 - fused if rising == 2 else 2) - ("down_proj" not in trained))
    routed = shared = 0
    if experts:
        routed, shared = (count * experts.intermediate_size for count in (experts.per_token, experts.shared))
    sent = 2 * width * hidden * experts.per_token + 8 * experts.count if experts else 0
    sequence: list[tuple[str, float | Range]] = [
        ("", model.norms_per_layer * (norm * hidden + statistics)),
        ("", Range(0, 0, 2 * hidden * dropout)),
        ("layernorm", of_inputs * width * hidden),
        ("layernorm", of_rising * width * hidden),
        ("layernorm", Range(0, norms, norms)),
        ("", width * (lora.rank or 0) * sum(one.passes for one in adapters)),
        # Each token's copies, sent to and brought back from its experts, and the router's scores in fp32.
        ("moe", sent),
    ]
    split: list[tuple[str, float | Range]] = [
        (up, width * (query + key + value)),
        ("attention", width * (latent + out) + 4 * heads * flash),
        ("attention", width * (2 * query - key - value) * plain),
        ("attention", width * query * (is_bundled and not plain and width == 2 and model.position == "rope")),
        ("attention", width * (query + key) * model.qk_norm),
        ("attention", Range(scores, scores, scores + (scores // width) * (width + 1) * dropout)),
        ("mlp", 0 if experts else inner * model.intermediate_size),
        ("moe", (rising * width if "moe_act" in again else inner) * routed),
        ("moe shared_experts", inner * shared),
    ]
    found = NOTHING
    for rows, parts in ((split, layout.tp), (sequence, layout.tp if layout.sequence_parallel else 1)):
        kept = NOTHING
        for by, size in rows:
            kept += NOTHING if again & {*by.split()} else size
        found += kept * (tokens / parts)
    if is_bundled:
        return Range.of(0.98 * found.low, found.expected, 1.02 * found.high)
    more = (width + 1) * sum(one.inputs * one.passes for one in adapters)
    given = 0
    if settings.quantization != "none":
        given = width * sum(one.inputs * one.passes for one in matrices)
        more += width * sum((one.inputs + one.outputs) * one.passes for one in matrices)
    found += Range(0, given, more) * tokens
    # In fp8 the inputs of matrices may be kept in 8 bits (Transformer Engine).
    low = 0.6 if settings.precision == "fp8" else 1
    return Range.of(low * found.low, found.expected, 1.05 * found.high * (CROWD if experts else 1))


def has_plain_attention(training: Training) -> bool:
    """Tell whether torch has no fused kernel for a model's attention: in fp32 with grouped queries."""
    return training.settings.width == 4 and training.model.heads != training.model.kv_heads
