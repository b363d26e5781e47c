"""Configuration by Hydra: composed, resolved to `Settings`; what Hydra has no use for is refused."""

import gc
import io
import logging
import os
import re
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from launcher.config.program import write_values
from launcher.config.run_path import RUN_DIR, flatten
from launcher.config.settings import Settings, read_texts, refuse
from launcher.config.words import (
    FIELDS,
    PRIMARY,
    Flags,
    Sources,
    explain_foreign,
    find_shipped,
    make_parser,
    read_key,
    rewrite_override,
)
from launcher.errors import LaunchError, UsageError
from launcher.fields import check_values, describe_shape, show_value
from launcher.files import name_user
from launcher.text import print_text, suggest

logger = logging.getLogger(__name__)

ACTED_ON = ("mode", "searchpath", "sweeper", "sweep.dir", "job.config")
"""Keys and groups of `hydra` that have an effect, with all keys below them."""
HYDRAS_FOLDER = "multirun/${now:"
"""How Hydra's default of `hydra.sweep.dir` begins."""
MISTAKES = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, OverflowError),
    RecursionError,
)
"""What Hydra and OmegaConf raise for a user's mistake."""
FAILURES = (*MISTAKES, AssertionError, AttributeError, LookupError, TypeError)
"""The others are for a file of a shape that Hydra does not expect, or for a wrong call of ours."""
BESIDE = {
    "env": "; a variable is set by itself: env.{0}=VALUE",
    "cluster": "; any other option of sbatch is cluster.additional.{0}, of srun cluster.srun.{0}",
    "fit": "; what the estimate has no key for, `launch fit -- PROGRAM` measures on fake tensors",
}
"""Where else something is that a section has no key for."""


@dataclass(slots=True)
class Composed:
    """A composed configuration, before the run directory is known."""

    tree: DictConfig
    """Hydra's tree, whose keys can be set and removed."""
    hydra: DictConfig
    """What `${hydra:KEY}` refers to."""
    choices: dict[str, str]
    """Option chosen for each group."""
    warnings: tuple[str, ...]
    """Hydra's warnings, each in one line."""
    sources: Sources
    """Where it comes from."""
    overrides: tuple[str, ...]
    """The command line's settings as they were given; of a job of a sweep, its own."""
    words: tuple[str, ...]
    """The same in Hydra's terms."""
    own_files: tuple[str, ...]
    """Files that are not the shipped ones, relative to the working directory."""
    given_run_dir: str | None
    """`run_dir` as it is given; in the tree stands the one that was chosen last."""
    sweep_dir: str | None
    """`hydra.sweep.dir` of a sweep, if the user has set it; launch has no use for Hydra's default."""
    params: Mapping[str, object]
    """`hydra.sweeper.params` of the basic sweeper of a sweep."""

    @property
    def asks_sweep(self) -> bool:
        """Whether `hydra.mode` is MULTIRUN."""
        return bool(self.hydra.hydra.mode == RunMode.MULTIRUN)

    @property
    def sweeper(self) -> str:
        """The chosen option of the group `hydra/sweeper`."""
        return str(self.hydra.hydra.runtime.choices["hydra/sweeper"])

    @property
    def given(self) -> frozenset[str]:
        """Keys that the command line sets."""
        return frozenset(map(read_key, self.overrides))

    def set_run_dir(self, run_dir: str | None) -> None:
        """Let `${run_dir}` and `${hydra:runtime.output_dir}` refer to a run directory."""
        self.tree.run_dir = run_dir
        is_known = run_dir is not None and "${" not in run_dir  # else it may refer to itself
        self.hydra.hydra.runtime.output_dir = run_dir if is_known else RUN_DIR
        HydraConfig.instance().cfg = cast(Any, self.hydra)


