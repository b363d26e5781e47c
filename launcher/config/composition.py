"""Configuration by Hydra: overrides, composition, and errors that a user can act on."""

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from launcher.config.composed import FAILURES, Composed
from launcher.config.hydra_settings import (
    read_hydra_settings,
    refuse_setting,
    refuse_words,
    set_hydra_config,
)
from launcher.config.overrides import check_removal, check_shape, is_choice, read_key, rewrite_overrides
from launcher.config.resource_limits import MAX_SECONDS, limit_composition
from launcher.config.search_path import PRIMARY, Sources
from launcher.config.settings import Settings
from launcher.config.suggestions import shorten_message, suggest, suggest_dotted_key
from launcher.config.sweep_mode import mentions_hydra
from launcher.config.yaml_files import MOST_BYTES, check_aliases, read_text, read_yaml
from launcher.errors import UsageError
from launcher.files import LARGEST

OTHER_FOLDERS: ContextVar[tuple[Path, ...]] = ContextVar("OTHER_FOLDERS", default=())
"""Folders of configuration after the first, for the Hydra that is being opened."""
ConfigStore.instance().store(name="launch_schema", node=Settings)


class SearchPath(SearchPathPlugin):
    """Has Hydra search the folders after the first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders, in their order."""
        for folder in OTHER_FOLDERS.get():
            search_path.append("launch", f"file://{folder}")


@contextmanager
def open_hydra(sources: Sources, seconds: float | None = MAX_SECONDS) -> Iterator[ConfigLoader]:
    """Give the loader of a Hydra that reads these sources, and restore the previous Hydra at the end.

    The block may use `seconds` of CPU time; None sets no limit, for a block that runs programs. Raises
    UsageError for a file whose aliases multiply, before Hydra reads any. A file with more than MOST_BYTES is
    left to the limit of CPU time: it may be one that nobody chooses.
    """
    Plugins.instance().register(SearchPath)
    first, *others = sources.folders
    token = OTHER_FOLDERS.set(tuple(others))
    previous = GlobalHydra.instance().hydra  # that of a sweep, if a trial is composed here
    GlobalHydra.instance().clear()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            limit_composition(sources, seconds),
            initialize_config_dir(str(first), PRIMARY, "1.3"),
        ):
            for path, content in sources.read_own_files(MOST_BYTES):
                check_aliases(path, content.decode("utf-8", "replace"))
            yield GlobalHydra.instance().config_loader()
    finally:
        OTHER_FOLDERS.reset(token)
        GlobalHydra.instance().hydra = previous


def compose(sources: Sources, overrides: Sequence[str], number: int | None = None) -> Composed:
    """Compose the configuration, of the job with this number in a sweep; raises UsageError with the fix."""
    sources = add_searchpath(sources, overrides)
    with open_hydra(sources) as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        words = normalize_overrides(sources, overrides)
        try:
            tree = compose_tree(loader, sources, words)
            choices = {str(g): str(o) for g, o in tree.hydra.runtime.choices.items() if o}
            own_files = tuple(sources.list_own(choices))
            uses_hydra = mentions_hydra(words) or (own_files and sources.mentions("hydra"))
            interpolated = set_hydra_config(tree, number) if uses_hydra else None
            if uses_hydra:
                read_hydra_settings(loader, tree)
        except FAILURES as error:
            raise UsageError(diagnose_failure(loader, sources, words, error)) from None
    del tree["hydra"]
    if OmegaConf.get_type(tree) is not Settings:
        raise UsageError(explain_primary(sources))
    if "dataloader.num_workers" in map(read_key, words) or any(map(sets_workers, own_files)):
        tree.dataloader.workload = ""  # the user's own number is not derived from a workload
    doubts = dict.fromkeys(" ".join(str(entry.message).split()) for entry in caught)
    return Composed(
        tree=tree,
        choices={group: option for group, option in choices.items() if not group.startswith("hydra/")},
        warnings=tuple(doubts),
        sources=sources,
        given=frozenset(map(read_key, overrides)),
        own_files=own_files,
        interpolated=interpolated,
    )


def sets_workers(file: str) -> bool:
    """Tell whether a file that is no workload of its own sets the number of DataLoader workers."""
    found = read_yaml(Path(file))
    section = found.get("dataloader") if isinstance(found, dict) else None
    return isinstance(section, dict) and "num_workers" in section


def compose_tree(
    loader: ConfigLoader, sources: Sources, words: list[str], mode: RunMode = RunMode.RUN
) -> DictConfig:
    """Compose by Hydra; keys of the result can be set and removed."""
    tree = loader.load_configuration(sources.primary, words, mode)
    OmegaConf.set_struct(tree, value=False)
    return tree


