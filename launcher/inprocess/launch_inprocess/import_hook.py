"""Waits for the program to import a module."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter a millisecond
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import TypeVar

    Action = Callable[[ModuleType], object]
    Argument = TypeVar("Argument")


TORCH_ENTRIES = ("torch", "torch.nn", "torch.optim", "torch.distributed", "torch.utils.data")
"""Modules of torch that programs import first; `from torch.nn import …` looks at `torch.nn` alone."""


class ImportWatcher:
    """A finder that finds nothing itself: it has actions run once another finder's module is loaded."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module by the other finders, and have its loader report it."""
        if name not in self.actions:
            return None
        spec = find_by_others(self, name, path, target)
        if spec is not None and spec.loader is not None:
            report_load(spec.loader, name)
        return spec

    def run_actions(self, name: str, module: ModuleType) -> None:
        """Run what waits for a module; after the last one, this finder removes itself."""
        actions = self.actions.pop(name, [])
        finders = getattr(sys, "meta_path", None) or []
        if not self.actions and self in finders:
            finders.remove(self)
        for action in actions:
            call_safely(action, module)


WATCHER = ImportWatcher()
"""One for the interpreter, as `sys.meta_path` is."""


def when_imported(name: str, action: Action) -> None:
    """Run an action with a module once the program has imported it, or now if it has.

    What the action raises is dropped: nothing of ours ends the program.
    """
    module = sys.modules.get(name)
    if module is not None and not is_loading(module):
        call_safely(action, module)
        return
    finders = getattr(sys, "meta_path", None)
    if finders is not None and WATCHER not in finders:
        finders.insert(0, WATCHER)
    WATCHER.actions.setdefault(name, []).append(action)


def when_framework_is_used(action: Action) -> None:
    """Run an action once the program has begun to import torch, also in a rank forked with torch."""
    if "torch" not in sys.modules:
        when_imported("torch.version", action)  # the first module that torch imports
        return
    waiting = [action]

    def act_once(module: ModuleType) -> None:
        if waiting:
            waiting.pop()(module)

    for name in TORCH_ENTRIES:
        when_imported_again(name, act_once)


def when_imported_again(name: str, action: Action) -> None:
    """Run an action with a loaded module once the program imports it.

    An import asks the spec of a module that it finds in `sys.modules` whether that is still being loaded
    (PyImport_ImportModuleLevelObject in CPython's import.c): the spec gets a class of its own until then.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None:
        return
    spec_class = type(spec)

    def answer(asked: ModuleSpec) -> bool:
        asked.__class__ = spec_class
        call_safely(action, sys.modules[name])
        return getattr(asked, "_initializing", False)

    spec.__class__ = type(spec_class.__name__, (spec_class,), {"_initializing": property(answer)})


def is_loading(module: ModuleType) -> bool:
    """Tell whether a module's code is still running."""
    return getattr(getattr(module, "__spec__", None), "_initializing", False) is True


def find_by_others(
    watcher: ImportWatcher, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Ask the finders beside this one, as the import system does."""
    for other in list(sys.meta_path):
        find = getattr(other, "find_spec", None)
        if find is not None and other is not watcher:
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
    return None


def report_load(loader: object, name: str) -> None:
    """Have a loader run what waits for a module once it has loaded it.

    A loader may serve other modules too (`zipimport`), and may have no attributes of its own to replace.
    """
    execute, attributes = getattr(loader, "exec_module", None), getattr(loader, "__dict__", None)
    if execute is None or not isinstance(attributes, dict) or "exec_module" in attributes:
        return

    def execute_and_report(module: ModuleType) -> None:
        execute(module)
        if getattr(module, "__name__", None) == name:
            attributes.pop("exec_module", None)
            WATCHER.run_actions(name, module)

    attributes["exec_module"] = execute_and_report


def call_safely(action: Callable[[Argument], object], argument: Argument) -> None:
    """Call something whose failure must not end the program."""
    try:
        action(argument)
    except Exception:
        return
