"""DataLoaders: workers run on the CPUs that the plan has for them, and their default number is the plan's."""

from __future__ import annotations

import os

from .import_hook import Suppressed, replace, when_imported

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


def start_loader_policies(environ: Mapping[str, str]) -> None:
    """Have the workers that this very process starts moved, and give its loaders the number of the plan."""
    plan = environ.get("LAUNCH_RANK_PLAN")
    if plan:
        place_workers(plan)
    number = environ.get("LAUNCH_NUM_WORKERS", "")
    if environ.get("LAUNCH_LOADER_DEFAULT") == "1" and number.isdecimal() and int(number):
        for module, name in LOADER_CLASSES.items():
            when_imported(module, lambda module, name=name: _install_default(module, name, int(number)))  # type: ignore[misc]


def watch_waits(
    watch: Callable[[str, Callable[[ModuleType], None]], None],
    begin: Callable[[], bool],
    end: Callable[[object], None],
) -> None:
    """Have waits for batches, and for the workers' start, seen: `watch` runs an action with a module.

    `begin()` comes before each wait, and tells whether it is one; `end(iterator)` after it, with None if no
    batch has come.
    """

    def replace_wait(owner: type, name: str) -> None:
        original: Callable[[object], Any] = getattr(owner, name)

        def wait(loader: object) -> Any:  # noqa: ANN401  # a batch
            if not begin():
                return original(loader)
            came: object = None
            try:
                found = original(loader)
                came = loader if name == "__next__" else None
            finally:
                end(came)
            return found

        replace(owner, name, wait)

    def replace_waits(module: ModuleType) -> None:
        replace_wait(getattr(module, LOADER_CLASSES[module.__name__]), "__iter__")
        if module.__name__ == "torch.utils.data.dataloader":
            replace_wait(module._BaseDataLoaderIter, "__next__")  # torchdata's iterators have it, too

    for name in LOADER_CLASSES:
        watch(name, replace_waits)


def place_workers(plan: str) -> None:
    """Have the workers that this process starts moved to their CPUs in the rank's plan."""
    process, own_cpus = os.getpid(), os.sched_getaffinity(0)  # on which its children start

    def read_cpus(name: str) -> set[int]:
        """Return CPUs of the plan; empty if they are the rank's own. Raises KeyError and the like."""
        import json  # torch has imported it by now

        cpus: set[int] = set()
        for part in json.loads(plan)[name].split(","):
            low, _, high = part.partition("-")
            cpus.update(range(int(low), int(high or low) + 1))
        return set() if cpus == own_cpus else cpus

    def move_started_workers(module: ModuleType) -> None:
        """Have workers moved as soon as torch notes their PIDs, before it gives them work.

        From here, it is the same for fork, spawn and forkserver, and pickles nothing.
        """
        cpus, original = read_cpus("worker_cpus"), module._set_worker_pids

        def note_and_move(loader: int, pids: tuple[int, ...]) -> None:
            original(loader, pids)
            for pid in pids if os.getpid() == process else ():
                _move_process(pid, own_cpus, cpus)

        if cpus:
            module.__dict__["_set_worker_pids"] = note_and_move

    def correct_count_check(module: ModuleType) -> None:
        """Leave out torch's warning of too many workers if it counts the rank's own CPUs alone.

        The CPUs that workers get count, and so do those that the rank would have without us. It is a
        descriptor, since torch's warning points at its caller, which is not to be one of ours.
        """
        most = max(len(read_cpus("worker_cpus")), len(read_cpus("cpus_before")))
        name = "check_worker_number_rationality"
        method = vars(module.DataLoader)[name]

        def find_method(_check: object, loader: object, owner: type | None = None) -> Callable[..., None]:
            is_own = os.getpid() == process and os.sched_getaffinity(0) == own_cpus
            is_left_out = is_own and 0 < getattr(loader, "num_workers", 0) <= most
            found: Callable[..., None] = method.__get__(loader, owner)
            return (lambda: None) if is_left_out else found

        if most:
            setattr(module.DataLoader, name, type("Check", (), {"__get__": find_method})())

    # It gets the workers' PIDs of every loader, torchdata's too, once they have started.
    when_imported("torch.utils.data._utils.signal_handling", move_started_workers)
    when_imported("torch.utils.data.dataloader", correct_count_check)


