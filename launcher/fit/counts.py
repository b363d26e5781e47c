"""What a model has: parameters, operations of a token, and the activations that a layer keeps.

The count of activations for GPT-3's layer, 34 + 5as/h bytes for each element of (sequence, batch, hidden), is
that of Korthikanti et al. (arXiv:2205.05198, section 4.1); the same rules count SwiGLU, grouped queries,
latent attention and experts. Widths are in elements a token.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from launcher.fit.training import (
    ATTENTION_MATRICES,
    MLP_MATRICES,
    Lora,
    ModelDimensions,
    Training,
)

EAGER_NORM = 8
"""Bytes an element that an RMSNorm written in Python keeps more: its input in fp32, and the normalised one
(transformers.models.llama.LlamaRMSNorm)."""


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


def list_matrices(model: ModelDimensions, *, mixture: bool) -> list[Matrix]:
    """List the matrices of a layer: attention's, and those of the MLP, or of shared and routed experts.

    Down-projections of latent attention are whole on each GPU (arXiv:2405.04434, appendix C).
    """
    hidden, latent, bias = model.hidden_size, model.latent_attention, model.bias
    keys, values = model.kv_heads * model.head_width, model.heads * model.head_width
    of_input = bias or model.qkv_bias
    if latent is None:
        found = [
            Matrix("q_proj", hidden, values, of_input),
            Matrix("k_proj", hidden, keys, of_input),
            Matrix("v_proj", hidden, keys, of_input),
        ]
    else:
        queries, values = AttentionWidths.of(model).query, model.heads * latent.value_width
        rank, down = latent.query_rank, latent.kv_rank + latent.rope_width
        found = [
            Matrix("q_proj", rank or hidden, queries, False),
            Matrix("k_proj", hidden, down, model.qkv_bias, "whole"),
            Matrix("v_proj", latent.kv_rank, model.heads * latent.plain_width + values, False),
        ]
        if rank:
            found.append(Matrix("q_proj", hidden, rank, model.qkv_bias, "whole"))
    found.append(Matrix("o_proj", values, hidden, bias or model.out_bias))
    experts, kinds = model.experts, [(model.intermediate_size, "split", 1, 1)]
    if mixture and experts is not None:
        width, shared = experts.intermediate_size, experts.shared
        kinds = [(width, "split", shared, shared), (width, "routed", experts.count, experts.per_token)]
    for width, held, copies, passes in kinds:
        rising = MLP_MATRICES[:-1] if model.mlp == "swiglu" else ("up_proj",)
        found += [Matrix(name, hidden, width, bias, held, copies, passes) for name in rising]
        found.append(Matrix("down_proj", width, hidden, bias, held, copies, passes))
    return found


def list_adapters(model: ModelDimensions, lora: Lora | None, *, mixture: bool) -> list[Matrix]:
    """List a layer's matrices that have an adapter."""
    names = lora.matrices if lora else ()
    return [one for one in list_matrices(model, mixture=mixture) if one.name in names]


def _count_norm(model: ModelDimensions) -> int:
    """Count the parameters of one norm of the hidden size: an RMSNorm has no bias."""
    has_bias = model.bias if model.norm_bias is None else model.norm_bias
    return model.hidden_size * (2 if model.norm == "layernorm" and has_bias else 1)


def _count_layer(model: ModelDimensions, *, mixture: bool) -> dict[str, int]:
    """Count the parameters of a layer: `split` by tp, `whole` on each GPU of a tp group, and `routed`.

    Norms and the router are whole.
    """
    latent, experts = model.latent_attention, model.experts
    norms = model.norms_per_layer * _count_norm(model)
    if latent:
        norms += latent.kv_rank + (latent.query_rank or 0)
    elif model.qk_norm:
        norms += 2 * model.head_width
    found = {"split": 0, "whole": norms, "routed": 0}
    for one in list_matrices(model, mixture=mixture):
        found[one.held] += one.copies * one.parameters
    if mixture and experts is not None:
        outputs = experts.count + experts.shared_gate
        found["whole"] += model.hidden_size * outputs + experts.count * experts.router_bias
    return found


