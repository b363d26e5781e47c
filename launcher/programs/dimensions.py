"""The dimensions of a model, its parameters and its floating-point operations, counted without torch."""

from dataclasses import dataclass

from launcher.programs.options import OptionError, option


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer; the switches cover LLaMA and GPT-2."""

    name: str = option("tiny", "name, for people")
    vocab_size: int = option(256, "tokens; the data are bytes, so at least 256")
    layers: int = option(4, "transformer blocks")
    hidden_size: int = option(128, "width of the residual stream")
    heads: int = option(4, "query heads")
    kv_heads: int = option(2, "key and value heads; fewer than heads is grouped-query attention")
    head_dim: int | None = option(None, "width of a head; hidden_size / heads if not given")
    intermediate_size: int = option(384, "width inside the MLP")
    max_seq_len: int = option(128, "longest context; rows of the table if position is learned")
    norm: str = option("rmsnorm", "normalisation", "rmsnorm", "layernorm")
    norm_eps: float = option(1e-5, "added to the variance")
    mlp: str = option("swiglu", "feed-forward layer", "swiglu", "gelu")
    position: str = option("rope", "how positions enter", "rope", "learned")
    rope_theta: float = option(10000.0, "base of the rotary frequencies")
    bias: bool = option(False, "biases in linear layers and norms")
    tied_embeddings: bool = option(True, "the output layer is the input embedding")

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.heads


def check_model(config: ModelConfig) -> None:
    """Raise OptionError if the dimensions do not make a model."""
    for name in (
        "layers",
        "hidden_size",
        "heads",
        "kv_heads",
        "intermediate_size",
        "max_seq_len",
        "head_dim",
    ):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise OptionError(f"model.{name}={value} must be at least 1")
    if config.vocab_size < 256:
        raise OptionError(f"model.vocab_size={config.vocab_size} must be at least 256: the data are bytes")
    if config.heads % config.kv_heads:
        raise OptionError(f"model.heads={config.heads} is not divisible by model.kv_heads={config.kv_heads}")
    if config.head_dim is None and config.hidden_size % config.heads:
        raise OptionError(
            f"model.hidden_size={config.hidden_size} is not divisible by model.heads={config.heads}: "
            "change one, or give model.head_dim"
        )
    if config.position == "rope" and config.head_width % 2:
        raise OptionError(f"rotary embeddings need an even width of a head, not {config.head_width}")


def count_linear(config: ModelConfig, inputs: int, outputs: int) -> int:
    """Count the parameters of one linear layer."""
    return inputs * outputs + (outputs if config.bias else 0)


def count_norm(config: ModelConfig) -> int:
    """Count the parameters of one norm: RMSNorm has no bias."""
    return config.hidden_size * (2 if config.norm == "layernorm" and config.bias else 1)


def count_block(config: ModelConfig) -> int:
    """Count the parameters of one transformer block."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    attention = (
        count_linear(config, width, queries)
        + 2 * count_linear(config, width, keys)
        + count_linear(config, queries, width)
    )
    rising = 2 if config.mlp == "swiglu" else 1
    mlp = rising * count_linear(config, width, inner) + count_linear(config, inner, width)
    return attention + mlp + 2 * count_norm(config)


def count_parameters(config: ModelConfig) -> int:
    """Count all parameters of the model; tied embeddings count once."""
    tables = config.vocab_size * (1 if config.tied_embeddings else 2)
    if config.position == "learned":
        tables += config.max_seq_len
    return tables * config.hidden_size + config.layers * count_block(config) + count_norm(config)


def count_matmul_parameters(config: ModelConfig) -> int:
    """Count the parameters that multiply each token: the blocks and the output layer, no look-up tables."""
    return config.vocab_size * config.hidden_size + config.layers * count_block(config) + count_norm(config)


def count_flops(config: ModelConfig, seq_len: int, *, recompute: bool = False) -> int:
    """Count the floating-point operations of training on one token.

    6 for each multiplying parameter (2 forward, 4 backward); 12 * seq_len * heads * head_width a layer for
    the two products of attention, the masked half included (PaLM, arXiv:2204.02311, appendix B). With
    activation checkpointing a block's forward comes twice, except its last product, before which torch stops.
    """
    attention = 4 * config.layers * seq_len * config.heads * config.head_width
    forward = 2 * count_matmul_parameters(config) + attention
    once = config.vocab_size + config.layers * config.intermediate_size
    again = forward - 2 * once * config.hidden_size if recompute else 0
    return 3 * forward + again
