"""Configuration by Hydra: composed, resolved to `Settings`; what Hydra has no use for is refused."""

import io
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.config.program import write_values
from launcher.config.run_path import flatten
from launcher.config.settings import Settings, settle_words, show_value
from launcher.config.words import (
    MOST_BYTES,
    PRIMARY,
    Flags,
    Sources,
    check_word,
    explain_foreign,
    find_shipped,
    make_parser,
    mentions_hydra,
    read_defaults,
    read_key,
    read_text,
    read_yaml,
    rewrite_override,
    shorten_message,
    suggest,
    suggest_dotted_key,
)
from launcher.errors import UsageError
from launcher.files import LARGEST
from launcher.text import print_text

ACTED_ON = ("mode", "searchpath", "sweeper", "sweep.dir", "job.config")
"""Keys and groups of `hydra` that have an effect, with all keys below them."""
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


def list_hydra_words(sources: Sources, choices: Mapping[str, str]) -> list[str]:
    """Return what the user's chosen files set of Hydra, as words; raises UsageError for what has no effect.

    The command line's words have been judged by `refuse_words`.
    """
    words: list[str] = []
    for file in sources.list_own(choices):
        found: Any = read_yaml(Path(file))
        if not isinstance(found, dict):
            continue
        defaults = found.get("defaults")
        for entry in defaults if isinstance(defaults, list) else ():
            named = entry.items() if isinstance(entry, dict) else ()
            groups = [(str(group).partition("hydra/"), option) for group, option in named]
            words += [f"hydra/{group}={option}" for (_, is_hydras, group), option in groups if is_hydras]
        if isinstance(found.get("hydra"), dict):
            words += [f"hydra.{key}={show_value(value)}" for key, value in flatten(found["hydra"]).items()]
    refuse_words(words)
    return words


def refuse_setting(key: str, value: object, word: str) -> None:
    """Raise UsageError for a setting that has no effect; `word` is the setting as the user wrote it."""
    instead = next((name for name in INSTEAD if is_within(key, [name])), None)
    if not instead and is_within(key, ACTED_ON):
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
    """Let `${hydra:KEY}` refer to the `hydra` of this configuration, and return what it refers to.

    `number` is the job's number in a sweep.
    """
    HydraConfig.instance().set_config(tree)
    values: Any = HydraConfig.instance().cfg
    OmegaConf.set_readonly(values.hydra, value=False)
    if number is not None:  # in this copy alone: in the configuration it would be a setting of the user's
        values.hydra.job.num, values.hydra.job.id = number, str(number)
    return cast(DictConfig, values)


def is_within(key: str, keys: Iterable[str]) -> bool:
    """Tell whether a key is one of these, or below one."""
    return any(key == one or key.startswith((f"{one}.", f"{one}/")) for one in keys)


RUN_DIR = "RUN_DIR"
"""Stands for the run directory if there is none."""
MISTAKES = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError)
"""What Hydra and OmegaConf raise for a user's mistake."""
SHAPES = (AssertionError, AttributeError, LookupError, TypeError)
"""What Hydra raises for a file of a shape that it does not expect, or for a wrong call of ours."""
FAILURES = (*MISTAKES, *SHAPES)
NOUNS = {int: "number", str: "text"}
SHAPES_OF = {dict: "a mapping, as in {}.NAME=…", list: "a list, as in {}=[…]"}


@dataclass(slots=True)
class Composed:
    """A composed configuration, before the run directory is known."""

    tree: DictConfig
    """Hydra's tree, whose keys can be set and removed."""
    choices: dict[str, str]
    """Option chosen for each group."""
    warnings: tuple[str, ...]
    """Hydra's warnings, each in one line."""
    sources: Sources
    """Where it comes from."""
    given: frozenset[str] = frozenset()
    """Keys that the command line sets."""
    overrides: tuple[str, ...] = ()
    """The command line's settings as they were given; of a job of a sweep, its own."""
    own_files: tuple[str, ...] = ()
    """Files that are not the shipped ones, relative to the working directory."""
    interpolated: DictConfig | None = None
    """What `${hydra:KEY}` refers to; None if nothing can refer to it."""
    given_run_dir: str | None = None
    """`run_dir` as it is given; in the tree stands the one that was chosen last."""

    def set_run_dir(self, run_dir: str | None) -> None:
        """Let `${run_dir}` and `${hydra:runtime.output_dir}` refer to a run directory."""
        self.tree.run_dir = run_dir
        if self.interpolated is not None:
            is_known = run_dir is not None and "${" not in run_dir  # else it may refer to itself
            self.interpolated.hydra.runtime.output_dir = run_dir if is_known else RUN_DIR
            HydraConfig.instance().cfg = cast(Any, self.interpolated)


