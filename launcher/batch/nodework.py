"""A planned node's work: torchrun's agent and its ranks, watched to their end, and the record of it."""

import os
import signal
import subprocess
from collections.abc import Callable

from launcher.attend import Viewer
from launcher.batch.companion import Companion
from launcher.batch.place import Place
from launcher.conclude import judge_outcome, note_kills
from launcher.job import Job
from launcher.launch.control import open_control
from launcher.launch.supervise import Supervisor
from launcher.runs.logs import Follower, read_tail
from launcher.runs.rundir import RunDir

AGENT_LINES = 2000
"""Last lines of the agent's log that are searched for its report."""
HOLD = 5.0
"""Seconds after which the plan is shown in any case, while nodes wait for each other."""


def run_agent(
    job: Job,
    run: RunDir,
    place: Place,
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
