"""A `DataLoader(...)` that says nothing of workers gets the plan's number of them."""

from __future__ import annotations

import os

from .import_hook import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

LOADER_CLASSES = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
}
"""Classes whose constructors get the default, by module; torchdata's does not call torch's."""
MAX_DEPTH, MAX_ITEMS = 4, 8
"""How far a dataset is searched for tensors on a device."""
ACCELERATORS = ("cuda", "xpu", "hpu", "npu")
"""Types of torch.device, as in `self.device = "cuda:0"`."""


def set_worker_default(environ: Mapping[str, str]) -> None:
    """Make the plan's number of workers the default, in this process alone, if the job asks for it."""
    number = environ.get("LAUNCH_NUM_WORKERS", "")
    if environ.get("LAUNCH_LOADER_DEFAULT") != "1" or not number.isdecimal() or not int(number):
        return
    for module, name in LOADER_CLASSES.items():
        when_imported(module, WorkerDefault(int(number), name).install)


class WorkerDefault:
    """The number of workers for the loaders of one class."""

    def __init__(self, number: int, class_name: str) -> None:
        self.number = number
        self.class_name = class_name
        self.process = os.getpid()
        self.loaders: Any = None
        """Loaders that have got it, by their ids, held weakly."""

    def install(self, module: ModuleType) -> None:
        """Put the default into the constructor of the module's class."""
        from weakref import WeakValueDictionary

        self.loaders = WeakValueDictionary()
        loader_class = getattr(module, self.class_name)
        loader_class.__init__ = self.wrap_init(loader_class.__init__)
        os.register_at_fork(after_in_child=self.remove_in_child)

    def wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a constructor with the default, also in its signature.

        Frameworks make loaders again from what differs from the signature's defaults: with 0 there, an
        explicit `num_workers=0` would be lost.
        """
        import functools
        import inspect

        signature = inspect.signature(original)
        names = list(signature.parameters)
        position = names.index("num_workers")

        @functools.wraps(original)
        def init_with_default(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # they are the user's
            is_default = 0 < len(args) <= position and "num_workers" not in kwargs
            if not is_default or os.getpid() != self.process:
                return original(*args, **kwargs)
            arguments = {**dict(zip(names, args)), **kwargs}  # noqa: B905  # Python 3.9 has no `strict`
            added = self.choose_worker_options(arguments)
            original(*args, **kwargs, **added)
            if added:
                self.remember(args[0])
            return None

        changed = [
            parameter.replace(default=self.number) if parameter.name == "num_workers" else parameter
            for parameter in signature.parameters.values()
        ]
        init_with_default.__dict__["__signature__"] = signature.replace(parameters=changed)
        return init_with_default

    def choose_worker_options(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return what a loader gets beside the arguments of its call; nothing if workers would not do."""
        try:
            dataset = arguments.get("dataset")
            start = choose_start_method()
            if start is None or is_iterable(dataset) or holds_device(dataset):
                return {}
        except Exception:  # an object that does not let itself be looked at
            return {}
        context = {} if "multiprocessing_context" in arguments else start
        return {"num_workers": self.number, **context}

    def remember(self, loader: object) -> None:
        """Note that this loader's workers come from the default."""
        try:
            self.loaders[id(loader)] = loader
        except TypeError:  # a class without weak references
            return

    def remove_in_child(self) -> None:
        """Take the default back in a forked child: it may be a daemon, which may have no children."""
        from contextlib import suppress

        for loader in list(self.loaders.values()):
            with suppress(Exception):
                loader.num_workers, loader.prefetch_factor = 0, None


def choose_start_method() -> dict[str, str] | None:
    """Return the option by which workers are forked, which a program stands that was written for no workers.

    The other ways import the program's main file again, which it may not be made for, and pickle its dataset.
    If Python has one of them by default (forkserver since 3.14), it is overruled. If the program has chosen
    one, there is no good default (None).
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


def holds_device(value: object, depth: int = MAX_DEPTH) -> bool:
    """Tell whether a dataset shows something on a device, which a forked worker could not touch.

    It looks at the dataset's attributes, those of the datasets in it, and the first items of lists and dicts.
    """
    import torch

    if isinstance(value, (torch.Tensor, torch.device)):
        return getattr(value, "device", value).type != "cpu"
    if isinstance(value, str):
        return value.partition(":")[0] in ACCELERATORS
    return depth > 0 and any(holds_device(item, depth - 1) for item in list_contents(value))


def list_contents(value: object) -> list[object]:
    """Return the first items of a container, or the attributes of what can be indexed, as datasets can."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [item for item in value[:MAX_ITEMS] if not isinstance(item, str)]
    return list(getattr(value, "__dict__", {}).values()) if hasattr(type(value), "__getitem__") else []
