"""One `launch fit` within the program's interpreter: from torch's import to the end of the second step.

`LAUNCH_FIT` is JSON: `result`, the file for what was found; `gpu`, which GPU to pretend (None for the CPU):
its `name`, `memory` in bytes, `capability` and `count`; and `steps`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch._dynamo  # torch itself imports it later, and compares functions that are replaced here
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .fake_answers import find_traced_line, find_user_line
from .fake_functions import replace_functions
from .fake_tensors import FakeDispatch
from .module_owners import ModuleOwners
from .pretended_cuda import pretend_cuda
from .pretended_group import pretend_group
from .step_memory import StepMemory
from .unneeded_work import leave_out_work

MOST_NOTES = 20


class StepSession:
    """The session of this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.process = os.getpid()
        self.begun = time.monotonic()
        self.memory = StepMemory()
        self.owners = ModuleOwners(self)
        self.steps: dict[int, int] = {}
        """Steps by optimizer."""
        self.kept: list[object] = []
        """Optimizers, so that no other gets the number of one that is gone."""
        self.is_in_optimizer = False
        self.notes: list[str] = []
        self.optimizer_names: list[str] = []
        self.failure: tuple[str, BaseException] | None = None
        """The last operation that failed, and its exception."""
        self.show_error: Any = None

    def begin(self) -> None:
        """Turn fake tensors on."""
        if self.order.get("gpu"):
            pretend_cuda(self.order["gpu"], self.memory)
        pretend_group()
        leave_out_work(self)
        self.memory.watch_resizes()
        self.owners.register()
        register_optimizer_step_pre_hook(self.begin_step)
        register_optimizer_step_post_hook(self.end_step)
        show_error, sys.excepthook = sys.excepthook, self.record_error
        self.show_error = show_error
        replace_functions()
        FakeDispatch(self).__enter__()

    def note_result(self, result: object) -> None:
        """Note what an operation has allocated."""
        category, owner = self.choose_category()
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.memory.note_tensor(leaf, category, owner)
        self.memory.end_operation()

    def choose_category(self) -> tuple[str, str]:
        """Return what is being allocated now, and for which module."""
        if self.is_in_optimizer or (torch._C._current_graph_task_id() != -1 and not self.owners.stack):
            return "temporary", ""
        return "activations", self.owners.name_current()

    def is_in_forward(self) -> bool:
        """Tell whether a module's forward runs."""
        return bool(self.owners.stack)

    def begin_step(self, optimizer: Any, *_: object) -> None:  # torch's hook
        """Note the gradients, and that an optimizer steps."""
        self.is_in_optimizer = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = self.owners.find_owner(parameter)
                self.memory.mark(parameter, "weights", owner)
                if parameter.grad is not None:
                    self.memory.mark_gradient(parameter.grad, owner)

    def end_step(self, optimizer: Any, *_: object) -> None:  # torch's hook
        """Note the optimizer's states; after the last step, end the process."""
        self.is_in_optimizer = False
        for parameter, state in optimizer.state.items():
            owner = self.owners.find_owner(parameter)
            for value in tree_leaves(state):
                if isinstance(value, torch.Tensor) and value.dim():
                    self.memory.mark(value, "optimizer", owner)
        if id(optimizer) not in self.steps:
            self.kept.append(optimizer)
            self.optimizer_names.append(type(optimizer).__name__)
        self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        wanted = int(self.order.get("steps", 2))
        if min(self.steps.values()) >= wanted or max(self.steps.values()) > wanted:
            self.finish({"complete": True})

    def note_answer(self, what: str, answer: object) -> None:
        """Note that the program was told a value that nobody knows."""
        file, line, text = find_user_line()
        note = f"{describe_code_line(file, line)}: {what} of a fake tensor was answered with {answer}: {text}"
        if note not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(note)

    def note(self, text: str) -> None:
        """Note something that a person should know of the result."""
        if text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)

    def note_failure(self, operator: str, error: BaseException) -> None:
        """Note that an operation has failed, which may end the program."""
        self.failure = operator, error

    def record_error(self, kind: type, error: BaseException, trace: Any) -> None:  # as sys.excepthook
        """Record the exception that ends the program, and the operation of which it comes."""
        operator, chain = "", [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
            chain.append(cause)
        if self.failure is not None and self.failure[1] in chain:
            operator = self.failure[0]
        file, line, text = find_traced_line(trace)
        what = f"{kind.__name__}: {error}".strip().partition("\n")[0]
        place = describe_code_line(file, line)
        self.write({"failed": {"reason": what, "operator": operator, "place": place, "line": text}})
        self.show_error(kind, error, trace)

    def refuse(self, reason: str, operator: str) -> None:
        """End the process: torch cannot go on without values."""
        file, line, text = find_user_line()
        place = describe_code_line(file, line)
        self.finish({"refused": {"reason": reason, "operator": operator, "place": place, "line": text}})

    def finish(self, how: dict[str, Any]) -> None:
        """Write the result, and end the process before the program goes on."""
        if os.getpid() != self.process:
            return
        self.write(how)
        for output in (sys.stdout, sys.stderr):
            try:
                output.flush()
            except (OSError, ValueError, AttributeError):
                continue
        os._exit(0)

    def write(self, how: dict[str, Any]) -> None:
        """Write what was found."""
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
            "parameters": self.owners.count_parameters(),
            "optimizers": self.optimizer_names,
            "notes": self.notes,
            "seconds": round(time.monotonic() - self.begun, 2),
            "torch": torch.__version__,
        }
        path = self.order["result"]
        with open(f"{path}.draft", "w", encoding="utf-8") as stream:
            json.dump(result, stream)
        os.replace(f"{path}.draft", path)


def describe_code_line(file: str, line: int) -> str:
    """Return `FILE:LINE`, short if it is below the working directory."""
    if not file:
        return "the program"
    short = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f"{short}:{line}"


def begin_session(order: dict[str, Any]) -> None:
    """Begin the session of this process."""
    StepSession(order).begin()
