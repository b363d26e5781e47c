"""Kernels of a GPU on fake tensors: those of `torch.autocast("cuda")`, attention, dropout.

torch's own autocast casts what C++ sees on CUDA: no fake tensor. All operations that have a kernel for it get
another one; the kinds are those of ATen/autocast_mode.h (torch 2.13). torch's CPU build takes attention and
dropout to pieces, which keep more.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import library
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable

LOWER = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu "
    "addmm convolution cudnn_convolution cudnn_convolution_transpose addmv addr matmul einsum mm mv "
    "linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention"
)
"""Computed in autocast's type."""
ACCUMULATED = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
"""They read what they get, and give fp32, unless they are asked for another type."""
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""Computed in the widest type of their arguments. All others are computed in fp32."""
REFUSED = "binary_cross_entropy"
KEY = torch._C.DispatchKey.AutocastCUDA
FLASH_TYPES = (torch.float16, torch.bfloat16)
MOST_WIDTH = 256
"""Of a head, in flash attention."""
autocast, autograd, cuda = (
    library.Library("aten", "IMPL", key) for key in ("AutocastCUDA", "AutogradCUDA", "CUDA")
)
"""torch knows kernels as long as these live."""
casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights, and what autocast has made of them, until it is left."""


def replace_kernels() -> None:
    """Put these in the place of torch's."""
    loose: Any = torch
    clear = loose.clear_autocast_cache

    def forget() -> None:
        casts.clear()
        clear()

    loose.clear_autocast_cache = forget
    with warnings.catch_warnings(action="ignore"):  # that torch has kernels of its own
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEY.name):
            short = name.removeprefix("aten::")
            if short != REFUSED:
                autocast.impl(short, _make_kernel(short))
    autograd.impl("dropout", drop)
    autograd.impl("scaled_dot_product_attention", attend)
    # Where no autograd is, as in `inference_mode`, the dispatch mode asks for this.
    attention: Any = torch.ops.aten.scaled_dot_product_attention.default
    attention.py_kernels.setdefault(torch._C.DispatchKey.CompositeImplicitAutograd, attend)
    for name in ("silu_backward", "_fused_rms_norm"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            cuda.impl(name, lambda *_: None)
    torch.backends.mha.set_fastpath_enabled(False)


def _make_kernel(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    operation: Any = getattr(getattr(torch.ops.aten, base), overload or "default")
    is_lower, is_accumulated, is_widest = (base in names.split() for names in (LOWER, ACCUMULATED, WIDEST))
    places = [argument.name for argument in operation._schema.arguments]

    def compute(*args: Any, **named: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY)):
            floats = [each for each in tree_leaves((args, named)) if _is_cast(each)]
            if is_accumulated:
                named = {**dict(zip(places, args, strict=False)), **named}
                if floats and named.get("dtype") is None:
                    named["dtype"] = torch.float32
                return operation(**named)
            dtype = torch.get_autocast_dtype("cuda") if is_lower else torch.float32
            if is_widest:
                dtype = max((each.dtype for each in floats), key=lambda kind: kind.itemsize, default=dtype)
            args, named = tree_map_only(torch.Tensor, lambda each: _cast(each, dtype), (args, named))
            return operation(*args, **named)

    return compute


def _is_cast(value: object) -> bool:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return is_float and value.device.type == "cuda"  # type: ignore[attr-defined]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another type."""
    if not _is_cast(tensor) or tensor.dtype == dtype:
        return tensor
    is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf
    is_kept = is_weight and dtype == torch.get_autocast_dtype("cuda") and torch.is_autocast_cache_enabled()
    if is_kept and id(tensor) in casts:
        return casts[id(tensor)][1]
    made: torch.Tensor = torch.ops.aten.to.dtype(tensor, dtype)
    if is_kept and not tensor._is_view():
        casts[id(tensor)] = (tensor, made)
    return made


def drop(tensor: torch.Tensor, share: float, is_training: bool) -> torch.Tensor:  # torch's own form
    """Compute dropout by the kernel of a GPU."""
    return torch.native_dropout(tensor, share, True)[0] if is_training and share else tensor


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
    ops: Any = torch.ops.aten
    args: tuple[Any, ...]
    shape, named = query.shape, {"scale": scale}
    if len(shape) != 4 or query.dtype == torch.float64:
        compute, args = ops._scaled_dot_product_attention_math, (attn_mask, dropout_p, is_causal)
        named["enable_gqa"] = enable_gqa
    elif query.dtype in FLASH_TYPES and attn_mask is None and shape[-1] <= MOST_WIDTH:
        compute, args = ops._scaled_dot_product_flash_attention, (dropout_p, is_causal, False)
    else:
        if enable_gqa and key.shape[-3] != shape[-3]:
            repeats = shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
        if attn_mask is not None:  # the kernel adds it, for all heads: expanded, no copy
            is_flag = attn_mask.dtype == torch.bool
            bias = torch.zeros_like(attn_mask, dtype=query.dtype) if is_flag else attn_mask
            attn_mask = bias.expand((*shape[:3], key.shape[2]))
        compute = ops._scaled_dot_product_efficient_attention
        args = (attn_mask, torch.is_grad_enabled(), dropout_p, is_causal)
    return compute(query, key, value, *args, **named)[0]
