"""Warns of settings that have no effect on a job, and of variables that overrule settings."""

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from launcher.config.overrides import read_key
from launcher.config.program import find_script
from launcher.config.request import DEVICE_VARIABLES
from launcher.config.settings import ClusterConfig, Settings
from launcher.config.sources import PRIMARY, Sources
from launcher.config.start import Cluster
from launcher.files import read_file
from launcher.plan.allocator import find_variable, parse_settings
from launcher.plan.variables import is_kept
from launcher.protocol import LAUNCH_GC, LAUNCH_NUM_WORKERS
from launcher.runs.secrets import mask_variables, mask_words
from launcher.text import clean_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

OVERRULED = {
    LAUNCH_GC: ("gc", "gc.policy", "gc.warmup", "gc.every", "gc.log"),
    LAUNCH_NUM_WORKERS: ("dataloader", "dataloader.num_workers", "dataloader.workload"),
}
"""Variables of the user's, with the keys that they come over."""
ANYWHERE = ("kind", "container")
"""Keys of `cluster` that are checked elsewhere: a container is refused if there is no srun."""


MOST_TEXT = 1 << 20
"""Bytes of a program that is looked at for its use of Hydra."""
SETTINGS = frozenset(field.name for field in fields(Settings)) - {"model", "data", "program", "name"}
"""Keys that are hardly an argument of a program that uses Hydra."""


def warn_unused(config: Settings, cluster: Cluster, given: Collection[str]) -> None:
    """Say which of the settings for SLURM have no use, since the job runs on this machine.

    If `cluster` is set to run here, those in files are meant for other runs, and the
    command line's alone count.
    """
    if cluster.kind not in ("local", "manual"):
        return
    keys = list(list_changed("cluster", config.cluster, ClusterConfig()))
    if config.cluster.kind != "auto":
        keys = [key for key in keys if any(f"{word}.".startswith(f"{key}.") for word in given)]
    if keys:
        verb, them = ("is", "it") if len(keys) == 1 else ("are", "them")
        logger.warning(
            f"{', '.join(keys)} {verb} for SLURM, and this job runs here ({cluster.why}): set"
            f" cluster=slurm, or leave {them} out"
        )


def warn_unread(sources: Sources, program: Sequence[str]) -> None:
    """Say which words after a program look like settings, and which file looks like launch's configuration.

    `conf/config.yaml` is Hydra's usual name: a program that uses Hydra has its own there.
    """
    script = Path(find_script(program))
    words = [word for word in program[1:] if "=" in word and read_key(word).partition(".")[0] in SETTINGS]
    if words:
        stand = "stands" if len(words) == 1 else "stand"
        logger.info(
            f"{', '.join(mask_words(words))} {stand} after the program, which gets what stands there: write"
            f" settings of launch before {script}"
        )
    if sources.primary != PRIMARY:
        return
    for folder in dict.fromkeys((Path("conf"), script.parent / "conf")):
        is_own = os.path.isfile(folder / "config.yaml") and not os.path.exists(folder / f"{PRIMARY}.yaml")  # noqa: PTH110, PTH113 - raise nothing
        if is_own and not uses_hydra(script):
            logger.info(
                f"{folder}/config.yaml is not read: launch reads {PRIMARY}.yaml and the groups in conf/ of"
                " the working directory (--config-name and --config-path name others)"
            )


def uses_hydra(script: Path) -> bool:
    """Tell whether a program's text names Hydra; one that cannot be read does not."""
    try:
        return b"hydra" in read_file(script, MOST_TEXT, follow=True)
    except OSError:
        return False


def warn_unforked(config: Settings, agent: str, given: Collection[str]) -> None:
    """Say which settings of `start` have no use, since `agent` forks no ranks."""
    if agent == "direct" and config.start.warm != "off":
        return
    why = "start.warm=off" if agent == "direct" else f"agent={agent}"
    if config.start.preload and "start.preload" in given:
        logger.warning(f"start.preload is not used with {why}: each rank imports by itself")


def warn_overruled(environ: Mapping[str, str], given: Collection[str]) -> None:
    """Say which variables of the environment come over what the command line asks for."""
    over = {name: keys for name, keys in OVERRULED.items() if name in environ and is_kept(environ, name, {})}
    if name := find_variable(environ):
        over[name] = tuple(f"allocator.{key}" for key in parse_settings(environ[name]) or ())
    for name, keys in over.items():
        if lost := [key for key in keys if key in given]:
            logger.warning(f"{name}={environ[name]} is set, and comes over {', '.join(lost)}: unset it")


def warn_visible(config: Settings, cluster: Cluster, given: Collection[str]) -> None:
    """Say which secrets are on the command line of a `launch` that stays: `ps` shows them to everybody."""
    if config.dry_run or (cluster.kind == "slurm" and not config.follow):
        return
    names = [name for name in config.env if "env" in given or f"env.{name}" in given]
    masked = mask_variables({name: str(config.env[name]) for name in names})
    if shown := [f"env.{name}" for name in names if masked[name] != str(config.env[name])]:
        verb, them = ("is", "it") if len(shown) == 1 else ("are", "them")
        logger.warning(
            f"{', '.join(shown)} {verb} on the command line, which all users of this machine see by"
            f" `ps` while launch runs: put {them} into a file that you alone can read, env.from_file=FILE"
        )


def warn_elsewhere(config: Settings, environ: Mapping[str, str]) -> None:
    """Say which variables of the environment do not count, since another machine is planned for.

    They name this machine's devices, as SLURM's CUDA_VISIBLE_DEVICES does in a job.
    """
    for name in DEVICE_VARIABLES if config.machine.snapshot else ():
        if name in environ and name not in config.env:
            machine, value = (
                clean_text(PurePath(str(config.machine.snapshot)).stem),
                clean_text(environ[name]),
            )
            logger.warning(
                f"{name}={value} is of this machine, and does not count in a plan for {machine}: "
                f"set env.{name}={value} if it is meant for that"
            )


def list_changed(name: str, found: "DataclassInstance", default: object) -> Iterator[str]:
    """Give the keys whose values are not the defaults."""
    for field in fields(found):
        key, value, usual = f"{name}.{field.name}", getattr(found, field.name), getattr(default, field.name)
        if field.name in ANYWHERE or value == usual:
            continue
        if is_dataclass(value) and not isinstance(value, type):
            yield from list_changed(key, value, usual)
        else:
            yield key
