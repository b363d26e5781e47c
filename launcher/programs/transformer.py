"""A decoder-only transformer in plain PyTorch: LLaMA's architecture, with switches for GPT-2's."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from launcher.programs.options import ModelConfig

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

    def forward(self, x: Tensor, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attend over (batch, tokens, hidden); `rotations` if positions are rotary."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)  # (batch, heads, tokens, width)
            for layer in (self.query, self.key, self.value)
        )
        if rotations is not None:
            query, key = rotate(query, *rotations), rotate(key, *rotations)
        grouped = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """The feed-forward layer: LLaMA's SwiGLU (arXiv:2002.05202), or GPT-2's GELU with its tanh."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.bias
        self.gate = nn.Linear(hidden, inner, bias=bias) if config.mlp == "swiglu" else None
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.out = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, hidden) to (…, hidden)."""
        if self.gate is None:
            inner = F.gelu(self.up(x), approximate="tanh")
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        return self.out(inner)


aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What selective checkpointing keeps the results of: matrix products and attention. The rest is cheap."""


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig, *, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention = Attention(config)
        self.mlp = Mlp(config)

    def compute(self, x: Tensor, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.mlp(self.mlp_norm(x))

    def forward(self, x: Tensor, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Compute; what is not kept for backward is computed again then."""
        if self.recompute == "none":
            return self.compute(x, rotations)
        keep = partial(create_selective_checkpoint_contexts, KEPT)
        context = keep if self.recompute == "selective" else noop_context_fn
        # Inside the block rather than around it: FSDP's hooks and torch.compile then see one module.
        return checkpoint(self.compute, x, rotations, use_reentrant=False, context_fn=context)


CHUNK = 2048
"""Tokens whose logits exist at a time: large enough for the matrix products to be fast."""


def compute_chunked_loss(x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Give the mean cross-entropy of targets, for inputs (…, hidden) of an output layer (words, hidden)."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, table = x.to(dtype), table.to(dtype)
    return _ChunkedLoss.apply(x.flatten(0, -2), table, targets.flatten(), torch.is_grad_enabled())


class _ChunkedLoss(torch.autograd.Function):
    """Makes the gradients in the forward pass, chunk by chunk, as Liger does: no logits wait for backward.

    The largest tensors are a chunk's fp32 logits and their logarithms, and the gradient of the table, which
    several chunks add up in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, targets: Tensor, has_backward: bool) -> Tensor:  # noqa: ANN401 - torch's
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        x_gradient = torch.empty_like(x) if has_backward else None
        table_gradient: Tensor | None = None
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(x), CHUNK):
                some, wanted = x[start : start + CHUNK], targets[start : start + CHUNK, None]
                logarithms = F.log_softmax((some @ table.t()).float(), dim=-1)
                total -= logarithms.gather(1, wanted).sum()
                if x_gradient is None:
                    continue
                gradient = logarithms.exp_()
                gradient.scatter_add_(1, wanted, gradient.new_full((1, 1), -1.0).expand(wanted.shape))
                gradient = gradient.div_(len(x)).to(x.dtype)
                del logarithms
                torch.mm(gradient, table, out=x_gradient[start : start + CHUNK])
                part = gradient.t() @ some
                table_gradient = part if table_gradient is None else table_gradient.float().add_(part)
                del gradient, part  # before the next chunk's logits
        ctx.gradients = x_gradient, table_gradient
        return total.div_(len(x))

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        x_gradient, table_gradient = ctx.gradients
        ctx.gradients = None
        return x_gradient.mul_(scale), table_gradient.mul_(scale).to(x_gradient.dtype), None, None


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


def count_flops(model: Transformer, seq_len: int, *, recompute: bool = False) -> int:
    """Count the floating-point operations of training on one token; the model is whole, not sharded.

    6 for each parameter that multiplies (2 forward, 4 backward), which look-up tables do not unless they are
    the output layer too; 12 * seq_len * heads * head_width a layer for the two products of attention, the
    masked half included (PaLM, arXiv:2204.02311, appendix B). With full activation checkpointing a block's
    forward comes twice, except its last product, before which torch stops.
    """
    config = model.config
    tables = config.vocab_size * config.hidden_size * (model.head is not None)
    if model.positions is not None:
        tables += model.positions.weight.numel()
    multiplying = sum(parameter.numel() for parameter in model.parameters()) - tables
    forward = 2 * multiplying + 4 * config.layers * seq_len * config.heads * config.head_width
    once = config.vocab_size + config.layers * config.intermediate_size
    return 3 * forward + (forward - 2 * once * config.hidden_size if recompute else 0)
