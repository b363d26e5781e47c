"""`launch tune dataloader`: tries a program with several numbers of workers, and keeps the best."""

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.config_programs import name_files, report_config_programs
from launcher.cli.run import plan_job, try_anew
from launcher.cli.tune_choice import check_override, describe_use, render_override, save_override
from launcher.cli.tune_settings import OURS, find_max_workers, specify_search
from launcher.cli.tune_trial import (
    FailedTrialError,
    InterruptedTrialError,
    describe_program,
    run_trial,
    specify_trial,
)
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.launch.job import JobSpec, render_agent
from launcher.launch.local_run import prepare_run
from launcher.report.console import make_console
from launcher.report.tune_table import announce_trial, describe_trial, print_trials
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.run_directory import RunDir, write_json
from launcher.text import count_things, join_words, print_text
from launcher.tune.search import Trial, choose_best, choose_next, price_all
from launcher.tune.trial_records import MeasureError, MismatchError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.config.composition import Composed


@dataclass(slots=True)
class Tuning:
    """A search under way."""

    composed: "Composed"
    spec: JobSpec
    argv: Sequence[str]
    run: RunDir
    max_workers: int
    trials: list[Trial] = field(default_factory=list)
    interrupted: int | None = None
    """Signal that has ended the search early."""

    def search(self) -> None:
        """Try the most telling number until it is clear which one is best; raises as `try_count`."""
        thrift = price_all(self.max_workers, self.spec.config.tune.steps) / 2
        while (count := choose_next(self.trials, self.max_workers, thrift)) is not None:
            try:
                self.try_count(count)
            except InterruptedTrialError as error:
                self.interrupted = error.args[0]
                return
            except KeyboardInterrupt:  # between two runs
                self.interrupted = signal.SIGINT
                return

    def try_count(self, count: int) -> None:
        """Try a number of workers; raises MeasureError if the program cannot be tuned.

        If a trial with fewer workers has succeeded, a failure is put down to the number: the search stops.
        """
        folder = self.run.path / f"workers-{count}"
        trial_spec = specify_trial(self.composed, self.spec, count, folder)
        progress = announce_trial(make_console(), f"trying {count_things(count, 'worker')} …")
        try:
            trial = run_trial(trial_spec, self.argv, count, progress)
        except MeasureError as error:
            known = [each.workers for each in self.trials if each.rate]
            if not known or (isinstance(error, MismatchError) and not any(known)):
                raise
            trial = Trial(count, failure=str(error))
            self.max_workers = min(self.max_workers, count - 1)
        self.trials.append(trial)
        for line in describe_trial(trial).splitlines():
            logger.info(line)


def tune_program(
    composed: "Composed",
    names: Sequence[str],
    program: tuple[str, ...] | None,
    argv: Sequence[str],
) -> int:
    """Tune what is named for a program, and return the exit code; raises LaunchError."""
    if list(names) != ["dataloader"]:
        given = f"`{names[0]}` cannot be tuned" if names else "tune what?"
        raise UsageError(f"{given}: say `launch tune dataloader [KEY=VALUE …] [-- PROGRAM ARGUMENT …]`")
    return try_anew(lambda: search(composed, program, argv))


def search(composed: "Composed", program: tuple[str, ...] | None, argv: Sequence[str]) -> int:
    """Search for the number of workers, and return the exit code; raises LaunchError or RunIdTakenError."""
    spec = specify_search(composed, program)
    target = check_override(spec.config.save, replaces=spec.config.yes)
    job = plan_job(spec)
    max_workers, why = find_max_workers(job.config, job.plan)
    if spec.config.dry_run:
        return preview_search(composed, spec, max_workers, why, target)
    run, manifest = prepare_run(spec, argv, [job.host])
    name_files(composed.own_files)
    report_config_programs([spec], composed.own_files)
    where = f"{count_things(len(job.plan.ranks), 'rank')} of {job.host}"
    logger.info(f"{describe_program(spec)} on {where}, with 0 to {max_workers} workers each ({why})")
    logger.info(f"run directory {run.path}")
    tuning = Tuning(composed, spec, argv, run, max_workers)
    try:
        tuning.search()
    except (MeasureError, LaunchError) as error:
        return give_up(tuning, manifest, error)
    return conclude_search(tuning, manifest, target, where)


def preview_search(composed: "Composed", spec: JobSpec, max_workers: int, why: str, target: str) -> int:
    """Show what would be tried, and start nothing."""
    folder = Path("RUN_DIR", "workers-0")
    first = specify_trial(composed, spec, 0, folder)
    command = render_agent(plan_job(first), "RUN_ID")
    variables = [f"{name}={first.environ[name]}" for name in OURS]
    steps = spec.config.tune.steps
    print_text(
        f"would try 0 workers, then up to {max_workers} ({why}) until it is clear, each for {steps} steps at"
        f" most\nwould write {target}\n{join_words(['env', *variables, *command])}\n"
    )
    return 0