def read_values(composed: Composed, keys: Sequence[str]) -> dict[str, object]:
    """Return single values that are needed before the run directory is known; raises UsageError."""
    try:
        composed.set_run_dir(composed.given_run_dir)  # another run may have taken the one that was chosen
        return {key: OmegaConf.select(composed.tree, key, throw_on_missing=True) for key in keys}
    except MISTAKES as error:
        raise UsageError(shorten_message(error)) from None


def resolve(composed: Composed, run_dir: Path | None = None) -> Settings:
    """Resolve interpolations, `${run_dir}` among them, and return typed values; raises UsageError.

    A verb that starts nothing has no run directory: `RUN_DIR` stands for it. A machine's snapshot becomes a
    path.
    """
    try:
        composed.set_run_dir(composed.given_run_dir)
        chosen = str(run_dir) if run_dir else composed.tree.run_dir  # an interpolation may give null
        composed.set_run_dir(RUN_DIR if chosen is None else chosen)
        config = cast(Settings, OmegaConf.to_object(composed.tree))
    except MISTAKES as error:
        raise UsageError(shorten_message(error)) from None
    check_kind(Settings, config, "")
    if chosen is None:
        composed.tree.run_dir = config.run_dir = None
    settle_words(config)
    config.env = write_values(config.env)
    config.machine.snapshot = composed.sources.find_beside("machine", config.machine.snapshot)
    if config.cluster.machine is not None:
        config.cluster.machine = find_snapshot(composed.sources, config.cluster.machine)
    return config


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
    elif origin in SHAPES_OF and not isinstance(value, origin):
        raise UsageError(f"{key}={value}: give {SHAPES_OF[origin].format(key)}")
    elif origin is list:
        (inner,) = kind.__args__
        for number, entry in enumerate(cast(list[object], value)):
            if not isinstance(entry, inner):
                raise UsageError(f"{key}={value}: entry {number} is {entry}, give a {NOUNS[inner]}")


def find_snapshot(sources: Sources, name: str) -> str:
    """Return the snapshot of a machine named as in `machine=NAME`, or a file; raises UsageError."""
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


OTHER_FOLDERS: ContextVar[tuple[Path, ...]] = ContextVar("OTHER_FOLDERS", default=())
"""Folders of configuration after the first, for the Hydra that is being opened."""
ConfigStore.instance().store(name="launch_schema", node=Settings)
WHOLE_NUMBER = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
"""YAML 1.1's without those to base 60: `time: 10:00:00` is a text, as in YAML 1.2, and not 36000."""
for base in (
    yaml.SafeLoader,
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
):  # of OmegaConf's, 2.4's the second
    base.yaml_implicit_resolvers = {
        first: [(tag, WHOLE_NUMBER if tag == "tag:yaml.org,2002:int" else form) for tag, form in resolvers]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }


class SearchPath(SearchPathPlugin):
    """Has Hydra search the folders after the first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders, in their order."""
        for folder in OTHER_FOLDERS.get():
            search_path.append("launch", f"file://{folder}")


HYDRAS_OWN, NO_GROUPS = HydraConf(), HydraConf(defaults=[])
"""Hydra's settings with and without the options of its groups, which take longer to compose than ours."""


@contextmanager
def open_hydra(sources: Sources, settings: HydraConf = HYDRAS_OWN) -> Iterator[ConfigLoader]:
    """Give the loader of a Hydra that reads these sources, and restore the previous Hydra at the end."""
    Plugins.instance().register(SearchPath)
    ConfigStore.instance().store(group="hydra", name="config", node=settings, provider="hydra")
    first, *others = sources.folders
    token = OTHER_FOLDERS.set(tuple(others))
    previous = GlobalHydra.instance().hydra  # that of a sweep, if a trial is composed here
    GlobalHydra.instance().clear()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            initialize_config_dir(str(first), PRIMARY, "1.3"),
        ):
            yield GlobalHydra.instance().config_loader()
    finally:
        OTHER_FOLDERS.reset(token)
        GlobalHydra.instance().hydra = previous
        ConfigStore.instance().store(group="hydra", name="config", node=HYDRAS_OWN, provider="hydra")


