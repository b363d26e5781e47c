"""Carries a job out on this node: run directory, agent, console, and the account of how it ended."""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.config.program import runs_bundled
from launcher.errors import EXIT_MACHINE, MachineError
from launcher.files import open_own
from launcher.launch.ending import NodeEnd, check_success, describe_failure, post_end
from launcher.launch.job import Job, JobSpec, build_agent_environ
from launcher.launch.signals import name_signal
from launcher.launch.supervisor import Supervisor, make_agent
from launcher.launch.terminal import Terminal, open_terminal
from launcher.launch.warm.process import WarmProcess
from launcher.launch.watching import keep_watch_folder, watch_node
from launcher.runs.manifest import Outcome, Run, begin_run, identify_process, stamp_time, write_manifest
from launcher.runs.progress import LONG_BEFORE, CleanEnd, describe_progress, explain_early_exits
from launcher.runs.run_directory import (
    RunDir,
    create_run_dir,
    open_run_dir,
    release_space,
    reserve_space,
    write_json,
    write_private,
)
from launcher.text import describe_first_failed_rank, describe_time

if TYPE_CHECKING:
    from launcher.report.viewer import OutputViewer

logger = logging.getLogger(__name__)


def execute_job(
    job: Job,
    run: RunDir,
    manifest: Run,
    make_viewer: Callable[[Job, RunDir, Terminal | None], "OutputViewer"],
    early: WarmProcess | None,
) -> int:
    """Run a job here to its end and return the exit code; raises MachineError before that.

    The run directory holds the plan. `early` is a warm process that was started before this.
    """
    config, started = job.config, time.monotonic()
    # The job's one rank has a terminal as if there was no launcher.
    is_alone = job.world_size == 1 and config.logs.console != "none"
    terminal = open_terminal(run) if is_alone else None
    viewer = make_viewer(job, run, terminal)
    reserve_space(run)
    with keep_watch_folder(job.environ, enabled=config.watch.enabled) as folder:
        watching = watch_node(job, run, folder, config.node_rank or 0)
        try:
            environ = build_agent_environ(config, job.cluster, job.environ, run, job.host, folder)
            agent = make_agent(job, run, environ, terminal, early)
            end = Supervisor(job, run, viewer, agent, watching, manifest, terminal).run_to_end()
        except OSError as error:
            release_space(run)
            manifest.last.outcome = Outcome("failed", exit_code=EXIT_MACHINE, reason=str(error))
            with contextlib.suppress(OSError):
                write_manifest(run, manifest)
            raise MachineError(f"the ranks could not be started ({error}): see {run.path}") from None
        finally:
            if terminal:
                terminal.finish()
            watching.close()
    manifest.last.hangs, manifest.last.stragglers = watching.found["hangs"], watching.found["stragglers"]
    report_end(job, run, manifest, viewer, end, time.monotonic() - started)
    if not viewer.close():
        os._exit(end.status)  # a thread is stuck in a write, and the interpreter's own end would wait for it
    return end.status


