"""Lists what the user's configuration files have run, so that it is shown before it runs."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.program import BUNDLED
from launcher.config.settings import SLURM_KINDS, ClusterConfig
from launcher.files import name_user
from launcher.runs.secrets import mask_words
from launcher.text import join_words

if TYPE_CHECKING:
    from launcher.launch.job import JobSpec

logger = logging.getLogger(__name__)

LOADED = (
    *("BASH_ENV", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "PYTHON_EXEC"),
)
"""Variables that make a program run other code than its own."""
PROLOGS = ("prolog", "epilog", "task-prolog", "task-epilog")
"""Options of srun that name programs."""


def report_config_programs(specs: Sequence["JobSpec"], own_files: Sequence[str]) -> None:
    """Log what the user's configuration files have run, but not what is on the command line."""
    brought = dict.fromkeys(each for spec in specs for each in list_brought(spec)) if own_files else {}
    if brought:
        logger.info(f"{', '.join(own_files)} has this run: {'; '.join(brought)}")


def list_brought(spec: "JobSpec") -> Iterator[str]:
    """Give what the configuration has run, except for what the command line sets."""
    config, given = spec.config, spec.given
    command = config.program.get("command")
    configured = spec.program is None and "program.command" not in given
    if configured and isinstance(command, list) and command != list(BUNDLED):
        yield join_words(mask_words([str(word) for word in command]))
    for name in LOADED:
        keys = {"env", f"env.{name}", *(["env.from_file"] if name in spec.file_variables else ())}
        if name in config.env and not given & keys:
            yield join_words([f"{name}={config.env[name]}"])
    if spec.cluster.kind in SLURM_KINDS:
        yield from list_job_programs(config.cluster, given)


def list_job_programs(cluster: ClusterConfig, given: AbstractSet[str]) -> Iterator[str]:
    """Give what a job of SLURM runs besides the program, and in which image that is."""
    if "cluster.setup" not in given:
        yield from (f"cluster.setup: {line}" for line in cluster.setup)
    for name, value in cluster.srun.items():
        if name.replace("_", "-") in PROLOGS and not given & {"cluster.srun", f"cluster.srun.{name}"}:
            yield f"cluster.srun.{name}: {value}"
    if cluster.container.image and "cluster.container.image" not in given:
        yield f"cluster.container.image: {cluster.container.image}"


def list_targets(node: object, key: str) -> Iterator[str]:
    """Give what Hydra calls to make a configuration's objects (`_target_`), except for its plugins."""
    if isinstance(node, Mapping):
        target = str(node.get("_target_", ""))
        if target and not target.startswith("hydra_plugins."):
            yield f"{key}: {target}"
        for name, value in node.items():
            yield from list_targets(value, f"{key}.{name}")
    elif isinstance(node, list):
        for value in node:
            yield from list_targets(value, key)


def name_files(own_files: Sequence[str]) -> None:
    """Say which configuration is not the shipped one, and whose it is if it is another user's."""
    if own_files:
        logger.info(f"configuration from {', '.join(map(name_file, own_files))}")


def name_file(path: str) -> str:
    """Return a file's name, with its owner if that is neither this user nor root."""
    owner = Path(path).stat().st_uid
    return path if owner in (os.geteuid(), 0) else f"{path} (of {name_user(owner)})"
