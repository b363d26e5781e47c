"""`launch`: reads the command line, composes the configuration, and calls the verb."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.cli.verbs import (
    Call,
    Command,
    call_verb,
    check_words,
    find_verb,
    parse_command,
    print_full_help,
    print_help,
)
from launcher.errors import EXIT_DEFECT, EXIT_MACHINE, LaunchError
from launcher.protocol import LAUNCH_RANK_PLAN, OWN_VARIABLES
from launcher.text import leave, log_defect, log_error, set_up_logging

if TYPE_CHECKING:
    from launcher.cli.early_start import EarlyStart
    from launcher.config.compose import Composed

logger = logging.getLogger(__name__)


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
        status = run_command(parse_command(argv), argv)
        sys.stdout.flush()
    except LaunchError as error:
        log_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        drop_output()
        return 141
    except OSError as error:
        drop_output()
        log_defect(error, f"the system refused: {error}")
        return EXIT_MACHINE
    except Exception as error:
        what = f"internal error, {type(error).__name__}: {error} (HYDRA_FULL_ERROR=1 shows where): report it"
        log_defect(error, what)
        return EXIT_DEFECT
    return status


def drop_output() -> None:
    """Give up on stdout, whose reader has left or whose disk is full; else Python complains at its exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_command(command: Command, argv: Sequence[str]) -> int:
    """Do what a command line asks, and return the exit code; raises LaunchError."""
    if "--help-all" in command.words:
        return print_full_help()
    if {"-h", "--help"} & set(command.words):
        return print_help(command.verb)
    if "--version" in command.words:
        from launcher.runs.provenance import DISTRIBUTION, find_version

        sys.stdout.write(f"launch {find_version(DISTRIBUTION) or 'is not installed'}\n")
        return 0
    from launcher.cli.early_start import start_early
    from launcher.config.words import check_here

    check_here()
    with start_early(command, os.environ) as early:
        return compose_and_call(command, argv, early)


def compose_and_call(command: Command, argv: Sequence[str], early: "EarlyStart") -> int:
    """Compose what the words ask for, and call the verb with it: once, or for each job of a sweep."""
    from launcher.config.words import Sources, asks_sweep, find_shipped, parse_flags, refuse_other_mode

    if not {"-sc", "--shell-completion"} & set(command.words):
        check_words(command)
    flags = parse_flags(command.words)
    if flags.completion:
        from launcher.cli.completion import complete_line

        return complete_line(flags.overrides)
    if flags.asks_hydra:
        from launcher.config.compose import show_flags

        return show_flags(flags)
    sweep = asks_sweep(flags, command.verb)
    refuse_other_mode(flags, sweep=sweep)
    if sweep:
        early.close()
        from launcher.cli.sweep import run_sweep

        return run_sweep(flags, command, argv)
    overrides = add_pet(flags.overrides, os.environ)
    if find_verb(command.verb).takes_names and not overrides and flags.sources == Sources((find_shipped(),)):
        # Without a setting these verbs need no Hydra, which takes longer than all of the rest.
        return call_verb(Call(command.verb, None, command.names, argv=argv))
    from launcher.config.compose import compose

    return call_composed(compose(flags.sources, overrides), command, argv, early)


def add_pet(overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Put the overrides that `PET_*` variables stand for before the user's own, which win."""
    from launcher.config.start import pet_overrides
    from launcher.config.words import quote_value

    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    pet = {key: value for key, value in pet_overrides(environ).items() if key not in given}
    return [*(f"{key}={quote_value(value)}" for key, value in pet.items()), *overrides]


def call_composed(
    composed: "Composed", command: Command, argv: Sequence[str], early: "EarlyStart | None" = None
) -> int:
    """Call the verb with a configuration; return the exit code, raise LaunchError."""
    for warning in composed.warnings:
        logger.warning(warning)
    if find_verb(command.verb).takes == "program":
        from launcher.cli.job_warnings import warn_unread

        warn_unread(command.program or ())
    return call_verb(Call(command.verb, composed, command.names, command.program, argv, early))
