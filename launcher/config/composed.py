"""A composed configuration before its run directory is known; nothing here needs Hydra."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from launcher.config.environment_files import write_values
from launcher.config.schema import LaunchConfig, settle_words
from launcher.config.search_path import Sources
from launcher.config.suggestions import suggest
from launcher.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

RUN_DIR = "RUN_DIR"
"""Stands for the run directory if there is none."""


@dataclass(frozen=True, slots=True)
class HydraSettings:
    """Hydra's settings that have an effect; None means Hydra's default, which launch does not use."""

    multirun: bool = False
    """`hydra.mode=MULTIRUN`."""
    sweeper: str = "basic"
    """The chosen option of the group `hydra/sweeper`."""
    params: Mapping[str, str] = field(default_factory=dict)
    """`hydra.sweeper.params` of the basic sweeper."""
    run_dir: str | None = None
    """`hydra.run.dir`."""
    sweep_dir: str | None = None
    """`hydra.sweep.dir`."""
    name: str | None = None
    """`hydra.job.name`."""
    verbose: bool = False
    """`hydra.verbose`."""


class ConfigValues(Protocol):
    """The values of a composed configuration: Hydra's, or those that were kept of an earlier composition."""

    @property
    def tree(self) -> "DictConfig":
        """Hydra's tree, whose keys can be set and removed."""
        ...

    def select(self, keys: Sequence[str]) -> dict[str, object]:
        """Return single values, before the run directory is known; raises UsageError."""
        ...

    def resolve(self, run_dir: Path | None) -> LaunchConfig:
        """Resolve all interpolations; raises UsageError."""
        ...

    def to_mapping(self) -> dict[str, object]:
        """Return all values, as they were resolved last."""
        ...

    def find_text(self, left_out: Collection[str]) -> str | None:
        """Return the same as YAML, without some sections; None if it has to be written first."""
        ...


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration, before the run directory is known."""

    values: ConfigValues
    choices: dict[str, str]
    """Option chosen for each group."""
    warnings: tuple[str, ...]
    """Hydra's warnings, each in one line."""
    sources: Sources
    """Where it comes from."""
    given: frozenset[str] = frozenset()
    """Keys that the command line sets."""
    settings: HydraSettings = field(default_factory=HydraSettings)
    """Hydra's own settings."""
    own_files: tuple[str, ...] = ()
    """Files that are not the shipped ones, relative to the working directory."""

    @property
    def tree(self) -> "DictConfig":
        """Hydra's tree, whose keys can be set and removed."""
        return self.values.tree


def read_values(composed: Composed, keys: Sequence[str]) -> dict[str, object]:
    """Return single values that are needed before the run directory is known; raises UsageError."""
    return composed.values.select(keys)


def resolve(composed: Composed, run_dir: Path | None = None) -> LaunchConfig:
    """Resolve interpolations, `${run_dir}` among them, and return typed values; raises UsageError.

    A verb that starts nothing has no run directory: `RUN_DIR` stands for it. A machine's snapshot becomes a
    path.
    """
    config = composed.values.resolve(run_dir)
    settle_words(config)
    config.env = write_values(config.env)
    config.machine.snapshot = composed.sources.find_beside("machine", config.machine.snapshot)
    if config.cluster.machine is not None:
        config.cluster.machine = find_snapshot(composed.sources, config.cluster.machine)
    return config


def find_snapshot(sources: Sources, name: str) -> str:
    """Return the snapshot of a machine named as in `machine=NAME`, or a file; raises UsageError."""
    import yaml

    from launcher.config.yaml_files import read_yaml

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
