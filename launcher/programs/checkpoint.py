"""Checkpoints: sharded by torch.distributed.checkpoint, complete or absent, the newest resumed from."""

import errno
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.programs.options import ModelConfig, OptionError

MAX_KEPT = 2
"""Checkpoints kept; older ones are removed."""
COMPLETE = re.compile(r"step-(\d{8})")


@dataclass(slots=True)
class Progress:
    """How far training has come."""

    step: int = 0
    """Optimizer steps done."""
    consumed: int = 0
    """Sequences consumed by all ranks: where the data go on."""
    loss: float = float("nan")
    """Loss of the last step that was logged or saved, averaged over the ranks."""


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """Saves and loads the state of training, together on all ranks, in a directory that all of them see.

    The training draws no random numbers after the weights, so a checkpoint holds no generator's state.
    """

    directory: Path
    config: ModelConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def find(self) -> Path | None:
        """Return the newest checkpoint on every rank, or None; raises OptionError on all ranks."""
        found: list[Path | OptionError | None] = [None]
        if dist.get_rank() == 0:
            try:
                found = [prepare_directory(self.directory, self.config)]
            except OptionError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], OptionError):
            raise found[0]
        return found[0]

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint beside the others, rename it when it is whole, and remove the oldest.

        A kill meanwhile leaves the last one as it was.
        """
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - slow import

        target = self.directory / f"step-{progress.step:08}"
        part = target.with_suffix(".part")
        save(self._collect_state(progress), checkpoint_id=part)
        if dist.get_rank() == 0:
            (part / "model.json").write_text(json.dumps(asdict(self.config)))
            part.rename(target)
            for old in list_complete(self.directory)[:-MAX_KEPT]:
                shutil.rmtree(old)
        dist.barrier()  # the other ranks go on once the rename is done
        return target

    def load(self, path: Path) -> Progress:
        """Read a checkpoint, which any number of ranks may have saved."""
        from torch.distributed.checkpoint.state_dict import set_state_dict  # noqa: PLC0415 - slow import
        from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

        state = self._collect_state(Progress())
        load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return Progress(**state["progress"])

    def _collect_state(self, progress: Progress) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415 - slow import

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": asdict(progress)}


def list_complete(directory: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if COMPLETE.fullmatch(path.name))


def prepare_directory(directory: Path, model: ModelConfig) -> Path | None:
    """Make the directory, remove what a killed save left, and return the newest checkpoint.

    Raises OptionError if that cannot be done, or if the checkpoint is of a model of other dimensions.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for part in directory.glob("step-*.part"):
            shutil.rmtree(part)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        complete = list_complete(directory)
    except OSError as error:
        raise OptionError(f"--checkpoint-dir {directory}: {error.strerror}: give one to write to") from None
    if not complete:
        return None
    path, here = complete[-1], asdict(model)
    try:
        saved = dict(json.loads((path / "model.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(f"{path} is no checkpoint of this program ({error}): remove it") from None
    other = [f"{key}={saved.get(key)}" for key in here if key != "name" and saved.get(key) != here[key]]
    if other:
        raise OptionError(
            f"{path} is of a model with {', '.join(other)}: give that, or another --checkpoint-dir"
        )
    return path
