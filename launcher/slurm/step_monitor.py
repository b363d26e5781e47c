"""Monitors a running step: waits for its end, and passes signals on to the ranks in stages."""

import logging
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.launch.signals import KILL_GRACE, STOPPING, SignalQueue, StopStages, name_signal
from launcher.runs.node_records import read_nodes
from launcher.slurm.attempt import Attempt, is_taken_over
from launcher.slurm.attempt_end import choose_stop_time
from launcher.slurm.attempt_lifecycle import ask_job_status, prepare_for_kill
from launcher.slurm.commands import SHORT_TIMEOUT
from launcher.slurm.liveness import OWN_GAP
from launcher.slurm.node_step import NodeStep
from launcher.slurm.notation import parse_signal
from launcher.slurm.slurm_environ import PORT_TAKEN

logger = logging.getLogger(__name__)

TICK = 1.0
"""Seconds between two looks at clocks and records."""
SRUN_GRACE = 10.0
"""Seconds that srun has to end a step that did not end by itself."""
ELASTIC_GRACE = 30.0
"""Seconds that the other nodes have to see by themselves that one of them has failed for good."""
READ_PERIOD = 5.0
"""Seconds between two looks at the records of an elastic job's nodes, on a shared disk."""


@dataclass(slots=True)
class StepMonitor:
    """The batch script's process during an attempt: the signals that it got, and the stages of a stop."""

    attempt: Attempt
    inbox: SignalQueue
    signals: list[tuple[int, float]] = field(default_factory=list)
    """What came, and when, in seconds since the epoch."""
    deferred: list[int] = field(default_factory=list)
    """Signals for the ranks that came before there were any."""
    stop: StopStages | None = None
    stop_at: float | None = None
    """When the ranks are to be stopped before the time limit, in seconds since the epoch."""
    failed_at: float | None = None
    """When a node of an elastic job was first seen to have failed for good."""
    next_read: float = 0.0
    """Monotonic time of the next look at the records."""

    @property
    def grace(self) -> float:
        """Seconds that ranks have after the first stopping signal."""
        return self.attempt.request.config.torchrun.shutdown_timeout

    def run_to_end(self, step: NodeStep, attend: Callable[[], None] = lambda: None) -> None:
        """Stay with a step to its end; what an earlier one was stopped for, a port in use, is over.

        `attend` is called again and again while the step runs.
        """
        self.stop, self.failed_at = None, None
        for number in self.deferred:
            self.pass_on(number, step)
        self.deferred.clear()
        poller = select.poll()
        poller.register(self.inbox.wakeup, select.POLLIN)
        pidfd = os.pidfd_open(step.process.pid)
        poller.register(pidfd, select.POLLIN)
        try:
            while step.process.poll() is None:
                began = time.monotonic()
                poller.poll(TICK * 1000)
                if time.monotonic() - began > OWN_GAP and is_taken_over(self.attempt.run):
                    logger.info("this node was taken for lost while it slept: its ranks are killed")
                    step.send(signal.SIGKILL)
                    self.stop = StopStages([], time.monotonic() + KILL_GRACE)
                for number in self.inbox.take():
                    self.handle_signal(number, step)
                attend()
                self.check_deadlines(step)
        finally:
            os.close(pidfd)

    def wait(self, seconds: float) -> None:
        """Let time pass while there is no step; a signal ends that."""
        poller = select.poll()
        poller.register(self.inbox.wakeup, select.POLLIN)
        poller.poll(seconds * 1000)
        self.take_early_signals()

    def take_early_signals(self) -> bool:
        """Take the signals that came before the ranks' step; tell whether one of them ends the attempt."""
        taken = self.inbox.take()
        self.signals += [(number, time.time()) for number in taken]
        self.deferred += [number for number in taken if number not in STOPPING]
        if signal.SIGTERM in taken:
            prepare_for_kill(self.attempt)
        return any(number in STOPPING for number, _ in self.signals)

    def handle_signal(self, number: int, step: NodeStep) -> None:
        """Do what a signal asks for."""
        self.signals.append((number, time.time()))
        if number not in STOPPING:
            self.pass_on(number, step)
            return
        if number == signal.SIGTERM:
            prepare_for_kill(self.attempt)
        if self.attempt.prepared is None:  # else SLURM has told the ranks by itself, and KillWait runs
            self.advance_stop(number, step)

    def pass_on(self, number: int, step: NodeStep) -> None:
        """Send the ranks a signal that does not stop them; theirs may be the time limit's."""
        step.send(number)
        checkpoint, seconds = parse_signal(self.attempt.request.config.cluster.signal)
        if number == checkpoint:
            now, status = time.time(), ask_job_status(self.attempt, SHORT_TIMEOUT)
            self.stop_at = choose_stop_time(now, status.end_time if status else None, seconds, self.grace)

    def check_deadlines(self, step: NodeStep) -> None:
        """Enter the next stage if its time has come."""
        if self.stop:
            if time.monotonic() >= self.stop.deadline:
                self.advance_stop(signal.SIGTERM, step)
        elif self.stop_at and time.time() >= self.stop_at:
            logger.info("the time limit is near")
            self.advance_stop(signal.SIGTERM, step)
        elif self.attempt.is_elastic and self.has_failed():
            self.advance_stop(signal.SIGTERM, step)

    def advance_stop(self, number: int, step: NodeStep) -> None:
        """Enter the next stage of ending the step: the signal, SIGTERM, SIGKILL, and then srun's own ways."""
        if self.stop and self.stop.current is None:
            step.process.kill()
            self.stop.deadline = time.monotonic() + SRUN_GRACE
            return
        self.stop = self.stop or StopStages.begin(number, self.grace)
        stage = self.stop.next_stage()
        if stage is None:
            self.stop.deadline = time.monotonic() + SRUN_GRACE
            step.process.terminate()
            return
        again = "; once more goes on at once" if not self.attempt.requeues and stage == signal.SIGINT else ""
        logger.info(f"{name_signal(stage)} to the ranks{again}")
        step.send(stage)

    def has_failed(self) -> bool:
        """Tell whether a node of an elastic job failed a while ago: its step goes on without it otherwise.

        Ranks elsewhere may wait for its ranks in a collective until that comes to its timeout.
        """
        run, now = self.attempt.run, time.monotonic()
        if now >= self.next_read:
            self.next_read = now + READ_PERIOD
            records = read_nodes(run.path, run.first_attempt)
            if any(record.exit_code == PORT_TAKEN and not record.failure for record in records):
                return True
            if self.failed_at is None and any(record.state == "failed" for record in records):
                self.failed_at = now
        return self.failed_at is not None and now > self.failed_at + ELASTIC_GRACE
