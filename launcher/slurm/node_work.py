"""A planned node's work: torchrun's agent and its ranks, watched to their end, and the record of it."""

import os
import signal
import subprocess
from collections.abc import Callable

from launcher.launch.job import Job
from launcher.launch.monitor import Viewer
from launcher.launch.outcome import judge_outcome, note_kills
from launcher.launch.stop_requests import open_control
from launcher.launch.supervisor import Supervisor
from launcher.runs.rank_logs import Follower, read_tail
from launcher.runs.run_directory import RunDir
from launcher.slurm.node_monitor import Companion
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
    """Run torchrun's agent and its ranks to their end; raises OSError where it cannot be started."""
    log = run.agent_log(place.host)
    viewer = Viewer(job, run, Follower(run, is_new=True), shows_job=place.node_rank == 0, hold=HOLD)
    control = open_control(0)
    companion = Companion(job, run, place, viewer, control, started)
    grace = job.config.torchrun.shutdown_timeout
    ranks, codes = len(job.plan.ranks), job.config.cluster.requeue.exit_codes
    supervisor = Supervisor(companion, ranks, grace, control=control, exit_codes=codes)
    signal.signal(signal.SIGTERM, lambda *_: None)  # from here on the supervisor's, and nothing after it
    outcome = supervisor.run(start, log)
    ending = judge_outcome(outcome, tuple(read_tail(log, AGENT_LINES, log_begin)), ranks)
    ending = note_kills(ending, job, companion.oom_kills)
    state = companion.write_end(ending)
    # To srun, the first task that fails is the end of all: others may still have time to stop.
    status = 0 if state == "stopped" and supervisor.commanded else ending.status
    if not companion.close():
        os._exit(status)  # a thread is stuck in a write, and the interpreter's end would wait for it
    return status
