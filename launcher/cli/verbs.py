"""The verbs: a row for each, what a verb is called with, and the help, which loads no Hydra.

The help of a verb is `help/VERB.txt`; a line in `help/all.txt` says what it does.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.text import print_text

if TYPE_CHECKING:
    from launcher.cli.early_start import EarlyStart
    from launcher.config.compose import Composed
    from launcher.config.settings import Settings

HELP = Path(__file__).with_name("help")
WIDTH = 106
"""Columns of the full help."""


class Takes(Enum):
    """What may stand on a verb's command line beside settings and flags."""

    NOTHING = auto()
    PROGRAM = auto()
    RUNS = auto()
    """Names of runs, and numbers of jobs."""
    NODES = auto()
    """Names of nodes."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A word that may stand first on the command line."""

    function: str
    """A module of this package and its function, which takes a Call and returns the exit code."""
    takes: Takes = Takes.NOTHING
    keys: tuple[str, ...] = ()
    """What completion offers beside the names of runs."""
    subjects: tuple[str, ...] = ()
    """Words of which the first has to follow."""

    @property
    def takes_names(self) -> bool:
        """Whether it takes names of what there is already: runs, jobs, nodes."""
        return self.takes in (Takes.RUNS, Takes.NODES)


VERBS: Mapping[str, Verb] = {
    "plan": Verb("plan:show_plan", Takes.PROGRAM),
    "topo": Verb("plan:show_topo"),
    "doctor": Verb("doctor:show_checkup"),
    "fit": Verb("fit:show_fit", Takes.PROGRAM),
    "tune": Verb("tune:tune_program", Takes.PROGRAM, subjects=("dataloader", "batch")),
    "status": Verb("runs:show_status", Takes.RUNS, ("format=", "runs_dir=")),
    "logs": Verb("logs:show_logs", Takes.RUNS, ("-f", "rank=", "logs.tail=", "runs_dir=")),
    "watch": Verb("watch:show_watch", Takes.RUNS, ("rank=", "format=", "runs_dir=")),
    "nodes": Verb("runs:show_nodes", Takes.NODES, ("format=", "runs_dir=")),
    "report": Verb("report:write_run_report", Takes.RUNS, ("save=", "runs_dir=")),
    "cancel": Verb("runs:cancel_runs", Takes.RUNS, ("yes=true", "runs_dir=")),
}
"""Without one of these words at its beginning, a command line runs a job."""
RUN = Verb("run:run_job", Takes.PROGRAM)


def find_verb(name: str) -> Verb:
    """Return a verb's row; that of a run for any other word."""
    return VERBS.get(name, RUN)


@dataclass
class Call:
    """What a verb is called with."""

    verb: str
    composed: "Composed | None" = None
    """The configuration before it is resolved; None if a verb of runs or nodes is given no setting."""
    names: Sequence[str] = ()
    program: tuple[str, ...] | None = None
    """The program on the command line and its arguments; None if there is none."""
    argv: Sequence[str] = ()
    """The whole command line."""
    early: "EarlyStart | None" = None
    """A warm process for a run, started while the configuration was composed."""

    @property
    def composition(self) -> "Composed":
        """The configuration before it is resolved, for verbs of programs and machines, which have one."""
        if self.composed is None:
            raise TypeError(f"{self.verb} is called without a configuration")
        return self.composed

    @property
    def given(self) -> frozenset[str]:
        """Keys that the command line sets."""
        return self.composed.given if self.composed else frozenset()

    @cached_property
    def config(self) -> "Settings":
        """The settings, checked; raises UsageError.

        What runs a program makes its own, in which the run directory is known.
        """
        from launcher.config.rules import Context, check
        from launcher.config.settings import Settings, settle_words

        if self.composed is None:
            config = Settings()
            settle_words(config)
        else:
            from launcher.cli.job_warnings import name_files, warn_elsewhere
            from launcher.config.compose import resolve
            from launcher.config.program import fill_env, read_env_files

            name_files(self.composed.own_files)
            config = resolve(self.composed)
            if not find_verb(self.verb).takes_names:
                config = fill_env(config, read_env_files(config))
                if self.verb != "topo" or config.image:
                    warn_elsewhere(config, os.environ)
        check(Context(config, f"launch {self.verb}", self.given))
        return config

    @cached_property
    def environ(self) -> Mapping[str, str]:
        """The environment that ranks would have."""
        return {**os.environ, **self.config.env}


def call_verb(call: Call) -> int:
    """Do what a verb does; returns the exit code, raises LaunchError."""
    module, function = find_verb(call.verb).function.split(":")
    status: int = getattr(import_module(f"launcher.cli.{module}"), function)(call)
    return status


def print_json(value: object) -> None:
    """Print an answer for programs."""
    import json

    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def print_help(verb: str) -> int:
    """Print the help of a verb, or of `run`, and return exit code 0."""
    print_text((HELP / f"{verb}.txt").read_text(encoding="utf-8"))
    return 0


def print_full_help() -> int:
    """Print the help of all verbs, keys, groups and flags; return exit code 0.

    If ./conf cannot be read, its options are left out: help always works.
    """
    from textwrap import fill

    from launcher.config.words import Sources, find_shipped, find_sources, make_parser
    from launcher.errors import UsageError

    try:
        sources = find_sources(None, None, None)
    except UsageError:
        sources = Sources((find_shipped(),))
    groups = []
    for group in sources.list_groups():
        options = ", ".join(sources.list_options(group))
        groups.append(fill(options, WIDTH, initial_indent=f"  {group:<14}  ", subsequent_indent=" " * 18))
    parts = {
        "{groups}": groups,
        "{flags}": [f"  {', '.join(one.option_strings):<25}  {one.help}" for one in make_parser()._actions],
    }
    text = (HELP / "all.txt").read_text(encoding="utf-8")
    for name, lines in parts.items():
        text = text.replace(name, "\n".join(lines))
    print_text(text)
    return 0
