"""What a model has: parameters, operations of a token, and the activations that a layer keeps.

The count of activations for GPT-3's layer, 34 + 5as/h bytes for each element of (sequence, batch, hidden), is
that of Korthikanti et al. (arXiv:2205.05198, section 4.1); the same rules count SwiGLU, grouped queries,
latent attention and experts. Widths are in elements a token.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

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


def list_attention_matrices(model: ModelDimensions) -> list[tuple[str, int, int]]:
    """Give (name, inputs, outputs) of a layer's attention; latent attention has two for most names."""
    hidden, queries, latent = model.hidden_size, model.heads * model.head_width, model.latent_attention
    if latent is None:
        keys = model.kv_heads * model.head_width
        sizes = (("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys))
        return [*sizes, ("o_proj", queries, hidden)]
    width, values = model.heads * (latent.plain_width + latent.rope_width), model.heads * latent.value_width
    rank = latent.query_rank
    query = [("q_proj", hidden, rank), ("q_proj", rank, width)] if rank else [("q_proj", hidden, width)]
    return [
        *query,
        ("k_proj", hidden, latent.kv_rank + latent.rope_width),
        ("v_proj", latent.kv_rank, model.heads * latent.plain_width + values),
        ("o_proj", values, hidden),
    ]


def list_mlp_matrices(model: ModelDimensions, width: int) -> list[tuple[str, int, int]]:
    """Give (name, inputs, outputs) of an MLP, or of one expert, of an inner width."""
    rising = ("gate_proj", "up_proj") if model.mlp == "swiglu" else ("up_proj",)
    return [*((name, model.hidden_size, width) for name in rising), ("down_proj", width, model.hidden_size)]


def _count_attention(model: ModelDimensions) -> tuple[int, int]:
    """Count the parameters of a layer's attention: (split by tp, on each GPU of a tp group).

    Down-projections of latent attention (arXiv:2405.04434, appendix C) and norms are whole on each GPU.
    """
    matrices, latent = list_attention_matrices(model), model.latent_attention
    total = sum(inputs * outputs for _, inputs, outputs in matrices)
    total += model.hidden_size if model.bias or model.out_bias else 0
    if latent is None:
        has_bias = model.bias or model.qkv_bias
        biases = sum(outputs for _, _, outputs in matrices[:-1]) if has_bias else 0
        return total + biases, 2 * model.head_width if model.qk_norm else 0
    query_rank = latent.query_rank or 0
    width = latent.kv_rank + latent.rope_width + query_rank
    norms = latent.kv_rank + query_rank
    down = model.hidden_size * width
    return total - down, down + norms + (width if model.qkv_bias else 0)


def _count_mlp(model: ModelDimensions, width: int) -> int:
    """Count the parameters of one MLP, or of one expert, of an inner width."""
    matrices = list_mlp_matrices(model, width)
    return sum(inputs * outputs + (outputs if model.bias else 0) for _, inputs, outputs in matrices)


def _count_norm(model: ModelDimensions) -> int:
    """Count the parameters of one norm of the hidden size: an RMSNorm has no bias."""
    has_bias = model.bias if model.norm_bias is None else model.norm_bias
    return model.hidden_size * (2 if model.norm == "layernorm" and has_bias else 1)


def _count_layer(model: ModelDimensions, *, mixture: bool) -> tuple[int, int, int]:
    """Count the parameters of a layer: (split by tp, on each GPU of a tp group, of the routed experts)."""
    attention, whole = _count_attention(model)
    whole += model.norms_per_layer * _count_norm(model)
    experts = model.experts
    if experts is None or not mixture:
        return attention + _count_mlp(model, model.intermediate_size), whole, 0
    expert = _count_mlp(model, experts.intermediate_size)
    router = model.hidden_size * experts.count + (experts.count if experts.router_bias else 0)
    router += model.hidden_size if experts.shared_gate else 0
    return attention + experts.shared * expert, whole + router, experts.count * expert


def _count_dense_layers(model: ModelDimensions) -> int:
    """Count the layers with an ordinary MLP, which are the first."""
    return model.layers if model.experts is None else min(model.experts.dense_layers, model.layers)


def _count_tables(model: ModelDimensions) -> tuple[int, int, int]:
    """Count (embedding, learned positions, output layer), the last 0 if it is the embedding."""
    table = model.vocab_size * model.hidden_size
    positions = model.max_seq_len * model.hidden_size if model.position == "learned" else 0
    return table, positions, 0 if model.tied_embeddings else table


def count_model_parameters(model: ModelDimensions) -> int:
    """Count all parameters of a model; tied embeddings count once."""
    dense = _count_dense_layers(model)
    total = sum(_count_tables(model)) + _count_norm(model)
    total += dense * sum(_count_layer(model, mixture=False))
    return total + (model.layers - dense) * sum(_count_layer(model, mixture=True))


def count_active_parameters(model: ModelDimensions) -> int:
    """Count the parameters that a token passes: of the routed experts those that it is sent to."""
    experts, total = model.experts, count_model_parameters(model)
    if experts is None:
        return total
    idle = max(0, experts.count - experts.per_token) * _count_mlp(model, experts.intermediate_size)
    return total - max(0, model.layers - experts.dense_layers) * idle


def count_largest_matrix(model: ModelDimensions) -> int:
    """Count the parameters of a layer's largest matrix: optimizers that work by matrix need as much."""
    inner = model.experts.intermediate_size if model.experts else model.intermediate_size
    return max(_count_mlp(model, inner) // 2, model.hidden_size * model.heads * model.head_width)


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
    latent, experts, head = model.latent_attention, model.experts, model.vocab_size * model.hidden_size
    widths = latent.plain_width + latent.rope_width + latent.value_width if latent else 2 * model.head_width
    attention = 2 * model.layers * seq_len * model.heads * widths
    multiplying = count_active_parameters(model) - sum(_count_tables(model)) + head
    forward = 2 * multiplying + attention
    done = 2 * forward + attention if is_frozen else 3 * forward
    if checkpointing == "selective":
        return done + attention
    if checkpointing != "full":
        return done
    again = forward - 2 * head
    if early_stop:
        dense = _count_dense_layers(model)
        last = dense * model.intermediate_size
        if experts is not None:
            active = (experts.per_token + experts.shared) * experts.intermediate_size
            last += (model.layers - dense) * active
        again -= 2 * last * model.hidden_size
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
    norm: int
    """The final norm."""
    has_head: bool

    @property
    def layer_count(self) -> int:
        """Layers of this stage, at least 1."""
        return max(1, sum(run.count for run in self.layers))

    @property
    def root(self) -> int:
        """The parameters that are in no layer."""
        return self.tables + self.norm

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


def list_stages(layers: int, stages: int) -> Iterator[tuple[int, int]]:
    """Give (first layer, number of layers) of each pipeline stage; what is left over is the first ones'."""
    each, more = divmod(layers, stages)
    first = 0
    for stage in range(stages):
        count = each + (stage < more)
        yield first, count
        first += count


def count_stage(training: Training, first: int, count: int, stage: int) -> StageParameters:
    """Count the parameters of a GPU of the stage that has `count` layers from layer `first` on.

    Matrices are split by tp, experts by ep and tp; norms, router and down-projections of latent attention
    are whole on each GPU (Megatron-LM, arXiv:1909.08053; Megatron Core's MoE). tp splits the embedding too,
    and a tied one is on both ends of a pipeline.
    """
    model, layout = training.model, training.layout
    dense = max(0, min(first + count, _count_dense_layers(model)) - first)
    folded = layout.ep > layout.replicas  # over tp, as Megatron Core does: then tp does not split them
    runs = []
    for size, mixture in ((dense, False), (count - dense, True)):
        if size:
            split, whole, experts = _count_layer(model, mixture=mixture)
            held = divide_up(experts, layout.ep if folded else layout.tp * layout.ep)
            runs.append(LayerRun(size, mixture, divide_up(split, layout.tp) + whole, held))
    embedding, positions, head = _count_tables(model)
    is_first, is_last = stage == 0, stage == layout.pp - 1
    tables = divide_up(embedding, layout.tp) + positions if is_first else 0
    if is_last:
        is_copied = model.tied_embeddings and not is_first
        tables += divide_up(embedding if is_copied else head, layout.tp)
    return StageParameters(tuple(runs), tables, _count_norm(model) if is_last else 0, is_last)


def count_trained(training: Training, parameters: StageParameters) -> StageParameters:
    """Count the parameters that are trained on a GPU: all of them, or LoRA's adapters.

    An adapter is two matrices, of `rank` by a matrix's inputs and by its outputs; tp does not split it here.
    """
    model, lora, experts = training.model, training.settings.lora, training.model.experts
    if lora is None:
        return parameters

    def count(matrices: Iterable[tuple[str, int, int]]) -> int:
        return lora.rank * sum(ins + outs for name, ins, outs in matrices if name in lora.matrices)

    runs, attention = [], count(list_attention_matrices(model))
    for run in parameters.layers:
        inner, held, shared = model.intermediate_size, 0, 1
        if run.mixture and experts is not None:
            inner, shared = experts.intermediate_size, experts.shared
            held = divide_up(experts.count, training.layout.ep)
        expert = count(list_mlp_matrices(model, inner))
        runs.append(LayerRun(run.count, run.mixture, attention + shared * expert, held * expert))
    has_head = parameters.has_head
    head = count([("lm_head", model.hidden_size, model.vocab_size)]) if has_head else 0
    return StageParameters(tuple(runs), head, 0, has_head)


def list_adapters(model: ModelDimensions, lora: Lora, *, mixture: bool) -> list[tuple[int, int, int]]:
    """Give (inputs, passes of a token, outputs) of each of a layer's matrices with an adapter."""
    inner, passes = model.intermediate_size, 1
    if mixture and model.experts is not None:
        inner, passes = model.experts.intermediate_size, model.experts.per_token + model.experts.shared
    found = [(name, inputs, 1, out) for name, inputs, out in list_attention_matrices(model)]
    found += [(name, inputs, passes, out) for name, inputs, out in list_mlp_matrices(model, inner)]
    return [(inputs, times, out) for name, inputs, times, out in found if name in lora.matrices]


@dataclass(frozen=True, slots=True)
class AttentionWidths:
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

    @property
    def inputs(self) -> int:
        """What is made of the layer's input."""
        return self.query + self.key + self.value + self.latent


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


def _count_attention_bytes(model: ModelDimensions, width: int, *, flash: bool, sdpa: bool) -> float:
    """Count the bytes a token of queries, keys, values and results, without the scores.

    Flash attention keeps its result and a logarithm in fp32 for each head (arXiv:2205.14135). By torch's
    `scaled_dot_product_attention` (`sdpa`) the result is copied to the order of tokens if queries are
    rotated; in fp32 with grouped queries, keys and values are repeated (torch's sdp_utils.cpp).
    """
    widths = AttentionWidths.of(model)
    kept = widths.inputs + widths.out
    if sdpa and width == 2 and model.position == "rope":
        kept += widths.query
    elif sdpa and has_plain_attention(model, width):
        kept += 2 * widths.query - widths.key - widths.value
    norms = 2 * (widths.query + widths.key) if model.qk_norm else 0
    return width * kept + norms * width / 2 + (4 * model.heads if flash else 0)


def count_layer_bytes(
    training: Training, *, mixture: bool, how: Implementation, recomputed: Collection[str] = ()
) -> float:
    """Count the bytes a token that a layer keeps on a GPU for its backward pass.

    By autocast the residual stream is in fp32, and the input of each matrix is a copy. With dropout, GELU, a
    key head for each query head and an inner width of 4 hidden sizes it is 34 + 5as/h of arXiv:2205.05198,
    over the hidden size. With LoRA a matrix keeps its input only if it has an adapter, whose low-rank result
    is kept too. `recomputed` are modules of Megatron Core's recompute_modules, and `attention`, the whole
    block but its input. tp splits queries, keys, values, results, scores and the MLP's inner width; with
    sequence parallelism the inputs of norms and matrices too.
    """
    model, settings, lora = training.model, training.settings, training.settings.lora
    hidden, experts, width = model.hidden_size, model.experts if mixture else None, settings.width
    trained = frozenset(ATTENTION_MATRICES + MLP_MATRICES) if lora is None else lora.matrices
    autocast = settings.autocast and settings.bundled
    stream, rising = 4 if autocast else width, 2 if model.mlp == "swiglu" else 1
    # Inputs of the norms with their statistics, of the attention's matrices, and of the MLP's.
    statistics = 4 if model.norm == "rmsnorm" else 8
    sequence: float = model.norms_per_layer * (stream * hidden + statistics)
    sequence += 2 * hidden if how.dropout else 0
    if "layernorm" not in recomputed:
        if trained & {"q_proj", "k_proj", "v_proj"}:
            sequence += (3 if autocast else 1) * width * hidden
        if trained & {"gate_proj", "up_proj"}:
            sequence += (rising if autocast else 1) * width * hidden
        if how.eager_norms and model.norm == "rmsnorm":  # a frozen weight needs no normalised input
            sequence += model.norms_per_layer * (EAGER_NORM if lora is None else EAGER_NORM / 2) * hidden
    split, scores = 0.0, 0.0
    if "attention" not in recomputed:
        # Selective checkpointing computes the scores again (arXiv:2205.05198, section 5).
        is_default = settings.checkpointing == "selective" and not settings.recompute_modules
        flash = settings.flash_attention or is_default or "core_attn" in recomputed
        split = _count_attention_bytes(model, width, flash=flash, sdpa=settings.bundled)
        if not flash or (settings.bundled and has_plain_attention(model, width)):
            scores = count_scores(model, settings.seq_len, width, dropout=how.dropout)
        if "mla_up_proj" in recomputed and model.latent_attention is not None:
            widths = AttentionWidths.of(model)
            split -= width * (widths.query + widths.key + widths.value)

    def count_mlp(inner: float) -> float:
        return count_mlp_bytes(model, inner, width, fused=how.fused_mlp, has_input="down_proj" in trained)

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
    return _share(training, split + scores, sequence)


def count_selected_bytes(training: Training, *, mixture: bool) -> float:
    """Count the bytes a token that a layer keeps on a GPU with selective checkpointing by operator.

    The layer's input, attention's result, and the result of each matrix (the bundled program) or of every
    second one (torchtitan); of routed experts half of what is sent to them and back.
    """
    model, settings = training.model, training.settings
    every, width = 1 if settings.bundled else 2, settings.width
    stream = 4 if settings.autocast else width
    widths, hidden = AttentionWidths.of(model), model.hidden_size
    inner = 2 if model.mlp == "swiglu" else 1
    results, sent = widths.inputs + inner * model.intermediate_size, 0
    if mixture and model.experts is not None:
        results = widths.inputs + inner * model.experts.shared * model.experts.intermediate_size
        sent = hidden * model.experts.per_token
    split = width * (widths.out + results / every) + 4 * model.heads
    return _share(training, split, stream * hidden + width * (2 * hidden / every + sent))


def _share(training: Training, split: float, sequence: float) -> float:
    """Give the bytes a token on a GPU: `split` by tp always, `sequence` by sequence parallelism alone."""
    layout = training.layout
    return split / layout.tp + (sequence / layout.tp if layout.sequence_parallel else sequence)
