"""Runs the jobs of a sweep, or the trials that a plugin of Hydra's asks for."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence

from launcher.cli.job_warnings import name_files
from launcher.cli.main import add_pet, call_composed
from launcher.cli.run import check_resume, is_for_slurm, specify_job, try_again
from launcher.cli.verbs import Command
from launcher.config.compose import Composed, compose
from launcher.config.run_path import choose_run_path, use_sweep_folder
from launcher.config.sweep import Multirun, expand_sweep, read_multirun
from launcher.config.words import Flags
from launcher.errors import UsageError
from launcher.launch.job import JobSpec
from launcher.launch.signals import STOPPING
from launcher.runs.manifest import CLOSED, read_manifest, take_dict
from launcher.runs.secrets import mask_words

logger = logging.getLogger(__name__)


def run_sweep(flags: Flags, command: Command, argv: Sequence[str]) -> int:
    """Run the jobs of a sweep; return the first exit code that is not 0."""
    multirun = read_multirun(flags.sources, add_pet(flags.overrides, os.environ))
    if multirun.sweeper != "basic":
        return run_plugin(multirun, command, argv)
    jobs = expand_sweep(multirun)
    # A mistake in the last job shows before the first runs.
    composed = [compose(multirun.sources, overrides, number) for number, overrides in enumerate(jobs)]
    folder = multirun.sweep_dir
    for number, each in enumerate(composed if folder and command.verb == "run" else ()):
        use_sweep_folder(each.tree, f"{folder}/{number}")
    if command.verb == "run" and all(map(is_for_slurm, composed)):
        return try_again(lambda: submit_all(specify_all(composed, command), composed, argv))
    first = 0
    for number, (each, overrides) in enumerate(zip(composed, jobs, strict=True), 1):
        logger.info(f"job {number} of {len(jobs)}: {' '.join(mask_words(overrides))}")
        status = call_composed(each, command, argv)
        first = first or status
        if status - 128 in STOPPING:
            break
    return first


def specify_all(composed: Sequence[Composed], command: Command) -> list[JobSpec]:
    """Resolve and check the jobs of an array, each with a run directory of its own; raises LaunchError."""
    specs: list[JobSpec] = []
    for each in composed:
        taken = {spec.run_path for spec in specs}
        run_path = choose_run_path(each, command.program, submits=True, taken=taken)
        specs.append(specify_job(each, command.program, run_path, os.environ))
    return specs


def submit_all(specs: Sequence[JobSpec], composed: Sequence[Composed], argv: Sequence[str]) -> int:
    """Submit jobs, several as one array."""
    from launcher.slurm.submission import submit_jobs

    own_files = list(dict.fromkeys(name for each in composed for name in each.own_files))
    for spec in specs:
        check_resume(spec)
    name_files(own_files)
    return submit_jobs(specs, argv)


def run_plugin(multirun: Multirun, command: Command, argv: Sequence[str]) -> int:
    """Run the trials that a plugin of Hydra's asks for; raises LaunchError.

    It says first which files the sweep is from.
    """
    from launcher.config.sweep import run_trials
    from launcher.runs.progress import read_objective

    sweeper = f"hydra/sweeper={multirun.sweeper}"
    what = f"{sweeper} chooses trials by the results of runs"
    if command.verb != "run":
        raise UsageError(f"{what}: leave it out for `launch {command.verb}`")
    if multirun.tree is not None and multirun.tree.dry_run:
        raise UsageError(f"{what}, and dry_run=true starts none: leave one of them out")
    name_files(multirun.own_files)
    return run_trials(multirun, lambda batch: run_batch(batch, command, argv), read_objective)


def run_batch(batch: Sequence[Composed], command: Command, argv: Sequence[str]) -> Iterator[int]:
    """Run trials to their ends, on a cluster all of them at the same time, and give their exit codes.

    The process exits if the user stops a trial or leaves it to the queue.
    """
    if not all(map(is_for_slurm, batch)):
        for each in batch:
            code = call_composed(each, command, argv)
            if code - 128 in STOPPING:
                sys.exit(code)
            yield code
        return
    for each in batch:
        each.tree.follow = True
    specs = specify_all(batch, command)
    status = submit_all(specs, batch, argv)
    for spec in specs:
        outcome = take_dict(read_manifest(spec.run_path), "outcome")
        if outcome.get("state") not in CLOSED:
            logger.info(f"the sweep stops here, since {spec.run_path} has not ended")
            sys.exit(status)
        yield int(outcome.get("exit_code") or 0)
