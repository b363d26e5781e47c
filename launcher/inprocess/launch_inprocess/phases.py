"""What a rank does beside training, seen by functions of torch's that call the original and note that.

They are put in place before any program has a copy of the original. One that the program replaces is not put
back.
"""

from __future__ import annotations

import functools
from _thread import get_ident

from .copied_names import REPLACED, replace
from .heartbeat import COMPILING, JOINING, LOADING, SAVING, Heartbeat
from .import_hook import when_imported
from .worker_server import start_server

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Function = Callable[..., Any]

SAVERS = ("torch.serialization", "torch.distributed.checkpoint.state_dict_saver", "safetensors.torch")
"""Modules with functions that save."""
LOADERS = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
}
"""Classes whose `__iter__` starts workers; all their iterators have torch's `__next__`."""


def note_phases(beat: Heartbeat, world_size: int) -> None:
    """Have phases noted in a heartbeat as soon as the modules are imported in which they are."""
    for name in SAVERS:
        replace_when_imported(beat, name, functools.partial(note_saving, beat, REPLACED[name]))
    for name, class_name in LOADERS.items():
        replace_when_imported(beat, name, functools.partial(note_loading, beat, class_name))
    replace_when_imported(beat, "torch.nn.modules.module", functools.partial(note_evaluating, beat))
    replace_when_imported(beat, "torch._dynamo.callback", functools.partial(note_compiling, beat))
    joined = functools.partial(note_joining, beat, has_server=world_size > 1)
    replace_when_imported(beat, "torch.distributed.distributed_c10d", joined)


def replace_when_imported(beat: Heartbeat, name: str, action: Callable[[ModuleType], None]) -> None:
    """Run an action with a module once the program has imported it; tell if the module is not as expected."""

    def act_or_tell(module: ModuleType) -> None:
        try:
            action(module)
        except Exception as error:
            beat.add_note(f"{name} is not watched: {type(error).__name__}: {error}"[:200])

    when_imported(name, act_or_tell)


def note_saving(beat: Heartbeat, names: tuple[str, ...], module: ModuleType) -> None:
    """Note that functions of a module save; it lasts beyond them, until a batch is drawn or a step ends."""
    for name in names:
        original = getattr(module, name, None)
        if callable(original):
            function = make_saver(beat, original)
            replace(module, name, function, original)
            function.__dict__["_torchdynamo_disable"] = True


def make_saver(beat: Heartbeat, original: Function) -> Function:
    """Return a function that notes that it saves, unless a thread of the program's saves meanwhile."""

    def save(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # they are the user's
        if get_ident() != beat.thread:
            return original(*args, **kwargs)
        beat.set_base(SAVING)
        try:
            return original(*args, **kwargs)
        finally:
            beat.note_activity()

    return save


def note_loading(beat: Heartbeat, class_name: str, module: ModuleType) -> None:
    """Note the waits for batches, and for the start of the workers."""
    loader = getattr(module, class_name)
    replace(loader, "__iter__", wrap_wait(beat, loader.__iter__, counts=0), loader.__iter__)
    if class_name == "DataLoader":
        iterator = module._BaseDataLoaderIter
        replace(iterator, "__next__", wrap_wait(beat, iterator.__next__, counts=1), iterator.__next__)


def wrap_wait(beat: Heartbeat, original: Function, *, counts: int) -> Function:
    """Return a method that notes the wait in it; in other threads than the one that trains, batches alone.

    A dataset may read from another loader: that is part of the wait for this one.
    """

    def load(owner: object) -> Any:  # noqa: ANN401  # a batch
        if beat.phase == LOADING:
            return original(owner)
        if get_ident() != beat.thread:
            found = original(owner)
            beat.count_batches(counts)
            return found
        batches = 0
        beat.begin_loading()
        try:
            found = original(owner)
            batches = counts
        finally:
            beat.end_loading(batches)
        return found

    return load


def note_evaluating(beat: Heartbeat, module: ModuleType) -> None:
    """Note that a model is set to evaluate or to train, once torch can tell whether it compiles that."""
    replace_when_imported(beat, "torch.compiler", functools.partial(replace_train, beat, module.Module))


def replace_train(beat: Heartbeat, module_class: Any, compiler: ModuleType) -> None:  # noqa: ANN401  # torch's
    """Replace the method that `eval` calls, too, and that calls itself for submodules.

    Where torch.compile traces it, it is the original: `is_compiling` comes first, since Dynamo makes a guard
    of what is read before it, and would compile again when the heartbeat has another mode.
    """
    is_compiling, original = compiler.is_compiling, module_class.train

    def train(self: Any, mode: bool = True) -> Any:  # noqa: ANN401  # torch's own form
        if not is_compiling() and mode is not beat.is_training:
            beat.note_mode(is_training=mode is not False)
        return original(self, mode)

    replace(module_class, "train", train, original)


def note_compiling(beat: Heartbeat, module: ModuleType) -> None:
    """Note compilation; `torch._dynamo.reset()` forgets callbacks, and these stay."""
    handler = module.callback_handler
    begin, end = handler.run_start_callbacks, handler.run_end_callbacks

    def run_start_callbacks(*args: object) -> None:
        beat.set_phase(COMPILING)
        begin(*args)

    def run_end_callbacks(*args: object) -> None:
        beat.set_phase(beat.base)
        end(*args)

    replace(handler, "run_start_callbacks", run_start_callbacks, begin)
    replace(handler, "run_end_callbacks", run_end_callbacks, end)


def note_joining(beat: Heartbeat, module: ModuleType, *, has_server: bool) -> None:
    """Note that the rank joins a process group, and start torch's server before that."""
    original = module.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # they are the user's
        if has_server and beat.is_first_join():
            start_server(beat)
        beat.set_phase(JOINING)
        try:
            return original(*args, **kwargs)
        finally:
            beat.set_phase(beat.base)

    replace(module, "init_process_group", init_process_group, original)
    init_process_group.__dict__["_torchdynamo_disable"] = True
