"""`torch.autocast("cuda")` on fake tensors: torch's own kernels cast what C++ sees on CUDA: no fake one.

All operations that have a kernel for autocast get another one; the kinds are those of ATen/autocast_mode.h
(torch 2.13).
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


def replace_autocast() -> library.Library:
    """Put these casts in the place of torch's, as long as the returned value lives."""
    kernels = library.Library("aten", "IMPL", KEY.name)
    casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    torch_: Any = torch
    clear = torch.clear_autocast_cache

    def forget() -> None:
        casts.clear()
        clear()

    torch_.clear_autocast_cache = forget
    with warnings.catch_warnings(action="ignore"):  # that torch has kernels of its own
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEY.name):
            short = name.removeprefix("aten::")
            if short != REFUSED:
                kernels.impl(short, _make_kernel(short, casts))
    return kernels


def _make_kernel(name: str, casts: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
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
            args, named = tree_map_only(torch.Tensor, lambda each: _cast(each, dtype, casts), (args, named))
            return operation(*args, **named)

    return compute


def _is_cast(value: object) -> bool:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return is_float and value.device.type == "cuda"  # type: ignore[attr-defined]


def _cast(
    tensor: torch.Tensor, dtype: torch.dtype, casts: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Return a tensor in another type; that of a weight is kept until autocast is left."""
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
