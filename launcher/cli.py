"""`launch`: reads the command line, and wires the rooms for what it asks."""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.command import VERBS, Command, parse_command
from launcher.errors import EXIT_MACHINE, LaunchError
from launcher.wording import leave

if TYPE_CHECKING:
    from launcher.config import Composed
    from launcher.flags import Flags
    from launcher.schema import LaunchConfig

LONGEST = 800
"""Characters of an error."""
INTERNAL = 70
"""Exit code for a defect of ours (EX_SOFTWARE of sysexits.h)."""


def main() -> None:
    """Entry point of `launch`: runs the command line and exits with its code."""
    open_streams()
    if "LAUNCH_RANK_PLAN" in os.environ:
        from launcher.rank.outer import leave_rank

        leave_rank(os.environ)
    leave(run_guarded(sys.argv[1:]))


def open_streams() -> None:
    """Put /dev/null where a standard stream is closed, and let the others take any character.

    Else the first file to be opened would take the stream's number, and the ranks' output would go there.
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
    try:
        status = run_command(parse_command(argv), argv)
        sys.stdout.flush()
    except LaunchError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        drop_output()
        return 141
    except OSError as error:
        drop_output()
        return report_defect(error, f"the system refused: {error}", EXIT_MACHINE)
    except Exception as error:
        what = f"internal error, {type(error).__name__}: {error} (HYDRA_FULL_ERROR=1 shows where): report it"
        return report_defect(error, what, INTERNAL)
    return status


def report_defect(error: Exception, text: str, status: int) -> int:
    """Print an error that was not foreseen, with its traceback where that is asked for."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    complain(text)
    return status


def drop_output() -> None:
    """Give up on stdout, whose reader has left or whose disk is full; else Python complains at its exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str) -> None:
    """Print an error as one line, the middle of a very long one left out."""
    line = " ".join(text.split())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"launch: error: {line}\n".encode("utf-8", "backslashreplace").decode())
        sys.stderr.flush()


def run_command(command: Command, argv: Sequence[str]) -> int:
    """Do what a command line asks."""
    if {"-h", "--help"} & set(command.words):
        from launcher.help import print_help

        return print_help(command.verb)
    if "--version" in command.words:
        from importlib.metadata import version

        sys.stdout.write(f"launch {version('launch')}\n")
        return 0
    from launcher.flags import parse_flags

    flags = parse_flags(command.words)
    if flags.completion:
        from launcher.completion import complete_line

        return complete_line(flags.sources, flags.overrides, VERBS)
    if flags.asks_hydra:
        from launcher.config import show_flags

        return show_flags(flags)
    if flags.multirun:
        return run_sweep(flags, command, argv)
    return run_verb(flags, command, argv)


def run_sweep(flags: "Flags", command: Command, argv: Sequence[str]) -> int:
    """Run the jobs of `-m` one after the other; return the first exit code that is not 0."""
    from launcher.config import compose, expand_sweep, resolve
    from launcher.launch.signals import STOPPING
    from launcher.runs.secrets import mask_words

    jobs = expand_sweep(flags.sources, flags.overrides)
    # A mistake in the last job shows before the first runs.
    composed = [compose(flags.sources, overrides) for overrides in jobs]
    if command.verb == "run" and all(is_for_slurm(resolve(each)) for each in composed):
        from launcher.job import draft_job
        from launcher.submit.jobs import submit_jobs

        drafts = [draft_job(each, command.program, os.environ) for each in composed]
        return submit_jobs(drafts, argv, flags.sources.list_own(composed[0].choices))
    first = 0
    for number, overrides in enumerate(jobs, 1):
        sys.stderr.write(f"launch: job {number} of {len(jobs)}: {' '.join(mask_words(overrides))}\n")
        status = run_verb(flags.with_overrides(overrides), command, argv)
        first = first or status
        if status - 128 in STOPPING:
            break
    return first


def is_for_slurm(config: "LaunchConfig") -> bool:
    """Tell whether a job is to be submitted: those of a sweep go to the queue together."""
    from launcher.launch.cluster import choose_cluster

    return config.cluster.kind == "slurm" or (
        config.cluster.kind == "auto"
        and choose_cluster("auto", config.nodes, None, None, os.environ).kind == "slurm"
    )


def run_verb(flags: "Flags", command: Command, argv: Sequence[str]) -> int:
    """Run one configuration."""
    from launcher.config import compose, resolve

    composed = compose(flags.sources, add_pet(flags.overrides, os.environ))
    for doubt in composed.warnings:
        sys.stderr.write(f"launch: warning: {doubt}\n")
    own_files = flags.sources.list_own(composed.choices)
    if command.verb == "tune":
        from launcher.verbs.tune import tune_program

        return tune_program(composed, command.names, command.program, argv, own_files)
    if command.verb != "run":
        from launcher.verbs.dispatch import show

        name_files(own_files)
        words = command.program or ()
        return show(command.verb, resolve(composed), command.names, given=composed.given, program=words)
    return run_job(composed, command.program, argv, own_files)


def run_job(
    composed: "Composed", words: tuple[str, ...] | None, argv: Sequence[str], own_files: Sequence[str]
) -> int:
    """Run a program where the configuration says, and return the exit code; raises LaunchError."""
    from launcher.job import draft_job

    draft = draft_job(composed, words, os.environ)
    if draft.cluster.kind == "slurm":
        from launcher.submit.jobs import submit_jobs

        return submit_jobs([draft], argv, own_files)
    if draft.cluster.kind == "allocation":
        from launcher.batch.allocation import run_allocation

        return run_allocation(draft, argv, own_files)
    from launcher.execute import execute_job, preview_job
    from launcher.job import plan_job

    job = plan_job(draft)
    if draft.config.dry_run:
        name_files(own_files)
        return preview_job(draft, job)
    return execute_job(draft, job, argv, own_files)


def name_files(own_files: Sequence[str]) -> None:
    """Say which configuration is not the shipped one."""
    if own_files:
        sys.stderr.write(f"launch: configuration from {', '.join(own_files)}\n")


def add_pet(overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Put the overrides that `PET_*` variables stand for before the user's own, which win."""
    from launcher.launch.cluster import pet_overrides
    from launcher.overrides import quote_value

    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    pet = {key: value for key, value in pet_overrides(environ).items() if key not in given}
    return [*(f"{key}={quote_value(value)}" for key, value in pet.items()), *overrides]
