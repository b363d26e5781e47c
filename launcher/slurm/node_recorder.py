"""The record of one node's part of an attempt: how its ranks ended, for the job's head."""

import contextlib
import logging
import signal
import time
from dataclasses import dataclass, replace

from launcher.launch.failure import list_clean_exits
from launcher.launch.head_channel import HeadChannel, report_signal
from launcher.launch.monitor import RankMonitor
from launcher.launch.outcome import JobOutcome, check_success, describe_agent_exit, describe_failure
from launcher.launch.signals import name_signal
from launcher.runs.node_records import NodeRecord, RankFailure, write_node
from launcher.slurm.slurm_environ import TaskIdentity

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeRecorder:
    """Writes the record of how one node's part of an attempt ended."""

    monitor: RankMonitor
    place: TaskIdentity
    control: HeadChannel
    started: float
    """Seconds since the epoch."""
    clean: tuple[tuple[int, float], ...] = ()
    """See `NodeRecord.clean`."""

    def record_stop(self, number: int, by_head: bool) -> None:
        """Write a record at once: SLURM may kill this process before its ranks have ended."""
        if not by_head:
            report_signal(2, self.place.host, number)
        with contextlib.suppress(OSError):
            self.write_record("stopped", 128 + number, number, "it was killed while its ranks ended", None)

    def write_end(self, ending: JobOutcome) -> str | None:
        """Record how this node's part ended, and say what was not as planned; returns the kept state."""
        failure, number = ending.failure, ending.outcome.signal
        if number and failure and failure.exitcode == -signal.SIGTERM:  # SLURM sent it to the rank too
            failure, ending = None, replace(ending, failure=None)
        state = "stopped" if number and not failure and ending.status else ending.state
        self.clean = tuple((d.process.rank, d.time) for d in list_clean_exits(ending.outcome.deaths))
        said = "" if failure or state != "failed" else f"torchrun's agent {describe_agent_exit(ending)}"
        for line in check_success(self.monitor, ending) if state == "succeeded" else ():
            logger.warning(line)
        try:
            self.write_record(state, ending.status, number, said, describe_failure(self.monitor, ending))
        except OSError as error:
            logger.warning(f"its record could not be written ({error})")
            return None
        return state

    def write_record(
        self, state: str, status: int, number: int | None, said: str, failure: RankFailure | None
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
        )
        write_node(self.monitor.run.path, self.place.attempt, record)
