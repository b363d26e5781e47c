"""`launch`: the words of a command line, the verbs, and what each is called with.

The help of a verb is `help/VERB.txt`; a line in `help/all.txt` says what it does.
"""

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import EXIT_DEFECT, EXIT_MACHINE, LaunchError, UsageError
from launcher.protocol import LAUNCH_RANK_PLAN, LAUNCH_WATCH, OWN_VARIABLES
from launcher.text import leave, log_defect, log_error, print_text, set_up_logging

if TYPE_CHECKING:
    from launcher.config.compose import Composed
    from launcher.config.settings import Settings
    from launcher.config.words import Flags, Sources
    from launcher.launch.warm.process import WarmProcess

logger = logging.getLogger(__name__)

HELP = Path(__file__).with_name("help")
WIDTH = 106
"""Columns of the full help."""
FOLLOW = ("-f", "--follow")
"""`follow=true` as `tail` writes it, for `launch logs`."""
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""A module's dotted name."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A word that may stand first on the command line."""

    function: str
    """A module of this package and its function, which takes a Call and returns the exit code."""
    takes: str = ""
    """What may stand beside settings and flags: a `program`, `runs` (or numbers of jobs), or `nodes`."""
    keys: tuple[str, ...] = ()
    """What completion offers beside the names of runs."""
    subjects: tuple[str, ...] = ()
    """Words of which the first has to follow."""

    @property
    def takes_names(self) -> bool:
        """Whether it takes names of what there is already: runs, jobs, nodes."""
        return self.takes in ("runs", "nodes")


VERBS: Mapping[str, Verb] = {
    "plan": Verb("plan:show_plan", "program"),
    "topo": Verb("plan:show_topo"),
    "doctor": Verb("doctor:show_checkup"),
    "fit": Verb("fit:show_fit", "program"),
    "tune": Verb("tune:tune_program", "program", subjects=("dataloader", "batch")),
    "status": Verb("runs:show_status", "runs", ("format=", "runs_dir=")),
    "logs": Verb("runs:show_logs", "runs", ("-f", "rank=", "logs.tail=", "runs_dir=")),
    "watch": Verb("watch:show_watch", "runs", ("rank=", "format=", "runs_dir=")),
    "nodes": Verb("runs:show_nodes", "nodes", ("format=", "runs_dir=")),
    "report": Verb("watch:write_run_report", "runs", ("save=", "runs_dir=")),
    "cancel": Verb("runs:cancel_runs", "runs", ("yes=true", "runs_dir=")),
}
"""Without one of these words at its beginning, a command line runs a job."""
RUN = Verb("run:run_job", "program")


def find_verb(name: str) -> Verb:
    """Return a verb's row; that of a run for any other word."""
    return VERBS.get(name, RUN)


@dataclass
class Call:
    """A command line's parts, and the configuration that they ask for."""

    verb: str
    words: tuple[str, ...] = ()
    """Overrides and Hydra's flags."""
    names: Sequence[str] = ()
    """Runs, jobs and nodes, for the verbs that take them; what `tune` is to tune."""
    program: tuple[str, ...] | None = None
    """The program on the command line and its arguments; None if there is none."""
    argv: Sequence[str] = ()
    """The whole command line."""
    composed: "Composed | None" = None
    """The configuration before it is resolved; None if a verb of runs or nodes is given no setting."""
    early: "WarmProcess | None" = None
    """A warm process for a run, started before the configuration is composed."""

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
        from launcher.config.settings import Settings

        if self.composed is None:
            return Settings()
        from launcher.config.compose import name_files, resolve
        from launcher.config.program import fill_env
        from launcher.config.rules import check, warn_elsewhere

        name_files(self.composed.own_files)
        config = resolve(self.composed)
        if not find_verb(self.verb).takes_names:
            config = fill_env(config)
            if self.verb != "topo" or config.image:
                warn_elsewhere(config, os.environ)
        check(config, f"launch {self.verb}", self.given)
        return config

    @cached_property
    def environ(self) -> Mapping[str, str]:
        """The environment that ranks would have."""
        return {**os.environ, **self.config.env}