def count_dense_layers(model: ModelDimensions) -> int:
    """Count the layers with an ordinary MLP, which are the first."""
    return model.layers if model.experts is None else min(model.experts.dense_layers, model.layers)


def _count_tables(model: ModelDimensions) -> tuple[int, int, int]:
    """Count (embedding, learned positions, output layer), the last 0 if it is the embedding."""
    table = model.vocab_size * model.hidden_size
    positions = model.max_seq_len * model.hidden_size if model.position == "learned" else 0
    return table, positions, 0 if model.tied_embeddings else table


def count_model_parameters(model: ModelDimensions) -> int:
    """Count all parameters of a model; tied embeddings count once."""
    dense = count_dense_layers(model)
    total = sum(_count_tables(model)) + _count_norm(model)
    for count, mixture in ((dense, False), (model.layers - dense, True)):
        total += count * sum(_count_layer(model, mixture=mixture).values()) if count else 0
    return total


def count_active_parameters(model: ModelDimensions) -> int:
    """Count the parameters that a token passes: of the routed experts those that it is sent to."""
    routed = [one for one in list_matrices(model, mixture=True) if one.held == "routed"]
    idle = sum(max(0, one.copies - one.passes) * one.parameters for one in routed)
    return count_model_parameters(model) - (model.layers - count_dense_layers(model)) * idle