def compose(sources: Sources, overrides: Sequence[str], number: int | None = None) -> Composed:
    """Compose the configuration, of the job with this number in a sweep; raises UsageError with the fix."""
    sources = add_searchpath(sources, overrides)
    uses_hydra = mentions_hydra(overrides) or sources.mentions("hydra")
    with (
        open_hydra(sources, HYDRAS_OWN if uses_hydra else NO_GROUPS) as loader,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UserWarning)
        words = normalize_overrides(sources, overrides)
        try:
            tree = loader.load_configuration(sources.primary, words, RunMode.RUN)
            choices = {str(g): str(o) for g, o in tree.hydra.runtime.choices.items() if o}
            own_files = tuple(sources.list_own(choices))
            interpolated = set_hydra_config(tree, number) if uses_hydra else None
            if uses_hydra:
                list_hydra_words(sources, choices)
        except FAILURES as error:
            raise UsageError(diagnose_failure(loader, sources, words, error)) from None
    OmegaConf.set_struct(tree, value=False)
    del tree["hydra"]
    if OmegaConf.get_type(tree) is not Settings:
        raise UsageError(explain_primary(sources))
    sets_workers = "dataloader.num_workers" in map(read_key, words)
    for file in own_files:
        found = read_yaml(Path(file))
        if found is not None and not isinstance(found, dict):  # OmegaConf takes a text for a key
            raise UsageError(f"{file} holds no settings: write them a line each, as KEY: VALUE")
        section = (found or {}).get("dataloader")
        sets_workers |= isinstance(section, dict) and "num_workers" in section
    if sets_workers:
        tree.dataloader.workload = ""  # the user's own number is not derived from a workload
    doubts = dict.fromkeys(" ".join(str(entry.message).split()) for entry in caught)
    return Composed(
        tree=tree,
        choices={group: option for group, option in choices.items() if not group.startswith("hydra/")},
        warnings=tuple(doubts),
        sources=sources,
        given=frozenset(map(read_key, overrides)),
        overrides=tuple(overrides),
        own_files=own_files,
        interpolated=interpolated,
        given_run_dir=cast(Any, tree._get_node("run_dir"))._value(),
    )


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
    defaults, words = read_defaults(sources, sources.primary), []
    for given in overrides:
        check_word(given)
    refuse_words(overrides)
    for given in overrides:
        word = rewrite_override(sources, defaults, given, sweep=sweep)
        try:
            OverridesParser.create().parse_override(word)
        except FAILURES as error:
            key = given.partition("=")[0]
            why = re.sub(r"\w+Exception\((.*)\)", r"Hydra stops at \1", shorten_message(error))
            why = why.replace("None", "") or "Hydra gives it another meaning"
            raise UsageError(f"cannot read {given!r} ({why}): quote the value, as in '{key}=\"…\"'") from None
        words.append(word)
    return words


def diagnose_failure(loader: ConfigLoader, sources: Sources, words: list[str], error: BaseException) -> str:
    """Say in one line what is wrong, with the nearest right name; raises UsageError for Hydra's settings.

    What the shipped configuration by itself raises too is no mistake of the user's: it is raised again.
    """
    if isinstance(error, SHAPES) and not isinstance(error, MISTAKES):
        shipped = Sources((find_shipped(),))
        with open_hydra(shipped) as own_loader:
            try:
                own_loader.load_configuration(shipped.primary, [], RunMode.RUN)
            except SHAPES:
                raise error from None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        near = suggest(option, error.options or ())
        if group.startswith("hydra/"):
            refuse_setting(group.removeprefix("hydra/"), option, f"{group}={option}")
            near += ", or install the plugin that has it"
        return f"there is no {option!r} in {group or 'the configuration'}{near}"
    if broken := find_broken_file(sources, words, error):
        return broken
    chosen = [word for word in words if sources.has_group(read_key(word))]
    if chosen and "Config group override" in str(error):
        group = read_key(chosen[0])
        option = next(iter(sources.list_options(group)), "NAME")
        return f"{chosen[0]}: name an option of the group, as in {group}={option}"
    try:
        tree = loader.load_configuration(sources.primary, chosen, RunMode.RUN)
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


