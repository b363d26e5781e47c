"""A decoder-only transformer in plain PyTorch: LLaMA's architecture, with switches for GPT-2's."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from launcher.programs.chunked_loss import compute_chunked_loss
from launcher.programs.dimensions import ModelConfig

INIT_STD = 0.02
"""Standard deviation of fresh weights, GPT-2's and LLaMA's."""


def make_norm(config: ModelConfig) -> nn.Module:
    """Make the norm that the configuration names."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


def make_rotations(length: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Give cosines and sines of the rotary angles, each (length, width / 2), in fp32 (arXiv:2104.09864)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + width / 2) of (batch, heads, tokens, width) by its position's angle."""
    left, right = heads.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(heads)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, config.head_width
        hidden, bias = config.hidden_size, config.bias
        self.query = nn.Linear(hidden, self.heads * self.width, bias=bias)
        self.key = nn.Linear(hidden, self.kv_heads * self.width, bias=bias)
        self.value = nn.Linear(hidden, self.kv_heads * self.width, bias=bias)
        self.out = nn.Linear(self.heads * self.width, hidden, bias=bias)

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """Reshape (batch, tokens, heads * width) to (batch, heads, tokens, width)."""
        return x.view(*x.shape[:-1], heads, self.width).transpose(1, 2)

    def forward(self, x: Tensor, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attend over (batch, tokens, hidden); `rotations` if positions are rotary."""
        query, key = self.split_heads(self.query(x), self.heads), self.split_heads(self.key(x), self.kv_heads)
        value = self.split_heads(self.value(x), self.kv_heads)
        if rotations is not None:
            query, key = rotate(query, *rotations), rotate(key, *rotations)
        grouped = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class SwiGlu(nn.Module):
    """LLaMA's feed-forward layer (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.out = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, hidden) to (…, hidden)."""
        out: Tensor = self.out(F.silu(self.gate(x)) * self.up(x))
        return out


class GeluMlp(nn.Module):
    """GPT-2's feed-forward layer, with its tanh approximation of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.out = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, hidden) to (…, hidden)."""
        out: Tensor = self.out(F.gelu(self.up(x), approximate="tanh"))
        return out


KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What selective checkpointing keeps the results of: matrix products and attention. The rest is cheap."""


def keep_products(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Tell selective checkpointing what to keep."""
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig, *, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention = Attention(config)
        self.mlp = SwiGlu(config) if config.mlp == "swiglu" else GeluMlp(config)

    def compute(self, x: Tensor, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotations)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def forward(self, x: Tensor, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Compute; what is not kept for backward is computed again then."""
        if self.recompute == "none":
            return self.compute(x, rotations)
        keep = partial(create_selective_checkpoint_contexts, keep_products)
        context = keep if self.recompute == "selective" else noop_context_fn
        # Inside the block rather than around it: FSDP's hooks and torch.compile then see one module.
        out: Tensor = checkpoint(self.compute, x, rotations, use_reentrant=False, context_fn=context)
        return out


class Transformer(nn.Module):
    """The language model: token numbers (batch, tokens) to the loss, or to logits (…, vocab_size)."""

    def __init__(self, config: ModelConfig, *, recompute: str = "none") -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position == "learned"
        self.positions = nn.Embedding(config.max_seq_len, config.hidden_size) if learned else None
        self.blocks = nn.ModuleList(Block(config, recompute=recompute) for _ in range(config.layers))
        self.norm = make_norm(config)
        # A tied head is no second parameter: to_empty() after the meta device would untie it.
        tied = config.tied_embeddings
        self.head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Give the mean cross-entropy of the targets, in nats a token; without them the logits."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        rotations = None
        if self.positions is not None:
            x = x + self.positions.weight[:length]
        else:
            rotations = make_rotations(length, self.config.head_width, self.config.rope_theta, tokens.device)
        for block in self.blocks:
            x = block(x, rotations)
        x = self.norm(x)
        table = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(x, table) if targets is None else compute_chunked_loss(x, table, targets)


@torch.no_grad()
def initialise(model: Transformer, generator: torch.Generator) -> None:
    """Fill the weights: normal, the layers that write to the residual stream narrower (GPT-2's rule).

    Works on what is stored locally, so that shards of FSDP are filled where they lie.
    """
    narrow = INIT_STD / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if name.endswith("bias"):
            local.zero_()
        elif "norm" in name:
            local.fill_(1.0)
        else:
            local.normal_(0.0, narrow if name.endswith("out.weight") else INIT_STD, generator=generator)
