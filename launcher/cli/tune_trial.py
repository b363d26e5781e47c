"""One trial of `launch tune`: a run of the program that ends once it has been measured."""

import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.config.schema import LaunchConfig
from launcher.errors import MachineError
from launcher.launch.agent import check_open_files, start_agent
from launcher.launch.job import Draft, build_environ, plan_job, render_agent
from launcher.launch.local_run import AGENT_LINES, prepare_run, write_plan
from launcher.launch.monitor import Attendant, attend_job
from launcher.launch.outcome import Ending, explain_failure, judge_outcome, record_end
from launcher.launch.processes import RankProcess
from launcher.launch.supervisor import Supervisor
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS
from launcher.runs.rank_logs import read_tail
from launcher.runs.secrets import mask_words
from launcher.tune.search import Trial
from launcher.tune.trial_records import MeasureError, judge_trial, read_records

WARMUP = 2
"""Steps after which garbage collection is as in the later steps of a long run: before any is measured."""
RECORDS = "measured"
"""Folder of the ranks' records in a trial's run directory."""


class InterruptedTrialError(Exception):
    """`launch` was sent a signal; its number is the argument."""


class FailedTrialError(MeasureError):
    """The program failed; the text is how, in some lines."""

    def __init__(self, lines: Sequence[str], status: int) -> None:
        super().__init__("\n".join(lines))
        self.status = status


@dataclass(slots=True)
class Watcher:
    """Looks after a trial: as a job is looked after, but in silence, and for no longer than it may take."""

    attendant: Attendant
    deadline: float
    """Monotonic."""
    progress: AbstractContextManager[object]
    """Shows people that something goes on."""
    late: bool = False
    said: list[str] = field(default_factory=list)
    showing: ExitStack = field(default_factory=ExitStack)

    def begin(self) -> None:
        """Show progress: not before the agent's start, since a thread must not hold locks in a fork."""
        self.showing.enter_context(self.progress)

    def find_ranks(self, agent: int) -> Iterable[RankProcess]:
        """Return the ranks that the agent (a PID) has started since the last call."""
        return self.attendant.find_ranks(agent)

    def announce(self, text: str) -> None:
        """Keep a line for people: they see it if the trial fails."""
        self.said.append(text)

    def note_stop(self, number: int, *, by_head: bool) -> None:
        """Nothing to do: the trial is over anyway."""

    def may_reap(self) -> bool:
        """Say that nobody waits for a child; asked again and again, so that the time is looked at here."""
        if not self.late and time.monotonic() > self.deadline:
            self.late = True
            signal.raise_signal(signal.SIGTERM)  # as if somebody had sent it to `launch`
        return True

    def end(self) -> None:
        """Take the progress down."""
        self.showing.close()


def draft_trial(draft: Draft, workers: int, folder: Path) -> Draft:
    """Return the draft of a trial with a number of workers and a run directory of its own."""
    config = replace(draft.config, run_dir=str(folder))
    if config.gc.warmup > WARMUP:
        config.gc = replace(config.gc, warmup=WARMUP)
    order = {"folder": str(folder / RECORDS), "steps": config.tune.steps, "seconds": config.tune.seconds}
    own = {
        LAUNCH_NUM_WORKERS: str(workers),
        LAUNCH_LOADER_DEFAULT: "1",
        LAUNCH_METER: json.dumps(order),
    }
    return replace(draft, config=config, environ={**draft.environ, **own})


def run_trial(
    draft: Draft,
    argv: Sequence[str],
    workers: int,
    folder: Path,
    progress: AbstractContextManager[object],
) -> Trial:
    """Run the program with a number of workers, and return what was measured.

    Raises MeasureError where nothing can be said, FailedTrialError where the program failed, and
    InterruptedTrialError for a signal; UsageError and MachineError as any job does.
    """
    trial = draft_trial(draft, workers, folder)
    attendant = open_trial(trial, argv)
    job, run = attendant.job, attendant.run
    watcher = Watcher(attendant, time.monotonic() + trial.config.tune.timeout, progress)
    supervisor = Supervisor(watcher, len(job.plan.ranks), job.config.torchrun.shutdown_timeout)
    command, log = render_agent(job, f"{run.path.parent.name}-{run.id}"), run.agent_log(job.host)
    environ = build_environ(job.config, job.cluster, job.environ, run, job.host)
    try:
        outcome = supervisor.run(lambda: start_agent(command, environ, log), log)
    except OSError as error:
        raise MachineError(f"torchrun's agent could not be run ({error}): see {run.path}") from None
    finally:
        watcher.end()
    ending = judge_outcome(outcome, tuple(read_tail(log, AGENT_LINES)))
    record_end(attendant, ending)
    check_ending(watcher, ending, trial.config)
    return judge_trial(read_records(run.path / RECORDS), workers, len(job.plan.ranks))


def open_trial(trial: Draft, argv: Sequence[str]) -> Attendant:
    """Plan a trial, make its run directory, and return who looks after it; raises as any job does."""
    job = plan_job(trial)
    check_open_files()
    run, manifest = prepare_run(trial, argv, [job.host])
    settled = trial.settle(run.path)
    settled.torchrun.max_restarts = 0
    job = job.settle(settled)
    write_plan(run, job, trial.config)
    (run.path / RECORDS).mkdir(mode=0o700)
    return attend_job(job, run, manifest)


def check_ending(watcher: Watcher, ending: Ending, config: LaunchConfig) -> None:
    """Raise where a trial ended in another way than by its own measuring, or the program's end."""
    if watcher.late:
        raise MeasureError(
            f"not measured within tune.timeout={config.tune.timeout:g} s: give more time, or a smaller task"
        )
    if ending.outcome.signal is not None:
        raise InterruptedTrialError(ending.outcome.signal)
    if ending.status:
        raise FailedTrialError(explain_failure(watcher.attendant, ending), ending.status)


def describe_program(draft: Draft) -> str:
    """Return the program's words for people and files, as they are typed, secrets masked."""
    import shlex

    if draft.words is None:
        return f"program={draft.composed.choices.get('program', '')}"
    return shlex.join(mask_words(draft.words)).replace(f"{os.path.expanduser('~')}/", "~/")  # noqa: PTH111