def read_values(composed: Composed, keys: Sequence[str]) -> dict[str, object]:
    """Return single values that are needed before the run directory is known; raises UsageError."""
    try:
        composed.set_run_dir(composed.given_run_dir)  # another run may have taken the one that was chosen
        return {key: OmegaConf.select(composed.tree, key, throw_on_missing=True) for key in keys}
    except MISTAKES as error:
        raise explain_failure(error, composed.sources) from None


def resolve(composed: Composed, run_dir: Path | None = None) -> Settings:
    """Resolve interpolations, `${run_dir}` among them, and return typed values; raises UsageError.

    A verb that starts nothing has no run directory: `RUN_DIR` stands for it. A machine's snapshot becomes a
    path.
    """
    sources = composed.sources
    try:
        composed.set_run_dir(composed.given_run_dir)
        chosen = str(run_dir) if run_dir else composed.tree.run_dir  # an interpolation may give null
        composed.set_run_dir(RUN_DIR if chosen is None else chosen)
        config = cast(Settings, OmegaConf.to_object(composed.tree))
    except MISTAKES as error:
        raise explain_failure(error, sources) from None
    if chosen is None:
        composed.tree.run_dir = config.run_dir = None
    check_values(config)
    config.env = write_values(config.env)
    if (path := config.machine.snapshot) is not None and not os.path.exists(path):  # noqa: PTH110 - or a NUL
        config.machine.snapshot = str(sources.find_file(f"machine/{path}") or path)
    if (name := config.cluster.machine) is not None and not Path(name).is_file():
        found = sources.find_file(f"machine/{name}.json") or sources.find_file(f"machine/{name}")
        if found is None:
            near = suggest(name, sources.list_options("machine"))
            raise UsageError(f"cluster.machine={name} is no machine in conf/machine and no snapshot{near}")
        config.cluster.machine = str(found)
    return config


