"""The run's name and the path of its directory, chosen before the configuration is resolved with them."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path, PurePath

from omegaconf import DictConfig, OmegaConf

from launcher.config.compose import RUN_DIR, Composed, read_values
from launcher.config.program import find_script
from launcher.errors import UsageError

BUNDLED_PROGRAM = "train"
"""Option of the group `program` whose runs are named after their model."""
EMPTY_PATH = "{}= is empty, perhaps from an unset shell variable: name a run's directory"
DRY_RUN_ID = "RUN_ID"
"""Stands for the run's ID in a script for sbatch: the job's number decides it."""


@dataclass(frozen=True, slots=True)
class RunPath:
    """Where a run is to be, and by which key."""

    name: str
    """The run's name."""
    path: Path
    """The run directory, absolute; in a dry run, something that stands for it."""
    key: str
    """`run_dir` (an earlier run's), `new_run_dir`, or `runs_dir`, below which it gets a path of its own."""


def choose_run_path(
    composed: Composed,
    program: tuple[str, ...] | None,
    *,
    suffix: str = "",
    submits: bool = False,
    taken: Collection[Path] = (),
) -> RunPath:
    """Choose the run directory, which is made later; raises UsageError.

    `suffix` is added to the run's name. `submits` is for a job of sbatch's: in a dry run, its script names
    the run by the job's number. `taken` are the paths that other jobs of the sweep will have.
    """
    values = read_values(composed, ("name", "runs_dir", "run_dir", "new_run_dir", "node_rank", "dry_run"))
    name = str(values["name"] or choose_run_name(composed.choices, program)) + suffix
    for key in ("run_dir", "new_run_dir"):
        if values[key] == "":
            raise UsageError(EMPTY_PATH.format(key))
    if values["run_dir"] is not None:
        if values["new_run_dir"] is not None:
            raise UsageError(
                f"run_dir={values['run_dir']} goes on with an earlier run, and new_run_dir="
                f"{values['new_run_dir']} makes a new one: leave one of them out"
            )
        return RunPath(name, make_absolute(str(values["run_dir"])), "run_dir")
    if values["new_run_dir"] is not None:
        path = Path(str(values["new_run_dir"]))
        if values["node_rank"] is None:  # nodes that are started by hand share one
            refuse_used(path, "new_run_dir")
        return RunPath(name, make_absolute(str(path)), "new_run_dir")
    above = make_absolute(str(values["runs_dir"])) / name
    if values["dry_run"]:
        return RunPath(name, above / DRY_RUN_ID if submits else Path(RUN_DIR), "runs_dir")
    return RunPath(name, choose_id(above, datetime.now().astimezone(), taken), "runs_dir")


def make_absolute(text: str) -> Path:
    """Return an absolute path without `..`, whose meaning depends on the links before it."""
    path = Path(text).absolute()
    return Path(os.path.realpath(path)) if ".." in path.parts else path


def choose_id(above: Path, now: datetime, taken: Collection[Path] = (), prefix: str = "") -> Path:
    """Return `above/YYYYMMDD-HHMMSS`, with `-2`, `-3` … if there is one, or it is among those taken."""
    stem = f"{prefix}{now:%Y%m%d-%H%M%S}"
    paths = (above / (stem if number == 1 else f"{stem}-{number}") for number in count(1))
    return next(path for path in paths if path not in taken and not os.path.lexists(path))


def choose_run_name(choices: Mapping[str, str], program: tuple[str, ...] | None) -> str:
    """Return the name of a run that is given none: the program's, else the model's."""
    if program is not None:
        script = find_script(program)
        return PurePath(script).stem if script else "run"
    option = choices.get("program", "run")
    return choices.get("model", "run") if option == BUNDLED_PROGRAM else option


def refuse_used(path: Path, key: str) -> None:
    """Raise UsageError if the new directory that this key names is not empty."""
    try:
        used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except (OSError, ValueError):  # reported when the directory is made
        return
    if used:
        raise UsageError(
            f"{path}, of {key}, is there already: run_dir={path} goes on with an earlier run, and a new one"
            " needs another directory"
        )


def use_sweep_folder(tree: DictConfig, path: str) -> None:
    """Use a path in a sweep's folder as a run's new directory, unless our keys name one.

    Raises UsageError if the directory is not empty.
    """
    if is_unset(tree, "run_dir") and is_unset(tree, "new_run_dir"):
        if is_unset(tree, "node_rank"):  # nodes that are started by hand share one
            refuse_used(Path(path), "hydra.sweep.dir")
        tree.new_run_dir = path


def is_unset(tree: DictConfig, key: str) -> bool:
    """Tell whether a key is null."""
    return not OmegaConf.is_interpolation(tree, key) and tree[key] is None
