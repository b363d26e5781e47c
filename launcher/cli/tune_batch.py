"""`launch tune batch`: tries a program with several micro-batches, by its own option for them."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.batch_bounds import find_bounds
from launcher.cli.batch_option import PREFIX, BatchOption, describe_command, find_batch_option
from launcher.cli.run import plan_job
from launcher.cli.tune_choice import check_override, describe_use, render_comments, save_override
from launcher.cli.tune_session import TuneSession, open_session
from launcher.cli.tune_settings import specify_search
from launcher.cli.tune_trial import FinishedTrial, plan_trial, run_trial, specify_trial
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.launch.job import JobSpec, render_start
from launcher.probe.available_memory import MemoryGuard
from launcher.protocol import LAUNCH_METER
from launcher.report.console import make_console
from launcher.report.fit import announce_trial, describe_batch_size, print_batches, tabulate_batches
from launcher.runs.rank_logs import read_tail
from launcher.text import format_size, join_words, print_text
from launcher.tune.batch_records import check_effect, find_memory_error, measure_batch
from launcher.tune.batch_search import (
    FAILED,
    FITS,
    TOO_LARGE,
    BatchBounds,
    BatchChoice,
    BatchTrial,
    choose_next_batch,
    conclude_trials,
)
from launcher.tune.trial_records import MeasureError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.config.compose import Composed

LOG_LINES = 20_000
"""Last lines of each rank's logs that are searched for an allocation that has failed."""


@dataclass(slots=True)
class BatchSearch:
    """The search for a micro-batch."""

    session: TuneSession
    option: BatchOption
    bounds: BatchBounds
    trials: list[BatchTrial] = field(default_factory=list)

    def run(self) -> None:
        """Try sizes until the largest that fits and the fastest are known; raises as `try_batch`."""
        self.session.try_each(lambda: choose_next_batch(self.trials, self.bounds), self.try_batch)

    def try_batch(self, batch: int) -> None:
        """Try a size; raises MeasureError if the program cannot be tuned so.

        Once a size has fitted, a failure for another reason than memory is put down to the size.
        """
        session = self.session
        spec = specify_batch(session.composed, session.spec, self.option, session.run.path, batch)
        progress = announce_trial(make_console(), f"trying {self.option.render(batch)} …")
        guard = MemoryGuard()
        try:
            trial = judge_batch(run_trial(spec, session.argv, progress, guard.is_starved), batch)
        except MeasureError as error:
            if not any(each.verdict == FITS for each in self.trials):
                raise
            trial = BatchTrial(batch, FAILED, reason=find_last_words(error))
        self.trials.append(trial)
        logger.info(describe_batch_size(trial))
        check_effect(self.trials, self.option.name)


def search_batch(composed: "Composed", program: tuple[str, ...] | None, argv: Sequence[str]) -> int:
    """Search for the micro-batch, and return the exit code; raises LaunchError or RunIdTakenError."""
    spec = specify_search(composed, program, (LAUNCH_METER,))
    option = find_batch_option(spec)
    check_saving(spec)
    job = plan_job(spec)
    bounds = find_bounds(spec, job, option)
    if spec.config.dry_run:
        return preview_batch(composed, spec, option, bounds)
    within = f"{option.render(bounds.start)} first, at most {bounds.max_batch}{describe_memory_bound(bounds)}"
    search = BatchSearch(open_session(composed, spec, job, argv, within), option, bounds)
    try:
        search.run()
        if not search.session.interrupted:
            check_any_fits(search)
    except (MeasureError, LaunchError) as error:
        return search.session.give_up(error)
    return conclude_batch(search)


def specify_batch(
    composed: "Composed", spec: JobSpec, option: BatchOption, run_path: Path, batch: int
) -> JobSpec:
    """Return the trial of a size."""
    return specify_trial(composed, option.specify(composed, spec, batch), run_path / f"batch-{batch}")


def check_saving(spec: JobSpec) -> None:
    """Raise UsageError if the choice cannot be kept in the file that save= names."""
    save = spec.config.save
    if save is None:
        return
    if spec.program is not None:
        raise UsageError(
            f"save={save}: a file can hold the choice for a program of the group `program` alone, leave it"
            " out: the command to use is printed"
        )
    check_override(save, replaces=spec.config.yes)


def describe_memory_bound(bounds: BatchBounds) -> str:
    """Say how much of the machine's memory trials may use, after a comma."""
    return f", within {format_size(bounds.memory_kib)} of memory" if bounds.memory_kib else ""


def preview_batch(composed: "Composed", spec: JobSpec, option: BatchOption, bounds: BatchBounds) -> int:
    """Show what would be tried, and start nothing."""
    first = specify_batch(composed, spec, option, Path("RUN_DIR"), min(bounds.start, bounds.max_batch))
    command = render_start(plan_trial(first)[1], "RUN_ID")
    steps = spec.config.tune.steps
    written = f"would write {spec.config.save}\n" if spec.config.save else ""
    print_text(
        f"would try {option.render(min(bounds.start, bounds.max_batch))}, then twice as much until it does"
        f" not fit, up to {bounds.max_batch}{describe_memory_bound(bounds)}, each for {steps} steps at most\n"
        f"{written}{join_words(['env', f'{LAUNCH_METER}={first.environ[LAUNCH_METER]}', *command])}\n"
    )
    return 0


