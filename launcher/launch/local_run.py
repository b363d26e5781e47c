"""Carries a job out on this node: run directory, agent, console, and the account of how it ended."""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.config.composition import dump_yaml
from launcher.config.schema import LaunchConfig
from launcher.errors import EXIT_MACHINE, MachineError
from launcher.files import LARGEST, read_file
from launcher.launch.agent import check_open_files, start_agent
from launcher.launch.job import Draft, Job, build_environ, open_target, render_agent
from launcher.launch.monitor import RankMonitor, Viewer
from launcher.launch.outcome import report_outcome
from launcher.launch.pseudo_terminal import PseudoTerminal, open_terminal
from launcher.launch.supervisor import Supervisor
from launcher.plan.json_form import plan_to_json
from launcher.runs.disk_space import release_space, reserve_space
from launcher.runs.manifest import describe_start, write_manifest
from launcher.runs.rank_logs import measure_file, read_tail
from launcher.runs.run_directory import RunDir, write_json, write_private
from launcher.runs.run_process import hold_directory, identify_process
from launcher.runs.secrets import mask_tree
from launcher.text import join_words, print_text

logger = logging.getLogger(__name__)

AGENT_LINES = 2000
"""Last lines of the agent's log that are searched for its report."""


def execute_job(
    draft: Draft,
    job: Job,
    argv: Sequence[str],
    make_viewer: Callable[[Job, RunDir], Viewer],
    count_oom_kills: Callable[[], int],
) -> int:
    """Run a job here to its end and return the exit code; raises UsageError or MachineError before that."""
    check_open_files()
    run, manifest = prepare_run(draft, argv, [job.host])
    job = job.settle(draft.settle(run.path))
    write_plan(run, job, draft.config)
    command = render_agent(job, run.id)
    monitor = RankMonitor(job, run, make_viewer(job, run), count_oom_kills, manifest)
    log = run.agent_log(job.host)
    log_begin, started = measure_file(log), time.monotonic()
    reserve_space(run)
    codes = job.config.cluster.requeue.exit_codes
    supervisor = Supervisor(
        monitor, len(job.plan.ranks), job.config.torchrun.shutdown_timeout, exit_codes=codes
    )
    try:
        environ = build_environ(job.config, job.cluster, job.environ, run, job.host)
        if terminal := find_terminal(job):
            monitor.use_terminal(terminal)
            environ |= terminal.variables
            supervisor.pressed, supervisor.helpers = terminal.pressed, terminal.helpers
        outcome = supervisor.run(lambda: start_agent(command, environ, log), log)
    except OSError as error:
        release_space(run)
        manifest["outcome"] = {"state": "failed", "exit_code": EXIT_MACHINE, "reason": str(error)}
        with contextlib.suppress(OSError):
            write_manifest(run, manifest)
        raise MachineError(f"torchrun's agent could not be run ({error}): see {run.path}") from None
    finally:
        monitor.restore_terminal()
    agent_log = read_tail(log, AGENT_LINES, log_begin)
    status = report_outcome(monitor, outcome, agent_log, time.monotonic() - started)
    if not monitor.viewer.close():
        os._exit(status)  # a thread is stuck in a write, and the interpreter's own end would wait for it
    return status


def find_terminal(job: Job) -> PseudoTerminal | None:
    """Return a terminal for the job's one rank to have as if there was no launcher; None for other jobs."""
    if job.cluster.max_nodes * len(job.plan.ranks) > 1 or job.config.logs.console == "none":
        return None
    return open_terminal()


def prepare_run(draft: Draft, argv: Sequence[str], hosts: Sequence[str]) -> tuple[RunDir, dict[str, object]]:
    """Make the run directory with configuration and manifest.

    Raises MachineError, leaving nothing, and UsageError or SchedulerError where another run may be at it.
    """
    config = draft.config
    if config.run_dir and draft.cluster.kind != "manual":  # nodes that are started by hand share one
        from launcher.slurm.run_states import refuse_run_in_use

        refuse_run_in_use(Path(config.run_dir), submits=draft.cluster.kind == "slurm")
    run = None
    try:
        run = open_target(draft)
        draft.settle(run.path)
        keep_config(run, dump_yaml(draft.composed, mask_tree))
        manifest = describe_start(run, ["launch", *argv], draft.composed.choices)
        manifest["hosts"] = list(hosts)
        if hosts:  # else a job is being submitted, and hangs on no process of ours
            manifest["process"] = identify_process(os.getpid())
            hold_directory(run.path)
        write_manifest(run, manifest)
    except OSError as error:
        if run and not config.run_dir:
            remove_run(run)
        raise refuse_run(config, error) from None
    return run, manifest


def write_plan(run: RunDir, job: Job, config: LaunchConfig) -> None:
    """Write this node's plan into the run directory; raises MachineError, leaving nothing of a new one."""
    try:
        write_json(run.plan_path(job.host), plan_to_json(job.plan))
    except OSError as error:
        if not config.run_dir:
            remove_run(run)
        raise refuse_run(config, error) from None


def refuse_run(config: LaunchConfig, error: OSError) -> MachineError:
    """Return the error for a run directory that cannot be written."""
    key, target = ("run_dir", config.run_dir) if config.run_dir else ("runs_dir", config.runs_dir)
    where = f"{error.filename or target} ({error.strerror})"
    return MachineError(f"cannot write the run directory, {where}: set {key}=DIR to another place")


def keep_config(run: RunDir, text: str) -> None:
    """Write `config.yaml`; warn where an earlier start had other settings, and would not go on as it was."""
    path = run.path / "config.yaml"
    if path.exists() and read_file(path, LARGEST) != text.encode("utf-8", "surrogateescape"):
        logger.warning(f"other settings than those of the earlier start in {run.path}")
    write_private(path, text)


def remove_run(run: RunDir) -> None:
    """Remove a run directory that could not be filled, and the folders above it that are left empty."""
    shutil.rmtree(run.path, ignore_errors=True)
    for folder in run.path.parents[:2]:
        with contextlib.suppress(OSError):
            folder.rmdir()


def preview_job(draft: Draft, job: Job) -> int:
    """Show the plan and the command, and start nothing: `dry_run=true`."""
    from launcher.report.console import make_console
    from launcher.report.placement_table import print_placement

    print_placement(make_console(), job.plan, explain=job.config.explain)
    command = render_agent(job.settle(draft.settle(Path("RUN_DIR"))), "RUN_ID")
    print_text(join_words(command) + "\n")
    return 0