def add_searchpath(sources: Sources, overrides: Sequence[str]) -> Sources:
    """Return the sources with the folders of `hydra.searchpath`, of the command line or the primary file.

    Hydra reports what is wrong with either.
    """
    try:
        given = [word for word in overrides if read_key(word) == "hydra.searchpath"]
        path = sources.find_file(sources.primary)
        text = "" if given or not path else read_text(path)
        if given:
            found = OverridesParser.create().parse_override(given[0]).value()
        elif "searchpath" in text:
            with limit_composition(sources):
                found = OmegaConf.select(OmegaConf.create(text), "hydra.searchpath")
        else:
            return sources
        folders = [find_folder(str(entry)) for entry in (found if isinstance(found, Sequence) else ())]
    except FAILURES:
        return sources
    return replace(sources, searchpath=tuple(folder for folder in folders if folder))


def find_folder(entry: str) -> Path | None:
    """Return the folder of an entry of `hydra.searchpath`: a path, `file://PATH`, `pkg://PACKAGE`."""
    scheme, separator, name = entry.rpartition("://")
    if not separator or scheme == "file":
        return Path(name).absolute()
    try:
        spec = find_spec(name.replace("/", ".")) if scheme == "pkg" and name else None
    except ImportError:
        return None
    return next((Path(folder) for folder in (spec and spec.submodule_search_locations) or ()), None)


def normalize_overrides(sources: Sources, overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
    """Return the overrides in Hydra's terms; raises UsageError for a word that Hydra cannot read."""
    for given in overrides:
        check_shape(given)
        check_removal(given)
    refuse_words(overrides)
    words = rewrite_overrides(sources, overrides, sweep=sweep)
    for word, given in zip(words, overrides, strict=True):
        check_override_syntax(word, given)
    return words


def check_override_syntax(word: str, given: str) -> None:
    """Raise UsageError for a word that is not an override."""
    try:
        OverridesParser.create().parse_override(word)
    except FAILURES as error:
        key = given.partition("=")[0]
        why = re.sub(r"\w+Exception\((.*)\)", r"Hydra stops at \1", shorten_message(error))
        why = why.replace("None", "") or "Hydra gives it another meaning"
        raise UsageError(f"cannot read {given!r} ({why}): quote the value, as in '{key}=\"…\"'") from None


def diagnose_failure(loader: ConfigLoader, sources: Sources, words: list[str], error: BaseException) -> str:
    """Say in one line what is wrong, with the nearest right name; raises UsageError for Hydra's settings."""
    if early := explain_known(sources, error):
        return early
    chosen = [word for word in words if is_choice(sources, word)]
    for word in chosen if "Config group override" in str(error) else ():
        group = read_key(word)
        option = next(iter(sources.list_options(group)), "NAME")
        return f"{word}: name an option of the group, as in {group}={option}"
    try:
        tree = compose_tree(loader, sources, chosen)
    except FAILURES as worse:
        return shorten_message(worse)
    if OmegaConf.get_type(tree) is not Settings:
        return explain_primary(sources)
    known = list_keys(tree)
    for word in words:
        key = re.split("[=@]", word)[0]
        if key not in known and not key.startswith(("+", "~", "hydra")) and word not in chosen:
            return f"there is no key {key!r}{suggest_dotted_key(key, [*known, *sources.list_groups()])}"
    return shorten_message(error)


def explain_known(sources: Sources, error: BaseException) -> str:
    """Say what is wrong if the error itself tells, else nothing; raises UsageError for Hydra's settings."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return explain_missing_config(str(error.missing_cfg_file), error.options or ())
    if isinstance(error, UnicodeDecodeError):
        for file, content in sources.read_own_files(LARGEST):
            try:
                content.decode()
            except UnicodeDecodeError as bad:
                return f"{os.path.relpath(file)} is not UTF-8 (byte {bad.start}): save it as UTF-8"
    if isinstance(error, RecursionError):
        path = sources.find_file(sources.primary)
        return (
            f"{path or sources.primary} is built on itself, or has too many levels: the shipped defaults are"
            " called launch_defaults"
        )
    return ""


def explain_missing_config(name: str, options: Sequence[str]) -> str:
    """Say that there is no `group/option`, with the nearest; raises UsageError for a setting of Hydra's."""
    group, _, option = name.rpartition("/")
    message = f"there is no {option!r} in {group or 'the configuration'}{suggest(option, options)}"
    if not group.startswith("hydra/"):
        return message
    refuse_setting(group.removeprefix("hydra/"), option, f"{group}={option}")
    return f"{message}, or install the plugin that has it"


def explain_primary(sources: Sources) -> str:
    """Say that the primary file does not build on launch_schema."""
    path = sources.find_file(sources.primary)
    return (
        f"{path or sources.primary} does not build on launch_schema: begin it with"
        " `defaults: [launch_defaults, _self_]`, which are the shipped defaults"
    )


def list_keys(tree: DictConfig, prefix: str = "") -> list[str]:
    """Return every key of a configuration, dotted."""
    keys = []
    for key in map(str, tree):
        name = f"{prefix}{key}"
        keys.append(name)
        child = tree._get_node(key)
        keys += list_keys(child, f"{name}.") if isinstance(child, DictConfig) and not child._is_none() else []
    return keys
