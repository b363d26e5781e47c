"""The words of a command line: folders of configuration, Hydra's flags, overrides, near and foreign names.

Nothing here loads Hydra, which takes longer than the rest of a start.
"""

import argparse
import difflib
import json
import os
import re
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from launcher.config import settings
from launcher.config.settings import ClusterConfig, Settings
from launcher.errors import UsageError
from launcher.files import LARGEST, read_file

PRIMARY = "launch"
"""Name of the primary configuration: not `config`, which a training program's own conf/ often holds."""
DEFAULTS = "launch_defaults"
"""What that is built on, and what a primary configuration of one's own can be."""

NESTED = ("*.yaml", "*/*.yaml", "*/*/*.yaml")
"""Where primary files, options, and options of groups in groups are."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Folders of configuration, the first match winning, and the name of the primary file."""

    folders: tuple[Path, ...]
    primary: str = PRIMARY
    searchpath: tuple[Path, ...] = ()
    """Folders of `hydra.searchpath`, which come after the others; Hydra finds these by itself."""

    @property
    def everywhere(self) -> tuple[Path, ...]:
        """All folders."""
        return self.folders + self.searchpath

    def has_group(self, name: str) -> bool:
        """Tell whether a group of this name exists in any folder."""
        try:
            return name != "" and any((folder / name).is_dir() for folder in self.everywhere)
        except OSError:  # too long to be a name
            return False

    def list_groups(self) -> tuple[str, ...]:
        """Return the groups in alphabetic order."""
        return tuple(
            sorted({path.parent.name for folder in self.everywhere for path in folder.glob("*/*.yaml")})
        )

    def list_options(self, group: str) -> tuple[str, ...]:
        """Return the options of a group in alphabetic order."""
        return tuple(
            sorted({path.stem for folder in self.everywhere for path in (folder / group).glob("*.yaml")})
        )

    def find_file(self, name: str) -> Path | None:
        """Return the file that `name` (`launch`, `model/tiny`) is read from; None if there is none."""
        paths = (folder / f"{name}.yaml" for folder in self.everywhere)
        try:
            return next((path for path in paths if path.is_file()), None)
        except OSError:  # too long to be a name
            return None

    def find_beside(self, group: str, name: str | None) -> str | None:
        """Return the file that an option of a group names: from here, else beside the option, first match.

        A name that leads to no file is returned as it is.
        """
        if name is None:
            return None
        try:
            beside = (folder / group / name for folder in self.everywhere)
            found = None if Path(name).exists() else next((path for path in beside if path.is_file()), None)
        except (OSError, ValueError):  # too long to be a name, or with a NUL in it
            found = None
        return str(found or name)

    def list_own(self, choices: Mapping[str, str]) -> list[str]:
        """Return the chosen files that are not the shipped ones, relative to the working directory.

        A choice is of a group, or of `group@package`.
        """
        options = (f"{group.partition('@')[0]}/{option}" for group, option in choices.items())
        found = dict.fromkeys(map(self.find_file, (self.primary, DEFAULTS, *options)))
        return [os.path.relpath(path) for path in found if path and find_shipped() not in path.parents]

    def read_own_files(self, most: int) -> Iterator[tuple[Path, bytes]]:
        """Give the user's files, chosen or not, that can be read and have `most` bytes at most."""
        own_folders = (folder for folder in self.everywhere if folder != find_shipped())
        files = (path for folder in own_folders for pattern in NESTED for path in folder.glob(pattern))
        for path in filter(os.path.isfile, files):
            try:
                content = read_file(path, most, follow=True)
            except OSError:
                continue
            yield path, content

    def mentions(self, word: str) -> bool:
        """Tell whether a file of the user's holds a word; Hydra reports a file that cannot be read."""
        return any(word.encode() in content for _, content in self.read_own_files(LARGEST))


def find_shipped() -> Path:
    """Return the shipped conf/: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def find_sources(config_path: str | None, config_dir: str | None, primary: str | None) -> Sources:
    """Find the folders: conf/ here (or `config_path`), the shipped ones, then `config_dir`.

    Raises UsageError for a folder that was named and is not there, or that cannot be read.
    """
    own = Path(config_path or "conf").absolute()
    last = [Path(config_dir).absolute()] if config_dir else []
    for folder in ([own] if config_path else []) + last:
        if not folder.is_dir():
            raise UsageError(
                f"there is no configuration folder {folder}: check --config-path and --config-dir"
            )
    folders = tuple(folder for folder in (own, find_shipped(), *last) if folder.is_dir())
    for folder in folders:
        check_readable(folder)
    return Sources(folders, primary or PRIMARY)


def check_here() -> None:
    """Raise UsageError if the working directory has been removed."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror}): cd to another") from None


