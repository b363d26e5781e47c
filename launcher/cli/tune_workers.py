"""`launch tune dataloader`: tries a program with several numbers of workers, and keeps the best."""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.run import plan_job
from launcher.cli.tune_choice import check_override, describe_use, render_override, save_override
from launcher.cli.tune_session import TuneSession, open_session
from launcher.cli.tune_settings import OURS, find_max_workers, specify_search
from launcher.cli.tune_trial import describe_program, plan_trial, run_trial, specify_trial
from launcher.errors import LaunchError
from launcher.launch.job import JobSpec, render_start
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_NUM_WORKERS
from launcher.report.console import make_console
from launcher.report.fit import announce_trial, describe_trial, print_trials
from launcher.text import count_things, join_words, print_text
from launcher.tune.search import Trial, choose_best, choose_next, price_all
from launcher.tune.trial_records import MeasureError, MismatchError, measure_trial

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.config.compose import Composed


@dataclass(slots=True)
class WorkerSearch:
    """The search for a number of workers."""

    session: TuneSession
    max_workers: int
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> None:
        """Try the most telling number until it is clear which one is best; raises as `try_count`."""
        thrift = price_all(self.max_workers, self.session.spec.config.tune.steps) / 2
        self.session.try_each(
            lambda: choose_next(self.trials, self.max_workers, thrift),
            self.try_count,
        )

    def try_count(self, count: int) -> None:
        """Try a number of workers; raises MeasureError if the program cannot be tuned.

        If a trial with fewer workers has succeeded, a failure is put down to the number: the search stops.
        """
        session = self.session
        trial_spec = specify_count(session.composed, session.spec, session.run.path, count)
        progress = announce_trial(make_console(), f"trying {count_things(count, 'worker')} …")
        try:
            finished = run_trial(trial_spec, session.argv, progress)
            finished.check()
            trial = measure_trial(finished.read_records(), count, finished.ranks)
        except MeasureError as error:
            known = [each.workers for each in self.trials if each.rate]
            if not known or (isinstance(error, MismatchError) and not any(known)):
                raise
            trial = Trial(count, failure=str(error))
            self.max_workers = min(self.max_workers, count - 1)
        self.trials.append(trial)
        for line in describe_trial(trial).splitlines():
            logger.info(line)


def specify_count(composed: "Composed", spec: JobSpec, run_path: Path, count: int) -> JobSpec:
    """Return the trial of a number of workers."""
    variables = {LAUNCH_NUM_WORKERS: str(count), LAUNCH_LOADER_DEFAULT: "1"}
    return specify_trial(composed, spec, run_path / f"workers-{count}", variables)


def search_workers(composed: "Composed", program: tuple[str, ...] | None, argv: Sequence[str]) -> int:
    """Search for the number of workers, and return the exit code; raises LaunchError or RunIdTakenError."""
    spec = specify_search(composed, program)
    target = check_override(spec.config.save, replaces=spec.config.yes)
    job = plan_job(spec)
    max_workers, why = find_max_workers(job.config, job.plan)
    if spec.config.dry_run:
        return preview_search(composed, spec, max_workers, why, target)
    session = open_session(composed, spec, job, argv, f"with 0 to {max_workers} workers each ({why})")
    search = WorkerSearch(session, max_workers)
    try:
        search.run()
    except (MeasureError, LaunchError) as error:
        return session.give_up(error)
    return conclude_search(search, target)


def preview_search(composed: "Composed", spec: JobSpec, max_workers: int, why: str, target: str) -> int:
    """Show what would be tried, and start nothing."""
    first = specify_count(composed, spec, Path("RUN_DIR"), 0)
    command = render_start(plan_trial(first)[1], "RUN_ID")
    variables = [f"{name}={first.environ[name]}" for name in OURS]
    steps = spec.config.tune.steps
    print_text(
        f"would try 0 workers, then up to {max_workers} ({why}) until it is clear, each for {steps} steps at"
        f" most\nwould write {target}\n{join_words(['env', *variables, *command])}\n"
    )
    return 0


def conclude_search(search: WorkerSearch, target: str) -> int:
    """Show what was measured, keep the choice, and return the exit code."""
    session, trials = search.session, search.trials
    chosen, config = choose_best(trials), session.spec.config
    saved = None
    if chosen and not session.interrupted:
        origin = f"{session.program}, {session.place}"
        save_override(target, render_override(trials, chosen, config.dataloader, name=target, origin=origin))
        saved = target
    result = describe_result(search, chosen, saved)
    status = session.finish(result)
    if config.format == "json":
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    elif trials:
        print_trials(make_console(stderr=False), trials, chosen)
        sys.stdout.flush()
    program = f" -- {describe_program(session.spec)}" if session.spec.program else ""
    logger.info(describe_choice(chosen, saved, program))
    return status


def describe_result(search: WorkerSearch, chosen: Trial | None, saved: str | None) -> dict[str, object]:
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
        for trial in sorted(search.trials, key=lambda trial: trial.workers)
    ]
    state = {"complete": search.session.interrupted is None, "max_workers": search.max_workers}
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
