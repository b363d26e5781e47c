"""The verbs: a line for each here, and a file of its name beside this one, which ends with its help."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.config.settings import Settings


class Takes(Enum):
    """What may stand on a verb's command line beside settings and flags."""

    NOTHING = auto()
    PROGRAM = auto()
    RUNS = auto()
    """Names of runs, and numbers of jobs."""
    NODES = auto()
    """Names of nodes."""


@dataclass(frozen=True, slots=True)
class VerbCall:
    """What a verb is called with."""

    config: "Settings"
    environ: Mapping[str, str]
    """The environment, for verbs of the machine with the variables that ranks would have."""
    names: Sequence[str] = ()
    program: Sequence[str] = ()
    given: Collection[str] = ()
    """Keys that the command line sets."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A word that may stand first on the command line."""

    function: str
    """In the verb's file; it takes a VerbCall and returns the exit code (tune's is called as a run is)."""
    summary: str
    takes: Takes = Takes.NOTHING
    keys: tuple[str, ...] = ()
    """What completion offers beside the names of runs."""
    subjects: tuple[str, ...] = ()
    """Words of which the first has to follow."""


VERBS: Mapping[str, Verb] = {
    "plan": Verb(
        "show_plan", "show placement and variables, start nothing; explain=true says why", Takes.PROGRAM
    ),
    "topo": Verb("show_topo", "show the machine, and what this job may use of it"),
    "doctor": Verb(
        "show_checkup", "look for what slows jobs down here, and compare the last run with its plan"
    ),
    "fit": Verb(
        "show_fit", "run a program's first steps without a GPU, and say whether it fits", Takes.PROGRAM
    ),
    "tune": Verb(
        "tune_program",
        "find the number of DataLoader workers, or the micro-batch, that a program is fastest with",
        Takes.PROGRAM,
        subjects=("dataloader", "batch"),
    ),
    "status": Verb(
        "show_status",
        "show how runs stand: state, nodes, step, last line",
        Takes.RUNS,
        ("format=", "runs_dir="),
    ),
    "logs": Verb(
        "show_logs",
        "print what a run's ranks have printed; -f goes on to its end, rank=3 is that rank alone",
        Takes.RUNS,
        ("-f", "rank=", "logs.tail=", "runs_dir="),
    ),
    "watch": Verb(
        "show_watch",
        "show live what a run's ranks do, and who holds the others up",
        Takes.RUNS,
        ("rank=", "format=", "runs_dir="),
    ),
    "nodes": Verb(
        "show_nodes",
        "show what is known of each node over past runs: findings, losses, hangs, slow ranks",
        Takes.NODES,
        ("format=", "runs_dir="),
    ),
    "report": Verb(
        "write_run_report",
        "write what there is to know of a run into one HTML page",
        Takes.RUNS,
        ("save=", "runs_dir="),
    ),
    "cancel": Verb(
        "cancel_runs",
        "end runs, in SLURM's queue or here, after asking",
        Takes.RUNS,
        ("yes=true", "runs_dir="),
    ),
}
"""Without one of these words at its beginning, a command line runs a job."""


def takes_runs(verb: str) -> bool:
    """Tell whether a verb, or `run`, takes names of runs."""
    return verb in VERBS and VERBS[verb].takes is Takes.RUNS


def takes_names(verb: str) -> bool:
    """Tell whether a verb, or `run`, takes names of what there is already: runs, jobs, nodes."""
    return takes_runs(verb) or (verb in VERBS and VERBS[verb].takes is Takes.NODES)


def takes_program(verb: str) -> bool:
    """Tell whether a verb, or `run`, has a use for a program."""
    return verb not in VERBS or VERBS[verb].takes is Takes.PROGRAM


def load_verb(verb: str) -> Callable[[VerbCall], int]:
    """Return what a verb does, from its file."""
    function: Callable[[VerbCall], int] = getattr(import_module(f"launcher.cli.{verb}"), VERBS[verb].function)
    return function


def load_help(verb: str) -> str:
    """Return the help of a verb, from its file."""
    return str(import_module(f"launcher.cli.{verb}").HELP)
