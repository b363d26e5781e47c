"""The words of a command line: folders of configuration, Hydra's flags, overrides, names of other tools.

Nothing here loads Hydra, which takes longer than the rest of a start.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from launcher.config.settings import ClusterConfig, Settings, refuse
from launcher.errors import UsageError
from launcher.fields import list_settings

PRIMARY = "launch"
"""Name of the primary configuration: not `config`, which a training program's own conf/ often holds."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Folders of configuration, the first match winning, and the name of the primary file."""

    folders: tuple[Path, ...]
    primary: str = PRIMARY

    def find_file(self, name: str) -> Path | None:
        """Return the first file of this name (`launch.yaml`, `machine/dgx.json`); None if there is none."""
        try:
            return next((path for each in self.folders if (path := each / name).is_file()), None)
        except (OSError, ValueError):  # too long to be a name, or with a NUL in it
            return None

    def has_group(self, name: str) -> bool:
        """Tell whether a group of this name exists."""
        return any((folder / name).is_dir() for folder in self.folders)

    def list_groups(self) -> list[str]:
        """Return the groups in alphabetic order."""
        return sorted({path.parent.name for folder in self.folders for path in folder.glob("*/*.yaml")})

    def list_options(self, group: str) -> list[str]:
        """Return the options of a group in alphabetic order."""
        return sorted({path.stem for folder in self.folders for path in folder.glob(f"{group}/*.yaml")})

    def mention(self, word: str) -> bool:
        """Tell whether a file of the user's holds a word; Hydra reports a file that cannot be read."""
        own = [folder for folder in self.folders if folder != find_shipped()]
        try:
            files = (path for folder in own for path in folder.rglob("*.yaml") if path.is_file())
            return any(word.encode() in path.read_bytes() for path in files)
        except OSError:
            return False


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
            raise refuse("no_folder", folder=folder)
    folders = tuple(folder for folder in (own, find_shipped(), *last) if folder.is_dir())
    for folder in folders:
        if not os.access(folder, os.R_OK | os.X_OK):
            raise UsageError(f"{folder} cannot be read: `chmod u+rx {folder}`, or start from another folder")
    return Sources(folders, primary or PRIMARY)


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
    shell_completion: bool = False
    hydra_help: bool = False
    run: bool = False
    """Run once, whatever `hydra.mode` says."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line with the fix."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}: see `launch --help`")


def make_parser() -> Parser:
    """Return the parser of the flags; overrides are whatever else there is."""
    parser = Parser(prog="launch", add_help=False, allow_abbrev=False)
    switch: dict[str, Any] = {"action": "store_true"}
    parts = ["job", "hydra", "all"]
    infos = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    for flags, takes, text in (
        ("-h --help", switch, "a short help, or that of a verb"),
        ("--help-all", switch, "this help"),
        ("--version", switch, "the version"),
        ("-c --cfg", {"choices": parts}, "print the configuration and stop"),
        ("--resolve", switch, "with --cfg: resolve interpolations"),
        ("-p --package", {}, "with --cfg: print this part alone"),
        ("-m --multirun", switch, "run each combination of a=1,2 b=3,4"),
        ("-cn --config-name", {}, "primary configuration instead of launch.yaml"),
        ("-cp --config-path", {}, "folder to search first, instead of ./conf"),
        ("-cd --config-dir", {}, "folder to search as well, after the shipped one"),
        ("-i --info", {"nargs": "?", "const": "all", "choices": infos}, "print how it was composed"),
        ("-sc --shell-completion", switch, "with install=bash, zsh or fish: completion"),
        ("--hydra-help", switch, "Hydra's own help"),
        ("-r --run", switch, "run (the default)"),
    ):
        parser.add_argument(*flags.split(), help=text, **takes)
    return parser


def parse_flags(words: Sequence[str]) -> Flags:
    """Read flags and overrides in any order, options that are no flags among them; raises UsageError."""
    known, overrides = make_parser().parse_known_args(list(words))
    sources = find_sources(known.config_path, known.config_dir, known.config_name)
    given = {name: value for name, value in vars(known).items() if name in Flags.__dataclass_fields__}
    return Flags(sources, tuple(overrides), **given)


@cache
def list_flags() -> Mapping[str, argparse.Action]:
    """Return the flags by their option strings."""
    return make_parser()._option_string_actions


FIELDS = {key: each for key, _, each in list_settings(Settings())}
"""The field of each setting and section, by its dotted key."""
TEXTS = {key for key, each in FIELDS.items() if each.type in (str, str | None)} | {"model.config"}
"""Settings that are texts: their values are taken as they are, as `n[0-3],n7` of SLURM's."""
FREE_FORM = ("env.", "allocator.", "torchrun.rdzv_conf.", "cluster.additional.", "cluster.srun.")
"""Keys that the schema does not list, and that need no `+`, one by one or as a mapping in braces."""
OVERRIDE = re.compile(r"(\+{0,2})([^=@~+]+)([=@].*)", re.DOTALL)
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
"""A whole value in Hydra's quotes."""
NON_ASCII = re.compile(r"=(?=[^'\"\[\](){},]*[^\x00-\x7f])[^'\"\[\](){},]*", re.DOTALL)
"""A plain value with a letter that Hydra's grammar does not know: `=é`, `=/home/ü/data`."""


