"""Hydra's own settings, `hydra.KEY`: what they mean for a run, and what to write instead of the others."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from launcher.config.config_file import flatten
from launcher.config.other_tools import explain_foreign
from launcher.config.search_path import PRIMARY
from launcher.errors import UsageError

ACTED_ON = ("mode", "searchpath", "sweeper", "sweep.dir")
"""Keys and groups of `hydra` that have an effect, with all keys below them."""
FILLED_IN = ("runtime", "overrides", "job.config", "job.config_name", "job.override_dirname", "env", "output")
"""Keys that Hydra fills in, and those that control how it does."""
INSTEAD = {
    "run": "write new_run_dir=DIR, or hydra.sweep.dir=DIR for the runs of a sweep",
    "job.name": "write name=NAME",
    "verbose": "`launch --info` shows how the configuration is composed",
    "launcher": "cluster=slurm submits the jobs of a sweep, cluster.array_parallelism=N of them at a time;"
    " elsewhere they run one after the other",
    "sweeper.max_batch_size": "cluster.array_parallelism=N says how many jobs run at the same time",
    "sweep.subdir": "the runs of a sweep are in hydra.sweep.dir/0, /1 and so on",
    "job.chdir": "programs start where `launch` does; LAUNCH_RUN_DIR tells them the run directory",
    "job.env_set": "write env.NAME=VALUE",
    "job_logging": "logs.console=rank0|all|none says what is shown",
    "hydra_logging": "logs.console=rank0|all|none says what is shown",
}
"""What to write instead of other keys; for all the rest, the advice is `leave it out`."""
DEFAULTS = {"launcher": "basic", "sweeper": "basic", "callbacks": None}
"""Options of Hydra's groups; those of the others are `default`."""


@dataclass(frozen=True, slots=True)
class HydraSettings:
    """Hydra's settings that have an effect; None means Hydra's default, which launch does not use."""

    multirun: bool = False
    """`hydra.mode=MULTIRUN`."""
    sweeper: str = "basic"
    """The chosen option of the group `hydra/sweeper`."""
    params: Mapping[str, str] = field(default_factory=dict)
    """`hydra.sweeper.params` of the basic sweeper."""
    sweep_dir: str | None = None
    """`hydra.sweep.dir`."""


def read_hydra_settings(loader: ConfigLoader, tree: DictConfig) -> HydraSettings:
    """Return Hydra's settings in a composed configuration; raises UsageError for one without effect."""
    node = tree.hydra
    chosen = find_chosen(node.runtime.choices)
    for group, option in chosen.items():
        refuse_setting(group, option, f"hydra/{group}={option}")
    default = flatten_node(loader.load_configuration(None, [], RunMode.RUN).hydra)
    changed = {key: value for key, value in flatten_node(node).items() if default.get(key, MISSING) != value}
    for key in sorted(changed, key=lambda key: key != "job.env_copy"):  # Hydra derives env_set from that one
        if not is_within(key, chosen) and (key, changed[key]) != ("job.name", PRIMARY):
            refuse_setting(key, changed[key], f"hydra.{key}={show_value(changed[key])}")
    sweeper = str(chosen.get("sweeper", "basic"))
    params = node.sweeper.params if sweeper == "basic" else None
    return HydraSettings(
        multirun=node.mode == RunMode.MULTIRUN,
        sweeper=sweeper,
        params={str(key): str(value) for key, value in (params or {}).items()},
        sweep_dir=str(node.sweep.dir) if "sweep.dir" in changed else None,
    )


def find_chosen(choices: Mapping[str, object]) -> dict[str, object]:
    """Return the options of Hydra's groups that are not the default, by group, as `sweeper/sampler`."""
    named = {group.removeprefix("hydra/"): option for group, option in choices.items() if "hydra/" in group}
    return {group: option for group, option in named.items() if option != DEFAULTS.get(group, "default")}


def flatten_node(node: DictConfig) -> dict[str, object]:
    """Return the leaves of a configuration by their dotted keys, unresolved; empty mappings have none."""
    return flatten(OmegaConf.to_container(node, resolve=False))


def refuse_setting(key: str, value: object, word: str) -> None:
    """Raise UsageError for a setting that has no effect; `word` is the setting as the user wrote it."""
    instead = next((name for name in INSTEAD if is_within(key, [name])), None)
    if not instead and is_within(key, ACTED_ON + FILLED_IN):
        return
    if foreign := explain_foreign(f"hydra.{key}"):
        raise UsageError(f"{word} {foreign}")
    fix = INSTEAD.get(instead or "", "leave it out")
    if is_within(key, ["job.env_set"]):
        fix = fix.replace("NAME=VALUE", f"{key.removeprefix('job.env_set.')}={value}")
    raise UsageError(f"{word} is not carried out by launch: {fix}")


def refuse_words(words: Iterable[str]) -> None:
    """Raise UsageError for the first word of a command line that is a setting without effect."""
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if key.startswith(("hydra.", "hydra/")):
            refuse_setting(key[len("hydra.") :], value, word)


def set_hydra_config(tree: DictConfig, number: int | None) -> DictConfig:
    """Let `${hydra:KEY}` refer to the `hydra` of this configuration, and return it for later restoring.

    `number` is the job's number in a sweep.
    """
    HydraConfig.instance().set_config(tree)
    values: Any = HydraConfig.instance().cfg
    OmegaConf.set_readonly(values.hydra, value=False)
    if number is not None:  # in this copy alone: in the configuration it would be a setting of the user's
        values.hydra.job.num, values.hydra.job.id = number, str(number)
    return cast(DictConfig, values)


def restore_hydra_config(values: DictConfig, run_dir: str) -> None:
    """Let `${hydra:KEY}` refer to a configuration again; its output directory is the run directory."""
    values.hydra.runtime.output_dir = run_dir
    HydraConfig.instance().cfg = cast(Any, values)


def show_value(value: object) -> str:
    """Write a value as the command line has it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def is_within(key: str, keys: Iterable[str]) -> bool:
    """Tell whether a key is one of these, or below one."""
    return any(key == one or key.startswith((f"{one}.", f"{one}/")) for one in keys)
