"""Configuration by Hydra: overrides, composition, and errors that a user can act on."""

import io
import os
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
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
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.envfile import write_values
from launcher.errors import UsageError
from launcher.flags import Flags
from launcher.overrides import check_shape, is_choice, read_key, rewrite_overrides
from launcher.schema import LaunchConfig
from launcher.sources import PRIMARY, Sources, find_shipped
from launcher.suggest import shorten_message, suggest, suggest_key

FAILURES = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError),
    # By these it stumbles over files of an unforeseen shape.
    *(AssertionError, AttributeError, LookupError, TypeError),
)
"""What Hydra raises for a user's mistake."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration, before the run directory is known."""

    tree: DictConfig
    choices: dict[str, str]
    """Option chosen for each group."""
    warnings: tuple[str, ...]
    """What Hydra finds doubtful, each in one line."""
    sources: Sources
    """Where it comes from."""
    given: frozenset[str] = frozenset()
    """Keys that the command line sets."""


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
        with warnings.catch_warnings(action="ignore"):
            yield Hydra.create_main_hydra2(PRIMARY, search_path)
    finally:
        GlobalHydra.instance().clear()


def compose(sources: Sources, overrides: Sequence[str]) -> Composed:
    """Compose the configuration; raises UsageError with the fix."""
    with open_hydra(sources) as hydra, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        words = normalize_overrides(sources, overrides)
        try:
            tree = compose_tree(hydra, sources, words)
        except FAILURES as error:
            raise UsageError(diagnose_failure(hydra, sources, words, error)) from None
    choices = {str(g): str(o) for g, o in tree.hydra.runtime.choices.items() if o and "hydra" not in str(g)}
    del tree["hydra"]
    if OmegaConf.get_type(tree) is not LaunchConfig:
        raise UsageError(explain_foreign(sources))
    doubts = dict.fromkeys(" ".join(str(entry.message).split()) for entry in caught)
    return Composed(tree, choices, tuple(doubts), sources, frozenset(map(read_key, overrides)))


def compose_tree(hydra: Hydra, sources: Sources, words: list[str]) -> DictConfig:
    """Compose by Hydra, without its logging; keys of the result can be set and removed."""
    tree = hydra.compose_config(sources.primary, words, RunMode.RUN, with_log_configuration=False)
    OmegaConf.set_struct(tree, value=False)
    return tree


def resolve(composed: Composed, run_dir: Path | None = None) -> LaunchConfig:
    """Resolve interpolations, `${run_dir}` among them, and return typed values; raises UsageError.

    Before the run directory is known, `RUN_DIR` stands for it. A machine's snapshot becomes a path.
    """
    tree = composed.tree
    try:
        unknown = run_dir is None and tree.run_dir is None
        if run_dir or unknown:
            tree.run_dir = str(run_dir or "RUN_DIR")
        config = OmegaConf.to_object(tree)
    except FAILURES as error:
        raise UsageError(shorten_message(error)) from None
    if not isinstance(config, LaunchConfig):
        raise UsageError("the configuration does not build on launch_schema: put it first in its defaults")
    if unknown:
        tree.run_dir = config.run_dir = None
    config.env = write_values(config.env)
    config.machine.snapshot = composed.sources.find_beside("machine", config.machine.snapshot)
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
    """Return the overrides in Hydra's terms; raises UsageError for a word that Hydra cannot read."""
    for given in overrides:
        check_shape(given)
    words = rewrite_overrides(sources, overrides, sweep=sweep)
    for word, given in zip(words, overrides, strict=True):
        check_override(word, given)
    return words


def check_override(word: str, given: str) -> None:
    """Raise UsageError for a word that is not an override."""
    try:
        OverridesParser.create().parse_override(word)
    except FAILURES as error:
        key = given.partition("=")[0]
        why = re.sub(r"\w+Exception\((.*)\)", r"Hydra stops at \1", shorten_message(error))
        why = why.replace("None", "") or "Hydra gives it another meaning"
        raise UsageError(f"cannot read {given!r} ({why}): quote the value, as in '{key}=\"…\"'") from None


def diagnose_failure(hydra: Hydra, sources: Sources, words: list[str], error: BaseException) -> str:
    """Say in one line what is wrong, with the nearest right name."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return (
            f"there is no {option!r} in {group or 'the configuration'}{suggest(option, error.options or ())}"
        )
    chosen = [word for word in words if is_choice(sources, word)]
    for word in chosen if "Config group override" in str(error) else ():
        group = read_key(word)
        return f"{word}: name an option of the group, as in {group}={sources.list_options(group)[0]}"
    try:
        tree = compose_tree(hydra, sources, chosen)
    except FAILURES as worse:
        return shorten_message(worse)
    if OmegaConf.get_type(tree) is not LaunchConfig:
        return explain_foreign(sources)
    known = list_keys(tree)
    for word in words:
        key = re.split("[=@]", word)[0]
        if key not in known and not key.startswith(("+", "~", "hydra")) and word not in chosen:
            return f"there is no key {key!r}{suggest_key(key, [*known, *sources.list_groups()])}"
    return shorten_message(error)


def explain_foreign(sources: Sources) -> str:
    """Say that the primary file is no configuration of ours."""
    path = sources.find_file(sources.primary)
    return (
        f"{path or sources.primary} does not build on launch_schema: put `launch` (all the shipped defaults)"
        " or `launch_schema` first in its defaults"
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


def show_flags(flags: Flags) -> int:
    """Show what `--cfg`, `--info` or `--hydra-help` ask for, as Hydra does; raises UsageError."""
    name, words = flags.sources.primary, normalize_overrides(flags.sources, flags.overrides)
    output = io.StringIO()
    with open_hydra(flags.sources) as hydra:
        try:
            with redirect_stdout(output), redirect_stderr(io.StringIO()):
                if flags.cfg:
                    hydra.show_cfg(name, words, flags.cfg, flags.package, flags.resolve)
                elif flags.info:
                    hydra.show_info(flags.info, name, words)
                else:
                    hydra.hydra_help(name, get_args_parser(), Namespace(overrides=[]))
        except FAILURES as error:
            raise UsageError(diagnose_failure(hydra, flags.sources, words, error)) from None
        except SystemExit:  # so Hydra ends where there is no such package
            raise UsageError(
                f"the configuration has nothing at {flags.package!r}: see `launch --cfg {flags.cfg}`"
            ) from None
    sys.stdout.write(output.getvalue())
    return 0


def ask_completion(sources: Sources, request: str, words: Sequence[str] = ()) -> str:
    """Return what Hydra's shell completion prints for `install=bash`, or for a query of these words.

    Raises UsageError for a shell that it does not know, or for words that it cannot read.
    """
    *before, last = words or [""]
    # Hydra takes the line from the environment, splits it at white space, and answers on stdout.
    whole = [word for word in normalize_overrides(sources, before) if len(word.split()) == 1]
    line = " ".join(["launch", *whole, last])
    output = io.StringIO()
    try:
        with open_hydra(sources) as hydra, borrow_variable("COMP_LINE", line), redirect_stdout(output):
            hydra.shell_completion(sources.primary, [request])
    except FAILURES as error:
        raise UsageError(f"{request}: {shorten_message(error)}") from None
    return output.getvalue()


@contextmanager
def borrow_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
