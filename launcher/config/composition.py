"""Configuration by Hydra: overrides, composition, and errors that a user can act on."""

import os
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.config.composed import RUN_DIR, Composed, HydraSettings
from launcher.config.config_file import flatten
from launcher.config.hydra_settings import (
    read_hydra_settings,
    refuse_setting,
    refuse_words,
    restore_hydra_config,
    set_hydra_config,
)
from launcher.config.overrides import check_removal, check_shape, is_choice, read_key, rewrite_overrides
from launcher.config.resource_limits import MAX_SECONDS, limit_composition
from launcher.config.schema import LaunchConfig
from launcher.config.search_path import PRIMARY, Sources
from launcher.config.suggestions import shorten_message, suggest, suggest_dotted_key
from launcher.config.sweep_mode import mentions_hydra
from launcher.config.yaml_files import MOST_BYTES, check_aliases, read_text, read_yaml
from launcher.errors import UsageError
from launcher.files import LARGEST

FAILURES = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError),
    # Hydra raises these for files of a shape that it does not expect.
    *(AssertionError, AttributeError, LookupError, TypeError),
)
"""What Hydra raises for a user's mistake."""
NOUNS = {int: "number", str: "text"}
HARMLESS_PLUGINS = {"SearchPath", "HydraColorlogSearchPathPlugin"}
"""Plugins that add to Hydra's search path nothing that a composition of ours depends on."""
OTHER_FOLDERS: ContextVar[tuple[Path, ...]] = ContextVar("OTHER_FOLDERS", default=())
"""Folders of configuration after the first, for the Hydra that is being opened."""


@dataclass(slots=True)
class HydraValues:
    """The values of a configuration that Hydra has composed."""

    tree: DictConfig
    sources: Sources
    interpolated: DictConfig | None = None
    """What `${hydra:KEY}` refers to; None if nothing can refer to it."""
    given: str | None = None
    """`run_dir` before `resolve` has set it."""
    chosen: str | None = None
    """What `resolve` has set it to."""

    def select(self, keys: Sequence[str]) -> dict[str, object]:
        """Return single values, before the run directory is known; raises UsageError."""
        try:
            if self.interpolated is not None:
                restore_hydra_config(self.interpolated, RUN_DIR)
            with limit_composition(self.sources):
                found = {key: OmegaConf.select(self.tree, key) for key in keys}
        except FAILURES as error:
            raise UsageError(shorten_message(error)) from None
        if "run_dir" in found and found["run_dir"] == self.chosen:
            found["run_dir"] = self.given  # another run may have taken the one that was chosen
        return found

    def resolve(self, run_dir: Path | None) -> LaunchConfig:
        """Resolve all interpolations; raises UsageError."""
        tree = self.tree
        try:
            unknown = run_dir is None and tree.run_dir is None
            if tree.run_dir != self.chosen:
                self.given = tree.run_dir
            if run_dir or unknown:
                tree.run_dir = str(run_dir or RUN_DIR)
            if self.interpolated is not None:
                restore_hydra_config(self.interpolated, str(tree.run_dir))
            with limit_composition(self.sources):
                config = OmegaConf.to_object(tree)
        except FAILURES as error:
            raise UsageError(shorten_message(error)) from None
        if not isinstance(config, LaunchConfig):
            raise UsageError(
                "the configuration does not build on launch_schema: put it first in its defaults"
            )
        check_kind(LaunchConfig, config, "")
        if unknown:
            tree.run_dir = config.run_dir = None
        self.chosen = tree.run_dir
        return config

    def to_mapping(self) -> dict[str, object]:
        """Return all values, as they were resolved last."""
        found: Any = OmegaConf.to_container(self.tree, resolve=True)
        return dict(found)

    def find_text(self, left_out: Collection[str]) -> None:
        """Return None: there is no text yet."""


@dataclass(frozen=True, slots=True)
class FrozenValues:
    """All values of a composition, resolved with a mark in the place of the run directory."""

    run_dir: str | None
    """`run_dir` before that."""
    tree: dict[str, Any]
    config: LaunchConfig


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
    ConfigStore.instance().store(name="launch_schema", node=LaunchConfig)
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
            settings = read_hydra_settings(loader, tree) if uses_hydra else HydraSettings()
        except FAILURES as error:
            raise UsageError(diagnose_failure(loader, sources, words, error)) from None
    del tree["hydra"]
    if OmegaConf.get_type(tree) is not LaunchConfig:
        raise UsageError(explain_primary(sources))
    if "dataloader.num_workers" in map(read_key, words) or any(map(sets_workers, own_files)):
        tree.dataloader.workload = ""  # the user's own number is not derived from a workload
    doubts = dict.fromkeys(" ".join(str(entry.message).split()) for entry in caught)
    return Composed(
        values=HydraValues(tree, sources, interpolated),
        choices={group: option for group, option in choices.items() if not group.startswith("hydra/")},
        warnings=tuple(doubts),
        sources=sources,
        given=frozenset(map(read_key, overrides)),
        settings=settings,
        own_files=own_files,
    )


def sets_workers(file: str) -> bool:
    """Tell whether a file that is no workload of its own sets the number of DataLoader workers."""
    found = read_yaml(Path(file))
    section = found.get("dataloader") if isinstance(found, dict) else None
    return isinstance(section, dict) and "num_workers" in section


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


def freeze_values(composed: Composed, mark: str) -> FrozenValues | None:
    """Return all values, which depend on nothing but files, words and the run directory; None if they may.

    They may if a value calls a resolver (`${oc.env:HOME}`), or a plugin has added to Hydra's search path.
    """
    values = composed.values
    if not isinstance(values, HydraValues) or values.interpolated or composed.settings != HydraSettings():
        return None
    if {found.__name__ for found in Plugins.instance().discover(SearchPathPlugin)} - HARMLESS_PLUGINS:
        return None
    tree = values.tree
    raw: Any = OmegaConf.to_container(tree, resolve=False)
    texts = [text for text in map(str, flatten(raw).values()) if "${" in text or mark in text]
    if any(":" in text or mark in text for text in texts) or "${" in str(raw["run_dir"]):
        return None
    try:
        tree.run_dir = mark
        with limit_composition(composed.sources):
            found: Any = OmegaConf.to_container(tree, resolve=True)
            config = cast(LaunchConfig, OmegaConf.to_object(tree))
    except (*FAILURES, UsageError):
        return None
    finally:
        tree.run_dir = raw["run_dir"]
    return FrozenValues(raw["run_dir"], found, config)


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
    if OmegaConf.get_type(tree) is not LaunchConfig:
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
