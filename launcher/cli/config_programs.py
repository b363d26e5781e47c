"""Lists what the user's configuration files have run, so that it is shown before it runs."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from launcher.config.program import BUNDLED
from launcher.config.schema import ClusterConfig
from launcher.launch.job import JobSpec
from launcher.launch.monitor import MANAGED
from launcher.runs.secrets import mask_words
from launcher.text import join_words

logger = logging.getLogger(__name__)

LOADED = (
    *("BASH_ENV", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "PYTHON_EXEC"),
)
"""Variables that make a program run other code than its own."""
PROLOGS = ("prolog", "epilog", "task-prolog", "task-epilog")
"""Options of srun that name programs."""


def report_config_programs(specs: Sequence[JobSpec], own_files: Sequence[str]) -> None:
    """Log what the user's configuration files have run, but not what is on the command line."""
    brought = dict.fromkeys(each for spec in specs for each in list_brought(spec)) if own_files else {}
    if brought:
        logger.info(f"{', '.join(own_files)} has this run: {'; '.join(brought)}")


def list_brought(spec: JobSpec) -> Iterator[str]:
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
    if spec.cluster.kind in MANAGED:
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
