"""Which tensors are fake: those on the pretended GPU, and a module's parameters; the rest stays real.

C++ code of torch sees fake tensors of a GPU on the meta device: there is no GPU to ask for streams. Python
code sees them on the GPU. Where a device comes back from C++ as `meta`, the GPU is meant.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..import_hook import when_imported
from .fake_answers import answer_scalar, is_called_by, refuse_operation
from .fake_attention import attend, is_attention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from .step_session import StepSession

META, GPU = torch.device("meta"), torch.device("cuda", 0)
LARGE = 4096
"""Elements from which on a tensor made in a module's `__init__` is fake at once: smaller ones may be read."""
DDP = os.path.join("nn", "parallel", "distributed.py")
"""Whose reducer makes its buckets on the device that C++ sees."""
aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)
"""Types of an index that is a mask."""


class OwnFakeMode(FakeTensorMode):
    """The mode in which operations run that have a fake tensor: it knows that there is no GPU."""

    @property
    def avoid_device_init(self) -> bool:
        """Tell torch not to move constants to a GPU."""
        return True

    @avoid_device_init.setter
    def avoid_device_init(self, _: bool) -> None:
        """Some versions of torch set it."""


def make_fake_mode() -> FakeTensorMode:
    """Return the mode for this process."""
    mode = OwnFakeMode(allow_non_fake_inputs=True)
    mode.allow_meta = True
    return mode