def main() -> None:
    """Entry point of `launch`: runs the command line and exits with its code."""
    open_streams()
    if LAUNCH_RANK_PLAN in os.environ:
        from launcher.rank.hook import leave_outer_rank

        leave_outer_rank(os.environ)
    for name in OWN_VARIABLES:  # of an enclosing rank's launch; no rank of this one is to act on them
        os.environ.pop(name, None)
    leave(run_guarded(sys.argv[1:]))


def open_streams() -> None:
    """Open /dev/null for each closed standard stream, and let the others take any character.

    Otherwise the next opened file would get the stream's number, and the ranks' output would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run_guarded(argv: Sequence[str]) -> int:
    """Run a command line and return the exit code; errors become one line on stderr."""
    set_up_logging()
    try:
        status = run_command(parse_command(argv))
        sys.stdout.flush()
    except LaunchError as error:
        log_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:
        log_defect(error, f"the system refused: {error}")
        return EXIT_MACHINE
    except Exception as error:
        what = f"internal error, {type(error).__name__}: {error} (HYDRA_FULL_ERROR=1 shows where): report it"
        log_defect(error, what)
        return EXIT_DEFECT
    return status


def run_command(call: Call) -> int:
    """Do what a command line asks, and return the exit code; raises LaunchError."""
    if "--help-all" in call.words:
        return print_full_help()
    if {"-h", "--help"} & set(call.words):
        print_text((HELP / f"{call.verb}.txt").read_text(encoding="utf-8"))
        return 0
    if "--version" in call.words:
        from launcher.runs.provenance import DISTRIBUTION, find_version

        sys.stdout.write(f"launch {find_version(DISTRIBUTION) or 'is not installed'}\n")
        return 0
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror}): cd to another") from None
    if call.verb == "run" and "dry_run=true" not in call.words:
        call.early = start_early(call, os.environ)
    try:
        return compose_and_call(call)
    finally:
        if call.early:
            call.early.close()


def start_early(call: Call, environ: Mapping[str, str]) -> "WarmProcess | None":
    """Return a warm process if the ranks may be forked from it; None if not.

    `import torch` takes a second, and composing and planning go on meanwhile. If the ranks are to run
    elsewhere, by another agent, or with other variables, the process is ended again.
    """
    if argv := find_early_program(call, environ):
        from launcher.launch.warm.process import WarmProcess
        from launcher.launch.warm.program import ExecNeededError

        inherited = {name: value for name, value in environ.items() if name != LAUNCH_WATCH}
        with contextlib.suppress(ExecNeededError):  # of which the start tells
            # as `launcher.launch.job.build_agent_environ` has them
            return WarmProcess.start(argv, {"PYTHONUNBUFFERED": "1", **inherited})
    return None


def find_early_program(call: Call, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the program's argv if a run of a Python program that uses torch is asked for; None if not.

    That is the one on the command line, or the bundled one if no file of the user's own and no word names
    another. Whether its ranks run here and are forked is decided later, and errors of the command line are
    left to those who report them.
    """
    from launcher.config.program import BUNDLED, resolve_program
    from launcher.launch.warm.program import read_program

    words = [word for word in call.words if word not in ("-r", "--run")]
    if any(word.startswith("-") or ("=" not in word and word[:1] != "~") for word in words):  # no settings
        return None
    if call.program is None and (Path("conf").exists() or any(w.startswith("program=") for w in words)):
        return None
    try:
        argv = resolve_program(call.program or BUNDLED, environ)
    except UsageError:
        return None
    if call.program is None:
        return argv
    text = read_program(argv, environ)
    return argv if text and text.uses_torch and not text.obstacle else None


def compose_and_call(call: Call) -> int:
    """Compose what the words ask for, and call the verb with it: once, or for each job of a sweep."""
    from launcher.config.words import Flags, Sources, asks_sweep, find_shipped, find_sources, parse_flags

    try:
        flags = parse_flags(call.words)
    except UsageError:  # of another tool's -c as a rule, and then its other words say more
        check_words(call, Flags(find_sources(None, None, None), ()))
        raise
    if flags.shell_completion:
        from launcher.cli.completion import complete_line

        return complete_line(flags.overrides)
    check_words(call, flags)
    if flags.cfg or flags.info or flags.hydra_help:
        from launcher.config.compose import show_flags

        return show_flags(flags)
    if asks_sweep(flags, call.verb):
        if call.early:
            call.early.close()
        from launcher.cli.run import run_sweep

        return run_sweep(flags, replace(call, early=None))
    overrides = list(flags.overrides)
    if not find_verb(call.verb).takes_names:
        overrides = add_pet(overrides, os.environ)
    elif not overrides and flags.sources == Sources((find_shipped(),)):
        # Without a setting these verbs need no Hydra, which takes longer than all of the rest.
        return call_verb(call)
    from launcher.config.compose import compose

    return call_composed(call, compose(flags.sources, overrides))