def rewrite_override(word: str, groups: Collection[str], defaults: Collection[str], *, sweep: bool) -> str:
    """Let `model=x` and `+model=x` both choose from a group, and a text or a variable be set byte for byte.

    Hydra refuses the first for a group without a default, and the second for one with a default (`defaults`).
    Values may have letters that are not ASCII. With `sweep`, commas in a value separate the jobs' values.
    """
    match = OVERRIDE.fullmatch(word)
    if not match:
        return word
    key, rest = match[2], match[3]
    if key == "dataloader" and re.fullmatch(r"=[+-]?\d+", rest, re.ASCII):  # no option of the group
        return f"dataloader.num_workers{rest}"
    is_text = key in TEXTS and rest not in ("=", "=null")
    if key.startswith("env."):  # `env.from_file` is a list of files, or none
        is_text = key != "env.from_file" or not rest.startswith(("=[", "=null"))
    divisions = key.startswith("allocator.") and rest.startswith("=[") and ">" in rest  # [256:1,>:8]
    if rest.startswith("=") and ((is_text and not sweep) or divisions or NON_ASCII.fullmatch(rest)):
        rest = "=" + quote_value(rest[1:])
    # A whole `env` is not rewritten: within braces, Hydra makes 1000.0 of `1e3`.
    whole = f"{key}." in FREE_FORM and key != "env" and rest.startswith("={")
    if key.startswith(FREE_FORM) or whole or key == "model.config":
        return f"++{key}{rest}"
    if key.partition("/")[0] in groups and not key.startswith("hydra/"):
        package = rest.partition("=")[0]  # `@program.net` puts the option there
        return f"{'' if f'{key}{package}' in defaults else '+'}{key}{rest}"
    return f"{match[1]}{key}{rest}"


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


def read_section(key: str) -> str:
    """Return the section that a key is in, or is itself."""
    return key.partition(".")[0]


def asks_sweep(flags: Flags, verb: str) -> bool:
    """Tell whether a command line is for a sweep: by `-m`, else `hydra.mode` (in a file, for runs only).

    Raises UsageError for a setting of sweeps in a line that is for none.
    """
    sweep = flags.multirun
    modes = [word for word in flags.overrides if read_key(word) == "hydra.mode"]
    if not (flags.run or sweep) and modes:
        sweep = modes[-1].rpartition("=")[2].strip("'\"") == "MULTIRUN"
    elif not (flags.run or sweep) and verb == "run" and flags.sources.mention("MULTIRUN"):
        from launcher.config.compose import compose

        sweep = compose(flags.sources, flags.overrides, sweep=True).asks_sweep
    for word in () if sweep else flags.overrides:
        if read_key(word).startswith(("hydra.sweep", "hydra/sweeper")):
            raise UsageError(f"{word} goes with -m, for a sweep, and this is a single run")
    return sweep


CLUSTER = frozenset(field.name for field in fields(ClusterConfig))
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def explain_foreign(key: str) -> str:
    """Say whose a key or an option is, and what there is here: `is torchrun's: the key here is nodes`.

    Empty for one that no other tool is known to have.
    """
    if key.startswith("--"):
        key = key[2:].replace("-", "_")
    if VARIABLE.fullmatch(key):
        return f"is a variable of the environment: the key here is env.{key}"
    name = key.removeprefix("hydra.launcher.").removeprefix("cluster.")
    plain = name.removeprefix("slurm_")
    is_submitits = key.startswith("hydra.launcher.") or plain != name
    if "." in name or (key.startswith("cluster.") and name in CLUSTER):
        return ""
    found = ((tool, names[plain]) for tool, names in read_tables().items() if plain in names)
    tool, fix = next(found, ("SLURM's", f"cluster.{plain}" if plain in CLUSTER else ""))
    if not fix and plain != name:
        fix = plain if plain in FIELDS else f"cluster.additional.{plain}"
    known = fix if fix.startswith("leave it out") else f"the key here is {fix}"
    whose = "submitit's" if is_submitits else tool
    return f"is {whose}: {known}" if fix else ""


@cache
def read_tables() -> dict[str, dict[str, str]]:
    """Return what to write instead of each name, by tool."""
    return tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8"))
