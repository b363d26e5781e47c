"""The cross-entropy of an output layer, without all logits at once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2048
"""Tokens whose logits exist at a time: large enough for the matrix products to be fast."""


def compute_chunked_loss(x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Give the mean cross-entropy of targets, for inputs (…, hidden) of an output layer (words, hidden)."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, table = x.to(dtype), table.to(dtype)
    apply: Callable[..., Tensor] = _ChunkedLoss.apply
    return apply(x.flatten(0, -2), table, targets.flatten(), torch.is_grad_enabled())


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