def give_up(tuning: Tuning, manifest: dict[str, object], error: MeasureError | LaunchError) -> int:
    """Say why nothing could be measured; returns the program's exit code, or raises UsageError."""
    status = error.status if isinstance(error, FailedTrialError) else getattr(error, "exit_code", 2)
    end_run(tuning, manifest, "failed", status)
    if isinstance(error, LaunchError):
        raise error
    if not isinstance(error, FailedTrialError):
        raise UsageError(f"{error} (run directory {tuning.run.path})")
    for line in str(error).splitlines():
        logger.info(line)
    logger.info(f"run directory {tuning.run.path}")
    return error.status


def conclude_search(tuning: Tuning, manifest: dict[str, object], target: str, where: str) -> int:
    """Show what was measured, keep the choice, and return the exit code."""
    chosen, config = choose_best(tuning.trials), tuning.spec.config
    stopped = tuning.interrupted
    program = describe_program(tuning.spec)
    saved = None
    if chosen and not stopped:
        origin = f"{program}, {where}"
        save_override(
            target, render_override(tuning.trials, chosen, config.dataloader, name=target, origin=origin)
        )
        saved = target
    result = describe_result(tuning, chosen, saved)
    with contextlib.suppress(OSError):
        write_json(tuning.run.path / "tuning.json", result)
    status = 128 + stopped if stopped else 0
    end_run(tuning, manifest, "stopped" if stopped else "succeeded", status)
    if config.format == "json":
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    elif tuning.trials:
        print_trials(make_console(stderr=False), tuning.trials, chosen)
        sys.stdout.flush()
    logger.info(describe_choice(chosen, saved, f" -- {program}" if tuning.spec.program else ""))
    return status


def describe_result(tuning: Tuning, chosen: Trial | None, saved: str | None) -> dict[str, object]:
    """Return the result for programs."""
    rows = [
        {
            "workers": trial.workers,
            "steps_per_second": round(trial.rate, 4) if trial.rate else None,
            "wait_share": round(trial.wait, 4) if trial.rate else None,
            "memory_kib": trial.memory_kib or None,
            "steps": trial.steps,
            "unit": trial.unit,
            "failure": trial.failure or None,
        }
        for trial in sorted(tuning.trials, key=lambda trial: trial.workers)
    ]
    state = {"complete": tuning.interrupted is None, "max_workers": tuning.max_workers}
    choice = {"num_workers": chosen.workers if chosen else None, "saved": saved}
    return {"schema": 1, "subject": "dataloader", **state, **choice, "trials": rows}


def describe_choice(chosen: Trial | None, saved: str | None, program: str) -> str:
    """Say what was chosen and how to use it."""
    if chosen is None:
        return "interrupted before anything was measured"
    best = count_things(chosen.workers, "worker")
    if saved is None:
        return f"interrupted: {best} is the best so far, and no file was written"
    return f"{best} chosen; {saved} written: {describe_use(saved, program)}"


def end_run(tuning: Tuning, manifest: dict[str, object], state: str, status: int) -> None:
    """Complete the manifest."""
    manifest["ended"] = stamp_time()
    manifest["outcome"] = {"state": state, "exit_code": status}
    try:
        write_manifest(tuning.run, manifest)
    except OSError as error:
        raise MachineError(f"{tuning.run.manifest_path} cannot be written ({error}): make room") from None


HELP = """\
usage: launch tune dataloader [KEY=VALUE ...] [PROGRAM ARGUMENT ...]

Runs the program on this machine with several numbers of DataLoader workers, for
some dozens of steps each, and ends it when its steps per second and its waiting
for data are clear. The program is not changed: a DataLoader(...) without
num_workers gets the number to be tried, and so do LAUNCH_NUM_WORKERS and
`{num_workers}` among the arguments. It starts from its beginning each time, and
writes what it writes. The choice, the fewest workers that are as fast as any,
is kept as an option of the group dataloader.

  save=FILE            where to keep it (conf/dataloader/tuned.yaml, which
                       `launch dataloader=tuned` takes)
  yes=true             replace a file there that launch has not written
  format=table|json    json: {"schema": 1, "num_workers": N,
                       "trials": [{workers, ...}]}
  dry_run=true         show what would be tried
  tune.max_workers=N   workers of a rank at most (auto: two for each of its
                       cores, if memory allows)
  tune.steps=N         measured steps at most for each number of workers (48)
  tune.seconds=N       seconds of measuring for each number (60)
  tune.timeout=N       seconds that a run of the program may take (900)

  launch tune dataloader train.py --epochs 1
  launch tune dataloader nproc_per_node=2 tune.max_workers=8 train.py
"""
