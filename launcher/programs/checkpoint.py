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

from launcher.programs.dimensions import ModelConfig
from launcher.programs.options import OptionError
from launcher.programs.process_group import broadcast

MAX_KEPT = 2
"""Checkpoints kept; older ones are removed."""
COMPLETE = re.compile(r"step-(\d{8})")


@dataclass(slots=True)
class TrainingProgress:
    """How far training has come."""

    step: int = 0
    """Optimizer steps done."""
    consumed: int = 0
    """Sequences consumed by all ranks: where the data go on."""
    loss: float = float("nan")
    """Loss of the last step, averaged over the ranks."""


def list_complete(directory: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if COMPLETE.fullmatch(path.name))


def prepare_directory(directory: Path, model: ModelConfig) -> Path | None:
    """Make the directory, remove what a killed save left, and give the newest checkpoint.

    Raises OptionError if that can't be, or if the checkpoint is of another model.
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
    check_saved_model(complete[-1], model)
    return complete[-1]


def check_saved_model(path: Path, model: ModelConfig) -> None:
    """Raise OptionError if a checkpoint is of other dimensions, or none."""
    try:
        saved = dict(json.loads((path / "model.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(f"{path} is no checkpoint of this program ({error}): remove it") from None
    here = asdict(model)
    other = [f"{key}={saved.get(key)}" for key in here if key != "name" and saved.get(key) != here[key]]
    if other:
        raise OptionError(
            f"{path} is of a model with {', '.join(other)}: give that, or another --checkpoint-dir"
        )


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """Saves and loads the state of training, together on all ranks, in a directory that all of them see."""

    directory: Path
    config: ModelConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def find(self) -> Path | None:
        """Give every rank the newest checkpoint; raises OptionError on all ranks."""
        found: Path | OptionError | None = None
        if dist.get_rank() == 0:
            try:
                found = prepare_directory(self.directory, self.config)
            except OptionError as error:
                found = error
        found = broadcast(found)
        if isinstance(found, OptionError):
            raise found
        return found

    def collect_state(self, progress: TrainingProgress) -> dict[str, Any]:
        """Gather what a checkpoint holds, in torch.distributed.checkpoint's terms."""
        from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415 - slow import

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": asdict(progress), **save_random()}

    def save(self, progress: TrainingProgress) -> Path:
        """Write a checkpoint beside the others, rename it when it is whole, and remove the oldest.

        A kill meanwhile leaves the last one as it was.
        """
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - slow import

        target = self.directory / f"step-{progress.step:08}"
        part = target.with_suffix(".part")
        save(self.collect_state(progress), checkpoint_id=part)
        if dist.get_rank() == 0:
            (part / "model.json").write_text(json.dumps(asdict(self.config)))
            part.rename(target)
            for old in list_complete(self.directory)[:-MAX_KEPT]:
                shutil.rmtree(old)
        broadcast(None)  # the other ranks go on once the rename is done
        return target

    def load(self, path: Path) -> TrainingProgress:
        """Read a checkpoint, which any number of ranks may have saved."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - slow import
        from torch.distributed.checkpoint.state_dict import set_state_dict  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

        reader = FileSystemReader(path)
        known = reader.read_metadata().state_dict_metadata
        # A rank that did not exist when the checkpoint was saved has no random state in it.
        state = {
            k: v
            for k, v in self.collect_state(TrainingProgress()).items()
            if not k.startswith("random") or k in known
        }
        load(state, storage_reader=reader)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        load_random(state)
        return TrainingProgress(**state["progress"])


def random_keys() -> tuple[str, str]:
    """Name this rank's random states in a checkpoint."""
    return f"random.{dist.get_rank()}.cpu", f"random.{dist.get_rank()}.cuda"


def save_random() -> dict[str, torch.Tensor]:
    """Give the state of this rank's random generators."""
    cpu, cuda = random_keys()
    state = {cpu: torch.get_rng_state()}
    if torch.cuda.is_available():
        state[cuda] = torch.cuda.get_rng_state()
    return state


def load_random(state: dict[str, Any]) -> None:
    """Restore this rank's random generators, as far as the checkpoint has them."""
    cpu, cuda = random_keys()
    if cpu in state:
        torch.set_rng_state(state[cpu])
    if cuda in state:
        torch.cuda.set_rng_state(state[cuda])
