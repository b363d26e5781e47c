"""One `launch fit` within the program's interpreter: from torch's import to the end of the second step.

`LAUNCH_FIT` is JSON: `result`, the file for what was found; `gpu`, which GPU to pretend (None for the CPU):
its `name`, `memory` in bytes, `capability` and `count`; and `steps`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import linecache
import math
import os
import sys
import sysconfig
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # torch itself imports it later, and compares functions that are replaced here
from torch import nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .fake_tensors import FakeDispatch, get_device, list_tensors, make_fake, unwrap_tensor
from .pretended_torch import leave_out_work, pretend_cuda, pretend_group, replace_functions

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

MOST_NOTES = 20
MOST_LINE = 200
"""Characters of a source line."""
TRUE_NAMES = ("isfinite", "all_finite", "is_finite")
LIBRARIES = tuple(
    os.path.abspath(path) + os.sep for path in (sysconfig.get_paths()["stdlib"], f"{__file__}/../../..")
)
NO_OWNER = None, ""
ROUNDING = 512
"""Bytes that CUDA's caching allocator rounds up to (kMinBlockSize)."""


@dataclasses.dataclass
class Allocation:
    """One storage; `died` is infinite as long as it lives."""

    size: int
    device: str
    category: str
    owner: str
    born: int
    died: float = math.inf
    reference: object = None


