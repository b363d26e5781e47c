"""A `DataLoader(...)` that says nothing of workers gets the plan's number of them."""

from __future__ import annotations

import os

from .import_hook import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

KINDS = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
}
"""Classes whose constructors have the default; torchdata's does not call torch's."""
DEPTH, WIDTH = 4, 8
"""How far a dataset is looked through for tensors on a device."""
DEVICES = ("cuda", "xpu", "hpu", "npu")


def give_workers(environ: Mapping[str, str]) -> None:
    """Make the plan's number of workers the default, in this process alone, where the job asks for it."""
    number = environ.get("LAUNCH_NUM_WORKERS", "")
    if environ.get("LAUNCH_LOADER_DEFAULT") != "1" or not number.isdecimal() or not int(number):
        return
    for module, name in KINDS.items():
        when_imported(module, Default(int(number), name).settle)


class Default:
    """The number of workers for the loaders of one class."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.process = os.getpid()
        self.given: Any = None
        """Loaders that have it, by their ids, held weakly."""

    def settle(self, module: ModuleType) -> None:
        """Put the default into the constructor of the module's class."""
        from weakref import WeakValueDictionary

        self.given = WeakValueDictionary()
        kind = getattr(module, self.name)
        kind.__init__ = self.wrap_init(kind.__init__)
        os.register_at_fork(after_in_child=self.take_back)

    def wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a constructor with the default, which its signature tells of.

        Frameworks make loaders anew from what differs from the signature's defaults: with 0 there, an
        explicit `num_workers=0` would be lost.
        """
        import functools
        import inspect

        signature = inspect.signature(original)
        names = list(signature.parameters)
        position = names.index("num_workers")

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # they are the user's
            unsaid = 0 < len(args) <= position and "num_workers" not in kwargs
            if not unsaid or os.getpid() != self.process:
                return original(*args, **kwargs)
            said = {**dict(zip(names, args)), **kwargs}  # noqa: B905  # Python 3.9 has no `strict`
            added = self.choose_options(said)
            original(*args, **kwargs, **added)
            if added:
                self.remember(args[0])
            return None

        changed = [
            item.replace(default=self.number) if item.name == "num_workers" else item
            for item in signature.parameters.values()
        ]
        init.__signature__ = signature.replace(parameters=changed)  # type: ignore[attr-defined]  # PEP 362
        return init

    def choose_options(self, said: Mapping[str, object]) -> dict[str, object]:
        """Return what a loader gets beside what its call says; nothing where workers would not do."""
        try:
            dataset = said.get("dataset")
            start = choose_start()
            if start is None or is_iterable(dataset) or holds_device(dataset):
                return {}
        except Exception:  # an object that does not let itself be looked at
            return {}
        context = {} if "multiprocessing_context" in said else start
        return {"num_workers": self.number, **context}

    def remember(self, loader: object) -> None:
        """Keep in mind that the default made this loader's workers."""
        try:
            self.given[id(loader)] = loader
        except TypeError:  # a class without weak references
            return

    def take_back(self) -> None:
        """In a forked child: a daemon may have no children, and what was not asked for must not break it."""
        from contextlib import suppress

        for loader in list(self.given.values()):
            with suppress(Exception):
                loader.num_workers, loader.prefetch_factor = 0, None


def choose_start() -> dict[str, str] | None:
    """Say how workers are to start: forked, which every program stands that was written for none.

    The other ways import the program's main file anew, which it may not be made for, and pickle its dataset:
    where Python has such a one by default (forkserver since 3.14), it is overruled, and where the program
    has chosen it, no default is the better one (None).
    """
    import multiprocessing

    first = multiprocessing.get_all_start_methods()[0]  # "the first of which is the default"
    chosen = multiprocessing.get_start_method(allow_none=True) or first
    if chosen == "fork":
        return {}
    return {"multiprocessing_context": "fork"} if chosen == first else None


def is_iterable(dataset: object) -> bool:
    """Tell whether each worker would go through all of a dataset, unless it shards itself."""
    import torch.utils.data

    return isinstance(dataset, torch.utils.data.IterableDataset)


def holds_device(value: object, depth: int = DEPTH) -> bool:
    """Tell whether a dataset shows something on a device, which a forked worker could not touch.

    Looked at are its attributes, those of the datasets in it, and the first items of lists and dicts.
    """
    import torch

    if isinstance(value, (torch.Tensor, torch.device)):
        return getattr(value, "device", value).type != "cpu"
    if isinstance(value, str):
        return value.partition(":")[0] in DEVICES
    return depth > 0 and any(holds_device(item, depth - 1) for item in list_inner(value))


def list_inner(value: object) -> list[object]:
    """Return what is in a container, the first of it, or in what can be indexed, as datasets can."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [item for item in value[:WIDTH] if not isinstance(item, str)]
    return list(getattr(value, "__dict__", {}).values()) if hasattr(type(value), "__getitem__") else []
