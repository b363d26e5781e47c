"""Hydra's flags on the command line of `launch`, with Hydra's names and meanings."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from launcher.config.sources import Sources, find_sources
from launcher.errors import UsageError


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
