"""`launch`: reads the command line, and calls the verb that it names."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from launcher.cli.arguments import Command, parse_command
from launcher.cli.early_start import EarlyStart, start_early
from launcher.config.sources import check_here
from launcher.errors import EXIT_DEFECT, EXIT_MACHINE, LaunchError
from launcher.protocol import LAUNCH_RANK_PLAN, OWN_VARIABLES
from launcher.text import leave, log_defect, log_error, set_up_logging


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
    """Do what a command line asks."""
    if (status := answer_about_launch(command)) is not None:
        return status
    check_here()
    with start_early(command, os.environ) as early:
        return carry_out(command, argv, early)


def carry_out(command: Command, argv: Sequence[str], early: EarlyStart) -> int:
    """Do what a command line asks that is not about `launch` itself."""
    from launcher.config.hydra_flags import parse_flags

    if not {"-sc", "--shell-completion"} & set(command.words):
        from launcher.cli.command_corrections import check_words

        check_words(command)
    flags = parse_flags(command.words)
    if flags.completion:
        from launcher.cli.completion import complete_line

        return complete_line(flags.overrides)
    if flags.asks_hydra:
        from launcher.config.hydra_output import show_flags

        return show_flags(flags)
    from launcher.config.overrides import asks_sweep, refuse_other_mode

    sweep = asks_sweep(flags, command.verb)
    refuse_other_mode(flags, sweep=sweep)
    if sweep:
        early.close()
        from launcher.cli.sweep import run_sweep

        return run_sweep(flags, command, argv)
    from launcher.cli.dispatch import run_verb

    return run_verb(flags, command, argv, early)


def answer_about_launch(command: Command) -> int | None:
    """Print the help or the version and return 0; None if neither is asked for."""
    if "--help-all" in command.words:
        from launcher.cli.help import print_full_help

        return print_full_help()
    if {"-h", "--help"} & set(command.words):
        from launcher.cli.help import print_help

        return print_help(command.verb)
    if "--version" in command.words:
        from launcher.runs.provenance import DISTRIBUTION, find_version

        sys.stdout.write(f"launch {find_version(DISTRIBUTION) or 'is not installed'}\n")
        return 0
    return None