def add_pet(overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Put the overrides that `PET_*` variables stand for before the user's own, which win."""
    from launcher.config.start import pet_overrides
    from launcher.config.words import quote_value

    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    pet = {key: value for key, value in pet_overrides(environ).items() if key not in given}
    return [*(f"{key}={quote_value(value)}" for key, value in pet.items()), *overrides]


def call_composed(call: Call, composed: "Composed") -> int:
    """Call the verb with a configuration; return the exit code, raise LaunchError."""
    for warning in composed.warnings:
        logger.warning(warning)
    from launcher.config.program import find_script
    from launcher.config.words import read_key, read_section

    program = call.program or ()
    settings = _list_own_keys() - {"model", "data", "program", "name"}  # hardly a program's own
    words = [word for word in program[1:] if "=" in word and read_section(read_key(word)) in settings]
    if words:
        logger.info(
            f"{_mask(words, ', ')} after the program: it gets what stands there; write settings of launch"
            f" before {Path(find_script(program))}"
        )
    return call_verb(replace(call, composed=composed))


def call_verb(call: Call) -> int:
    """Do what a verb does; returns the exit code, raises LaunchError."""
    module, function = find_verb(call.verb).function.split(":")
    status: int = getattr(import_module(f"launcher.cli.{module}"), function)(call)
    return status


def print_json(value: object) -> None:
    """Print an answer for programs."""
    import json

    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def print_full_help() -> int:
    """Print the help of all verbs, keys, groups and flags; return exit code 0.

    If ./conf cannot be read, its options are left out: help always works.
    """
    from textwrap import fill

    from launcher.config.words import Sources, find_shipped, find_sources, make_parser

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


# The words of a command line


def parse_command(argv: Sequence[str]) -> Call:
    """Split a command line into verb, overrides and program; raises UsageError for an empty program."""
    words = list(argv)
    name = words.pop(0) if words and words[0] in VERBS else "run"
    verb = find_verb(name)
    names: list[str] = []
    if verb.subjects and words and words[0].isalpha():
        names = [words.pop(0)]
    if verb.takes_names:
        words = ["follow=true" if word in FOLLOW else word for word in words]
    groups = list(group_words(words, has_program=not verb.takes_names))
    size = sum(map(len, groups))
    words, tail = words[:size], tuple(words[size:])
    program = tail[tail[0] == "--" :] if tail else None
    if program == ():
        raise UsageError("nothing stands after `--`: give a program, as in `launch -- ./train --lr 3e-4`")
    alone = [group[0] for group in groups if len(group) == 1]
    if verb.takes_names:
        names = [word for word in alone if "=" not in word and not word.startswith(("-", "~"))]
        words = [word for group in groups for word in group if len(group) == 2 or word not in names]
    else:
        _check_verbs(name, alone)
    return Call(name, tuple(words), tuple(names), program, argv)


def group_words(argv: Sequence[str], *, has_program: bool = True) -> Iterator[tuple[str, ...]]:
    """Give the words before the program: an option together with its value, any other word alone.

    Without a program, `--` ends them.
    """
    at = 0
    while at < len(argv) and not (_begins_program(argv[at : at + 2]) if has_program else argv[at] == "--"):
        size = 2 if _takes_value(argv[at : at + 3]) else 1
        yield tuple(argv[at : at + size])
        at += size


def _begins_program(words: Sequence[str]) -> bool:
    """Tell whether a program begins with the first of these words, which is no value of an option.

    A program begins with `--`, with `-m` before the name of a module (before anything else `-m` is Hydra's
    --multirun), or with a word that is a file or ends in .py. An override or a verb is no program, even if
    there is a file of that name.
    """
    word, *after = words
    if word == "-m":
        module = after[0] if after else ""
        return bool(MODULE.fullmatch(module)) and module not in VERBS and not _is_script(module)
    if word == "--":
        return True
    if word.startswith(("-", "~")) or "=" in word or word in VERBS:
        return False
    return _is_script(word)


def _is_script(word: str) -> bool:
    """Tell whether a word names a program by itself: it ends in .py, or is a file."""
    try:
        return word.endswith(".py") or Path(word).is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def _takes_value(words: Sequence[str]) -> bool:
    """Tell whether the second of these words is the value of the first, an option."""
    option, *after = words
    if not option.startswith("-") or "=" in option or not after or after[0] == "--":
        return False
    from launcher.config.words import list_flags

    if flag := list_flags().get(option):
        return after[0] in (flag.choices or ()) if flag.nargs == "?" else flag.nargs is None
    return not after[0].startswith("-") and "=" not in after[0] and not _begins_program(after)


def _check_verbs(verb: str, words: Sequence[str]) -> None:
    """Raise UsageError for a verb that does not stand first, and for a first word that is nearly one."""
    if late := next((word for word in words if word in VERBS), None):
        from launcher.config.settings import refuse

        raise refuse("late_verb", late=late)
    if verb not in VERBS and words and words[0].isalpha():
        import difflib

        near = difflib.get_close_matches(words[0].lower(), VERBS, n=1, cutoff=0.8)
        if near:
            raise UsageError(f"there is no verb {words[0]!r}: did you mean {near[0]}?")


def check_words(call: Call, flags: "Flags") -> None:
    """Raise UsageError for the words before the program that are neither settings nor flags.

    All names of other tools are told of at once, with ours.
    """
    problems: list[str] = []
    for group in group_words(call.words):
        word = group[0]
        if word.startswith("-") and word != "-":
            problems.append(_explain_option(group))
        elif "=" in word or word.startswith("~") or not word:
            problems.append(_explain_key(word, flags.sources))
        elif not any(problems):
            wrong = f"{word!r} is not KEY=VALUE, and"
            if find_verb(call.verb).takes == "program":
                problems.append(f"{wrong} no file here: to run it as a program, put `--` before it")
            else:
                problems.append(f"{wrong} `launch {call.verb}` takes nothing else")
            break
    if any(problems):
        raise UsageError("; ".join(filter(None, problems)))
    if (flags.package is not None or flags.resolve) and not flags.cfg:
        from launcher.config.settings import refuse

        raise refuse("package")


def _explain_key(word: str, sources: "Sources") -> str:
    """Say what another tool's key is here; empty for others, and for a group of the user's of that name."""
    from launcher.config.words import explain_foreign, read_key

    key, value = read_key(word), word.partition("=")[2]
    if key == "devices" and re.match(r"[\d,]+$|GPU-|MIG-", value):
        return f"{word} names GPUs, and devices is all, own or spread: write env.CUDA_VISIBLE_DEVICES={value}"
    explained = "" if key in _list_own_keys() else explain_foreign(key)
    if not explained or sources.has_group(key):
        return ""
    return f"{_mask([word])} {explained}"


def _explain_option(group: Sequence[str]) -> str:
    """Say what to write instead of an option that is not ours, else nothing."""
    import difflib

    from launcher.config.words import explain_foreign, list_flags, read_section

    option, _, value = group[0].partition("=")
    if option in list_flags():
        return ""
    name = option.lstrip("-").replace("-", "_")
    if explained := explain_foreign(option):
        return f"{_mask(group)} {explained}"
    if read_section(name) in _list_own_keys():
        value = group[1] if len(group) == 2 else value
        return f"{_mask(group)} is a setting, and these are written KEY=VALUE: write {name}={value or '…'}"
    if near := difflib.get_close_matches(option, list_flags(), n=1, cutoff=0.7):
        return f"there is no option {option}: did you mean {near[0]}?"
    return f"there is no option {option}: a program's options stand after the program"


def _mask(words: Sequence[str], between: str = " ") -> str:
    from launcher.runs.secrets import mask_words

    return between.join(mask_words(list(words)))


def _list_own_keys() -> set[str]:
    """Return the keys at the top of the configuration."""
    from launcher.config.settings import Settings

    return {field.name for field in fields(Settings)}
