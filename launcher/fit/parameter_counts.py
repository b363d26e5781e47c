"""Exact parameters of a model by kind of part, what one GPU holds of them, and the operations of a token."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from launcher.fit.fit_model import FitRequest, ModelDimensions


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of one transformer layer, by how a layout splits them."""

    attention: int
    """Query, key, value and output matrices with their biases: split by tp."""
    latent: int
    """Down-projections and norms of latent attention, norms of heads: each GPU of a tp group has them."""
    mlp: int
    """The MLP, or the shared experts: split by tp."""
    experts: int
    """All routed experts: split by ep, and by tp."""
    router: int
    """Router and gate of a mixture: each GPU has them."""
    norms: int
    """Each GPU of a tp group has them."""

    @property
    def total(self) -> int:
        """All of the layer."""
        return self.attention + self.latent + self.mlp + self.experts + self.router + self.norms


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """Parameters of a model by kind of part."""

    embedding: int
    """The table of tokens: split by tp."""
    positions: int
    """The table of learned positions."""
    head: int
    """The output layer; 0 if it is the embedding."""
    final_norm: int
    layers: tuple[LayerParameters, ...]
    """All layers, first to last."""

    @property
    def total(self) -> int:
        """All of the model; tied embeddings count once."""
        tables = self.embedding + self.positions + self.head
        return tables + self.final_norm + sum(layer.total for layer in self.layers)


def count_matrix(inputs: int, outputs: int, bias: bool = False) -> int:
    """Count the parameters of a linear layer."""
    return inputs * outputs + (outputs if bias else 0)


def count_norm_parameters(model: ModelDimensions, width: int) -> int:
    """Count the parameters of one norm: an RMSNorm has no bias."""
    has_bias = model.bias if model.norm_bias is None else model.norm_bias
    return width * (2 if model.norm == "layernorm" and has_bias else 1)


def count_attention(model: ModelDimensions) -> tuple[int, int]:
    """Count the parameters of a layer's attention: (split by tp, on each GPU of a tp group)."""
    if model.latent_attention is not None:
        return count_latent_attention(model)
    queries, keys = model.heads * model.head_width, model.kv_heads * model.head_width
    has_bias = model.bias or model.qkv_bias
    matrices = count_matrix(model.hidden_size, queries, has_bias)
    matrices += 2 * count_matrix(model.hidden_size, keys, has_bias)
    matrices += count_matrix(queries, model.hidden_size, model.bias or model.out_bias)
    return matrices, 2 * model.head_width if model.qk_norm else 0


def count_latent_attention(model: ModelDimensions) -> tuple[int, int]:
    """Count the parameters of multi-head latent attention (arXiv:2405.04434, appendix C)."""
    latent = model.latent_attention
    if latent is None:
        raise ValueError(f"{model.name} has no latent attention")
    hidden, width = model.hidden_size, model.heads * (latent.plain_width + latent.rope_width)
    down = count_matrix(hidden, latent.kv_rank + latent.rope_width, model.qkv_bias) + latent.kv_rank
    up = count_matrix(latent.kv_rank, model.heads * (latent.plain_width + latent.value_width))
    if latent.query_rank is None:
        up += count_matrix(hidden, width)
    else:
        down += count_matrix(hidden, latent.query_rank, model.qkv_bias) + latent.query_rank
        up += count_matrix(latent.query_rank, width)
    out = count_matrix(model.heads * latent.value_width, hidden, model.bias or model.out_bias)
    return up + out, down


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


def count_mlp(model: ModelDimensions, width: int) -> int:
    """Count the parameters of one MLP, or of one expert, of an inner width."""
    return sum(
        count_matrix(inputs, outputs, model.bias) for _, inputs, outputs in list_mlp_matrices(model, width)
    )


def is_mixture_layer(model: ModelDimensions, index: int) -> bool:
    """Tell whether a layer, counted from 0, has experts in place of the MLP."""
    return model.experts is not None and index >= model.experts.dense_layers