class StepMemory:
    """What the tensors of a program take: each storage that an operation has made, by kind of device.

    Sizes are those of storages, rounded up as CUDA's allocator rounds them. The composition of the peak is
    worked out at the end, so that an allocation that turns out to be a gradient was one from its beginning.
    """

    def __init__(self) -> None:
        self.serial = 0
        """Number of the operation; births and deaths are dated by it."""
        self.log: list[Allocation] = []
        self.living: dict[int, Allocation] = {}
        """By the storage's address in C++."""
        self.totals: dict[str, int] = {}
        self.peaks: dict[str, tuple[int, int]] = {}
        """Bytes, and the operation at whose end they were taken."""

    def note(self, storage: torch.UntypedStorage, device: str, category: str, owner: str) -> None:
        """Note a storage if it is new, or its size if that has changed."""
        address, size = storage._cdata, storage.nbytes()
        if device != "cpu":
            size = -(-size // ROUNDING) * ROUNDING
        known = self.living.get(address)
        if known is not None:
            if known.size == size:
                return
            category, owner = known.category, known.owner
            self._end(address, known)
        if size and device != "meta":
            made = Allocation(size, device, category, owner, self.serial)
            made.reference = weakref.ref(storage, lambda _: self._end(address, made))
            self.living[address] = made
            self.log.append(made)
            self.totals[device] = self.totals.get(device, 0) + size

    def _end(self, address: int, allocation: Allocation) -> None:
        if allocation.died == math.inf:
            allocation.died = self.serial
            self.totals[allocation.device] -= allocation.size
            if self.living.get(address) is allocation:
                del self.living[address]

    def watch_resizes(self) -> None:
        """See `UntypedStorage.resize_`, by which FSDP frees and takes memory; no operation tells of it."""
        storage_class: Any = torch.UntypedStorage
        original = storage_class.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # torch's own
            found, known = original(storage, size), self.living.get(storage._cdata)
            if known is not None:
                self.note(storage, known.device, known.category, known.owner)
            return found

        storage_class.resize_ = resize_

    def end_operation(self) -> None:
        """Take the time of a peak."""
        for device, total in self.totals.items():
            if total > self.peaks.get(device, (0, 0))[0]:
                self.peaks[device] = total, self.serial
        self.serial += 1

    def mark(self, value: object, category: str, owner: str = "") -> None:
        """Say what a tensor is, from its storage's beginning on; also within a wrapper such as DTensor.

        A gradient in a bucket of DDP's shares that with other modules'.
        """
        inner = unwrap_tensor(value)
        if category == "gradients" and any(each.untyped_storage().nbytes() > each.nbytes for each in inner):
            owner = ""
        for each in inner:
            storage = each.untyped_storage()
            allocation = self.living.get(storage._cdata)
            if allocation is None:
                self.note(storage, each.device.type, category, owner)
            else:
                allocation.category = category
                allocation.owner = owner or allocation.owner

    def describe_peak(self, device: str) -> dict[str, Any]:
        """Return the peak of a kind of device: bytes in all, by category, and by module and category."""
        total, serial = self.peaks.get(device, (0, 0))
        categories: collections.Counter[str] = collections.Counter()
        modules: dict[str, collections.Counter[str]] = {}
        for each in self.log:
            if each.device == device and each.born <= serial < each.died:
                for own in (categories, modules.setdefault(each.owner, collections.Counter())):
                    own[each.category] += each.size
        return {"total": total, "categories": categories, "modules": modules}


class StepSession:
    """The session of this process: its memory, the modules whose forward runs, and the steps."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.process = os.getpid()
        self.begun = time.monotonic()
        self.memory = StepMemory()
        self.stack: list[nn.Module] = []
        """Modules whose forward runs."""
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.parameters: dict[int, tuple[Any, str]] = {}
        """Parameters, and their modules' names, by the number of the parameter, which is kept."""
        self.steps: dict[Any, int] = {}
        """Steps by optimizer."""
        self.is_in_optimizer = False
        self.notes: list[str] = []
        self.failure: tuple[str, BaseException] | None = None
        """The last operation that failed, and its exception."""
        self.show_error = sys.excepthook

    def begin(self) -> None:
        """Turn fake tensors on."""
        if self.order.get("gpu"):
            pretend_cuda(self.order["gpu"], self.memory)
        pretend_group()
        leave_out_work(self)
        self.memory.watch_resizes()
        modules.register_module_forward_pre_hook(self._enter_module)
        modules.register_module_forward_hook(self._leave_module, always_call=True)
        modules.register_module_parameter_registration_hook(self._empty_tensor)
        modules.register_module_buffer_registration_hook(self._empty_tensor)
        register_optimizer_step_pre_hook(self.begin_step)
        register_optimizer_step_post_hook(self.end_step)
        sys.excepthook = self.record_error
        replace_functions()
        FakeDispatch(self).__enter__()

    def _enter_module(self, module: nn.Module, _inputs: object) -> None:
        """Begin a forward; the modules of a model get their names, and its tensors their owners."""
        if not self.stack and module not in self.names:
            for name, inner in module.named_modules():
                self.names[inner] = own = name.removeprefix("module.") or type(module).__name__
                for parameter in list_tensors(inner._parameters):
                    self.parameters[id(parameter)] = parameter, own
                    self.memory.mark(parameter, "weights", own)
                for buffer in list_tensors(inner._buffers):
                    self.memory.mark(buffer, "buffers", own)
        self.stack.append(module)

    def _leave_module(self, module: nn.Module, _inputs: object, _outputs: object) -> None:
        """End a forward."""
        while self.stack and self.stack.pop() is not module:
            pass

    def _empty_tensor(self, _module: nn.Module, _name: str, tensor: Any) -> None:  # torch's hook
        """Make a real parameter or buffer fake, as the same object."""
        if type(tensor) in (torch.Tensor, nn.Parameter) and get_device(tensor).type != "meta":
            tensor.data = make_fake(tensor, "cpu")
            self.memory.note(tensor.untyped_storage(), tensor.device.type, "weights", "")

    def note_result(self, result: object) -> None:
        """Note what an operation has allocated."""
        if self.is_in_optimizer or (torch._C._current_graph_task_id() != -1 and not self.stack):
            category, owner = "temporary", ""
        else:
            names = (self.names.get(module, "") for module in reversed(self.stack))
            category, owner = "activations", next(filter(None, names), "")
        for leaf in list_tensors(result):
            self.memory.note(leaf.untyped_storage(), leaf.device.type, category, owner)
        self.memory.end_operation()

    def begin_step(self, optimizer: Any, *_: object) -> None:  # torch's hook
        """Note the gradients, and that an optimizer steps."""
        self.is_in_optimizer = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _, owner = self.parameters.get(id(parameter), NO_OWNER)
                self.memory.mark(parameter, "weights", owner)
                if parameter.grad is not None:
                    self.memory.mark(parameter.grad, "gradients", owner)

    def end_step(self, optimizer: Any, *_: object) -> None:  # torch's hook
        """Note the optimizer's states; after the last step, end the process."""
        self.is_in_optimizer = False
        for parameter, state in optimizer.state.items():
            _, owner = self.parameters.get(id(parameter), NO_OWNER)
            for value in list_tensors(state):
                if value.dim():
                    self.memory.mark(value, "optimizer", owner)
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        wanted = self.order["steps"]
        if min(self.steps.values()) >= wanted or max(self.steps.values()) > wanted:
            self.finish()

    def answer_scalar(self, tensor: torch.Tensor) -> bool | int | float:
        """Return a plausible value: 1 for a number, False for a truth value; what it is for is noted.

        A number that is logged or divided by can be any number. Within a module's forward, a whole number or
        a truth value decides shapes or the way: then nobody can tell what memory the step would take, and the
        session ends. Two known questions have their answers: gradients are finite, and none is infinite.
        """
        place, text = find_line(traceback.walk_stack(sys._getframe(1))).values()
        answer: bool | int | float = 1
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(2))][:30]
            if any(frame.f_code.co_filename.endswith("grad_scaler.py") for frame in frames):
                return 0.0
            what, answer = "a number", 1.0
        else:
            what = "a truth value" if tensor.dtype == torch.bool else "a whole number"
            if self.stack:
                self.refuse(f"the program's way depends on {what} of a tensor", "aten::_local_scalar_dense")
            if tensor.dtype == torch.bool:
                answer = any(name in text for name in TRUE_NAMES)
        self.note(f"{place}: {what} of a fake tensor was answered with {answer}: {text}")
        return answer

    def note(self, text: str) -> None:
        """Note something that a person should know of the result."""
        if text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)

    def record_error(self, kind: type, error: BaseException, trace: Any) -> None:  # as sys.excepthook
        """Record the exception that ends the program, and the operation of which it comes."""
        operator, chain = "", (error, error.__cause__, error.__context__)
        if self.failure is not None and self.failure[1] in chain:
            operator = self.failure[0]
        what = f"{kind.__name__}: {error}".strip().partition("\n")[0]
        where = find_line(reversed([*traceback.walk_tb(trace)]))
        self.write(failed={"reason": what, "operator": operator, **where})
        self.show_error(kind, error, trace)

    def refuse(self, reason: str, operator: str) -> None:
        """End the process: torch cannot go on without values."""
        where = find_line(traceback.walk_stack(sys._getframe(1)))
        self.finish(refused={"reason": reason, "operator": operator, **where})

    def finish(self, **how: object) -> None:
        """Write the result, and end the process before the program goes on."""
        if os.getpid() == self.process:
            self.write(**how)
            for output in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    output.flush()
            os._exit(0)

    def write(self, **how: object) -> None:
        """Write what was found; a process that the program has forked writes nothing."""
        if os.getpid() != self.process:
            return
        device = "cuda" if self.order.get("gpu") else "cpu"
        if not self.memory.peaks.get(device) and self.memory.peaks:
            device = max(self.memory.peaks, key=lambda each: self.memory.peaks[each][0])
        result = {
            **how,
            "device": device,
            "peak": self.memory.describe_peak(device),
            "steps": max(self.steps.values(), default=0),
            "parameters": sum(int(parameter.numel()) for parameter, _ in self.parameters.values()),
            "optimizers": [type(optimizer).__name__ for optimizer in self.steps],
            "notes": self.notes,
            "seconds": round(time.monotonic() - self.begun, 2),
            "torch": torch.__version__,
        }
        path = self.order["result"]
        with open(f"{path}.draft", "w", encoding="utf-8") as stream:
            json.dump(result, stream)
        os.replace(f"{path}.draft", path)


def find_line(frames: Iterable[tuple[FrameType, int]]) -> dict[str, str]:
    """Return place and text of the first line that is neither Python's, a package's, nor this hook's.

    The file is short if it is below the working directory.
    """
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(("<", *LIBRARIES)) or f"{os.sep}site-packages{os.sep}" in file:
            continue
        short = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
        return {"place": f"{short}:{line}", "line": linecache.getline(file, line).strip()[:MOST_LINE]}
    return {"place": "the program", "line": ""}