def count_largest_matrix(model: ModelDimensions) -> int:
    """Count the parameters of a layer's largest matrix: optimizers that work by matrix need as much."""
    held = "routed" if model.experts else "split"
    matrices = list_matrices(model, mixture=bool(model.experts))
    mlp = sum(one.parameters for one in matrices if one.name in MLP_MATRICES and one.held == held)
    return max(mlp // 2, model.hidden_size * model.heads * model.head_width)


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
    done = 2 * forward + attention if is_frozen else 3 * forward
    if checkpointing == "selective":
        return done + attention
    if checkpointing != "full":
        return done
    again, dense = forward - 2 * head, count_dense_layers(model)
    for count, mixture in ((dense, False), (model.layers - dense, True)) if early_stop else ():
        last = [one for one in list_matrices(model, mixture=mixture) if one.name == "down_proj"]
        again -= 2 * count * sum(one.passes * one.inputs * one.outputs for one in last)
    return done + again


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Equal layers of a stage."""

    count: int
    mixture: bool
    """Whether they have experts in place of the MLP."""
    dense: int
    """Parameters of one layer on this GPU, without the routed experts."""
    experts: int
    """Parameters of one layer's routed experts on this GPU."""


@dataclass(frozen=True, slots=True)
class StageParameters:
    """What a GPU of one pipeline stage holds before anything is sharded over its replicas."""

    layers: tuple[LayerRun, ...]
    tables: int
    """Embedding, positions and output layer."""
    root: int
    """What is in no layer: the tables and the final norm."""
    has_head: bool

    @property
    def dense(self) -> int:
        """All parameters but the routed experts'."""
        return self.root + sum(run.count * run.dense for run in self.layers)

    @property
    def experts(self) -> int:
        """The routed experts' parameters."""
        return sum(run.count * run.experts for run in self.layers)

    @property
    def total(self) -> int:
        """All of this GPU."""
        return self.dense + self.experts

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max((run.dense + run.experts for run in self.layers), default=0)


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
    dense = max(0, min(first + count, count_dense_layers(model)) - first)
    folded = layout.ep > layout.replicas  # over tp, as Megatron Core does: then tp does not split them
    runs, adapted, rank = [], [], lora.rank if lora else 0
    for size, mixture in ((dense, False), (count - dense, True)):
        if size:
            parts = _count_layer(model, mixture=mixture)
            held = divide_up(parts["routed"], layout.ep if folded else layout.tp * layout.ep)
            runs.append(LayerRun(size, mixture, divide_up(parts["split"], layout.tp) + parts["whole"], held))
            added = {True: 0, False: 0}
            for one in list_adapters(model, lora, mixture=mixture):
                copies = divide_up(one.copies, layout.ep) if one.held == "routed" else one.copies
                added[one.held == "routed"] += copies * rank * (one.inputs + one.outputs)
            adapted.append(LayerRun(size, mixture, added[False], added[True]))
    embedding, positions, head = _count_tables(model)
    is_first, is_last = stage == 0, stage == layout.pp - 1
    tables = divide_up(embedding, layout.tp) + positions if is_first else 0
    if is_last:
        is_copied = model.tied_embeddings and not is_first
        tables += divide_up(embedding if is_copied else head, layout.tp)
    every = StageParameters(tuple(runs), tables, tables + is_last * _count_norm(model), is_last)
    if lora is None:
        return every, every
    has_head = is_last and "lm_head" in lora.matrices
    tables = has_head * rank * (model.hidden_size + model.vocab_size)
    return every, StageParameters(tuple(adapted), tables, tables, is_last)


class AttentionWidths(NamedTuple):
    """Elements a token of a layer's attention."""

    query: int
    key: int
    value: int
    latent: int
    """Compressed queries, keys and values, of latent attention alone (arXiv:2405.04434, section 2.1)."""
    out: int
    """Of all heads' results."""

    @classmethod
    def of(cls, model: ModelDimensions) -> "AttentionWidths":
        """Give the widths of a model's attention."""
        latent = model.latent_attention
        if latent is None:
            query, key = model.heads * model.head_width, model.kv_heads * model.head_width
            return cls(query, key, key, 0, query)
        query = model.heads * (latent.plain_width + latent.rope_width)
        value = model.heads * latent.value_width
        compressed = 2 * (latent.query_rank or 0) + 2 * latent.kv_rank + latent.rope_width
        return cls(query, query, value, compressed, value)


@dataclass(frozen=True, slots=True)
class Implementation:
    """How a layer is written, as far as that decides what it keeps."""

    dropout: bool = False
    eager_norms: bool = False
    """Norms as Hugging Face's, in Python."""
    fused_mlp: bool = False
    """A fused SwiGLU (Megatron Core's bias_swiglu_fusion, torch.compile)."""


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

    A fused SwiGLU keeps no result of its SiLU: three. One is the input of the last matrix, which keeps it if
    it is trained (`has_input`).
    """
    kept = 2 if model.mlp != "swiglu" else 3 if fused else 4
    return (kept if has_input else kept - 1) * width * inner


def count_layer_bytes(
    training: Training, *, mixture: bool, how: Implementation, recomputed: Collection[str] = ()
) -> float:
    """Count the bytes a token that a layer keeps on a GPU for its backward pass.

    By autocast the residual stream is in fp32, and the input of each matrix is a copy. With dropout, GELU, a
    key head for each query head and an inner width of 4 hidden sizes it is 34 + 5as/h of arXiv:2205.05198,
    over the hidden size. With LoRA a matrix keeps its input only if it has an adapter, whose low-rank result
    is kept too. Flash attention keeps its result and a logarithm in fp32 for each head (arXiv:2205.14135). By
    torch's `scaled_dot_product_attention`, as in the bundled program, the result is copied to the order of
    tokens if queries are rotated; in fp32 with grouped queries, keys and values are repeated (torch's
    sdp_utils.cpp).

    Each row is a tensor with the modules that compute it again if they are among `recomputed`: those of
    Megatron Core's recompute_modules, and `attention`, the whole block but its input. tp splits queries,
    keys, values, results, scores and the MLP's inner width; with sequence parallelism the inputs of norms and
    matrices too.
    """
    model, settings, lora = training.model, training.settings, training.settings.lora
    hidden, experts, width = model.hidden_size, model.experts if mixture else None, settings.width
    trained = frozenset(ATTENTION_MATRICES + MLP_MATRICES) if lora is None else lora.matrices
    autocast = settings.autocast and settings.bundled
    stream, rising = 4 if autocast else width, 2 if model.mlp == "swiglu" else 1
    statistics = 4 if model.norm == "rmsnorm" else 8
    widths, plain = AttentionWidths.of(model), settings.bundled and has_plain_attention(model, width)
    # Selective checkpointing computes the scores again (arXiv:2205.05198, section 5).
    is_default = settings.checkpointing == "selective" and not settings.recompute_modules
    flash = settings.flash_attention or is_default or "core_attn" in recomputed

    def count_mlp(inner: float) -> float:
        return count_mlp_bytes(model, inner, width, fused=how.fused_mlp, has_input="down_proj" in trained)

    sequence: list[tuple[str, float]] = [
        ("", model.norms_per_layer * (stream * hidden + statistics)),
        ("", 2 * hidden * how.dropout),
    ]
    for inputs, copies in ((ATTENTION_MATRICES[:-1], 3), (MLP_MATRICES[:-1], rising)):
        if trained & {*inputs}:
            sequence.append(("layernorm", (copies if autocast else 1) * width * hidden))
    if how.eager_norms and model.norm == "rmsnorm":  # a frozen weight needs no normalised input
        each = EAGER_NORM if lora is None else EAGER_NORM / 2
        sequence.append(("layernorm", model.norms_per_layer * each * hidden))
    made = widths.query + widths.key + widths.value
    split: list[tuple[str, float]] = [
        ("attention mla_up_proj" if model.latent_attention else "attention", width * made),
        ("attention", width * (widths.latent + widths.out) + 4 * model.heads * flash),
    ]
    if plain:
        split.append(("attention", width * (2 * widths.query - widths.key - widths.value)))
    elif settings.bundled and width == 2 and model.position == "rope":
        split.append(("attention", width * widths.query))
    if model.qk_norm:
        split.append(("attention", width * (widths.query + widths.key)))
    if plain or not flash:
        split.append(("attention", count_scores(model, settings.seq_len, width, dropout=how.dropout)))
    if lora:
        passes = [one.passes for one in list_adapters(model, lora, mixture=mixture)]
        sequence.append(("", width * lora.rank * sum(passes)))
    if experts is None:
        split.append(("mlp", count_mlp(model.intermediate_size)))
    else:
        routed, shared = (count * experts.intermediate_size for count in (experts.per_token, experts.shared))
        act = rising * width * routed if "moe_act" in recomputed else count_mlp(routed)
        split += [("moe", act), ("moe shared_experts", count_mlp(shared))]
        # Each token's copies, sent to and brought back from its experts, and the router's scores in fp32.
        sequence.append(("moe", 2 * width * hidden * experts.per_token + 8 * experts.count))
    again = set(recomputed)
    kept = [sum(size for by, size in rows if not again & {*by.split()}) for rows in (split, sequence)]
    return _share(training, *kept)


def count_selected_bytes(training: Training, *, mixture: bool) -> float:
    """Count the bytes a token that a layer keeps on a GPU with selective checkpointing by operator.

    The layer's input, attention's result, and the result of each matrix (the bundled program) or of every
    second one (torchtitan); of routed experts half of what is sent to them and back.
    """
    model, settings = training.model, training.settings
    every, width = 1 if settings.bundled else 2, settings.width
    stream, widths, hidden = 4 if settings.autocast else width, AttentionWidths.of(model), model.hidden_size
    inner, sent = model.intermediate_size, 0
    if mixture and model.experts is not None:
        inner = model.experts.shared * model.experts.intermediate_size
        sent = hidden * model.experts.per_token
    results = sum(widths) - widths.out + (2 if model.mlp == "swiglu" else 1) * inner
    split = width * (widths.out + results / every) + 4 * model.heads
    return _share(training, split, stream * hidden + width * (2 * hidden / every + sent))


def _share(training: Training, split: float, sequence: float) -> float:
    """Give the bytes a token on a GPU: `split` by tp always, `sequence` by sequence parallelism alone."""
    layout = training.layout
    return split / layout.tp + (sequence / layout.tp if layout.sequence_parallel else sequence)