version.setbase("1.3")
ConfigStore.instance().store(name="launch_schema", node=Settings)
FORMS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]*|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:bool": re.compile(r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE)$"),
}
"""YAML 1.1's without numbers to base 60, on and off: `time: 10:00:00` and `check: off` are texts."""
# OmegaConf 2.4 reads with the loader in C, and 2.3 with the one of this name: it takes a quarter of the time.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]
yaml.SafeLoader.yaml_implicit_resolvers = {
    first: [(tag, FORMS.get(tag, form)) for tag, form in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Hydra copies its sources twice for a composition, and with them all that the store holds, though what is
# read of it is copied once more: a fifth of the time.
ConfigStore.__deepcopy__ = lambda store, _: store  # type: ignore[attr-defined]


STORED: Any = ConfigStore.instance().repo["hydra"]["config.yaml"]
HYDRAS_OWN: DictConfig = STORED.node
NO_GROUPS: DictConfig = OmegaConf.structured(HydraConf(defaults=[]))
"""Hydra's settings with and without the options of its groups, which take longer to compose than ours."""


@contextmanager
def open_hydra(sources: Sources, settings: DictConfig = HYDRAS_OWN) -> Iterator[Hydra]:
    """Give a Hydra that reads these sources, and restore the previous one at the end; raises UsageError.

    What it raises is told as the user's mistake.
    """
    previous = GlobalHydra.instance().hydra  # that of a sweep, if a trial is composed here
    GlobalHydra.instance().clear()
    collects = gc.isenabled()
    gc.disable()  # thousands of small values, and hardly any garbage: a fifth of the time
    try:
        STORED.node = settings
        first, *others = sources.folders
        path = create_config_search_path(str(first))
        for folder in others:
            path.prepend("launch", f"file://{folder}", "schema")
        with warnings.catch_warnings(action="ignore"):
            yield Hydra.create_main_hydra2(PRIMARY, path)
    except FAILURES as error:
        raise explain_failure(error, sources) from None
    finally:
        if collects:
            gc.enable()
        GlobalHydra.instance().hydra = previous
        STORED.node = HYDRAS_OWN


def compose(
    sources: Sources, overrides: Sequence[str], number: int | None = None, *, sweep: bool = False
) -> Composed:
    """Compose the configuration, of the job with this number in a sweep; raises UsageError with the fix.

    With `sweep` it is what is the same for all jobs of a sweep.
    """
    settings = HYDRAS_OWN if sweep else choose_settings(sources, overrides)
    with open_hydra(sources, settings) as hydra, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        words = normalize_overrides(hydra, sources, overrides, sweep=sweep)
        mode = RunMode.MULTIRUN if sweep else RunMode.RUN
        tree = hydra.config_loader.load_configuration(sources.primary, words, mode)
        # The folders of `hydra.searchpath` come last, as Hydra has found them.
        searched = (Path(each.path) for each in tree.hydra.runtime.config_sources if each.schema == "file")
        sources = replace(sources, folders=tuple(dict.fromkeys((*sources.folders, *searched))))
        own_files = list_own_files(sources, tree)
        if OmegaConf.get_type(tree) is not Settings:
            raise refuse_primary(sources)
        OmegaConf.set_struct(tree, value=False)
        HydraConfig.instance().set_config(tree)  # for `${hydra:KEY}`
        interpolated = cast(DictConfig, HydraConfig.instance().cfg)
        OmegaConf.set_readonly(interpolated.hydra, value=False)
        if number is not None:
            interpolated.hydra.job.num, interpolated.hydra.job.id = number, str(number)
        choices = {str(group): str(option) for group, option in tree.hydra.runtime.choices.items() if option}
        for group, option in choices.items():
            if group.startswith("hydra/") and option not in ("default", "basic"):
                refuse_hydra(f"{group}={option}")
        sweep_dir, params = None, dict[str, object]()
        if sweep:  # while the tree has the `hydra` that they may refer to
            is_given = not str(tree.hydra.sweep._get_node("dir")._value()).startswith(HYDRAS_FOLDER)
            sweep_dir = str(tree.hydra.sweep.dir) if is_given else None
            if choices.get("hydra/sweeper") == "basic":
                params.update(tree.hydra.sweeper.params or {})
        del tree["hydra"]
        sets_workers = "dataloader.num_workers" in map(read_key, words)
        for file in own_files:
            found = yaml.load(Path(file).read_text(encoding="utf-8"), yaml.SafeLoader)
            if found is not None and not isinstance(found, dict):  # OmegaConf takes a text for a key
                raise UsageError(f"{file} holds no settings: write them a line each, as KEY: VALUE")
            for key, value in flatten((found or {}).get("hydra") or {}).items():
                refuse_hydra(f"hydra.{key}={show_value(value)}")
            section = (found or {}).get("dataloader")
            sets_workers |= isinstance(section, dict) and "num_workers" in section
        if sets_workers:
            tree.dataloader.workload = ""  # the user's own number is not derived from a workload
    return Composed(
        tree=tree,
        hydra=interpolated,
        choices={group: option for group, option in choices.items() if not group.startswith("hydra/")},
        warnings=tuple(dict.fromkeys(" ".join(str(entry.message).split()) for entry in caught)),
        sources=sources,
        overrides=tuple(overrides),
        words=tuple(words),
        own_files=tuple(own_files),
        given_run_dir=cast(Any, tree._get_node("run_dir"))._value(),
        sweep_dir=sweep_dir,
        params=params,
    )


def choose_settings(sources: Sources, overrides: Sequence[str]) -> DictConfig:
    """Return Hydra's settings without its groups, unless something speaks of Hydra."""
    uses_hydra = any("hydra" in word for word in overrides) or sources.mention("hydra")
    return HYDRAS_OWN if uses_hydra else NO_GROUPS


def list_own_files(sources: Sources, tree: DictConfig) -> list[str]:
    """Return the chosen files that are not the shipped ones, relative to the working directory."""
    chosen = [f"{group.partition('@')[0]}/{option}" for group, option in tree.hydra.runtime.choices.items()]
    found = [sources.find_file(f"{name}.yaml") for name in (sources.primary, "launch_defaults", *chosen)]
    return [
        os.path.relpath(path) for path in dict.fromkeys(found) if path and find_shipped() not in path.parents
    ]


def name_files(own_files: Sequence[str]) -> None:
    """Say which configuration is not the shipped one, and whose it is if it is another user's."""
    named = []
    for path in own_files:
        owner = Path(path).stat().st_uid
        named.append(path if owner in (os.geteuid(), 0) else f"{path} (of {name_user(owner)})")
    if named:
        logger.info(f"configuration from {', '.join(named)}")


def normalize_overrides(
    hydra: Hydra, sources: Sources, overrides: Sequence[str], *, sweep: bool = False
) -> list[str]:
    """Return the overrides in Hydra's terms; raises UsageError for what it cannot read or act on."""
    loader, parser = cast(ConfigLoaderImpl, hydra.config_loader), OverridesParser.create()
    for word in overrides:
        refuse_hydra(word)
    paths = [word for word in overrides if read_key(word) == "hydra.searchpath"]
    groups = loader.get_group_options("", ObjectType.GROUP, sources.primary, paths)
    defaults = list_defaults(loader.repository, sources.primary)
    words = [rewrite_override(word, groups, defaults, sweep=sweep) for word in overrides]
    for given, word in zip(overrides, words, strict=True):
        try:
            value = parser.parse_override(word).value()
        except FAILURES:
            value = given
        if value is given or not read_key(given):
            raise UsageError(f"cannot read {given!r} as KEY=VALUE: quote the value, as in 'KEY=\"…\"'")
        is_group = read_key(word) in groups and not word.startswith("~")
        # A mapping sets some of a section's keys, and stays.
        names = value if isinstance(value, list) else ["" if isinstance(value, dict) else value]
        if is_group and any(isinstance(name, int | float | list | dict | None) for name in names):
            raise UsageError(f"{given}: name an option of the group, as in {read_key(word)}=NAME")
    return words


def list_defaults(repository: ConfigRepository, name: str) -> set[str]:
    """Return the groups that have a default in a primary file, or in the files that it builds on."""
    found = repository.load_config(name)
    groups: set[str] = set()
    for entry in (found and found.defaults_list) or ():
        if isinstance(entry, GroupDefault):
            groups.add(f"{entry.group}@{entry.package}" if entry.package else str(entry.group))
        elif isinstance(entry, ConfigDefault) and entry.path not in (None, "_self_", "launch_schema"):
            groups |= list_defaults(repository, str(entry.path))
    return groups


def refuse_hydra(word: str) -> None:
    """Raise UsageError for a setting of Hydra's that has no effect, as the user wrote it."""
    key = read_key(word)
    if not key.startswith(("hydra.", "hydra/")):
        return
    name = key[len("hydra.") :].replace("/", ".") + "."
    fix = next((fix for one, fix in read_texts()["hydra"].items() if name.startswith(f"{one}.")), "")
    if fix or not any(name.startswith(f"{one}.") for one in ACTED_ON):
        raise UsageError(f"{word} is not carried out by launch: {fix or 'leave it out'}")


def explain_failure(error: BaseException, sources: Sources) -> LaunchError:
    """Return a user's mistake in one line, with the file and the nearest right name.

    Raises what is a defect of ours: of our code, or of Hydra's where there is no file of the user's.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_ours = str(frames[-1].f_globals.get("__name__")).startswith("launcher.")
    if not isinstance(error, MISTAKES) and (is_ours or sources.folders == (find_shipped(),)):
        raise error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        refuse_hydra(f"{group}={option}")
        hint = ", or install the plugin that has it" if group.startswith("hydra/") else ""
        near = suggest(option, error.options or (), most=20) + hint
        return UsageError(f"there is no {option!r} in {group or 'the configuration'}{near}")
    causes = (error, error.__cause__, error.__context__)
    cause = next((one for one in causes if isinstance(one, OmegaConfBaseException)), error)
    lines = [line.strip() for line in str(cause).splitlines()]
    text = " ".join(
        line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))
    )
    if isinstance(error, RecursionError):
        text = "it is built on itself or holds itself, or has too many levels"
    read = [frame.f_locals["config_path"] for frame in frames if frame.f_locals.get("config_path")]
    merged = re.match("In '(.*?)': ", str(error))
    file = merged[1] if merged else read[-1] if read else ""
    path = sources.find_file(f"{file.removesuffix('.yaml')}.yaml") if file else None
    where = f"{os.path.relpath(path)}: " if path else ""
    key = getattr(cause, "full_key", None) or ""
    if isinstance(error, OverflowError) and (named := re.search(r"full_key: (\S+)", str(error))):
        key = named[1]  # OmegaConf adds lines to errors of others, too
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        above, _, name = key.rpartition(".")
        if not above and OmegaConf.get_type(cause.parent_node) is not Settings:
            return refuse_primary(sources)
        if foreign := explain_foreign(key):
            return UsageError(f"{where}{key} {foreign}")
        known = [*map(str, cause.parent_node), *([] if above else sources.list_groups())]
        near = suggest(name, known, prefix=f"{above}." if above else "", most=20)
        beside = BESIDE.get(above, "").format(name)
        return UsageError(f"{where}there is no key {key!r}{near or ': see `launch --help-all`'}{beside}")
    if key in FIELDS and (shape := describe_shape(key, FIELDS[key].type)):
        return UsageError(f"{where}{key}: give {shape}")
    return UsageError(f"{where}{f'{key}: ' if key else ''}{text or type(error).__name__}")


def refuse_primary(sources: Sources) -> LaunchError:
    """Return the error of a primary file that does not build on launch_schema."""
    path = sources.find_file(f"{sources.primary}.yaml")
    return refuse("primary", file=os.path.relpath(path) if path else sources.primary)


def show_flags(flags: Flags) -> int:
    """Show what `--cfg`, `--info` or `--hydra-help` ask for, as Hydra does; raises UsageError."""
    name, output = flags.sources.primary, io.StringIO()
    is_ours = flags.cfg == "job" and "hydra" not in str(flags.package)
    settings = choose_settings(flags.sources, flags.overrides) if is_ours else HYDRAS_OWN
    with (
        open_hydra(flags.sources, settings) as hydra,
        redirect_stdout(output),
        redirect_stderr(io.StringIO()),
    ):
        words = normalize_overrides(hydra, flags.sources, flags.overrides)
        try:
            if flags.cfg:
                hydra.show_cfg(name, words, flags.cfg, flags.package, flags.resolve)
            elif flags.info:
                hydra.show_info(flags.info, name, words)
            else:
                parser = make_parser()  # Hydra's help describes this argument
                parser.add_argument("overrides", nargs="*", help="KEY=VALUE, to override the configuration")
                hydra.hydra_help(name, parser, Namespace(overrides=[]))
        except SystemExit:  # Hydra's exit if there is no such package
            raise refuse("no_package", flags=flags) from None
    print_text(output.getvalue())
    return 0


def ask_completion(sources: Sources, request: str, words: Sequence[str]) -> str:
    """Return what Hydra's shell completion answers to a query of these words; raises UsageError."""
    *before, last = words
    output = io.StringIO()
    with open_hydra(sources) as hydra, redirect_stdout(output):
        # Hydra takes the line from the environment, splits it at white space, and answers on stdout.
        whole = [word for word in normalize_overrides(hydra, sources, before) if len(word.split()) == 1]
        os.environ["COMP_LINE"] = " ".join(["launch", *whole, last])
        try:
            hydra.shell_completion(sources.primary, [request])
        finally:
            del os.environ["COMP_LINE"]
    return output.getvalue()
