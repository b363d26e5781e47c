"""Fake tensors: C++ sees them on torch's meta device, Python on the pretended GPU or on the CPU.

They are plain tensors without data whose backend keys are CUDA's or the CPU's, so that autocast and modules
treat them as real ones, while their device is `meta`, for which all of torch's C++ code works without a GPU.
What is on the GPU is fake, and so are the parameters of modules; the rest stays real. A tensor that is on
`meta` for the program itself has the keys of that backend, and takes no memory.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .session import StepSession

META, GPU, CPU = torch.device("meta"), torch.device("cuda", 0), torch.device("cpu")
DEVICES = {"cuda": GPU, "cpu": CPU}
MOST_KNOWN = 1 << 20
"""Elements of a tensor of whole numbers or truth values whose values are kept beside the fake one."""
aten = torch.ops.aten
read_device = torch._C.TensorBase.device.__get__
VALUE = "_launch_fit_value"


class Local(threading.local):
    """What a thread does."""

    in_kernel = False
    """It computes shapes: devices are what C++ says."""
    wants_meta = False
    """The program has asked for a tensor on `meta`, and it is not the device that C++ has seen."""

    @contextlib.contextmanager
    def doing(self, **what: bool) -> Iterator[None]:
        """Have it do something else for a while."""
        before = {name: getattr(self, name) for name in what}
        self.__dict__.update(what)
        try:
            yield
        finally:
            self.__dict__.update(before)


local = Local()


def list_tensors(value: object) -> list[Any]:
    """Return the tensors within lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def get_device(tensor: torch.Tensor) -> torch.device:
    """Return the device that C++ sees."""
    with torch._C.DisableTorchFunction():  # else it asks the property that stands for it
        return read_device(tensor)


def find_kind(tensor: torch.Tensor) -> str:
    """Return the kind of device on which a fake tensor is; empty for others."""
    if get_device(tensor).type != "meta":
        return ""
    keys = torch._C._dispatch_keys(tensor)
    if keys.has(torch._C.DispatchKey.CUDA):
        return "cuda"
    return "cpu" if keys.has(torch._C.DispatchKey.CPU) else ""


def _see_device(tensor: Any) -> torch.device:
    """Return the device of a tensor as the program sees it."""
    if _has_own_dispatch(type(tensor)):
        return unwrap_tensor(tensor)[0].device
    kind = "" if local.in_kernel else find_kind(tensor)
    return DEVICES[kind] if kind else get_device(tensor)


def _has_own_dispatch(kind: type) -> bool:
    """Tell whether this is a tensor that turns operations into others, as DTensor does."""
    return kind not in (torch.Tensor, torch.nn.Parameter) and hasattr(kind, "__tensor_flatten__")


def unwrap_tensor(value: Any) -> list[torch.Tensor]:
    """Return the tensors with a storage within a tensor; a wrapper such as DTensor has them as attributes."""
    if not _has_own_dispatch(type(value)):
        return [value] if isinstance(value, torch.Tensor) else []
    return [inner for name in value.__tensor_flatten__()[0] for inner in unwrap_tensor(getattr(value, name))]


