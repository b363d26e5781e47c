"""The jobs of a sweep: whether one is asked for, and the overrides of each of its jobs."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from launcher.config.composed import FAILURES
from launcher.config.composition import (
    add_searchpath,
    compose_tree,
    diagnose_failure,
    normalize_overrides,
    open_hydra,
)
from launcher.config.hydra_settings import HydraSettings, read_hydra_settings, set_hydra_config
from launcher.config.resource_limits import limit_composition
from launcher.config.search_path import Sources
from launcher.config.suggestions import shorten_message
from launcher.config.sweep_mode import mentions_hydra
from launcher.errors import UsageError


@dataclass(frozen=True, slots=True)
class Multirun:
    """What is known of a sweep before its jobs are."""

    sources: Sources
    words: tuple[str, ...]
    """The command line's overrides in Hydra's terms."""
    settings: HydraSettings
    tree: DictConfig | None
    """The configuration without the values of the sweep; None if nothing in it is Hydra's."""


def read_multirun(sources: Sources, overrides: Sequence[str]) -> Multirun:
    """Compose what is the same for all jobs of a sweep; raises UsageError."""
    sources = add_searchpath(sources, overrides)
    with open_hydra(sources) as loader, warnings.catch_warnings(action="ignore"):
        words = normalize_overrides(sources, overrides, sweep=True)
        if not mentions_hydra(words) and not sources.mentions("hydra"):
            return Multirun(sources, tuple(words), HydraSettings(), None)
        try:
            tree = compose_tree(loader, sources, words, RunMode.MULTIRUN)
            set_hydra_config(tree, None)
            return Multirun(sources, tuple(words), read_hydra_settings(loader, tree), tree)
        except FAILURES as error:
            raise UsageError(diagnose_failure(loader, sources, words, error)) from None


def resolve_sweeper(multirun: Multirun) -> tuple[list[str], object]:
    """Return the user's files that a sweep is composed from, and the value of `hydra.sweeper`.

    Raises UsageError.
    """
    if multirun.tree is None:
        return [], {}
    choices = {str(group): str(option) for group, option in multirun.tree.hydra.runtime.choices.items()}
    try:
        with limit_composition(multirun.sources):
            node = OmegaConf.to_container(multirun.tree.hydra.sweeper, resolve=True)
    except FAILURES as error:
        raise UsageError(shorten_message(error)) from None
    return multirun.sources.list_own(choices), node


def expand_sweep(multirun: Multirun) -> list[list[str]]:
    """Return the overrides of each job of a sweep: every combination of the values, the last varying first.

    Values of the command line override those of `hydra.sweeper.params`. Raises UsageError.
    """
    params = [f"{key}={value}" for key, value in multirun.settings.params.items()]
    with open_hydra(multirun.sources) as loader:
        try:
            words = [*normalize_overrides(multirun.sources, params, sweep=True), *multirun.words]
            parsed = OverridesParser.create(loader).parse_overrides(words)
            values = {override.get_key_element(): list_values(override) for override in parsed}
            return [list(job) for job in product(*values.values())]
        except FAILURES as error:
            raise UsageError(shorten_message(error)) from None


def list_values(override: Override) -> list[str]:
    """Return an override for each of its values; raises UsageError for values that cannot be listed."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise UsageError(
            f"{override.input_line} is for a sweeper that chooses values by results, as hydra/sweeper=optuna:"
            " name one, or list the values"
        )
    found = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    if not found:
        raise UsageError(f"{override.input_line} matches nothing: a sweep needs one value at least")
    return found
