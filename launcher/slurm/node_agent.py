"""A planned node's work: its ranks and what starts them, watched to their end, and the record of it."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from launcher.config.settings import SLURM_KINDS
from launcher.launch.ending import NodeEnd, check_success, describe_failure
from launcher.launch.job import Job
from launcher.launch.monitor import STARTING, RankMonitor, describe_job
from launcher.launch.signal_channel import SignalChannel, open_signal_channel
from launcher.launch.signals import name_signal
from launcher.launch.supervisor import Supervisor
from launcher.launch.watching import watch_node
from launcher.probe.limits import count_oom_kills
from launcher.report.viewer import OutputViewer, ViewOptions
from launcher.runs.node_records import NodeRecord, RankFailure, write_node
from launcher.runs.rank_logs import Follower
from launcher.runs.run_directory import RunDir, release_space, reserve_space
from launcher.slurm.node_channel import NodeReport, write_report
from launcher.slurm.node_job import AgentMaker
from launcher.slurm.slurm_environ import TaskIdentity

logger = logging.getLogger(__name__)

RECORD_SIZE = 16 << 10
"""Bytes that are held for the node's record, with which its first failure would be lost on a full disk."""
HOLD = 5.0
"""Seconds after which the plan is shown in any case, while nodes wait for each other."""


def run_agent(
    job: Job,
    run: RunDir,
    place: TaskIdentity,
    make_agent: AgentMaker,
    *,
    started: float,
    folder: str = "",
    helpers: Collection[int] = (),
) -> int:
    """Run this node's ranks to their end; raises OSError if they, or their agent, cannot be started.

    `folder` is where the ranks keep their heartbeats; empty if they are not watched. `helpers` are PIDs of
    processes of ours.
    """
    monitor = RankMonitor(job, run, make_node_viewer(job, run, place), count_oom_kills)
    control = open_signal_channel(0)
    reserve_space(run, RECORD_SIZE)
    recorder = NodeRecorder(monitor, place, control, started)
    monitor.on_stop = recorder.record_stop
    watching = watch_node(job, run, folder, place.node_rank) if folder else None
    signal.signal(signal.SIGTERM, lambda *_: None)  # from here on the supervisor's, and nothing after it
    agent = make_agent(job, monitor, control)
    supervisor = Supervisor(monitor, agent, control, watching, helpers)
    end = supervisor.run()
    if watching:
        watching.close()
    state = recorder.write_end(end)
    # To srun, the first task that fails is the end of all: others may still have time to stop.
    status = 0 if state == "stopped" and supervisor.commanded else end.status
    monitor.viewer.finish(patient=end.signal is None)
    if not monitor.viewer.close():
        os._exit(status)  # a thread is stuck in a write, and the interpreter's end would wait for it
    return status


def make_node_viewer(job: Job, run: RunDir, place: TaskIdentity) -> OutputViewer:
    """Return what shows this node's ranks; the job's first node shows what was chosen and its placement."""
    is_first, alone = place.node_rank == 0, job.world_size == 1
    mode = job.config.logs.console
    options = ViewOptions(
        mode,
        None if alone else lambda _: job.host,
        log_prefix=f"{place.host}: ",
        shared=job.cluster.kind in SLURM_KINDS and job.cluster.max_nodes > 1 and mode == "all",
        followed=job.cluster.kind == "slurm",
        heading=describe_job(job, run) if is_first else (),
        plan=job.plan if is_first else None,
        explain=job.config.explain,
        notice=STARTING if is_first and mode != "none" and job.cluster.max_nodes == 1 else "",
        hold=HOLD,
    )
    return OutputViewer(run, Follower(), options)


@dataclass(slots=True)
class NodeRecorder:
    """Writes the record of how one node's part of an attempt ended."""

    monitor: RankMonitor
    place: TaskIdentity
    control: SignalChannel
    started: float
    """Seconds since the epoch."""
    clean: tuple[tuple[int, float], ...] = ()
    """See `NodeRecord.clean`."""
    trouble: str = ""
    """See `NodeRecord.trouble`."""

    def record_stop(self, number: int, by_first_node: bool) -> None:
        """Write a record at once: SLURM may kill this process before its ranks have ended."""
        if not by_first_node:
            write_report(NodeReport("signalled", self.place.host, number=number))
        with contextlib.suppress(OSError):
            self.write_record("stopped", 128 + number, number, "it was killed while its ranks ended", None)

    def write_end(self, end: NodeEnd) -> str | None:
        """Record how this node's part ended, and say what was not as planned; returns the kept state."""
        number = end.signal
        if number and end.failure and end.failure.exitcode == -signal.SIGTERM:
            end = replace(end, failure=None)  # SLURM sent it to the rank too
        failure, hang = end.failure, end.hang
        state = "stopped" if number and not (failure or hang) and end.status else end.state
        self.clean = tuple((death.process.rank, death.time) for death in end.clean)
        said = "" if failure or hang or state != "failed" else end.describe_agent()
        for line in check_success(self.monitor, end) if state == "succeeded" else ():
            logger.warning(line)
        self.trouble = release_space(self.monitor.run)
        try:
            failed = describe_failure(self.monitor, end)
            self.write_record(state, end.status, number, said, failed, hang=hang)
        except OSError as error:
            logger.warning(f"its record could not be written ({error})")
            return None
        return state

    def write_record(
        self,
        state: str,
        status: int,
        number: int | None,
        said: str,
        failure: RankFailure | None,
        *,
        hang: str = "",
    ) -> None:
        """Write this node's record; raises OSError.

        Nothing is written once this task is cut off from the job: if the daemon behind it is gone, the node
        is lost to the job, which a record would hide.
        """
        if self.control.is_cut:
            return
        newest = max((process.attempt for process in self.monitor.ranks.values()), default=self.place.attempt)
        record = NodeRecord(
            self.place.host,
            self.place.node_rank,
            state,
            status,
            name_signal(number) if number else None,
            said,
            failure,
            newest - self.place.attempt,
            self.started,
            time.time(),
            len(self.monitor.job.plan.ranks),
            self.clean,
            hang,
            self.trouble,
        )
        write_node(self.monitor.run.path, self.place.attempt, record)
