"""Waits for the program to import a module."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], object]


class Waiter:
    """A finder that finds nothing itself: it has an action done once the others' module is there."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find a module that is waited for by the other finders, and have its loader tell of it."""
        actions = self.actions.pop(name, None)
        if actions is None:
            return None
        if not self.actions:
            leave(self)
        spec = find_by_others(self, name, path, target)
        if spec is not None and spec.loader is not None:
            tell_after(spec.loader, actions)
        return spec


WAITER = Waiter()
"""One for the interpreter, as `sys.meta_path` is."""


def when_imported(name: str, action: Action) -> None:
    """Do something with a module once the program has imported it, or now where it has.

    What the action raises is dropped: nothing of ours ends the program.
    """
    if name in sys.modules:
        attempt(action, sys.modules[name])
        return
    if not WAITER.actions:
        sys.meta_path.insert(0, WAITER)
    WAITER.actions.setdefault(name, []).append(action)


def leave(finder: Waiter) -> None:
    """Take a finder out of `sys.meta_path`, where it still is."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


def find_by_others(
    finder: Waiter, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    """Ask the finders beside this one, as the import system does."""
    for other in list(sys.meta_path):
        find = getattr(other, "find_spec", None)
        spec = find(name, path, target) if find is not None and other is not finder else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]  # an unknown finder's word
    return None


def tell_after(loader: object, actions: "Sequence[Action]") -> None:
    """Have a module's loader, which is this module's alone, do what waits for it."""
    execute = loader.exec_module  # type: ignore[attr-defined]  # loaders have had it since Python 3.4

    def execute_and_tell(module: ModuleType) -> None:
        del loader.exec_module  # type: ignore[attr-defined]
        execute(module)
        for action in actions:
            attempt(action, module)

    loader.exec_module = execute_and_tell  # type: ignore[attr-defined]


def attempt(action: Action, module: ModuleType) -> None:
    """Do something that must not end the program."""
    try:
        action(module)
    except Exception:
        return