def hide_device() -> None:
    """Have C++ see fake tensors of a GPU on the meta device, and Python on theirs."""
    original = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatch(
        cls: type,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return see_device(args[0])
        return original(cls, func, types, args, kwargs or {})

    show_device(FakeTensor, lambda tensor: tensor.fake_device)
    when_imported("torch.distributed.tensor._api", show_device_of_wrapper)
    kind: Any = FakeTensor
    kind.__torch_dispatch__ = classmethod(dispatch)
    fake_tensor.init_gpu_context = lambda _: None  # type: ignore[assignment]
    torch._C._set_only_lift_cpu_tensors(True)


def show_device(kind: Any, find: Any) -> None:  # a class, and what finds its device
    """Have Python see the device of a class of tensors that C++ sees on another."""
    kind.is_cuda = property(lambda tensor: find(tensor).type == "cuda")
    kind.is_cpu = property(lambda tensor: find(tensor).type == "cpu")
    kind.is_meta = property(lambda tensor: find(tensor).type == "meta")
    kind.get_device = lambda tensor: find(tensor).index if find(tensor).type == "cuda" else -1


def show_device_of_wrapper(module: ModuleType) -> None:
    """Do the same for DTensor, which C++ makes with the device that it sees."""
    kind: Any = module.DTensor
    show_device(kind, lambda tensor: tensor._local_tensor.device)
    kind.device = property(lambda tensor: tensor._local_tensor.device)


def see_device(tensor: FakeTensor) -> torch.device:
    """Return the device of a fake tensor as C++ is to see it."""
    is_meta = tensor.fake_device.type == "cuda" or tensor.fake_mode.in_kernel_invocation
    return META if is_meta else tensor.fake_device


class FakeDispatch(TorchDispatchMode):
    """Runs an operation on fake tensors if it has one or is for the GPU, and notes what it allocates."""

    def __init__(self, session: StepSession) -> None:
        super().__init__()
        self.session = session
        self.fake_mode = session.fake_mode

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return see_device(args[0])
        if any(has_own_dispatch(kind) for kind in types):
            return NotImplemented  # a wrapper, such as DTensor: its operations on what it wraps come here
        if is_within_other_mode(self.fake_mode):
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if fakes and func is aten._local_scalar_dense.default:
            return answer_scalar(self.session, fakes[0])
        if kwargs.get("device") == META:
            is_of_cpp = not leaves and (runs_in_backward() or is_called_by(DDP))
            restore_device(kwargs, fakes, is_of_cpp=is_of_cpp)
        if fakes or is_for_gpu(kwargs) or (not leaves and is_of_module(kwargs, args)):
            result = self.run_fake(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self.session.note_result(result)
        return result

    def run_fake(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors; one that has no answer without values ends the session."""
        try:
            if func is torch.ops._c10d_functional.wait_tensor.default:
                return args[0]  # what stands for it would return a new tensor
        except AttributeError:  # a torch without torch.distributed
            pass
        try:
            if is_chosen_by_mask(func, args):
                raise fake_tensor.DynamicOutputShapeException(func)
            with self.fake_mode:
                return func(*args, **kwargs)
        except (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.UnsupportedOperatorException,
        ) as error:
            refuse_operation(self.session, func, error)
            raise


def is_chosen_by_mask(func: Any, args: Sequence[Any]) -> bool:  # an operator
    """Tell whether an operation takes the elements where a mask is true: as many as its values say.

    torch says so itself on CPUs, but asks a CUDA kernel for the others' count.
    """
    if func is not aten.index.Tensor:
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype in MASKS for index in args[1])


class FakeFunctions(TorchFunctionMode):
    """Sees the calls of torch's functions, for what C++ would ask of a GPU before it dispatches."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call one function."""
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        args = tuple(map(name_pretended_gpu, args))
        kwargs = {key: name_pretended_gpu(value) for key, value in (kwargs or {}).items()}
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            func, name, args = torch.Tensor.to, "to", (args[0], choose_gpu(args[1:], kwargs))
            kwargs = {}
        if name == "to" and is_there(args, kwargs):
            return args[0]
        if name in ("pin_memory", "record_stream") and isinstance(args[0], torch.Tensor):
            return args[0] if name == "pin_memory" else None
        if name == "is_pinned":
            return False
        if is_attention(func, args, kwargs):
            return attend(*args, **kwargs)
        return func(*args, **kwargs)


def choose_gpu(rest: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device that a call of `Tensor.cuda` names."""
    named = kwargs.get("device", rest[0] if rest else None)
    return torch.device("cuda", named) if isinstance(named, int) else torch.device(named or GPU)


def name_pretended_gpu(value: Any) -> Any:  # an argument
    """Return an argument with the GPU's index if it is a GPU without one: C++ would ask for the current."""
    if isinstance(value, str) and value == "cuda":
        return GPU
    if isinstance(value, torch.device) and value.type == "cuda" and value.index is None:
        return GPU
    return value


def is_there(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether `tensor.to(…)` has nothing to do: C++ takes every fake tensor of a GPU for another's."""
    if not args or not isinstance(args[0], FakeTensor) or kwargs.get("copy") or len(args) > 2:
        return False
    wanted = args[1] if len(args) == 2 else kwargs.get("device", kwargs.get("dtype"))
    if isinstance(wanted, (str, int)):
        wanted = torch.device(wanted)
    if isinstance(wanted, torch.dtype):
        return wanted == args[0].dtype
    dtype = kwargs.get("dtype")
    return isinstance(wanted, torch.device) and wanted == args[0].device and dtype in (None, args[0].dtype)


def has_own_dispatch(kind: type) -> bool:
    """Tell whether this is a tensor that turns operations into others, as DTensor does."""
    return kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor) and hasattr(kind, "__tensor_flatten__")


def is_within_other_mode(own: FakeTensorMode) -> bool:
    """Tell whether somebody computes shapes with fake tensors of another mode, as DTensor does."""
    active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return active is not None and active is not own


def restore_device(kwargs: dict[str, Any], fakes: Sequence[FakeTensor], *, is_of_cpp: bool) -> None:
    """Put the GPU in the place of a meta device that C++ has passed on."""
    gpu = next((fake.fake_device for fake in fakes if fake.fake_device.type == "cuda"), None)
    if gpu is not None or is_of_cpp:
        kwargs["device"] = gpu or GPU


def is_for_gpu(kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the result is to be on a GPU."""
    device = kwargs.get("device")
    return isinstance(device, torch.device) and device.type == "cuda"


def runs_in_backward() -> bool:
    """Tell whether autograd runs."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_of_module(kwargs: Mapping[str, Any], args: Sequence[Any]) -> bool:
    """Tell whether a factory function makes something large in the `__init__` of a module, not on `meta`."""
    if kwargs.get("device") == META or not args or not isinstance(args[0], (list, tuple)):
        return False
    count = 1
    for size in args[0]:
        count *= size if isinstance(size, int) else 1
    return count >= LARGE and is_in_module_init()


def is_in_module_init() -> bool:
    """Tell whether a module is being made, by the frames on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_init = code.co_name == "__init__" and bool(code.co_varnames)
        if is_init and isinstance(frame.f_locals.get(code.co_varnames[0]), torch.nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
