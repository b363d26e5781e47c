"""Runs a program where the configuration says, and shows what another verb asks for."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.arguments import Command
from launcher.config.cluster import pet_overrides
from launcher.config.composition import Composed, compose, resolve
from launcher.config.hydra_flags import Flags
from launcher.config.hydra_settings import apply_settings
from launcher.config.overrides import quote_value
from launcher.files import name_user
from launcher.text import print_text

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.launch.job import Job
    from launcher.report.output_viewer import OutputViewer
    from launcher.runs.run_directory import RunDir


def run_verb(flags: Flags, command: Command, argv: Sequence[str]) -> int:
    """Run one configuration."""
    composed = compose(flags.sources, add_pet(flags.overrides, os.environ))
    if command.verb == "run":
        apply_settings(composed.tree, composed.settings, composed.settings.run_dir)
    if composed.settings.verbose:
        from launcher.config.hydra_output import explain_composition

        print_text(explain_composition(flags), sys.stderr)
    return run_composed(composed, command, argv)


def run_composed(composed: Composed, command: Command, argv: Sequence[str]) -> int:
    """Do what a verb asks with a configuration."""
    for doubt in composed.warnings:
        logger.warning(f"{doubt}")
    if command.verb == "run":
        return run_job(composed, command.program, argv, composed.own_files)
    if command.verb == "tune":
        from launcher.cli.tune import tune_program

        return tune_program(composed, command.names, command.program, argv, composed.own_files)
    from launcher.cli.plan import show

    name_files(composed.own_files)
    words = command.program or ()
    return show(command.verb, resolve(composed), command.names, given=composed.given, program=words)


def run_job(
    composed: Composed, words: tuple[str, ...] | None, argv: Sequence[str], own_files: Sequence[str]
) -> int:
    """Run a program where the configuration says, and return the exit code; raises LaunchError."""
    from launcher.cli.own_program import tell_program
    from launcher.launch.job import draft_job

    draft = draft_job(composed, words, os.environ)
    name_files(own_files)
    tell_program([draft], own_files)
    if draft.cluster.kind == "slurm":
        from launcher.config.sexagesimal import check_files
        from launcher.slurm.submission import submit_jobs

        check_files(draft)
        return submit_jobs([draft], argv)
    if draft.cluster.kind == "allocation":
        from launcher.slurm.allocation import run_allocation

        return run_allocation(draft, argv)
    from launcher.launch.job import plan_job
    from launcher.launch.local_run import execute_job, preview_job

    job = plan_job(draft)
    if draft.config.dry_run:
        return preview_job(draft, job)
    from launcher.probe.cgroups import count_oom_kills

    return execute_job(draft, job, argv, make_viewer, count_oom_kills)


def make_viewer(job: "Job", run: "RunDir") -> "OutputViewer":
    """Return what shows a job that runs on this machine."""
    from launcher.launch.monitor import STARTING, describe_job
    from launcher.report.output_viewer import OutputViewer, ViewOptions
    from launcher.runs.rank_logs import Follower, measure_logs

    alone = len(job.plan.ranks) * job.cluster.max_nodes == 1
    options = ViewOptions(
        job.config.logs.console,
        None if alone else lambda _: job.host,
        heading=describe_job(job, run),
        plan=job.plan,
        explain=job.config.explain,
        notice=STARTING if job.config.logs.console != "none" and job.cluster.max_nodes == 1 else "",
    )
    return OutputViewer(run, Follower(measure_logs(run.path)), options)


def name_files(own_files: Sequence[str]) -> None:
    """Say which configuration is not the shipped one, and whose it is where it is another user's."""
    if own_files:
        logger.info(f"configuration from {', '.join(map(name_file, own_files))}")


def name_file(path: str) -> str:
    """Return a file's name, with its owner where that is neither this user nor root."""
    owner = Path(path).stat().st_uid
    return path if owner in (os.geteuid(), 0) else f"{path} (of {name_user(owner)})"


def add_pet(overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Put the overrides that `PET_*` variables stand for before the user's own, which win."""
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    pet = {key: value for key, value in pet_overrides(environ).items() if key not in given}
    return [*(f"{key}={quote_value(value)}" for key, value in pet.items()), *overrides]
