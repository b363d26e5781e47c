"""Carries a job out on this node: run directory, agent, console, and the account of how it ended."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from launcher.errors import EXIT_MACHINE, MachineError
from launcher.launch.direct_agent import TakeWarm, make_local_agent
from launcher.launch.ending import report_end
from launcher.launch.job import Job, JobSpec, build_agent_environ, render_agent, shares_terminal
from launcher.launch.monitor import RankMonitor, Viewer
from launcher.launch.supervisor import Agent, Supervisor
from launcher.launch.torchrun_agent import TorchrunAgent
from launcher.launch.watching import keep_watch_folder, watch_node
from launcher.runs.manifest import describe_start, write_manifest
from launcher.runs.run_directory import (
    RunDir,
    create_run_dir,
    open_run_dir,
    release_space,
    reserve_space,
    write_json,
    write_private,
)
from launcher.runs.run_process import hold_directory, identify_process


def execute_job(
    job: Job,
    run: RunDir,
    manifest: dict[str, object],
    make_viewer: Callable[[Job, RunDir], Viewer],
    count_oom_kills: Callable[[], int],
    *,
    take_warm: TakeWarm | None = None,
    helpers: Collection[int] = (),
) -> int:
    """Run a job here to its end and return the exit code; raises MachineError before that.

    The run directory holds the plan. `take_warm` gives a warm process that was started before this, if there
    is one for the program; `helpers` are PIDs of processes of ours.
    """
    monitor = RankMonitor(job, run, make_viewer(job, run), count_oom_kills, manifest)
    started = time.monotonic()
    reserve_space(run)
    with keep_watch_folder(job.environ, enabled=job.config.watch.enabled) as folder:
        watching = watch_node(job, run, folder, job.config.node_rank or 0) if folder else None
        try:
            environ = build_agent_environ(
                job.config, job.cluster, job.environ, run, job.host, watch_folder=folder
            )
            # The job's one rank has a terminal as if there was no launcher.
            if job.world_size == 1 and job.config.logs.console != "none":
                monitor.use_terminal()
            agent = make_agent(monitor, environ, take_warm)
            end = Supervisor(monitor, agent, watching=watching, helpers=helpers).run()
        except OSError as error:
            release_space(run)
            manifest["outcome"] = {"state": "failed", "exit_code": EXIT_MACHINE, "reason": str(error)}
            with contextlib.suppress(OSError):
                write_manifest(run, manifest)
            raise MachineError(f"the ranks could not be started ({error}): see {run.path}") from None
        finally:
            if monitor.terminal:
                monitor.terminal.finish()
            if watching:
                watching.close()
    if watching and watching.hangs:
        manifest["hangs"] = watching.hangs
    if watching and watching.stragglers:
        manifest["stragglers"] = watching.stragglers
    status = report_end(monitor, end, time.monotonic() - started)
    if not monitor.viewer.close():
        os._exit(status)  # a thread is stuck in a write, and the interpreter's own end would wait for it
    return status


def make_agent(monitor: RankMonitor, environ: Mapping[str, str], take_warm: TakeWarm | None = None) -> Agent:
    """Return what starts a job's ranks on this machine, with variables of `build_agent_environ`."""
    job, run, terminal = monitor.job, monitor.run, monitor.terminal
    environ = {**environ, **(terminal.variables if terminal else {})}
    if job.agent.kind == "direct":
        return make_local_agent(job, run, environ, take_warm, has_terminal=terminal is not None)
    stdin = subprocess.DEVNULL if shares_terminal(job) else None
    return TorchrunAgent(
        render_agent(job, run.id), environ, run.agent_log(job.host), stdin, monitor.find_ranks
    )


def prepare_run(spec: JobSpec, argv: Sequence[str], hosts: Sequence[str]) -> tuple[RunDir, dict[str, object]]:
    """Make or open the run directory, with configuration and manifest, and return it and the manifest.

    Raises MachineError, leaving nothing, or RunIdTakenError.
    """
    run = None
    try:
        run = open_target(spec)
        write_private(run.path / "config.yaml", spec.config_text)
        manifest = describe_start(run, ["launch", *argv], spec.choices)
        manifest["hosts"] = list(hosts)
        manifest["agent"] = spec.agent.kind
        if spec.is_bundled:
            chosen = ("batch_size", "grad_accumulation", "activation_checkpointing", "parallel")
            manifest["training"] = {key: spec.config.program.get(key) for key in chosen}
        if hosts:  # else a job is being submitted, and hangs on no process of ours
            manifest["process"] = identify_process(os.getpid())
            hold_directory(run.path)
        write_manifest(run, manifest)
    except OSError as error:
        if run and spec.run_key == "runs_dir":
            remove_run(run)
        raise refuse_run(spec, error) from None
    return run, manifest


def open_target(spec: JobSpec) -> RunDir:
    """Make or open the run directory; raises OSError or RunIdTakenError."""
    if spec.run_key == "runs_dir":
        return create_run_dir(spec.run_path)
    return open_run_dir(spec.run_path, spec.config.node_rank)


def write_plan(spec: JobSpec, run: RunDir, host: str, plan: Mapping[str, object]) -> None:
    """Write a node's plan as JSON; raises MachineError, leaving nothing of a new run directory."""
    try:
        write_json(run.plan_path(host), plan)
    except OSError as error:
        if spec.run_key == "runs_dir":
            remove_run(run)
        raise refuse_run(spec, error) from None


def refuse_run(spec: JobSpec, error: OSError) -> MachineError:
    """Return the error for a run directory that cannot be written."""
    target = spec.config.runs_dir if spec.run_key == "runs_dir" else spec.run_path
    where = f"{error.filename or target} ({error.strerror})"
    return MachineError(f"cannot write the run directory, {where}: set {spec.run_key}=DIR to another place")


def remove_run(run: RunDir) -> None:
    """Remove a run directory that could not be filled, and the folders above it that are left empty."""
    shutil.rmtree(run.path, ignore_errors=True)
    for folder in run.path.parents[:2]:
        with contextlib.suppress(OSError):
            folder.rmdir()
