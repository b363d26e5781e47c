"""Exact parameters of a model by kind of part, and the floating-point operations of training on a token."""

from dataclasses import dataclass

from launcher.fit.fit_model import ModelDimensions


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