def count_layer(model: ModelDimensions, index: int) -> LayerParameters:
    """Count the parameters of a layer, counted from 0."""
    attention, latent = count_attention(model)
    norms = model.norms_per_layer * count_norm_parameters(model, model.hidden_size)
    experts = model.experts
    if experts is None or not is_mixture_layer(model, index):
        return LayerParameters(attention, latent, count_mlp(model, model.intermediate_size), 0, 0, norms)
    expert = count_mlp(model, experts.intermediate_size)
    router = count_matrix(model.hidden_size, experts.count) + (experts.count if experts.router_bias else 0)
    gate = model.hidden_size if experts.shared_gate else 0
    shared = experts.shared * expert
    return LayerParameters(attention, latent, shared, experts.count * expert, router + gate, norms)


def count_part_parameters(model: ModelDimensions) -> ModelParameters:
    """Count the parameters of a model by kind of part."""
    table = model.vocab_size * model.hidden_size
    dense = model.layers if model.experts is None else min(model.experts.dense_layers, model.layers)
    layers = (count_layer(model, 0),) * dense if dense else ()
    if dense < model.layers:
        layers += (count_layer(model, dense),) * (model.layers - dense)
    return ModelParameters(
        embedding=table,
        positions=model.max_seq_len * model.hidden_size if model.position == "learned" else 0,
        head=0 if model.tied_embeddings else table,
        final_norm=count_norm_parameters(model, model.hidden_size),
        layers=layers,
    )


def count_model_parameters(model: ModelDimensions) -> int:
    """Count all parameters of a model; tied embeddings count once."""
    return count_part_parameters(model).total


def count_active_parameters(model: ModelDimensions) -> int:
    """Count the parameters that a token passes: of the routed experts those that it is sent to."""
    return count_model_parameters(model) - count_idle_experts(model)


def count_idle_experts(model: ModelDimensions) -> int:
    """Count the parameters of experts that a token is not sent to."""
    experts = model.experts
    if experts is None:
        return 0
    idle = max(0, experts.count - experts.per_token) * count_mlp(model, experts.intermediate_size)
    return max(0, model.layers - experts.dense_layers) * idle


def count_attention_flops(model: ModelDimensions, seq_len: int) -> int:
    """Count the operations of attention's two products on a token, forward, in all layers.

    2 for each of a query's products with seq_len keys and for each value's weight, the masked half included.
    """
    latent = model.latent_attention
    widths = 2 * model.head_width
    if latent is not None:
        widths = latent.plain_width + latent.rope_width + latent.value_width
    return 2 * model.layers * seq_len * model.heads * widths


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
    parameter, no look-up tables, active experts alone, and attention's products thrice. `checkpointing` adds
    what is computed again, for HFU: `full` the layers' forward, with `early_stop` without each layer's
    last product, as torch.utils.checkpoint does; `selective` attention's two products (arXiv:2205.05198,
    section 5). A frozen model's matrices (`is_frozen`) need no gradients of their own: 4 for each parameter.
    """
    attention = count_attention_flops(model, seq_len)
    head = model.vocab_size * model.hidden_size
    parts = count_part_parameters(model)
    layers = sum(layer.total for layer in parts.layers) - count_idle_experts(model)
    forward = 2 * (layers + head + parts.final_norm) + attention
    done = 2 * forward + attention if is_frozen else 3 * forward
    if checkpointing == "selective":
        return done + attention
    if checkpointing != "full":
        return done
    again = forward - 2 * head
    return done + (again - 2 * count_last_products(model) if early_stop else again)


def count_last_products(model: ModelDimensions) -> int:
    """Count the multiplying parameters of the last matrix of each layer, of active experts alone."""
    experts = model.experts
    if experts is None:
        return model.layers * model.intermediate_size * model.hidden_size
    dense = min(experts.dense_layers, model.layers)
    active = (experts.per_token + experts.shared) * experts.intermediate_size
    return (dense * model.intermediate_size + (model.layers - dense) * active) * model.hidden_size


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
class RankParameters:
    """What a GPU of one pipeline stage holds before anything is sharded over its replicas."""

    layers: tuple[LayerRun, ...]
    tables: int
    """Embedding, positions and output layer."""
    norm: int
    """The final norm."""
    has_head: bool

    @property
    def layer_count(self) -> int:
        """Layers of this stage."""
        return sum(run.count for run in self.layers)

    @property
    def dense(self) -> int:
        """All parameters but the routed experts'."""
        return self.tables + self.norm + sum(run.count * run.dense for run in self.layers)

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