def report_end(
    job: Job, run: RunDir, manifest: Run, viewer: "OutputViewer", end: NodeEnd, seconds: float
) -> None:
    """Write how the job ended, and say it."""
    trouble, failure = release_space(run), describe_failure(job, run, end)
    codes = job.config.cluster.requeue.exit_codes
    is_requested = bool(failure and failure.status in codes)
    # The console has shown what a single rank printed, and it is not repeated.
    is_shown = job.world_size == 1 and job.config.logs.console != "none"
    early = ""
    if end.status and not is_requested:  # ranks that ended before the first failure, or long before a stop
        before = end.failure.time if end.failure else end.signal_time - LONG_BEFORE
        ends = [CleanEnd(d.process.rank, job.host, d.time, d.process.attempt) for d in end.clean]
        early = explain_early_exits(run, ends, before, len(job.plan.ranks))
    events = [*filter(None, (trouble, early))]
    state = "stopped" if is_requested and not end.hang else end.state
    outcome = Outcome(
        state,
        cause="hang" if end.hang else None,
        exit_code=end.status,
        signal=name_signal(end.signal) if end.signal else None,
        reason=end.hang or None,
        events=list(events),
        first_failure=failure.describe(job.host, failure.attempt) if failure else None,
        attempts=1 + max((d.process.attempt for d in end.deaths), default=run.first_attempt),
    )
    manifest.last.ended, manifest.last.outcome = stamp_time(), outcome
    try:
        write_manifest(run, manifest)
    except OSError as error:
        logger.warning(f"the manifest could not be written ({error})")
    # How it went: the first failure or what was not as planned, the result, the run directory.
    result = describe_progress(viewer.finish(patient=end.signal is None))
    lines, level = events, logging.INFO
    if state == "succeeded":
        level = logging.WARNING
        lines += check_success(job, run, end)
    elif state == "stopped":
        if failure:
            who = f"rank {failure.rank} on {job.host}"
            lines.append(f"{who} ended with {failure.status}, and asks for another start")
        if is_requested or any(death.exitcode in codes for death in end.last_deaths):
            lines.append(f"the same command with run_dir={run.path} goes on")
    elif end.hang:
        lines.append(f"ended for a hang: {end.hang}")
    elif failure is None:
        lines += [f"no rank failed, but {end.describe_agent()}", f"its log is {run.agent_log(job.host)}"]
    elif failure.lines and is_shown:
        lines.append(f"rank 0 on {job.host} {failure.reason}")  # the console has shown what it printed
    else:
        where = f"rank {failure.rank} on {job.host} (local rank {failure.local_rank})"
        what = "failed after that" if early else "failed first"
        lines += describe_first_failed_rank(where, failure.reason, failure.log, failure.lines, what)
    for line in lines:
        logger.log(level, line)
    logger.info(f"{state} after {describe_time(seconds)}" + (f": {result}" if result else ""))
    logger.info(f"run directory {run.path}")
    post_end(job.config.notify, run, job.host, outcome)


def prepare_run(
    spec: JobSpec, argv: Sequence[str], hosts: Sequence[str], plan: Mapping[str, object] | None = None
) -> tuple[RunDir, Run]:
    """Make or open the run directory, with configuration and manifest, and return it and the manifest.

    `plan` is the first host's, if it is made already. Raises MachineError, leaving nothing, or
    RunIdTakenError.
    """
    run = None
    try:
        if spec.run_key == "runs_dir":
            run = create_run_dir(spec.run_path)
        else:
            run = open_run_dir(spec.run_path, spec.config.node_rank)
        write_private(run.path / "config.yaml", spec.config_text)
        manifest = begin_run(run, ["launch", *argv], spec.choices)
        manifest.last.hosts, manifest.agent = list(hosts), spec.agent.kind
        if runs_bundled(spec.config):
            chosen = ("batch_size", "grad_accumulation", "activation_checkpointing", "parallel")
            manifest.training = {key: spec.config.program.get(key) for key in chosen}
        if hosts:  # else a job is being submitted, and hangs on no process of ours
            manifest.process = identify_process(os.getpid())
            open_own(run.path)  # until this process ends, which is known as the run's by that
        write_manifest(run, manifest)
        if plan:
            write_json(run.plan_path(hosts[0]), plan)
    except OSError as error:
        raise refuse_run(spec, error, run) from None
    return run, manifest


def refuse_run(spec: JobSpec, error: OSError, run: RunDir | None = None) -> MachineError:
    """Return the error for a run directory that cannot be written, and leave nothing of a new one."""
    if run and spec.run_key == "runs_dir":
        shutil.rmtree(run.path, ignore_errors=True)
        for folder in run.path.parents[:2]:
            with contextlib.suppress(OSError):  # other runs are in it
                folder.rmdir()
    target = spec.config.runs_dir if spec.run_key == "runs_dir" else spec.run_path
    where = f"{error.filename or target} ({error.strerror})"
    return MachineError(f"cannot write the run directory, {where}: set {spec.run_key}=DIR to another place")
