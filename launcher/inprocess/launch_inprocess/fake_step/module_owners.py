"""Which module an allocation belongs to, and parameters that are fake from their registration on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules

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
        self.converted: dict[int, tuple[Any, Any]] = {}
        """Real parameters and their fakes, by number."""

    def register(self) -> None:
        """Register for all modules of the process."""
        modules.register_module_forward_pre_hook(self.enter_module)
        modules.register_module_forward_hook(self.leave_module, always_call=True)
        modules.register_module_parameter_registration_hook(self.fake_parameter)
        modules.register_module_buffer_registration_hook(self.fake_buffer)
        loose: Any = nn.Module
        original = loose._apply

        def apply_to_tensors(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
            return self.convert_module(module, convert, original, recurse=recurse)

        loose._apply = apply_to_tensors

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

    def fake_parameter(self, _module: nn.Module, _name: str, parameter: Any) -> Any:  # torch's hook
        """Return what is registered in place of a real parameter: a fake one, the same for the same."""
        return self.make_fake(parameter)

    def fake_buffer(self, _module: nn.Module, _name: str, buffer: Any) -> Any:  # torch's hook
        """Return what is registered in place of a real buffer; small ones stay real, as constants."""
        return self.make_fake(buffer)

    def make_fake(self, tensor: Any) -> Any:  # a tensor or None
        """Return a fake tensor for a real one, and anything else as it is."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type == "meta":
            return tensor
        known = self.converted.get(id(tensor))
        if known is None:
            known = self.converted[id(tensor)] = tensor, self.session.fake_mode.from_tensor(tensor)
            self.session.memory.note_tensor(known[1], "weights", "")
        return known[1]

    def convert_module(
        self,
        module: nn.Module,
        convert: Any,
        original: Any,
        *,
        recurse: bool,  # torch's
    ) -> nn.Module:
        """Do as `Module._apply` does: a fake parameter stays the same object, as a real one does."""
        own = [each for each in module._parameters.values() if each is not None]
        if any(
            hasattr(type(each), "__tensor_flatten__") and not isinstance(each, FakeTensor) for each in own
        ):
            found: nn.Module = original(module, convert, recurse)
            return found
        if recurse:
            for child in module.children():
                child._apply(convert)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = self.convert_parameter(parameter, convert)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = convert(buffer)
        return module

    def convert_parameter(self, parameter: Any, convert: Any) -> Any:  # torch's
        """Return a parameter after a conversion."""
        with torch.no_grad():
            applied = convert(parameter)
        if applied is parameter:
            return parameter
        if isinstance(parameter, FakeTensor) and isinstance(applied, FakeTensor):
            parameter.data = applied
            parameter.fake_device = applied.fake_device
            if parameter.grad is not None:
                parameter.grad = convert(parameter.grad)
            return parameter
        known = self.converted.get(id(parameter))
        if known is None or known[1].device != applied.device:
            known = parameter, nn.Parameter(applied, parameter.requires_grad)
            self.converted[id(parameter)] = known
        return known[1]
