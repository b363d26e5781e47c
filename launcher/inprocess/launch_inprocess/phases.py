"""What a rank does beside training, seen by functions of torch's that call the original and note that.

They are put in place before any program has a copy of the original. One that the program replaces is not put
back.
"""

from __future__ import annotations

from _thread import get_ident

from .heartbeat import COMPILING, JOINING, LOADING, SAVING, Heartbeat
from .import_hook import REPLACED, replace, when_imported
from .process_groups import start_server

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Function = Callable[..., Any]

SAVERS = ("torch.serialization", "torch.distributed.checkpoint.state_dict_saver", "safetensors.torch")
"""Modules with functions that save."""


def note_phases(beat: Heartbeat) -> None:
    """Have phases noted in a heartbeat as soon as the modules are imported in which they are."""

    def watch(name: str, action: Callable[[ModuleType], object]) -> None:
        """Run an action with a module once it is imported; tell if the module is not as expected."""

        def act_or_tell(module: ModuleType) -> None:
            try:
                action(module)
            except Exception as error:
                beat.add_note(f"{name} is not watched: {type(error).__name__}: {error}"[:200])

        when_imported(name, act_or_tell)

    def watch_savers(module: ModuleType) -> None:
        for name in REPLACED[module.__name__]:
            original = getattr(module, name, None)
            if callable(original):
                replace(module, name, _make_saver(beat, original), traced=False)

    def watch_loader(module: ModuleType) -> None:
        # Their `__iter__` starts workers; all iterators of torchdata's class have torch's `__next__`.
        if module.__name__ == "torch.utils.data.dataloader":
            _replace_wait(beat, module.DataLoader, "__iter__", counts=0)
            _replace_wait(beat, module._BaseDataLoaderIter, "__next__", counts=1)
        else:
            _replace_wait(beat, module.StatefulDataLoader, "__iter__", counts=0)

    for name in SAVERS:
        watch(name, watch_savers)
    watch("torch.utils.data.dataloader", watch_loader)
    watch("torchdata.stateful_dataloader.stateful_dataloader", watch_loader)
    # The method is replaced once torch can tell whether it compiles it.
    watch(
        "torch.nn.modules.module",
        lambda module: watch("torch.compiler", lambda compiler: _replace_train(beat, module, compiler)),
    )
    watch("torch._dynamo.callback", lambda module: _note_compiling(beat, module))
    watch("torch.distributed.distributed_c10d", lambda module: _note_joining(beat, module))


def _make_saver(beat: Heartbeat, original: Function) -> Function:
    """Return a function that notes that it saves, unless a thread of the program's saves meanwhile.

    The phase lasts beyond it, until a batch is drawn or a step ends.
    """

    def save(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # they are the user's
        if get_ident() != beat.thread:
            return original(*args, **kwargs)
        beat.set_base(SAVING)
        try:
            return original(*args, **kwargs)
        finally:
            beat.note_activity()

    return save


def _replace_wait(beat: Heartbeat, owner: type, name: str, *, counts: int) -> None:
    """Have a method note the wait in it; in other threads than the one that trains, batches alone.

    A dataset may read from another loader: that is part of the wait for this one.
    """
    original: Function = getattr(owner, name)

    def load(loader: object) -> Any:  # noqa: ANN401  # a batch
        if beat.phase == LOADING:
            return original(loader)
        if get_ident() != beat.thread:
            found = original(loader)
            beat.count_batches(counts)
            return found
        batches = 0
        beat.begin_loading()
        try:
            found = original(loader)
            batches = counts
        finally:
            beat.end_loading(batches)
        return found

    replace(owner, name, load)


def _replace_train(beat: Heartbeat, module: ModuleType, compiler: ModuleType) -> None:
    """Replace the method that `eval` calls, too, and that calls itself for submodules.

    Where torch.compile traces it, it is the original: `is_compiling` comes first, since Dynamo makes a guard
    of what is read before it, and would compile again when the heartbeat has another mode.
    """
    is_compiling, original = compiler.is_compiling, module.Module.train

    def train(self: Any, mode: bool = True) -> Any:  # noqa: ANN401  # torch's own form
        if not is_compiling() and mode is not beat.is_training:
            beat.note_mode(is_training=mode is not False)
        return original(self, mode)

    replace(module.Module, "train", train)


def _note_compiling(beat: Heartbeat, module: ModuleType) -> None:
    """Note compilation; `torch._dynamo.reset()` forgets callbacks, and these stay."""
    handler = module.callback_handler
    begin, end = handler.run_start_callbacks, handler.run_end_callbacks

    def run_start_callbacks(*args: object) -> None:
        beat.set_phase(COMPILING)
        begin(*args)

    def run_end_callbacks(*args: object) -> None:
        beat.set_phase(beat.base)
        end(*args)

    replace(handler, "run_start_callbacks", run_start_callbacks)
    replace(handler, "run_end_callbacks", run_end_callbacks)


def _note_joining(beat: Heartbeat, module: ModuleType) -> None:
    """Note that the rank joins a process group, and start torch's server before the first."""
    original = module.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # they are the user's
        if beat.world_size > 1 and not beat.has_joined:
            beat.has_joined = True
            start_server(beat)
        beat.set_phase(JOINING)
        try:
            return original(*args, **kwargs)
        finally:
            beat.set_phase(beat.base)

    replace(module, "init_process_group", init_process_group, traced=False)