def _move_process(pid: int, source: set[int], target: set[int]) -> None:
    """Move all threads of a process from one set of CPUs to another, also those that it starts meanwhile.

    One that has ended or may not be moved stays. So does one that is not on `source`: somebody has bound it,
    or had bound the rank itself.
    """
    with Suppressed(Exception):  # it has ended
        for _ in range(2):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                with Suppressed(OSError):
                    if os.sched_getaffinity(thread) == source:
                        os.sched_setaffinity(thread, target)


def _install_default(module: ModuleType, class_name: str, number: int) -> None:
    """Put a number of workers into a class's constructor, for loaders whose call says nothing of workers.

    It is in the signature too: frameworks make loaders again from what differs from the signature's defaults,
    and with 0 there, an explicit `num_workers=0` would be lost.
    """
    import functools
    import inspect
    from weakref import WeakValueDictionary

    loaders: Any = WeakValueDictionary()
    process, loader_class = os.getpid(), getattr(module, class_name)
    original = loader_class.__init__
    signature = inspect.signature(original)
    names = list(signature.parameters)
    position = names.index("num_workers")

    @functools.wraps(original)
    def init_with_default(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # they are the user's
        is_default = 0 < len(args) <= position and "num_workers" not in kwargs
        added: dict[str, object] = {}
        if is_default and os.getpid() == process:
            with Suppressed(Exception):  # an object that does not let itself be looked at
                added = _choose_options({**dict(zip(names, args)), **kwargs}, number)  # noqa: B905  # Python 3.9
        original(*args, **kwargs, **added)
        if added:
            with Suppressed(TypeError):  # a class without weak references
                loaders[id(args[0])] = args[0]

    def remove_in_child() -> None:
        """Take the default back in a forked child: it may be a daemon, which may have no children."""
        for loader in list(loaders.values()):
            with Suppressed(Exception):
                loader.num_workers, loader.prefetch_factor = 0, None

    changed = [
        parameter.replace(default=number) if parameter.name == "num_workers" else parameter
        for parameter in signature.parameters.values()
    ]
    init_with_default.__dict__["__signature__"] = signature.replace(parameters=changed)
    loader_class.__init__ = init_with_default
    os.register_at_fork(after_in_child=remove_in_child)


def _choose_options(arguments: Mapping[str, object], number: int) -> dict[str, object]:
    """Return what a loader gets beside the arguments of its call; nothing if workers would not do.

    Each worker would go through all of an iterable dataset, unless it shards itself. A program that was
    written for no workers stands a fork. The other ways import the program's main file again, which it may
    not be made for, and pickle its dataset. If Python has one of them by default (forkserver since 3.14), it
    is overruled. If the program has chosen one, there is no good default.
    """
    import multiprocessing

    import torch.utils.data

    dataset = arguments.get("dataset")
    first = multiprocessing.get_all_start_methods()[0]  # "the first of which is the default"
    chosen = multiprocessing.get_start_method(allow_none=True) or first
    if chosen not in ("fork", first) or isinstance(dataset, torch.utils.data.IterableDataset):
        return {}
    if _holds_device(dataset):
        return {}
    is_overruled = chosen != "fork" and "multiprocessing_context" not in arguments
    return {"num_workers": number, **({"multiprocessing_context": "fork"} if is_overruled else {})}


def _holds_device(value: object, depth: int = MAX_DEPTH) -> bool:
    """Tell whether a dataset shows something on a device, which a forked worker could not touch.

    It looks at the dataset's attributes, those of the datasets in it (what can be indexed), and the first
    items of lists and dicts.
    """
    import torch

    if isinstance(value, (torch.Tensor, torch.device)):
        return getattr(value, "device", value).type != "cpu"
    if isinstance(value, str):
        return value.partition(":")[0] in ACCELERATORS
    if isinstance(value, dict):
        value = list(value.values())
    items: list[object] = []
    if isinstance(value, (list, tuple)):
        items = [item for item in value[:MAX_ITEMS] if not isinstance(item, str)]
    elif hasattr(type(value), "__getitem__"):
        items = list(getattr(value, "__dict__", {}).values())
    return depth > 0 and any(_holds_device(item, depth - 1) for item in items)