def show_devices() -> None:
    """Have Python see the devices of fake tensors."""
    kind: Any = torch.Tensor
    kind.device = property(_see_device)
    kind.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
    kind.is_cpu = property(lambda tensor: tensor.device.type == "cpu")
    kind.is_meta = property(lambda tensor: tensor.device.type == "meta")
    kind.get_device = lambda tensor: 0 if tensor.device.type == "cuda" else -1
    make_wrapper = kind._make_wrapper_subclass
    kind._make_wrapper_subclass = staticmethod(lambda *args, **named: make_wrapper(*args, **_lower(named)))
    mode: Any = FakeTensorMode
    dispatch = mode.dispatch

    def dispatch_as_kernel(own: Any, func: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        with local.doing(in_kernel=True):
            return dispatch(own, func, types, args, _lower(named or {}))

    mode.dispatch = dispatch_as_kernel


def _lower(named: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the device that C++ is to see."""
    is_gpu = torch.device(named.get("device") or "cpu").type == "cuda"
    return {**named, "device": META} if is_gpu else named


@contextlib.contextmanager
def _compute_shapes() -> Iterator[None]:
    """Run operations by their kernels for `meta`."""
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        with local.doing(in_kernel=True):
            yield


def make_fake(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a fake tensor that shares the storage of one on `meta`, or has the shape of a real one."""
    if get_device(tensor).type != "meta":
        tensor = _make_shape(tensor)
    return torch.Tensor._make_subclass(torch.Tensor, tensor, False, device_for_backend_keys=DEVICES[kind])


def _make_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on `meta` with the shape of a real one."""
    with _compute_shapes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


class FakeDispatch(TorchDispatchMode):
    """Computes the shapes of what is fake or for the GPU, runs the rest, and notes what each allocates."""

    supports_higher_order_operators = True

    def __init__(self, session: StepSession) -> None:
        super().__init__()
        self.session = session
        self.last_kind = ""
        """Of the last fake result: of what C++ code makes without naming a tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.HigherOrderOperator):
            if func.name() != "run_dtensor_rng_op":
                self.session.refuse("it has no implementation for fake tensors", func.name())
            with self:
                return args[2](*args[3:], **kwargs)
        if any(_has_own_dispatch(kind) for kind in types):
            return NotImplemented  # a wrapper, such as DTensor: its operations on what it wraps come here
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor computes shapes by torch's own fake tensors
        leaves = list_tensors((args, kwargs))
        kinds = [kind for leaf in leaves if (kind := find_kind(leaf))]
        if kinds and func is aten._local_scalar_dense.default:
            value = find_value(args[0])
            return self.session.answer_scalar(args[0]) if value is None else value.item()
        if (kinds or func is aten.to.device) and _is_composite(func):
            with self:  # as autograd does, where it is on
                return func.decompose(*args, **kwargs)
        kind = self._choose_kind(kwargs.get("device"), leaves, kinds)
        if not kind:
            result = func(*args, **kwargs)
        else:
            try:
                result = self._run_fake(func, args, kwargs, kind)
            except Exception as error:
                self.session.failure = func.name(), error
                raise
        self.session.note_result(result)
        return result

    def _choose_kind(
        self, device: torch.device | None, leaves: Sequence[torch.Tensor], kinds: Sequence[str]
    ) -> str:
        """Return the kind of device on which results are fake; empty if they are not."""
        known = "cuda" if "cuda" in kinds else next(iter(kinds), "")
        if device is None and known:
            # A number may be on another device than the tensors with a dimension.
            common = [find_kind(leaf) for leaf in leaves if leaf.dim()]
            return "cuda" if "cuda" in common else next(filter(None, common), known)
        if device is not None and device.type == "meta":
            return "" if local.wants_meta or (leaves and not known) else known or self.last_kind
        return "cuda" if device is not None and device.type == "cuda" else known and "cpu"

    def _run_fake(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], kind: str) -> Any:
        """Compute the shapes of an operation's results; one that has none without values ends the session."""
        kwargs.pop("pin_memory", None)
        if func is aten.index.Tensor:
            args = [args[0], _name_rows(args[1])]
        value = _compute_value(func, args, kwargs) if _is_dynamic(func) or kind == "cpu" else None
        if value is None and (reason := _find_obstacle(func, args)):
            self.session.refuse(reason, func.name())
        if func is aten._to_copy.default and value is not None:
            return value  # the program has it back from the GPU
        given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def lower(leaf: torch.Tensor) -> torch.Tensor:
            shape = leaf if get_device(leaf).type == "meta" else _make_shape(leaf)
            given[id(shape)] = leaf, shape
            return shape

        def wrap(leaf: torch.Tensor) -> torch.Tensor:
            return given[id(leaf)][0] if id(leaf) in given else make_fake(leaf, kind)

        if value is not None and _is_dynamic(func):
            result = tree_map_only(torch.Tensor, _make_shape, value)
        else:
            lowered, named = tree_map_only(torch.Tensor, lower, (tuple(args), kwargs))
            if "device" in named:
                named["device"] = META
            with _compute_shapes():
                result = func(*lowered, **named)
        found = tree_map_only(torch.Tensor, wrap, result)
        _keep_values(func, args, kwargs, found)
        self.last_kind = kind
        return found


@functools.cache
def _is_composite(func: Any) -> bool:  # an operator
    """Tell whether torch takes an operation to pieces before it reaches a device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CUDA")


def _is_dynamic(func: Any) -> bool:  # an operator
    """Tell whether the shape of an operation's result depends on values."""
    return torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor


def _find_obstacle(func: Any, args: Sequence[Any]) -> str:
    """Return why an operation has no shape without values; empty if it has."""
    is_sized = func is aten.repeat_interleave.Tensor and len(args) > 1
    if (_is_dynamic(func) and not is_sized) or (func is aten.index.Tensor and any(map(_is_mask, args[1]))):
        return "the shape of its result depends on values"
    return "its result depends on values" if torch.Tag.data_dependent_output in func.tags else ""


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _can_be_known(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.numel() > MOST_KNOWN)


def find_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor of whole numbers or truth values; None if they are unknown."""
    if not _can_be_known(tensor):
        return None
    if get_device(tensor).type != "meta":
        return tensor
    value, version = getattr(tensor, VALUE, (None, 0))
    return value if value is not None and version == _find_version(tensor) else None


def _find_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or another one with the same storage, has been written to."""
    return 0 if tensor.is_inference() else tensor._version


def _compute_value(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the known values of its arguments; None if those of one are unknown."""
    known = {id(leaf): find_value(leaf) for leaf in list_tensors((args, kwargs))}
    if func._schema.is_mutable or func.namespace != "aten" or any(one is None for one in known.values()):
        return None
    values, named = tree_map_only(torch.Tensor, lambda leaf: known[id(leaf)], (tuple(args), kwargs))
    if "device" in named:
        named["device"] = CPU
    return func(*values, **named)


def _keep_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Keep the values of results that are whole numbers or truth values, if they follow from known ones."""
    leaves = list_tensors(result)
    is_known = leaves and all(map(_can_be_known, leaves))
    if is_known and (value := _compute_value(func, args, kwargs)) is not None:
        for leaf, own in zip(leaves, tree_leaves(value), strict=True):
            setattr(leaf, VALUE, (own, _find_version(leaf)))


def _name_rows(indices: Sequence[Any]) -> list[Any]:
    """Return indices with the rows that a mask of known values names in its place."""
    rows: list[Any] = []
    for index in indices:
        value = find_value(index) if _is_mask(index) else None
        rows += [index] if value is None else value.nonzero().unbind(1)
    return rows