BROKEN = {
    UnicodeDecodeError: "is not UTF-8 (byte {}): save it as UTF-8",
    ListConfig: "holds a list: write settings, a line each, as KEY: VALUE",
    RecursionError: "holds a list or a mapping that holds itself: leave that out",
}
"""What can be wrong with a whole file, and how that is told."""
SAID = {
    "Cannot merge DictConfig with ListConfig": ListConfig,
    "must be a DictConfig": ListConfig,
    "incompatible container types": ListConfig,
    "recursive aliases": RecursionError,
}
"""What it is by words of OmegaConf's messages, of those from 2.4 on too."""


def find_broken_file(sources: Sources, words: Sequence[str], error: BaseException) -> str:
    """Name a file that is broken as a whole, if the error is about one: a chosen one first; else empty."""

    def classify(error: BaseException) -> type:
        return next((kind for said, kind in SAID.items() if said in str(error)), type(error))

    kind = classify(error)
    if kind not in BROKEN:
        return ""
    found: list[str] = []
    chosen = tuple(f"{read_key(word)}/{word.partition('=')[2]}.yaml" for word in words)
    for file, content in sources.read_own_files(LARGEST):
        own: type = type(None)
        at = 0
        try:
            if kind is not UnicodeDecodeError and len(content) <= MOST_BYTES:
                own = type(OmegaConf.create(content.decode("utf-8", "replace")))
            content.decode()
        except MISTAKES as broken:
            own, at = classify(broken), getattr(broken, "start", 0)
        if own is kind:
            name = os.path.relpath(file)
            found.insert(0 if name.endswith(chosen) else len(found), f"{name} {BROKEN[kind].format(at)}")
    if not found and kind is RecursionError:
        found = [
            f"{sources.find_file(sources.primary) or sources.primary} is built on itself, or has too many"
            " levels: the shipped defaults are called launch_defaults"
        ]
    return next(iter(found), "")


def explain_primary(sources: Sources) -> str:
    """Say that the primary file does not build on launch_schema."""
    return (
        f"{sources.find_file(sources.primary) or sources.primary} does not build on launch_schema: begin it"
        " with `defaults: [launch_defaults, _self_]`, which are the shipped defaults"
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
    name = flags.sources.primary
    sources = add_searchpath(flags.sources, flags.overrides)
    words = normalize_overrides(sources, flags.overrides)
    output = io.StringIO()
    with open_hydra(sources) as loader, redirect_stdout(output), redirect_stderr(io.StringIO()):
        hydra: Any = GlobalHydra.instance().hydra
        try:
            if flags.cfg:
                hydra.show_cfg(name, words, flags.cfg, flags.package, flags.resolve)
            elif flags.info:
                hydra.show_info(flags.info, name, words)
            else:
                parser = make_parser()  # Hydra's help describes this argument
                parser.add_argument("overrides", nargs="*", help="KEY=VALUE, to override the configuration")
                hydra.hydra_help(name, parser, Namespace(overrides=[]))
        except FAILURES as error:
            raise UsageError(diagnose_failure(loader, sources, words, error)) from None
        except SystemExit:  # Hydra's exit if there is no such package
            raise UsageError(
                f"the configuration has nothing at {flags.package!r}: see `launch --cfg {flags.cfg}`"
            ) from None
    print_text(output.getvalue())
    return 0


def ask_completion(sources: Sources, request: str, words: Sequence[str] = ()) -> str:
    """Return what Hydra's shell completion prints for `install=bash`, or for a query of these words.

    Raises UsageError for a shell that it does not know, or for words that it cannot read.
    """
    sources = add_searchpath(sources, words)
    *before, last = words or [""]
    # Hydra takes the line from the environment, splits it at white space, and answers on stdout.
    whole = [word for word in normalize_overrides(sources, before) if len(word.split()) == 1]
    line = " ".join(["launch", *whole, last])
    output = io.StringIO()
    try:
        os.environ["COMP_LINE"] = line
        with open_hydra(sources), redirect_stdout(output):
            hydra: Any = GlobalHydra.instance().hydra
            hydra.shell_completion(sources.primary, [request])
    except FAILURES as error:
        raise UsageError(f"{request}: {shorten_message(error)}") from None
    finally:
        del os.environ["COMP_LINE"]
    return output.getvalue()
