"""Runs a program where the configuration says, and shows what another verb asks for."""

import os
import sys
from collections.abc import Mapping, Sequence

from launcher.command import Command
from launcher.config import Composed, compose, resolve
from launcher.flags import Flags
from launcher.hydra_settings import apply_settings
from launcher.launch.cluster import pet_overrides
from launcher.overrides import quote_value


def run_verb(flags: Flags, command: Command, argv: Sequence[str]) -> int:
    """Run one configuration."""
    composed = compose(flags.sources, add_pet(flags.overrides, os.environ))
    if command.verb == "run":
        apply_settings(composed.tree, composed.settings, composed.settings.run_dir)
    if composed.settings.verbose:
        from launcher.hydra_output import explain_composition

        sys.stderr.write(explain_composition(flags))
    return run_composed(composed, command, argv)


def run_composed(composed: Composed, command: Command, argv: Sequence[str]) -> int:
    """Do what a verb asks with a configuration."""
    for doubt in composed.warnings:
        sys.stderr.write(f"launch: warning: {doubt}\n")
    if command.verb == "run":
        return run_job(composed, command.program, argv, composed.own_files)
    if command.verb == "tune":
        from launcher.verbs.tune import tune_program

        return tune_program(composed, command.names, command.program, argv, composed.own_files)
    from launcher.verbs.dispatch import show

    name_files(composed.own_files)
    words = command.program or ()
    return show(command.verb, resolve(composed), command.names, given=composed.given, program=words)


def run_job(
    composed: Composed, words: tuple[str, ...] | None, argv: Sequence[str], own_files: Sequence[str]
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
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    pet = {key: value for key, value in pet_overrides(environ).items() if key not in given}
    return [*(f"{key}={quote_value(value)}" for key, value in pet.items()), *overrides]