def check_readable(folder: Path) -> None:
    """Raise UsageError for a folder with a group or an option in it that cannot be read, or is a pipe."""
    for path in (folder, *folder.glob("*/"), *folder.glob("*.yaml"), *folder.glob("*/*.yaml")):
        needed = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
        if path.exists() and not (path.is_dir() or path.is_file()):
            raise UsageError(f"{path} is no regular file: move it away, or start from another folder")
        if not os.access(path, needed):
            raise UsageError(f"{path} cannot be read: `chmod -R u+rX {folder}`, or start from another folder")


MOST_BYTES = 1 << 19
"""Of a file: PyYAML and OmegaConf take some seconds for as much."""


def read_yaml(path: Path) -> object:
    """Return what a file holds; raises UsageError for what is too large, else YAMLError or RecursionError."""
    import yaml  # 20 ms, which help has no use for

    return yaml.safe_load(read_text(path))


def read_text(path: Path) -> str:
    """Return the text of a configuration file; raises UsageError for one that Hydra is not to read."""
    try:
        return read_file(path, MOST_BYTES, follow=True).decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): correct it, or move it away") from None


@dataclass(frozen=True, slots=True)
class Flags:
    """What the flags and overrides ask, with the folders they are read from."""

    sources: Sources
    overrides: tuple[str, ...]
    multirun: bool = False
    cfg: str | None = None
    """`job`, `hydra` or `all`: show the configuration instead of running."""
    resolve: bool = False
    package: str | None = None
    info: str | None = None
    completion: bool = False
    hydra_help: bool = False
    run: bool = False
    """Run once, whatever `hydra.mode` says."""

    @property
    def asks_hydra(self) -> bool:
        """Whether a flag asks Hydra to show something instead of running."""
        return bool(self.cfg or self.info or self.completion or self.hydra_help)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line with the fix."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}: see `launch --help`")


