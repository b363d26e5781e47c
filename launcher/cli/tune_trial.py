"""One trial of `launch tune`: a run of the program that ends once it has been measured."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.cli.job_warnings import unset_settings
from launcher.cli.run import make_agent_on_machine, plan_job, settle_fit
from launcher.config.compose import Composed, resolve
from launcher.config.config_file import render_config
from launcher.config.environment_files import fill_env
from launcher.config.settings import Settings
from launcher.errors import MachineError
from launcher.launch.agent import AgentRequest, check_open_files
from launcher.launch.ending import NodeEnd, complete_manifest, explain_failure, judge_end
from launcher.launch.job import Job, JobSpec, build_agent_environ
from launcher.launch.local_run import AGENT_LINES, make_agent, prepare_run, write_plan
from launcher.launch.monitor import RankMonitor
from launcher.launch.supervisor import Supervisor
from launcher.plan.model import plan_to_json
from launcher.probe.limits import count_oom_kills, is_memory_low
from launcher.protocol import LAUNCH_METER
from launcher.runs.progress import Progress
from launcher.runs.rank_logs import read_tail
from launcher.runs.secrets import mask_words
from launcher.text import redirect_log
from launcher.tune.trials import MeasureError, Record, read_records

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
class SilentViewer:
    """Shows that something goes on, and nothing of what the trial prints or logs."""

    progress: AbstractContextManager[object]
    """Shows people that something goes on."""
    showing: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Show progress: not before the agent's start, since a thread must not hold locks in a fork."""
        self.showing.enter_context(self.progress)
        self.showing.callback(redirect_log(lambda _: None))

    def do_nothing(self, *_: object, **__: object) -> None:
        """A trial has no terminal, and what it prints is not shown."""

    use_terminal = notify = watch_rank = do_nothing

    def release_log(self) -> None:
        """Let what is logged be seen."""
        self.showing.close()

    def finish(self, *, patient: bool = True) -> Sequence[Progress]:
        return ()

    def close(self) -> bool:
        """Take the progress down."""
        self.showing.close()
        return True


@dataclass(frozen=True, slots=True)
class FinishedTrial:
    """A trial that has come to its end, whichever."""

    monitor: RankMonitor
    ending: NodeEnd
    config: Settings
    timed_out: bool
    starved: bool
    """It was ended since the machine's memory ran out."""
    oom_kills: int
    """Processes of the job's cgroup that the kernel has killed for memory meanwhile."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.monitor.job.plan.ranks)

    def read_records(self) -> list[Record]:
        """Return what its ranks have measured; raises MeasureError for a damaged record."""
        return read_records(self.monitor.run.path / RECORDS)

    def check(self) -> None:
        """Raise an error if it ended by anything but its own measurement or the program's end.

        MeasureError if it took too long, InterruptedTrialError for a signal to `launch`, FailedTrialError.
        """
        if self.timed_out:
            raise MeasureError(
                f"not measured within tune.timeout={self.config.tune.timeout:g} s: give more time, or a"
                " smaller task"
            )
        self.check_signal()
        if self.starved:
            raise MeasureError("the machine's memory ran out, so it was ended")
        if self.ending.status:
            raise FailedTrialError(
                explain_failure(self.monitor, self.ending, output_shown=False), self.ending.status
            )

    def check_signal(self) -> None:
        """Raise InterruptedTrialError if `launch` was sent a signal, other than at the time limit."""
        if self.ending.signal is not None and not self.timed_out:
            raise InterruptedTrialError(self.ending.signal)


def specify_trial(
    composed: Composed, spec: JobSpec, folder: Path, variables: Mapping[str, str] | None = None
) -> JobSpec:
    """Return a trial with variables of its own, and a run directory of its own."""
    config = fill_env(resolve(composed, folder), spec.file_variables)
    config = unset_settings(config, spec.unset_allocator)
    config = replace(
        config,
        gc=replace(config.gc, warmup=min(config.gc.warmup, WARMUP)),
        torchrun=replace(config.torchrun, max_restarts=0),
        restarts=None,
    )
    order = {"folder": str(folder / RECORDS), "steps": config.tune.steps, "seconds": config.tune.seconds}
    return replace(
        spec,
        config=config,
        config_text=render_config(composed),
        environ={**spec.environ, **(variables or {}), LAUNCH_METER: json.dumps(order)},
        run_path=folder,
        run_key="new_run_dir",
    )


def run_trial(
    trial: JobSpec,
    argv: Sequence[str],
    progress: AbstractContextManager[object],
) -> FinishedTrial:
    """Run the program to its end, or until it has been measured, or the machine's memory runs out.

    Raises UsageError and MachineError as any job does.
    """
    trial, job = plan_trial(trial)
    check_open_files()
    run, manifest = prepare_run(trial, argv, [job.host])
    write_plan(trial, run, job.host, plan_to_json(job.plan))
    (run.path / RECORDS).mkdir(mode=0o700)
    monitor = RankMonitor(job, run, SilentViewer(progress), count_oom_kills, manifest)
    environ = build_agent_environ(job.config, job.cluster, job.environ, run, job.host)
    agent = make_agent(AgentRequest(job, run, environ), monitor, make_agent_on_machine)
    deadline = time.monotonic() + trial.config.tune.timeout
    supervisor = Supervisor(monitor, agent, deadline=deadline, is_starved=is_memory_low)
    try:
        outcome = supervisor.run()
    except OSError as error:
        raise MachineError(f"the ranks could not be started ({error}): see {run.path}") from None
    finally:
        monitor.viewer.close()
    ending = judge_end(outcome, read_tail(run.agent_log(job.host), AGENT_LINES))
    complete_manifest(monitor, ending)
    timed_out, starved = supervisor.timed_out, supervisor.starved
    return FinishedTrial(monitor, ending, trial.config, timed_out, starved, monitor.count_new_oom_kills())


def plan_trial(trial: JobSpec) -> tuple[JobSpec, Job]:
    """Plan a trial; what is free of the bundled program is chosen around what is tried, as a run does."""
    job = plan_job(trial)
    if trial.fit_model is None or not trial.is_bundled:
        return trial, job
    # Steps of one micro-step: sequences a second do not depend on how many there are.
    program = {**trial.config.program, "global_batch": "auto"}
    if program.get("grad_accumulation") == "auto":
        program["grad_accumulation"] = 1
    return settle_fit(replace(trial, config=replace(trial.config, program=program)), job, judges=False)


def describe_program(spec: JobSpec) -> str:
    """Return the program's words for people and files, as they are typed, secrets masked."""
    import shlex

    if spec.program is None:
        return f"program={spec.choices.get('program', '')}"
    return shlex.join(mask_words(spec.program)).replace(f"{os.path.expanduser('~')}/", "~/")  # noqa: PTH111
