"""Waits for the program to import a module, and puts functions in the place of those in it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from signal import NSIG, getsignal
    from types import FrameType, ModuleType
    from typing import Any, TypeVar

    Action = Callable[[ModuleType], object]
    Argument = TypeVar("Argument")
    Function = Callable[..., Any]
else:
    from _signal import NSIG, getsignal  # `signal` costs a millisecond

SAVERS = {
    "torch.serialization": "save",
    "torch.distributed.checkpoint.state_dict_saver": "save async_save save_state_dict",
    "safetensors.torch": "save_file save_model",
}
"""Functions that save, by module."""
REPLACED = {
    **SAVERS,
    "torch.distributed.distributed_c10d": "init_process_group destroy_process_group",
    "gc": "collect get_objects get_referrers",
}
"""Functions of modules that this package replaces, by module."""
COPIES: dict[int, list[tuple[dict[str, object], str]]] = {}
"""The namespaces and names that hold each of these functions, by its id, where `note_copies` was called."""


class ImportWatcher:
    """A finder that finds nothing itself: it has actions run once another finder's module is loaded."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module by the other finders, as the import system does, and report its load."""
        if name not in self.actions:
            return None
        for other in list(sys.meta_path):
            find = getattr(other, "find_spec", None)
            if find is None or other is self:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._report_load(spec.loader, name)
                return spec
        return None

    def _report_load(self, loader: object, name: str) -> None:
        """Have a loader run what waits for a module once it has loaded it.

        A loader may serve other modules too (`zipimport`), and may have no attributes of its own to replace.
        """
        execute, attributes = getattr(loader, "exec_module", None), getattr(loader, "__dict__", None)
        if execute is None or not isinstance(attributes, dict) or "exec_module" in attributes:
            return

        def execute_and_report(module: ModuleType) -> None:
            execute(module)
            if getattr(module, "__name__", None) != name:
                return
            attributes.pop("exec_module", None)
            for action in self.actions.pop(name, []):
                call_safely(action, module)

        attributes["exec_module"] = execute_and_report


WATCHER = ImportWatcher()
"""One for the interpreter, as `sys.meta_path` is. It stays there: an import that goes through the list while
it gets shorter misses a finder."""


def when_imported(name: str, action: Action) -> None:
    """Run an action with a module once the program has imported it, or now if it has.

    What the action raises is dropped: nothing of ours ends the program.
    """
    module = sys.modules.get(name)
    is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False) is True
    if module is not None and not is_loading:
        call_safely(action, module)
        return
    finders = getattr(sys, "meta_path", None)
    if finders is not None and WATCHER not in finders:
        finders.insert(0, WATCHER)
    WATCHER.actions.setdefault(name, []).append(action)


def when_framework_is_used(action: Action) -> None:
    """Run an action once the program has begun to import torch; at once in a rank forked with torch."""
    when_imported("torch" if "torch" in sys.modules else "torch.version", action)  # what torch imports first


def find_cuda() -> Any:  # noqa: ANN401  # torch's module
    """Return `torch.cuda` if the program has used a GPU, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


class Suppressed:
    """As `contextlib.suppress`, for failures of this package: it runs in the midst of the program.

    What a signal's handler of the program raises in the block goes on to the program.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self.kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Drop a failure."""
        return isinstance(error, self.kinds) and not is_foreign(error)


def is_foreign(error: Exception) -> bool:
    """Tell whether a signal's handler of the program has raised it, or it was thrown into this thread.

    A handler is called with the frame that it interrupts, as a tracer is; one that has let go of it is known
    by its code, if it is still set. What is thrown has a type that is neither Python's nor torch's, and comes
    up in code that is. All else is a failure of this package, whatever of the program's it has called: a
    plugin of torch's, an audit hook.
    """
    handlers: list[Any] = [handler for handler in map(getsignal, range(1, NSIG)) if callable(handler)]
    codes = {getattr(one, "__code__", None) for handler in handlers for one in (handler, handler.__call__)}
    trace, frame = error.__traceback__, None
    while trace is not None:
        outer, frame, trace = frame, trace.tb_frame, trace.tb_next
        if frame.f_code in codes or (outer is not None and _has_argument(frame, outer)):
            return True
    places = (type(error).__module__, frame.f_globals.get("__name__") if frame is not None else None)
    package, place = (str(name).partition(".")[0] for name in places)
    own, python = __name__.partition(".")[0], getattr(sys, "stdlib_module_names", (package,))  # since 3.10
    known = {own, "torch", *python}
    return package not in known and place in known


def _has_argument(frame: FrameType, argument: object) -> bool:
    """Tell whether a frame's function was called with something."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)  # `*rest`: inspect.CO_VARARGS
    found = [values.get(name) for name in code.co_varnames[:count]]
    return any(one is argument for each in found for one in (each if type(each) is tuple else (each,)))


def call_safely(action: Callable[[Argument], object], argument: Argument) -> None:
    """Call something whose failure must not end the program."""
    with Suppressed(Exception):
        action(argument)


def note_copies() -> None:
    """Note which modules hold copies of the functions in `REPLACED`, as `torch.save` is a copy.

    If a function is replaced before torch is imported, others copy the replacement. In a rank that was forked
    from a process with torch, the copies are there already. To look for them takes 30 ms, and has 32 MB of
    memory copied (a lookup writes the reference count of an object), so that the parent notes them. Names of
    this package, which calls the originals, are left out.
    """
    own = __name__.rpartition(".")[0]
    modules = dict(sys.modules)
    for name, functions in REPLACED.items():
        found = (getattr(modules.get(name), function, None) for function in functions.split())
        COPIES.update({id(function): [] for function in found if function is not None})
    for name, module in modules.items():
        if name.partition(".")[0] == own:
            continue
        namespace: dict[str, object] = getattr(module, "__dict__", {})
        for key, value in list(namespace.items()):
            if id(value) in COPIES:
                COPIES[id(value)].append((namespace, key))


def replace(owner: object, name: str, function: Function, *, traced: bool = True) -> None:
    """Put a function in the place of another, which it looks like, wherever that was noted and still is.

    torch.compile leaves one that is not `traced` alone. `functools.update_wrapper` costs a millisecond.
    """
    original = getattr(owner, name)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):  # pickle finds it by these
        setattr(function, attribute, getattr(original, attribute, None))
    function.__dict__.update(getattr(original, "__dict__", {}), __wrapped__=original)
    if not traced:
        function.__dict__["_torchdynamo_disable"] = True
    setattr(owner, name, function)
    for namespace, copy in COPIES.get(id(original), ()):
        if namespace.get(copy) is original:
            namespace[copy] = function


def surround(
    owner: object, name: str, begin: Callable[[], object], end: Callable[[], object] | None = None
) -> None:
    """Have something done before each call of a function, and perhaps after it, however it ends."""
    original: Function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # they are the user's
        begin()
        try:
            return original(*args, **kwargs)
        finally:
            if end is not None:
                end()

    replace(owner, name, call, traced=False)
