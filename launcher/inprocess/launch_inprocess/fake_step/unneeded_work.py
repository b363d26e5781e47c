"""What a program does beside its step and that is left out here: compiling, saving, loader processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..import_hook import when_imported

if TYPE_CHECKING:
    from types import ModuleType

    from .step_session import StepSession

NO_WORKERS = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "timeout": 0,
    "pin_memory": False,
    "worker_init_fn": None,
}
SAVERS = {
    "torch.serialization": ("save",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "save_state_dict"),
    "torch.distributed.checkpoint": ("save", "async_save", "save_state_dict"),
    "safetensors.torch": ("save_file", "save_model"),
}

METHODS = {
    "transformers.modeling_utils": ("PreTrainedModel", ("save_pretrained",)),
    "transformers.trainer": ("Trainer", ("_save_checkpoint", "save_model")),
    "accelerate.accelerator": ("Accelerator", ("save", "save_state", "save_model")),
    "lightning.pytorch.trainer.trainer": ("Trainer", ("save_checkpoint",)),
    "pytorch_lightning.trainer.trainer": ("Trainer", ("save_checkpoint",)),
}
"""What saves in frameworks: the class by module, and its methods."""


def leave_out_work(session: StepSession) -> None:
    """Put functions that do nothing in the place of those."""
    leave_out_compiling(session)
    for name, functions in SAVERS.items():
        when_imported(name, make_remover(functions))
    for name, (kind, methods) in METHODS.items():
        when_imported(name, make_method_remover(kind, methods))
    loose: Any = torch
    loose.save = skip
    when_imported("torch.utils.data.dataloader", leave_out_workers)


def skip(*_: object, **__: object) -> None:
    """Do nothing: a checkpoint of fake tensors is none."""


def make_remover(functions: tuple[str, ...]) -> Any:  # an action
    """Return what puts `skip` in the place of functions of a module."""

    def remove(module: ModuleType) -> None:
        for name in functions:
            if hasattr(module, name):
                setattr(module, name, skip)

    return remove


def make_method_remover(kind: str, methods: tuple[str, ...]) -> Any:
    """Return what puts `skip` in the place of methods of a class."""

    def remove(module: ModuleType) -> None:
        owner = getattr(module, kind)
        for name in methods:
            if hasattr(owner, name):
                setattr(owner, name, skip)

    return remove


def leave_out_compiling(session: StepSession) -> None:
    """Have torch.compile return the function as it is; the result says so."""

    def note() -> None:
        session.note("torch.compile was left out: the memory is that of the program without it")

    def compile_nothing(model: Any = None, **__: object) -> Any:  # the user's
        note()
        return model if model is not None else lambda function: function

    loose: Any = torch
    loose.compile = compile_nothing
    module: Any = torch.nn.Module
    module.compile = lambda self, *_, **__: note()


def leave_out_workers(module: ModuleType) -> None:
    """Have a DataLoader read in this process: fake tensors cannot be sent."""
    original = module.DataLoader.__init__

    def init(
        loader: Any,
        dataset: Any,
        batch_size: Any = 1,
        shuffle: Any = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        *args: Any,
        **named: Any,
    ) -> None:
        kept = {key: value for key, value in named.items() if key not in NO_WORKERS}
        if args:
            kept["collate_fn"] = args[0]
        if len(args) > 2:
            kept["drop_last"] = args[2]
        original(loader, dataset, batch_size, shuffle, sampler, batch_sampler, **kept)

    module.DataLoader.__init__ = init
