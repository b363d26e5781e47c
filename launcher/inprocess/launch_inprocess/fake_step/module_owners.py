"""Which module an allocation belongs to, and parameters that are fake from their registration on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from .fake_tensors import get_device, make_fake

if TYPE_CHECKING:
    from .step_session import StepSession


class ModuleOwners:
    """The modules whose forward runs, and the names of all."""

    def __init__(self, session: StepSession) -> None:
        self.session = session
        self.stack: list[nn.Module] = []
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.parameters: dict[int, tuple[Any, str]] = {}
        """By the number of the parameter, which is kept."""

    def register(self) -> None:
        """Register for all modules of the process."""
        modules.register_module_forward_pre_hook(self.enter_module)
        modules.register_module_forward_hook(self.leave_module, always_call=True)
        modules.register_module_parameter_registration_hook(self.empty_tensor)
        modules.register_module_buffer_registration_hook(self.empty_tensor)

    def enter_module(self, module: nn.Module, _inputs: object) -> None:
        """Begin a forward."""
        if not self.stack and module not in self.names:
            self.name_modules(module)
        self.stack.append(module)

    def leave_module(self, module: nn.Module, _inputs: object, _outputs: object) -> None:
        """End a forward."""
        while self.stack:
            if self.stack.pop() is module:
                return

    def name_modules(self, root: nn.Module) -> None:
        """Give the modules of a model their names, and its tensors their owners."""
        for name, module in root.named_modules():
            self.names[module] = name.removeprefix("module.") or type(root).__name__
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.parameters[id(parameter)] = parameter, self.names[module]
                    self.session.memory.mark(parameter, "weights", self.names[module])
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.session.memory.mark(buffer, "buffers", self.names[module])

    def name_current(self) -> str:
        """Return the module whose forward runs; empty outside of all."""
        for module in reversed(self.stack):
            if name := self.names.get(module, ""):
                return name
        return ""

    def find_owner(self, parameter: object) -> str:
        """Return the module of a parameter."""
        return self.parameters.get(id(parameter), (None, ""))[1]

    def count_parameters(self) -> int:
        """Return how many elements the parameters of all models have that have run."""
        return sum(int(parameter.numel()) for parameter, _ in self.parameters.values())

    def empty_tensor(self, _module: nn.Module, _name: str, tensor: Any) -> None:  # torch's hook
        """Make a real parameter or buffer fake, as the same object."""
        if type(tensor) in (torch.Tensor, nn.Parameter) and get_device(tensor).type != "meta":
            tensor.data = make_fake(tensor, "cpu")
            self.session.memory.note_tensor(tensor, "weights", "")
