"""Functions of torch that ask for a GPU before they dispatch, or that take another kernel on one.

They are replaced by name: what sees calls of functions does not see those that torch's own functions make.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.library import Library
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from .fake_tensors import CPU, GPU, find_kind, find_value, get_device, local, show_devices

FLASH_TYPES = (torch.float16, torch.bfloat16)
MOST_WIDTH = 256
"""Of a head, in flash attention."""
LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
OF_DATA = ("tensor", "as_tensor", "asarray", "new_tensor")
"""These look for the GPU before they dispatch."""
kernels: list[Any] = []
"""That torch is told of, as long as this lives."""
loose: Any = torch
tensor_class: Any = torch.Tensor


def replace_functions() -> None:
    """Put these in the place of torch's."""
    show_devices()
    constructors = _device._device_constructors()  # which names them for `torch.device(…)` as a context
    for function in constructors:
        name = getattr(function, "__name__", "")
        if getattr(torch, name, None) is function:
            setattr(torch, name, name_device(function))
    for name in LIKE:
        setattr(torch, f"{name}_like", name_device(getattr(torch, f"{name}_like"), has_default=False))
    for name in NEW:
        setattr(tensor_class, name, name_device(getattr(tensor_class, name), has_default=False))
    replace_moves()
    replace_values()
    replace_kernels()


def name_device(function: Any, *, has_default: bool = True) -> Any:  # torch's
    """Return a function that names the GPU with its index, and that tells the program's `meta` from C++'s."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        device = named.get("device")
        if device is None and has_default and not local.in_kernel:
            device = find_default()
        if device is None or local.in_kernel:
            return function(*args, **named)
        device = as_device(device)
        before, local.wants_meta = local.wants_meta, device.type == "meta"
        try:
            if device != GPU or function.__name__ not in OF_DATA:
                return function(*args, **{**named, "device": device})
            is_leaf = named.pop("requires_grad", False)
            source = args[0] if args and isinstance(args[0], torch.Tensor) else None
            made = function(*args, **{**named, "device": CPU if source is None else source.device}).to(GPU)
            return made.requires_grad_() if is_leaf else made
        finally:
            local.wants_meta = before

    return call


def find_default() -> torch.device | None:
    """Return the device of the innermost `with torch.device(…)`, or of `set_default_device`."""
    if torch._C._len_torch_function_stack():
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, _device.DeviceContext):
                return mode.device
    return None


def as_device(value: Any) -> torch.device:
    """Return a device; the GPU is the pretended one."""
    device = GPU if isinstance(value, int) else torch.device(value)
    return GPU if device.type == "cuda" else device


def replace_moves() -> None:
    """Replace what brings a tensor to a device."""
    move = tensor_class.to

    def to(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if local.in_kernel:
            return move(self, *args, **named)  # type: ignore[no-any-return]
        first, rest = (args[0], args[1:]) if args else (None, ())
        if isinstance(first, torch.Tensor):
            named.update(device=first.device, dtype=first.dtype)
        elif isinstance(first, torch.dtype):
            named["dtype"] = first
        elif first is not None:
            named["device"] = first
        names: tuple[str, ...] = ("non_blocking", "copy")
        if rest and not isinstance(rest[0], bool):
            names = ("dtype", *names)
        named.update(zip(names, rest, strict=False))
        named = {key: value for key, value in named.items() if value is not None}
        device = as_device(named.pop("device", self.device))
        if device == self.device and not named.get("copy"):
            named.pop("non_blocking", None)
            return move(self, named.pop("dtype", self.dtype), **named)  # type: ignore[no-any-return]
        before, local.wants_meta = local.wants_meta, device.type == "meta"
        try:
            return move(self, device, **{**named, "copy": True})  # type: ignore[no-any-return]
        finally:
            local.wants_meta = before

    def cuda(
        self: torch.Tensor, device: Any = None, non_blocking: bool = False, **named: Any
    ) -> torch.Tensor:
        return to(self, GPU, non_blocking=non_blocking, **named)

    def cpu(self: torch.Tensor, **named: Any) -> torch.Tensor:
        return to(self, CPU, **named)

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not find_kind(self):
            return copy(self, memo)
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    copy = tensor_class.__deepcopy__
    tensor_class.to, tensor_class.cuda, tensor_class.cpu = to, cuda, cpu
    tensor_class.__deepcopy__ = deepcopy
    tensor_class.pin_memory = lambda self, *_: self
    tensor_class.is_pinned = lambda _self, *_: False
    tensor_class.record_stream = lambda _self, _stream: None


def replace_values() -> None:
    """Have fake tensors give NumPy and lists what is known of them, else ones, as for a table of metrics."""

    def read(tensor: torch.Tensor) -> torch.Tensor | None:
        if get_device(tensor).type != "meta":
            return tensor
        known = find_value(tensor)
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=CPU) if known is None else known

    def make_reader(name: str) -> Any:
        original = getattr(tensor_class, name)
        return lambda tensor, *args, **named: original(read(tensor), *args, **named)

    for name in ("numpy", "tolist"):
        setattr(tensor_class, name, make_reader(name))
    show, set_state = torch._tensor_str._str, loose.random.set_rng_state

    def describe(tensor: torch.Tensor, **named: Any) -> str:
        if not find_kind(tensor):
            return str(show(tensor, **named))
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    loose._tensor_str._str = describe
    loose.set_rng_state = loose.random.set_rng_state = lambda state: (
        None if find_kind(state) else set_state(state)
    )


def replace_kernels() -> None:
    """Take the kernels of a GPU where torch's CPU build takes an operation to pieces, which keep more."""
    original, drop = F.scaled_dot_product_attention, F.dropout

    def attend_or_not(query: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return (attend if find_kind(query) == "cuda" else original)(query, *args, **named)

    def dropout(
        input: torch.Tensor,  # noqa: A002 - torch's own name
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if training and 0 < p < 1 and not inplace and find_kind(input) == "cuda":
            return torch.native_dropout(input, p, True)[0]
        return drop(input, p, training, inplace)

    functions: Any = F
    functions.scaled_dot_product_attention, functions.dropout = attend_or_not, dropout
    kernels.append(Library("aten", "IMPL", "CUDA"))
    for name in ("silu_backward", "_fused_rms_norm"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            kernels[0].impl(name, lambda *_: None)
    torch.backends.mha.set_fastpath_enabled(False)


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