def make_parser() -> Parser:
    """Return the parser of the flags; overrides are whatever else there is."""
    parser = Parser(prog="launch", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", help="a short help, or that of a verb")
    parser.add_argument("--help-all", action="store_true", help="this help")
    parser.add_argument("--version", action="store_true", help="the version")
    parser.add_argument(
        "-c", "--cfg", choices=["job", "hydra", "all"], help="print the configuration and stop"
    )
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    parser.add_argument("-p", "--package", help="with --cfg: print this part alone")
    parser.add_argument("-m", "--multirun", action="store_true", help="run each combination of a=1,2 b=3,4")
    parser.add_argument("-cn", "--config-name", help="primary configuration instead of launch.yaml")
    parser.add_argument("-cp", "--config-path", help="folder to search first, instead of ./conf")
    parser.add_argument("-cd", "--config-dir", help="folder to search as well, after the shipped one")
    infos = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument(
        "-i", "--info", nargs="?", const="all", choices=infos, help="print how it was composed"
    )
    parser.add_argument(
        *("-sc", "--shell-completion"),
        dest="completion",
        action="store_true",
        help="with install=bash, zsh or fish: completion",
    )
    parser.add_argument("--hydra-help", action="store_true", help="Hydra's own help")
    parser.add_argument("-r", "--run", action="store_true", help="run (the default)")
    return parser


def parse_flags(words: Sequence[str]) -> Flags:
    """Read flags and overrides in any order; raises UsageError."""
    parser = make_parser()
    known, overrides = parser.parse_known_args(list(words))
    for word in overrides:
        if word.startswith("-"):
            raise UsageError(f"there is no option {word}: see `launch --help`")
    if (known.package is not None or known.resolve) and not known.cfg:
        raise UsageError(
            "--package and --resolve go with --cfg: write --cfg job as well, or leave them out"
            " (SLURM's -p is cluster.partition=NAME)"
        )
    sources = find_sources(known.config_path, known.config_dir, known.config_name)
    given = {name: value for name, value in vars(known).items() if name in Flags.__dataclass_fields__}
    return Flags(sources, tuple(overrides), **given)


def takes_flag_value(option: str, word: str) -> bool | None:
    """Tell whether a word after one of the flags is its value; None if `option` is none of the flags."""
    action = make_parser()._option_string_actions.get(option)
    if action is None:
        return None
    if action.nargs == "?":
        return word in (action.choices or ())
    return action.nargs is None


def list_flag_values(option: str) -> list[str] | None:
    """Return the values that a flag takes, none if it takes any; None if no value follows."""
    action = make_parser()._option_string_actions.get(option)
    if action is None or action.nargs == 0:
        return None
    return list(action.choices or ()) if action.nargs is None or action.choices else None


def find_flag_sources(words: Sequence[str]) -> Sources:
    """Return the folders that the flags among these words choose; raises UsageError."""
    known, _ = make_parser().parse_known_args(list(words))
    return find_sources(known.config_path, known.config_dir, known.config_name)


FREE_FORM = ("env.", "allocator.", "torchrun.rdzv_conf.", "cluster.additional.", "cluster.srun.")
"""Keys that the schema does not list, and that need no `+`, one by one or as a mapping in braces."""
MODEL_CONFIG = "model.config"
"""A path, which no model of the group has."""
SLURM_TEXTS = tuple(f"cluster.{each.name}" for each in fields(ClusterConfig) if each.type == str | None)
"""Keys in SLURM's own notation: `n[0-3],n7`, `a100&ib`, `afterok:1?afterok:2`."""
NEUTRAL = {
    "binding": "binding=none",
    "cluster": "cluster=local",
    "dataloader": "dataloader=none",
    "gc": "gc=default",
    "machine": "machine=local",
}
"""What to write in place of `~GROUP` for a group that needs an option."""
OVERRIDE = re.compile(r"(\+{0,2})([^=@~+]+)([=@].*)", re.DOTALL)
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
"""A whole value in Hydra's quotes."""
NON_ASCII = re.compile(r"=(?=[^'\"\[\](){},]*[^\x00-\x7f])[^'\"\[\](){},]*", re.DOTALL)
"""A plain value with a letter that Hydra's grammar does not know: `=é`, `=/home/ü/data`."""


def rewrite_override(sources: Sources, defaults: set[str], word: str, *, sweep: bool) -> str:
    """Let `model=x` and `+model=x` both choose from a group, and `env.X=…` set a variable byte for byte.

    Hydra refuses the first for a group without a default, and the second for one with a default (`defaults`).
    Values may have letters that are not ASCII. With `sweep`, commas in a variable's value separate the jobs'
    values.
    """
    match = OVERRIDE.fullmatch(word)
    if not match:
        return word
    key, rest = match[2], match[3]
    if key == "dataloader" and re.fullmatch(r"=[+-]?\d+", rest, re.ASCII):  # no option of the group
        return f"dataloader.num_workers{rest}"
    variable = (key.startswith("env.") or key == MODEL_CONFIG) and not sweep and rest.startswith("=")
    if key == "env.from_file" and rest.startswith(("=[", "=null")):  # a list of files, or none
        variable = False
    is_text = key in (*SLURM_TEXTS, "tune.option") and not sweep and rest not in ("=", "=null")
    divisions = key.startswith("allocator.") and rest.startswith("=[") and ">" in rest  # [256:1,>:8]
    if variable or divisions or NON_ASCII.fullmatch(rest) or (is_text and rest.startswith("=")):
        rest = "=" + quote_value(rest[1:])
    # A whole `env` is not rewritten: within braces, Hydra makes 1000.0 of `1e3`.
    whole = f"{key}." in FREE_FORM and key != "env" and rest.startswith("={")
    if key.startswith(FREE_FORM) or whole or key == MODEL_CONFIG:
        return f"++{key}{rest}"
    if "." not in key and sources.has_group(key) and not key.startswith("hydra/"):
        package = rest.partition("=")[0]  # `@program.net` puts the option there
        return f"{'' if f'{key}{package}' in defaults else '+'}{key}{rest}"
    return f"{match[1]}{key}{rest}"


def check_word(word: str) -> None:
    """Raise UsageError for a word that is no override, or `~KEY` if the key always has a value."""
    if not word:
        raise UsageError("'' is not KEY=VALUE: an empty word, perhaps of an unset shell variable in quotes")
    if word.startswith(("=", "@")):
        raise UsageError(f"{word!r} is not KEY=VALUE: the key is missing")
    if "=" not in word and not word.startswith("~"):
        raise UsageError(f"{word!r} is not KEY=VALUE")
    if not word.startswith("~"):
        return
    *above, name = read_key(word).split(".")
    parent: object = Settings()
    for part in above:
        parent = getattr(parent, part, None) if is_dataclass(parent) else None
    value = getattr(parent, name, {}) if is_dataclass(parent) else {}
    if isinstance(value, dict):
        return
    key = ".".join((*above, name))
    if is_dataclass(value):
        fix = NEUTRAL.get(key) or f"{key}.{fields(value)[0].name}=…, or another key of it"
    else:
        fix = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
    raise UsageError(f"{word} changes nothing, since {key} always has a value: write {fix}")


def quote_value(value: str) -> str:
    """Quote a value for Hydra's grammar unless the user has: `1e3` stays `1e3`, and spaces are fine.

    In the grammar, backslashes are doubled only before a quote.
    """
    if QUOTED.fullmatch(value):
        return value
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"


def read_key(word: str) -> str:
    """Return the key of an override, as in the configuration: `+model@x=y` sets `model`."""
    return re.split("[=@]", word.lstrip("+~"))[0]


def read_defaults(sources: Sources, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the groups that have a default in a primary file, or in the files that it builds on.

    An error in a file is ignored here; composition reports it.
    """
    import yaml

    path = sources.find_file(name)
    try:
        tree = read_yaml(path) if path else None
    except (ValueError, RecursionError, yaml.YAMLError):
        return set()
    entries = tree.get("defaults") if isinstance(tree, dict) else None
    groups: set[str] = set()
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            groups |= {str(key).removeprefix("override ").removeprefix("optional ") for key in entry}
        elif isinstance(entry, str) and entry not in {"_self_", name, *seen}:
            groups |= read_defaults(sources, entry, seen | {name})
    return groups


def asks_sweep(flags: Flags, verb: str) -> bool:
    """Tell whether a command line is for a sweep: by `-m`, else `hydra.mode` (in a file, for runs only)."""
    if flags.multirun or flags.run:
        return flags.multirun
    modes = [word for word in flags.overrides if read_key(word) == "hydra.mode"]
    if modes:
        return modes[-1].rpartition("=")[2].strip("'\"") == "MULTIRUN"
    if verb != "run" or not (mentions_hydra(flags.overrides) or flags.sources.mentions("hydra")):
        return False
    from launcher.config.compose import add_searchpath
    from launcher.config.sweep import read_multirun

    sources = add_searchpath(flags.sources, flags.overrides)
    return sources.mentions("MULTIRUN") and read_multirun(sources, flags.overrides).asked


def mentions_hydra(words: Sequence[str]) -> bool:
    """Tell whether a word of the command line may change or use a setting of Hydra's."""
    return any("hydra" in word for word in words)


def refuse_other_mode(flags: Flags, *, sweep: bool) -> None:
    """Raise UsageError for a word that has no effect on a sweep, or that only a sweep can have."""
    for word in flags.overrides:
        key = read_key(word)
        if not sweep and key.startswith(("hydra.sweep", "hydra/sweeper")):
            raise UsageError(f"{word} goes with -m, for a sweep, and this is a single run")


CLUSTER = frozenset(field.name for field in fields(ClusterConfig))
SHORT = "short"
SUBMITIT, SLURM = "submitit's", "SLURM's"
TOP = ("nodes", "name")
"""Keys of ours that submitit's `slurm_` may stand before."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def explain_foreign(key: str) -> str:
    """Say whose a key is, and what there is here instead: `is torchrun's: the key here is nodes`.

    Empty for a key that no other tool is known to have.
    """
    if VARIABLE.fullmatch(key):
        return f"is a variable of the environment: the key here is env.{key}"
    name = key.removeprefix("hydra.launcher.").removeprefix("cluster.")
    is_submitits = key.startswith("hydra.launcher.") or name.startswith("slurm_")
    if "." in name or (key.startswith("cluster.") and name in CLUSTER):
        return ""
    plain = name.removeprefix("slurm_")
    for tool, names in read_tables().items():
        if plain in names and tool != SHORT:
            fix = names[plain]
            known = fix if fix.startswith("leave it out") else f"the key here is {fix}"
            return f"is {SUBMITIT if is_submitits else tool}: {known}"
    if plain in CLUSTER or (plain in TOP and is_submitits):
        found = plain if plain in TOP else f"cluster.{plain}"
    else:
        found = f"cluster.additional.{plain}" if name != plain else ""
    return f"is {SUBMITIT if is_submitits else SLURM}: the key here is {found}" if found else ""


def explain_option(option: str) -> str:
    """Say the same of an option, `--nproc-per-node` or `-N`."""
    short = read_tables()[SHORT].get(option[1:], "")
    return explain_foreign(option[2:].replace("-", "_") if option.startswith("--") else short)


@cache
def read_tables() -> dict[str, dict[str, str]]:
    """Return what to write instead of each name, by tool."""
    return tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8"))


COMPOSING = re.compile(r"In '(?P<file>[^']*)': \w+ raised while composing config: ")
"""How Hydra's errors begin that are about a value in a file, named by its group."""
NO_SECTION = re.compile(r"Invalid type assigned: \w+ is not a subclass of (?P<schema>\w+)\. ")
NO_MAPPING = re.compile(r"Cannot assign \w+ to Dict\[")
PLACES = {"fit": "; what the estimate has no key for, `launch fit -- PROGRAM` measures on fake tensors"}
"""Where else something is that a section has no key for."""
UNKNOWN = re.compile(r"Key '[^']*' not in '(?P<schema>\w+)'")
"""OmegaConf's words for a key that a dataclass does not have."""


def suggest(word: str, known: Sequence[str]) -> str:
    """Return `: did you mean …?`; without a similar name the choices, if they are few."""
    near = difflib.get_close_matches(word, dict.fromkeys(known), n=2, cutoff=0.5)
    if near:
        return f": did you mean {' or '.join(near)}?"
    return f": choose from {', '.join(sorted(known))}" if 0 < len(known) < 20 else ": see `launch --help-all`"


def suggest_dotted_key(key: str, known: Sequence[str]) -> str:
    """Return the same for a dotted key, from the keys that have the same prefix."""
    above, _, name = key.rpartition(".")
    beside = {each.rpartition(".")[2]: each for each in known if above and each.rpartition(".")[0] == above}
    if not beside:
        return suggest(key, known)
    words = difflib.get_close_matches(name, beside, n=2, cutoff=0.6)
    near = [beside[word] for word in words or [word for word in beside if word.startswith(name)]]
    if near:
        return f": did you mean {' or '.join(near)}?{PLACES.get(above, '')}"
    if above == "cluster":
        return f": any other option of sbatch is cluster.additional.{name}, of srun cluster.srun.{name}"
    return f": choose from {', '.join(sorted(beside.values()))}{PLACES.get(above, '')}"


def shorten_message(error: BaseException) -> str:
    """Return an error as one line, with the key if it is known; raises one that is a defect of ours.

    Hydra raises errors such as TypeError for files of a shape that it does not expect.
    """
    if isinstance(error, AssertionError | AttributeError | LookupError | TypeError):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith("launcher."):
            raise error
    cause = error.__cause__ if str(error.__cause__ or "") else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    text = " ".join(
        line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))
    )
    where = COMPOSING.match(text)
    file = f"{where['file']}.yaml: " if where else ""
    if key and "is not a ListConfig" in text:
        return f"{file}{key}: give a list, as in {key}=[…]"
    text = text[where.end() :] if where else text
    if key and (section := NO_SECTION.match(text)) and (kind := getattr(settings, section["schema"], None)):
        return f"{file}{key}: give its keys, as in {key}.{fields(kind)[0].name}=…"
    if key and NO_MAPPING.match(text):
        return f"{file}{key}: give a mapping, as in {key}.NAME=…"
    if where and key and (unknown := UNKNOWN.match(text)):
        if foreign := explain_foreign(key):
            return f"{file}{key} {foreign}"
        kind, above = getattr(settings, unknown["schema"], None), key.rpartition(".")[0]
        names = [field.name for field in (fields(kind) if kind else ())]  # none for a Hydra plugin's class
        near = suggest_dotted_key(key, [f"{above}.{name}" if above else name for name in names])
        return f"{file}there is no key {key!r}{near}"
    return f"{file}{key}: {text}" if key else text or type(error).__name__
