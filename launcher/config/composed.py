"""A composed configuration: single values before its run directory is known, typed ones with it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.config.environment_files import write_values
from launcher.config.hydra_settings import restore_hydra_config
from launcher.config.resource_limits import limit_composition
from launcher.config.search_path import Sources
from launcher.config.settings import Settings, settle_words
from launcher.config.suggestions import shorten_message, suggest
from launcher.config.yaml_files import read_yaml
from launcher.errors import UsageError

RUN_DIR = "RUN_DIR"
"""Stands for the run directory if there is none."""
FAILURES = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError),
    # Hydra raises these for files of a shape that it does not expect.
    *(AssertionError, AttributeError, LookupError, TypeError),
)
"""What Hydra raises for a user's mistake."""
NOUNS = {int: "number", str: "text"}


@dataclass(slots=True)
class Composed:
    """A composed configuration, before the run directory is known."""

    tree: DictConfig
    """Hydra's tree, whose keys can be set and removed."""
    choices: dict[str, str]
    """Option chosen for each group."""
    warnings: tuple[str, ...]
    """Hydra's warnings, each in one line."""
    sources: Sources
    """Where it comes from."""
    given: frozenset[str] = frozenset()
    """Keys that the command line sets."""
    own_files: tuple[str, ...] = ()
    """Files that are not the shipped ones, relative to the working directory."""
    interpolated: DictConfig | None = None
    """What `${hydra:KEY}` refers to; None if nothing can refer to it."""
    given_run_dir: str | None = None
    """`run_dir` before `resolve` has set it."""
    chosen_run_dir: str | None = None
    """What `resolve` has set it to."""


def read_values(composed: Composed, keys: Sequence[str]) -> dict[str, object]:
    """Return single values that are needed before the run directory is known; raises UsageError."""
    try:
        if composed.interpolated is not None:
            restore_hydra_config(composed.interpolated, RUN_DIR)
        with limit_composition(composed.sources):
            found = {key: OmegaConf.select(composed.tree, key) for key in keys}
    except FAILURES as error:
        raise UsageError(shorten_message(error)) from None
    if "run_dir" in found and found["run_dir"] == composed.chosen_run_dir:
        found["run_dir"] = composed.given_run_dir  # another run may have taken the one that was chosen
    return found


def resolve(composed: Composed, run_dir: Path | None = None) -> Settings:
    """Resolve interpolations, `${run_dir}` among them, and return typed values; raises UsageError.

    A verb that starts nothing has no run directory: `RUN_DIR` stands for it. A machine's snapshot becomes a
    path.
    """
    tree = composed.tree
    try:
        unknown = run_dir is None and tree.run_dir is None
        if tree.run_dir != composed.chosen_run_dir:
            composed.given_run_dir = tree.run_dir
        if run_dir or unknown:
            tree.run_dir = str(run_dir or RUN_DIR)
        if composed.interpolated is not None:
            restore_hydra_config(composed.interpolated, str(tree.run_dir))
        with limit_composition(composed.sources):
            config = OmegaConf.to_object(tree)
    except FAILURES as error:
        raise UsageError(shorten_message(error)) from None
    if not isinstance(config, Settings):
        raise UsageError("the configuration does not build on launch_schema: put it first in its defaults")
    check_kind(Settings, config, "")
    if unknown:
        tree.run_dir = config.run_dir = None
    composed.chosen_run_dir = tree.run_dir
    settle_words(config)
    config.env = write_values(config.env)
    config.machine.snapshot = composed.sources.find_beside("machine", config.machine.snapshot)
    if config.cluster.machine is not None:
        config.cluster.machine = find_snapshot(composed.sources, config.cluster.machine)
    return config


def check_kind(kind: Any, value: object, key: str) -> None:  # noqa: ANN401 - an annotation of the schema
    """Raise UsageError for what is no mapping or list where there has to be one.

    OmegaConf does not check what `${…}` stands for in place of a mapping or list, nor lists in lists.
    """
    origin = getattr(kind, "__origin__", kind)
    if is_dataclass(kind):
        if type(value) is not kind:
            raise UsageError(f"{key}={value}: give its keys, as in {key}.{fields(kind)[0].name}=…")
        for item in fields(kind):
            check_kind(item.type, getattr(value, item.name), f"{key}.{item.name}" if key else item.name)
    elif origin is dict and not isinstance(value, dict):
        raise UsageError(f"{key}={value}: give a mapping, as in {key}.NAME=…")
    elif origin is list:
        if not isinstance(value, list):
            raise UsageError(f"{key}={value}: give a list, as in {key}=[…]")
        (inner,) = kind.__args__
        for number, entry in enumerate(value):
            if not isinstance(entry, inner):
                raise UsageError(f"{key}={value}: entry {number} is {entry}, give a {NOUNS[inner]}")


def find_snapshot(sources: Sources, name: str) -> str:
    """Return the snapshot of a machine named as in `machine=NAME`, or a file; raises UsageError."""
    path = sources.find_file(f"machine/{name}")
    try:
        tree = read_yaml(path) if path else {"snapshot": name}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read ({error}): mend it, or name another machine") from None
    given = tree.get("snapshot") if isinstance(tree, dict) else None
    found = sources.find_beside("machine", str(given)) if given else None
    if found is None or not Path(found).is_file():
        near = suggest(name, sources.list_options("machine"))
        raise UsageError(f"cluster.machine={name} is no machine in conf/machine and no snapshot{near}")
    return found
