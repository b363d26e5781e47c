"""A planned node's work: torchrun's agent and its ranks, watched to their end, and the record of it."""

import os
import signal
import subprocess
from collections.abc import Callable

from launcher.launch.head_channel import open_head_channel
from launcher.launch.job import Job
from launcher.launch.monitor import MANAGED, STARTING, RankMonitor, describe_job
from launcher.launch.outcome import add_oom_kills, judge_outcome
from launcher.launch.supervisor import Supervisor
from launcher.probe.cgroups import count_oom_kills
from launcher.report.output_viewer import OutputViewer, ViewOptions
from launcher.runs.rank_logs import Follower, read_tail
from launcher.runs.run_directory import RunDir
from launcher.slurm.node_recorder import NodeRecorder
from launcher.slurm.slurm_environ import TaskIdentity

AGENT_LINES = 2000
"""Last lines of the agent's log that are searched for its report."""
HOLD = 5.0
"""Seconds after which the plan is shown in any case, while nodes wait for each other."""


def run_agent(
    job: Job,
    run: RunDir,
    place: TaskIdentity,
    start: Callable[[], "subprocess.Popen[bytes]"],
    *,
    log_begin: int,
    started: float,
) -> int:
    """Run torchrun's agent and its ranks to their end; raises OSError if it cannot be started."""
    log = run.agent_log(place.host)
    monitor = RankMonitor(job, run, make_node_viewer(job, run, place), count_oom_kills, asks_kernel=True)
    control = open_head_channel(0)
    recorder = NodeRecorder(monitor, place, control, started)
    monitor.on_stop = recorder.record_stop
    grace = job.config.torchrun.shutdown_timeout
    ranks, codes = len(job.plan.ranks), job.config.cluster.requeue.exit_codes
    supervisor = Supervisor(monitor, ranks, grace, control=control, exit_codes=codes)
    signal.signal(signal.SIGTERM, lambda *_: None)  # from here on the supervisor's, and nothing after it
    outcome = supervisor.run(start, log)
    ending = judge_outcome(outcome, tuple(read_tail(log, AGENT_LINES, log_begin)), ranks)
    ending = add_oom_kills(ending, job, monitor.count_new_oom_kills())
    state = recorder.write_end(ending)
    # To srun, the first task that fails is the end of all: others may still have time to stop.
    status = 0 if state == "stopped" and supervisor.commanded else ending.status
    monitor.viewer.finish(patient=outcome.signal is None)
    if not monitor.viewer.close():
        os._exit(status)  # a thread is stuck in a write, and the interpreter's end would wait for it
    return status


def make_node_viewer(job: Job, run: RunDir, place: TaskIdentity) -> OutputViewer:
    """Return what shows this node's ranks; the job's first node shows what was chosen and its placement."""
    is_first, alone = place.node_rank == 0, len(job.plan.ranks) * job.cluster.max_nodes == 1
    mode = job.config.logs.console
    options = ViewOptions(
        mode,
        None if alone else lambda _: job.host,
        log_prefix=f"{place.host}: ",
        shared=job.cluster.kind in MANAGED and job.cluster.max_nodes > 1 and mode == "all",
        followed=job.cluster.kind == "slurm",
        heading=describe_job(job, run) if is_first else (),
        plan=job.plan if is_first else None,
        explain=job.config.explain,
        notice=STARTING if is_first and mode != "none" and job.cluster.max_nodes == 1 else "",
        hold=HOLD,
    )
    return OutputViewer(run, Follower(), options)
