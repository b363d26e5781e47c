"""The run directory as the watcher sees it: all reading and writing there is in a thread of its own.

A filesystem that hangs blocks that thread, and nothing else: the watcher goes on with what it knows itself.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launcher.runs.node_records import NodeRecord, read_nodes
from launcher.watch.node_reports import (
    StoredReport,
    count_hangs,
    read_job_state,
    read_report,
    read_reports,
    watch_path,
    write_job_state,
    write_report,
)
from launcher.watch.watch_model import JobState, NodeReport

STUCK = 10.0
"""Seconds in one call to a filesystem, after which it is said to hang."""
OLD = 6.0
"""Age in seconds of a report whose node may have ended."""
MOST_TASKS = 100
"""Tasks that wait, at most: while the filesystem hangs, further ones are dropped."""
TWIN_LOOKS = 60
"""Reports in which nodes of one host name are looked for: all nodes' ranks start at about the same time."""


@dataclass(frozen=True, slots=True)
class SharedView:
    """What was found in the run directory last."""

    time: float
    """Monotonic."""
    written: float
    """When this node's own report was written, on the filesystem's clock: its `now`."""
    job: JobState | None = None
    job_age: float = float("inf")
    """Seconds since `job` was written, on the filesystem's clock."""
    reports: tuple[StoredReport, ...] = ()
    """All nodes', as far as they were asked for."""
    hangs: int = 0
    """The highest number of a hang that has a folder."""
    ended: tuple[NodeRecord, ...] = ()
    """Nodes that have ended their part of this attempt, if reports are missing or old."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is to be written and read."""

    report: NodeReport
    state: JobState | None
    """What is known of the job, if this node judges."""
    reads_all: bool
    """Read all nodes' reports."""


@dataclass(slots=True)
class SharedFiles:
    """Reads and writes in the run directory, without ever waiting for it."""

    run_path: Path
    view: SharedView | None = None
    """None until something was written and read."""
    last_other: float | None = None
    """Time of another node's word on the job that was read last."""
    trouble: str = ""
    """Why the last exchange failed."""
    twin: int | None = None
    """Rank of another node that writes this node's report, since it has the same host name."""
    exchange: Exchange | None = None
    tasks: deque[Callable[[], None]] = field(default_factory=deque)
    busy_since: float | None = None
    """Monotonic time at which the thread began what it does now."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Start the thread."""
        self.thread = threading.Thread(target=self.serve, name="run-directory", daemon=True)
        self.thread.start()

    def submit(self, exchange: Exchange) -> None:
        """Have a report written, and others read; one that still waits is replaced."""
        with self.changed:
            self.exchange = exchange
            self.changed.notify()

    def add_task(self, task: Callable[[], None]) -> None:
        """Have something done there, once if it already waits; an exception of it is kept as `trouble`."""
        with self.changed:
            if task not in self.tasks and len(self.tasks) < MOST_TASKS:
                self.tasks.append(task)
                self.changed.notify()

    def is_stuck(self, now: float) -> bool:
        """Tell whether the filesystem hangs; `now` is monotonic."""
        since = self.busy_since
        return since is not None and now - since > STUCK

    def wait_idle(self, seconds: float) -> bool:
        """Wait until all is done, at most so long; tell whether it is."""
        with self.changed:
            return self.changed.wait_for(self.is_idle, seconds)

    def is_idle(self) -> bool:
        """Tell whether nothing is left to do."""
        return self.busy_since is None and not self.tasks and self.exchange is None

    def serve(self) -> None:
        """Do what is asked for: the thread's body."""
        while True:
            with self.changed:
                self.busy_since = None
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.tasks or self.exchange)
                task, exchange = self.tasks.popleft() if self.tasks else None, None
                if task is None:
                    exchange, self.exchange = self.exchange, None
                self.busy_since = time.monotonic()
            try:
                if task:
                    task()
                elif exchange:
                    self.view = self.carry_out(exchange)
                    self.trouble = ""
            except (OSError, ValueError) as error:
                self.trouble = str(error)
            except Exception as error:  # this thread's end would look like a filesystem that hangs
                self.trouble = f"{type(error).__name__}: {error}"

    def carry_out(self, exchange: Exchange) -> SharedView:
        """Write this node's report, and the job's state if it judges; read the others'. Raises OSError."""
        own = exchange.report
        self.look_for_twin(own)
        job = read_job_state(self.run_path, own=True)
        written = write_report(self.run_path, own)
        age = self.measure_age(written) if job else float("inf")
        other = job.time if job and job.host != own.host and job.attempt == own.attempt else None
        if exchange.state and other in (None, self.last_other):  # what another node has told is read first
            write_job_state(self.run_path, exchange.state)
        self.last_other = other
        reports = read_reports(self.run_path, own=True) if exchange.reads_all else ()
        hangs = count_hangs(self.run_path) if exchange.state else 0
        told = [one for one in reports if one.report.attempt == own.attempt and written - one.written < OLD]
        looks = exchange.reads_all and len(told) < own.nodes
        ended = tuple(read_nodes(self.run_path, own.attempt)) if looks else ()
        return SharedView(time.monotonic(), written, job, age, reports, hangs, ended)

    def look_for_twin(self, own: NodeReport) -> None:
        """See whether another node has written this node's report since it did so itself."""
        if self.view and own.nodes > 1 and own.number <= TWIN_LOOKS and self.twin is None:
            found = read_report(self.run_path, own.host, own=True)
            if found and found.node_rank != own.node_rank:
                self.twin = found.node_rank

    def measure_age(self, now: float) -> float:
        """Return the seconds since the job's state was written; raises OSError."""
        return now - (watch_path(self.run_path) / "job.json").stat().st_mtime
