"""A run's directory: its name and path, chosen before settings are resolved, and `config.yaml` in it."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from launcher.config.program import find_script
from launcher.config.settings import refuse
from launcher.files import LARGEST, read_file
from launcher.runs.secrets import mask_tree

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from launcher.config.compose import Composed

BUNDLED_PROGRAM = "train"
"""Option of the group `program` whose runs are named after their model."""
RUN_DIR = "RUN_DIR"
"""Stands for the run directory if there is none."""
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
    composed: "Composed",
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
    from launcher.config.compose import read_values  # Hydra's time, which reading a file does without

    values = read_values(composed, ("name", "runs_dir", "run_dir", "new_run_dir", "node_rank", "dry_run"))
    name = str(values["name"] or choose_run_name(composed.choices, program)) + suffix
    for key in ("run_dir", "new_run_dir", "runs_dir"):
        if values[key] == "":
            raise refuse("empty_path", key=key)
    if values["run_dir"] is not None:
        if values["new_run_dir"] is not None:
            raise refuse("two_run_dirs", **values)
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
        raise refuse("used_dir", path=path, key=key)


def use_sweep_folder(tree: "DictConfig", path: str) -> None:
    """Use a path in a sweep's folder as a run's new directory, unless our keys name one.

    Raises UsageError if the directory is not empty.
    """
    nodes: Any = {key: tree._get_node(key) for key in ("run_dir", "new_run_dir", "node_rank")}
    given = {key for key, node in nodes.items() if node._value() is not None}
    if not given & {"run_dir", "new_run_dir"}:
        if not given:  # nodes that are started by hand share one
            refuse_used(Path(path), "hydra.sweep.dir")
        tree.new_run_dir = path


NAME = "config.yaml"
PLACE_KEYS = ("run_dir", "new_run_dir")
"""Keys that differ for the same run, since one makes the directory and the other goes on with it."""


def render_config(composed: "Composed", left_out: Collection[str]) -> str:
    """Return the text: what was resolved last, secrets masked, without some sections."""
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(composed.tree, resolve=True)
    return dump_masked({key: value for key, value in found.items() if key not in left_out})


def dump_masked(tree: Mapping[str, object]) -> str:
    """Return a configuration as YAML, secrets masked."""
    import yaml

    return str(yaml.safe_dump(mask_tree(dict(tree)), sort_keys=False))


def flatten(node: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves of nested mappings by their dotted keys; empty mappings have none."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        key: leaf
        for name, value in node.items()
        for key, leaf in flatten(value, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def read_config_value(run_path: Path, *keys: str) -> Any:  # noqa: ANN401 - whatever YAML holds
    """Return a value of a run directory's file; None if the file cannot be read or does not have it."""
    import yaml

    try:
        found = yaml.safe_load(read_file(run_path / NAME, LARGEST).decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def find_changes(run_path: Path, text: str) -> Iterator[str]:
    """Give `KEY OLD -> NEW` for what differs in a run directory's file from a new text; no key is null.

    A file that cannot be read, or holds something else, differs in nothing.
    """
    import yaml

    before = read_config_value(run_path)
    earlier, now = flatten(mask_tree(before)), flatten(yaml.safe_load(text))
    for key in dict.fromkeys([*now, *earlier]) if isinstance(before, dict) else ():
        is_chosen = key.startswith("program.") and now.get(key) == "auto"
        if key not in PLACE_KEYS and earlier.get(key) != now.get(key) and not is_chosen:
            old, new = (json.dumps(each.get(key), default=str) for each in (earlier, now))
            yield f"{key} {old} -> {new}"
