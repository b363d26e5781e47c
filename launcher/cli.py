"""`launch`: reads the command line, and wires the rooms for what it asks."""

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from launcher.flags import Flags
    from launcher.plan.model import Plan
    from launcher.schema import LaunchConfig

VERBS = ("plan",)
"""Words that may stand first; without one, a command line runs a job."""
INTERNAL = 70
"""Exit code for a defect of ours (EX_SOFTWARE of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, taken apart."""

    verb: str
    words: tuple[str, ...]
    """Overrides and Hydra's flags."""
    program: tuple[str, ...] | None
    """What stands after the first `--`; None where there is none."""


def main() -> None:
    """Entry point of `launch`: runs the command line and exits with its code."""
    sys.exit(run_guarded(sys.argv[1:]))


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
        # Who reads our output has left; this keeps Python from complaining at its own exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        complain(
            f"internal error, {type(error).__name__}: {error} (HYDRA_FULL_ERROR=1 shows where): report it"
        )
        return INTERNAL
    return status


def complain(text: str) -> None:
    """Print an error as one line."""
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    sys.stderr.write(f"launch: error: {line}\n")


def parse_command(argv: Sequence[str]) -> Command:
    """Split a command line into verb, overrides and program; raises UsageError for an empty program."""
    words = list(argv)
    program = None
    if "--" in words:
        at = words.index("--")
        words, program = words[:at], tuple(words[at + 1 :])
        if not program:
            raise UsageError(
                "nothing stands after `--`: give a program, as in `launch -- train.py --lr 3e-4`"
            )
    verb = words.pop(0) if words and words[0] in VERBS else "run"
    return Command(verb, tuple(words), program)


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
        from launcher.config import complete_line

        return complete_line(flags.sources, flags.overrides, VERBS)
    if flags.asks_hydra:
        from launcher.config import show_flags

        return show_flags(flags)
    if flags.multirun:
        return run_sweep(flags, command, argv)
    return run_verb(flags, command, argv)


def run_sweep(flags: "Flags", command: Command, argv: Sequence[str]) -> int:
    """Run the jobs of `-m` one after the other; return the first exit code that is not 0."""
    from launcher.config import expand_sweep
    from launcher.launch.supervise import STOPPING

    jobs = expand_sweep(flags.sources, flags.overrides)
    first = 0
    for number, overrides in enumerate(jobs, 1):
        sys.stderr.write(f"launch: job {number} of {len(jobs)}: {' '.join(overrides)}\n")
        status = run_verb(flags.with_overrides(overrides), command, argv)
        first = first or status
        if status - 128 in STOPPING:
            break
    return first


def run_verb(flags: "Flags", command: Command, argv: Sequence[str]) -> int:
    """Run one configuration."""
    from launcher.config import compose, resolve
    from launcher.job import plan_configured, plan_job

    composed = compose(flags.sources, add_pet(flags.overrides, os.environ))
    if command.verb == "plan":
        config = resolve(composed)
        return show_plan(plan_configured(config, {**os.environ, **config.env}), config)
    job = plan_job(composed, command.program, os.environ)
    from launcher.execute import execute_job, preview_job

    if job.config.dry_run:
        return preview_job(job)
    return execute_job(job, argv, flags.sources.list_own(composed.choices))


def add_pet(overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Put the overrides that `PET_*` variables stand for before the user's own, which win."""
    from launcher.config import quote_value
    from launcher.launch.cluster import pet_overrides

    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    pet = {key: value for key, value in pet_overrides(environ).items() if key not in given}
    return [*(f"{key}={quote_value(value)}" for key, value in pet.items()), *overrides]


def show_plan(plan: "Plan", config: "LaunchConfig") -> int:
    """Print a plan to stdout, as a table or as JSON."""
    if config.format == "json":
        import json

        from launcher.plan.codec import plan_to_json

        sys.stdout.write(json.dumps(plan_to_json(plan), indent=1) + "\n")
        return 0
    if config.format != "table":
        raise UsageError(f"format={config.format}: choose from table, json")
    from launcher.report.console import make_console
    from launcher.report.placement import print_placement

    print_placement(make_console(stderr=False), plan, explain=config.explain)
    return 0
