"""Configuration by Hydra: overrides, composition, and errors that a user can act on."""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import EXIT_USAGE, UsageError
from launcher.flags import Flags
from launcher.schema import LaunchConfig
from launcher.sources import PRIMARY, Sources, find_shipped
from launcher.suggest import shorten_message, suggest

FREE_FORM = ("env.", "torchrun.rdzv_conf.")
"""Keys that need no `+`, though the schema cannot know them."""
FAILURES = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError)
"""What Hydra raises for a user's mistake."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration, before the run directory is known."""

    tree: DictConfig
    choices: dict[str, str]
    """Option chosen for each group."""


@contextmanager
def open_hydra(sources: Sources) -> Iterator[Hydra]:
    """Give a Hydra over these sources, and clear its global state afterwards."""
    Plugins.instance()  # registers the readers of pkg://, file:// and structured:// sources
    ConfigStore.instance().store(name="launch_schema", node=LaunchConfig)
    search_path = ConfigSearchPathImpl()
    search_path.append("hydra", "pkg://hydra.conf")
    for folder in sources.folders:
        search_path.append("main" if folder == find_shipped() else "conf", f"file://{folder}")
    search_path.append("schema", "structured://")
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(PRIMARY, search_path)
    finally:
        GlobalHydra.instance().clear()


def compose(sources: Sources, overrides: Sequence[str]) -> Composed:
    """Compose the configuration; raises UsageError with the fix."""
    with open_hydra(sources) as hydra:
        words = normalize_overrides(sources, overrides)
        try:
            tree = compose_tree(hydra, sources, words)
        except FAILURES as error:
            raise UsageError(diagnose_failure(hydra, sources, words, error)) from None
    choices = {str(g): str(o) for g, o in tree.hydra.runtime.choices.items() if o and "hydra" not in str(g)}
    del tree["hydra"]
    if OmegaConf.get_type(tree) is not LaunchConfig:
        raise UsageError(
            f"{sources.primary}.yaml does not build on launch_schema: put it first in its defaults"
        )
    return Composed(tree, choices)


def compose_tree(hydra: Hydra, sources: Sources, words: list[str]) -> DictConfig:
    """Compose by Hydra, without its logging; keys of the result can be set and removed."""
    tree = hydra.compose_config(sources.primary, words, RunMode.RUN, with_log_configuration=False)
    OmegaConf.set_struct(tree, value=False)
    return tree


def resolve(composed: Composed, run_dir: Path | None = None) -> LaunchConfig:
    """Resolve interpolations, `${run_dir}` among them, and return typed values; raises UsageError."""
    if run_dir:
        composed.tree.run_dir = str(run_dir)
    try:
        config = OmegaConf.to_object(composed.tree)
    except FAILURES as error:
        raise UsageError(shorten_message(error)) from None
    if not isinstance(config, LaunchConfig):
        raise UsageError("the configuration does not build on launch_schema: put it first in its defaults")
    return config


def dump_yaml(composed: Composed, mask: Callable[[object], object]) -> str:
    """Return the configuration as YAML, interpolations resolved, after `mask` has hidden what is secret."""
    return yaml.safe_dump(mask(OmegaConf.to_container(composed.tree, resolve=True)), sort_keys=False)


def expand_sweep(sources: Sources, overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a multirun, as Hydra's basic sweeper does; raises UsageError."""
    try:
        parsed = OverridesParser.create().parse_overrides(normalize_overrides(sources, overrides, sweep=True))
        return [list(job) for job in BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]]
    except FAILURES as error:
        raise UsageError(shorten_message(error)) from None


