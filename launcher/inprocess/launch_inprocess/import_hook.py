"""Waits for the program to import a module."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter a millisecond
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Action = Callable[[ModuleType], object]


class Waiter:
    """A finder that finds nothing itself: it has an action done once the others' module is there."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is waited for by the other finders, and have its loader tell of it."""
        if name not in self.actions:
            return None
        spec = find_by_others(self, name, path, target)
        if spec is not None and spec.loader is not None:
            tell_after(spec.loader, name)
        return spec

    def do_actions(self, name: str, module: ModuleType) -> None:
        """Do what waits for a module; a finder that waits for nothing more leaves."""
        actions = self.actions.pop(name, [])
        finders = getattr(sys, "meta_path", None) or []
        if not self.actions and self in finders:
            finders.remove(self)
        for action in actions:
            attempt(action, module)


WAITER = Waiter()
"""One for the interpreter, as `sys.meta_path` is."""


def when_imported(name: str, action: Action) -> None:
    """Do something with a module once the program has imported it, or now where it has.

    What the action raises is dropped: nothing of ours ends the program.
    """
    module = sys.modules.get(name)
    if module is not None and not is_loading(module):
        attempt(action, module)
        return
    finders = getattr(sys, "meta_path", None)
    if finders is not None and WAITER not in finders:
        finders.insert(0, WAITER)
    WAITER.actions.setdefault(name, []).append(action)


def is_loading(module: ModuleType) -> bool:
    """Tell whether a module's code is still running."""
    return getattr(getattr(module, "__spec__", None), "_initializing", False) is True


def find_by_others(
    finder: Waiter, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Ask the finders beside this one, as the import system does."""
    for other in list(sys.meta_path):
        find = getattr(other, "find_spec", None)
        spec = find(name, path, target) if find is not None and other is not finder else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]  # an unknown finder's word
    return None


def tell_after(loader: object, name: str) -> None:
    """Have a loader do what waits for a module once it has loaded it.

    A loader may serve other modules too (`zipimport`), and may be of a kind that cannot be told.
    """
    execute, own = getattr(loader, "exec_module", None), getattr(loader, "__dict__", None)
    if execute is None or own is None or isinstance(loader, type) or "exec_module" in own:
        return

    def execute_and_tell(module: ModuleType) -> None:
        execute(module)
        if getattr(module, "__name__", None) == name:
            own.pop("exec_module", None)
            WAITER.do_actions(name, module)

    try:
        loader.exec_module = execute_and_tell  # type: ignore[attr-defined]  # shadows the class's own
    except Exception:
        return


def attempt(action: Action, module: ModuleType) -> None:
    """Do something that must not end the program."""
    try:
        action(module)
    except Exception:
        return