def divide_up(total: int, parts: int) -> int:
    """Divide, and round up: the fullest of `parts` shares."""
    return -(-total // max(1, parts))


def list_stages(layers: int, stages: int) -> Iterator[tuple[int, int]]:
    """Give (first layer, number of layers) of each pipeline stage; what is left over is the first ones'."""
    each, more = divmod(layers, stages)
    first = 0
    for stage in range(stages):
        count = each + (stage < more)
        yield first, count
        first += count


def split_layer(layer: LayerParameters, request: FitRequest) -> tuple[int, int]:
    """Give one layer's (dense, expert) parameters on a GPU.

    Matrices are split by tp, experts by ep and tp; norms, router and down-projections of latent attention
    are whole on each GPU (Megatron-LM, arXiv:1909.08053; Megatron Core's MoE).
    """
    layout = request.layout
    whole = layer.latent + layer.router + layer.norms
    dense = divide_up(layer.attention + layer.mlp, layout.tp) + whole
    folded = layout.ep > layout.dp * layout.cp  # over tp, as Megatron Core does: then tp does not split them
    return dense, divide_up(layer.experts, layout.ep if folded else layout.tp * layout.ep)


def count_stage(request: FitRequest, first: int, count: int, stage: int) -> RankParameters:
    """Count the parameters of a GPU of the stage that has `count` layers from layer `first` on."""
    model, layout = request.model, request.layout
    parts = count_part_parameters(model)
    starts_at = model.layers if model.experts is None else min(model.experts.dense_layers, model.layers)
    dense = max(0, min(first + count, starts_at) - first)
    runs = []
    for size, mixture in ((dense, False), (count - dense, True)):
        if size:
            layer = count_layer(model, starts_at if mixture else 0)
            runs.append(LayerRun(size, mixture, *split_layer(layer, request)))
    last = stage == layout.pp - 1
    tables = count_tables(parts, model, is_first=stage == 0, is_last=last, tp=layout.tp)
    return RankParameters(tuple(runs), tables, parts.final_norm if last else 0, last)


def count_tables(
    parts: ModelParameters, model: ModelDimensions, *, is_first: bool, is_last: bool, tp: int
) -> int:
    """Count the tables of a stage: tp splits the embedding, and a tied one is on both ends of a pipeline."""
    tables = divide_up(parts.embedding, tp) + parts.positions if is_first else 0
    if is_last:
        tied_elsewhere = model.tied_embeddings and not is_first
        tables += divide_up(parts.embedding if tied_elsewhere else parts.head, tp)
    return tables


def count_trained(request: FitRequest, parameters: RankParameters) -> RankParameters:
    """Count the parameters that are trained on a GPU: all of them, or LoRA's adapters.

    An adapter is two matrices, of `rank` by a matrix's inputs and by its outputs; tp does not split it here.
    """
    model, lora = request.model, request.settings.lora
    if lora is None:
        return parameters

    def count(matrices: Iterable[tuple[str, int, int]]) -> int:
        return lora.rank * sum(ins + outs for name, ins, outs in matrices if name in lora.matrices)

    runs, attention = [], count(list_attention_matrices(model))
    for run in parameters.layers:
        inner, held, shared = model.intermediate_size, 0, 1
        if run.mixture and model.experts is not None:
            inner, shared = model.experts.intermediate_size, model.experts.shared
            held = divide_up(model.experts.count, request.layout.ep)
        expert = count(list_mlp_matrices(model, inner))
        runs.append(LayerRun(run.count, run.mixture, attention + shared * expert, held * expert))
    has_head = parameters.has_head
    head = count([("lm_head", model.hidden_size, model.vocab_size)]) if has_head else 0
    return RankParameters(tuple(runs), head, 0, has_head)


def count_largest_matrix(model: ModelDimensions) -> int:
    """Count the parameters of a layer's largest matrix: optimizers that work by matrix need as much."""
    inner = model.experts.intermediate_size if model.experts else model.intermediate_size
    return max(count_mlp(model, inner) // 2, model.hidden_size * model.heads * model.head_width)