def normalize_overrides(sources: Sources, overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
    """Let `model=x` and `+model=x` both choose from a group, and `env.X=…` set a variable byte for byte.

    Hydra by itself refuses the first for a group without a default and the second for one with it.
    Raises UsageError for a word that Hydra cannot read.
    """
    defaults = read_defaults(sources, sources.primary)
    words = [normalize_override(sources, defaults, word, sweep=sweep) for word in overrides]
    for word, given in zip(words, overrides, strict=True):
        check_override(word, given)
    return words


def normalize_override(sources: Sources, defaults: set[str], word: str, *, sweep: bool) -> str:
    """Rewrite one override; see normalize_overrides."""
    match = re.fullmatch(r"(\+{0,2})([^=@~+]+)([=@].*)", word, re.DOTALL)
    if not match:
        return word
    key, rest = match[2], match[3]
    if key.startswith("env.") and not sweep and rest.startswith("="):
        rest = "=" + quote_value(rest[1:])
    if key.startswith(FREE_FORM):
        return f"++{key}{rest}"
    if "." not in key and sources.has_group(key):
        return f"{'' if key in defaults else '+'}{key}{rest}"
    return word


def quote_value(value: str) -> str:
    """Quote a value for Hydra's grammar unless the user has: `1e3` stays `1e3`, and spaces are fine."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value
    return QuotedString(value, Quote.single).with_quotes()


def read_defaults(sources: Sources, name: str) -> set[str]:
    """Return the groups that have a default in a primary file, or in the files that it builds on."""
    path = sources.find_file(name)
    try:
        entries = yaml.safe_load(path.read_text()).get("defaults") if path else []
    except (AttributeError, OSError, ValueError, yaml.YAMLError):
        entries = []  # composing says what is wrong with the file
    groups: set[str] = set()
    for entry in entries or []:
        if isinstance(entry, dict):
            groups |= {str(key).removeprefix("override ").removeprefix("optional ") for key in entry}
        elif entry not in ("_self_", name):
            groups |= read_defaults(sources, str(entry))
    return groups


def check_override(word: str, given: str) -> None:
    """Raise UsageError for a word that is not an override."""
    if "=" not in word and not word.startswith("~"):
        raise UsageError(
            f"{given!r} is not KEY=VALUE: to run a program, put it after `--`, as in `launch -- {given}`"
        )
    try:
        OverridesParser.create().parse_override(word)
    except FAILURES as error:
        key = given.partition("=")[0]
        hint = f"quote the value for Hydra, as in '{key}=\"…\"'"
        raise UsageError(f"cannot read {given!r} ({shorten_message(error)}): {hint}") from None


def diagnose_failure(hydra: Hydra, sources: Sources, words: list[str], error: BaseException) -> str:
    """Say in one line what is wrong, with the nearest right name."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return (
            f"there is no {option!r} in {group or 'the configuration'}{suggest(option, error.options or ())}"
        )
    try:
        known = list_keys(compose_tree(hydra, sources, [w for w in words if is_choice(sources, w)]))
    except FAILURES as worse:
        return shorten_message(worse)
    for word in words:
        key = re.split("[=@]", word)[0]
        if key not in known and not key.startswith(("+", "~", "hydra")) and not is_choice(sources, word):
            return f"there is no key {key!r}{suggest(key, [*known, *sources.list_groups()])}"
    return shorten_message(error)


def is_choice(sources: Sources, word: str) -> bool:
    """Tell whether an override chooses an option of a group."""
    return sources.has_group(re.split("[=@]", word.lstrip("+~"))[0])


def list_keys(tree: DictConfig, prefix: str = "") -> list[str]:
    """Return every key of a configuration, dotted."""
    keys = []
    for key in map(str, tree):
        name = f"{prefix}{key}"
        keys.append(name)
        child = tree._get_node(key)
        keys += list_keys(child, f"{name}.") if isinstance(child, DictConfig) and not child._is_none() else []
    return keys


def show_flags(flags: Flags) -> int:
    """Show what `--cfg`, `--info` or `--hydra-help` ask for, as Hydra does; raises UsageError."""
    name, words = flags.sources.primary, normalize_overrides(flags.sources, flags.overrides)
    with open_hydra(flags.sources) as hydra:
        try:
            if flags.cfg:
                hydra.show_cfg(name, words, flags.cfg, flags.package, flags.resolve)
            elif flags.info:
                hydra.show_info(flags.info, name, words)
            else:
                hydra.hydra_help(name, get_args_parser(), Namespace(resolve=False))
        except FAILURES as error:
            raise UsageError(diagnose_failure(hydra, flags.sources, words, error)) from None
        except SystemExit:  # Hydra has said why: there is no such package
            return EXIT_USAGE
    return 0


def complete_line(sources: Sources, request: Sequence[str], verbs: Sequence[str]) -> int:
    """Install or answer shell completion as Hydra does, with our verbs; nothing after `--`."""
    words = os.environ.get("COMP_LINE", "").split(" ")
    if "--" in words:
        return 0
    if len(words) == 2:
        sys.stdout.write("".join(f"{verb} " for verb in verbs if verb.startswith(words[1])))
    if len(words) > 2 and words[1] in verbs:
        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
    with open_hydra(sources) as hydra:
        hydra.shell_completion(sources.primary, list(request))
    return 0
