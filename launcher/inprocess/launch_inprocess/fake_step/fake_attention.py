"""Scaled dot product attention on fake tensors of a GPU: the kernel that a GPU would take.

Without one, torch takes the formula itself, whose scores alone can be more than all the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

FLASH_TYPES = (torch.float16, torch.bfloat16)
MOST_WIDTH = 256
"""Of a head, in flash attention."""


def is_attention(func: object, args: Any, kwargs: Any) -> bool:  # a call's
    """Tell whether a call is attention on fake tensors of a GPU."""
    if func is not torch.nn.functional.scaled_dot_product_attention:
        return False
    query = args[0] if args else kwargs.get("query")
    return isinstance(query, FakeTensor) and query.fake_device.type == "cuda"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # torch's own form
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention by the kernel of a GPU: flash, memory-efficient, or the formula."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (each.to(dtype) for each in (query, key, value))
        attn_mask = (
            attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        )
    ops, width = torch.ops.aten, query.shape[-1]
    is_flat = query.dim() != 4
    if query.dtype in FLASH_TYPES and attn_mask is None and width <= MOST_WIDTH and not is_flat:
        found = ops._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return found[0]  # type: ignore[no-any-return]
    if is_flat or query.dtype == torch.float64:
        return attend_by_formula(query, key, value, attn_mask, is_causal=is_causal)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    bias = expand_mask(query, key, attn_mask)
    found = ops._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )
    return found[0]  # type: ignore[no-any-return]


def expand_mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask as the memory-efficient kernel takes it: added, and for all heads (expanded, no copy)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return mask.expand(shape)


def attend_by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Compute attention by its formula, which keeps the scores."""
    scores = query @ key.transpose(-2, -1)
    if is_causal:
        scores = scores + torch.zeros(scores.shape[-2:], dtype=scores.dtype, device=scores.device)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    return torch.softmax(scores, -1) @ value