def judge_batch(finished: FinishedTrial, batch: int) -> BatchTrial:
    """Tell whether a size fits, and how fast it is; raises MeasureError if it failed for another reason.

    A program that catches the error of an allocation, and goes on or ends in peace, does not fit either.
    """
    finished.check_signal()
    said = find_memory_error(read_rank_logs(finished))
    if said:
        return BatchTrial(batch, TOO_LARGE, reason=said)
    if finished.starved:
        return BatchTrial(batch, TOO_LARGE, reason="the machine's memory ran out, so it was ended")
    if finished.oom_kills > 0:
        return BatchTrial(batch, TOO_LARGE, reason="the kernel killed a process for memory")
    finished.check()
    return measure_batch(finished.read_records(), batch, finished.ranks)


def read_rank_logs(finished: FinishedTrial) -> Iterator[str]:
    """Give the last lines of what the ranks of a trial have printed."""
    run = finished.monitor.run
    for rank in range(finished.ranks):
        for stream in ("err", "out"):
            yield from read_tail(run.rank_log(rank, run.first_attempt, stream), LOG_LINES)


def find_last_words(error: MeasureError) -> str:
    """Return the last line of a failure, without the mark of a quoted one."""
    lines = [line.strip().removeprefix("| ").strip() for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if line), "")


def check_any_fits(search: BatchSearch) -> None:
    """Raise MachineError if not even the smallest size fits."""
    if all(trial.verdict != FITS for trial in search.trials):
        last = search.trials[-1]
        raise MachineError(
            f"{search.option.render(last.batch)} does not fit ({last.reason}), nor does any larger one: use"
            " a smaller model or shorter sequences, activation checkpointing, or more sharding"
            f" (run directory {search.session.run.path})"
        )


def conclude_batch(search: BatchSearch) -> int:
    """Show what was measured, keep the choice, and return the exit code."""
    session, option = search.session, search.option
    choice = conclude_trials(search.trials, search.bounds)
    saved = save_choice(search, choice.batch) if choice and not session.interrupted else None
    result = describe_batch_result(search, choice, saved)
    status = session.finish(result)
    if session.spec.config.format == "json":
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    elif search.trials:
        print_batches(make_console(stderr=False), search.trials, choice)
        sys.stdout.flush()
    if choice is None:
        logger.info("interrupted before anything was measured")
        return status
    early = "interrupted: " if session.interrupted else ""
    logger.info(f"{early}largest micro-batch that fits: {choice.largest} ({choice.why})")
    command = describe_command(session.spec, option, choice.batch, session.argv)
    logger.info(f"{early}{describe_sizes(choice)}: `{command}`")
    if saved:
        logger.info(f"{saved} written: {describe_use(saved, '', 'program')}")
    return status


def describe_sizes(choice: BatchChoice) -> str:
    """Say which size is safe, which is the fastest, and which to use."""
    safe = "none is known to have 5% to spare" if choice.largest_safe is None else f"{choice.largest_safe}"
    fast = "not measured" if choice.fastest is None else f"{choice.fastest}"
    return f"with 5% of the memory to spare: {safe}; fastest: {fast}; use {choice.batch}"


def save_choice(search: BatchSearch, batch: int) -> str | None:
    """Write the choice as an option of the group `program`, if save= asks for it; returns the file."""
    session, target = search.session, search.session.spec.config.save
    if target is None:
        return None
    origin = f"{session.program}, {session.place}"
    base = session.spec.choices.get("program", "train")
    comments = render_comments("batch", tabulate_batches(search.trials), origin)
    values = [
        f"defaults: [{json.dumps(base)}, _self_]",
        f"{search.option.name.removeprefix(PREFIX)}: {batch}",
    ]
    save_override(target, "\n".join([*comments, *values]) + "\n")
    return target


def describe_batch_result(
    search: BatchSearch, choice: BatchChoice | None, saved: str | None
) -> dict[str, object]:
    """Return the result for programs."""
    found = {
        "batch": choice.batch if choice else None,
        "largest": choice.largest if choice else None,
        "largest_with_margin": choice.largest_safe if choice else None,
        "fastest": choice.fastest if choice else None,
        "largest_is_limit": choice.is_bounded if choice else False,
        "limit": choice.why if choice else None,
        "argument": search.option.render(choice.batch) if choice else None,
        "saved": saved,
    }
    state = {"complete": search.session.interrupted is None, "option": search.option.name}
    trials = sorted(search.trials, key=lambda trial: trial.batch)
    rows = [describe_batch_trial(trial) for trial in trials]
    return {"schema": 1, "subject": "batch", **state, **found, "trials": rows}


def describe_batch_trial(trial: BatchTrial) -> dict[str, object]:
    """Return a trial for programs; what is not known is null."""
    return {
        "batch": trial.batch,
        "verdict": trial.verdict,
        "sequences_per_second": round(trial.rate, 4) or None,
        "standard_error": round(trial.error, 4) if trial.rate else None,
        "step_seconds": round(trial.step_seconds, 6) or None,
        "steps": trial.steps,
        "unit": trial.unit,
        "memory_kib": trial.memory_kib or None,
        "gpu_kib": trial.gpu_kib or None,
        "gpu_total_kib": trial.gpu_total_kib or None,
        "reason": trial.reason or None,
    }
