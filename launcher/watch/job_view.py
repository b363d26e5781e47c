"""The job as one node sees it: what it finds in the run directory, what that says together, and who judges.

All reading and writing there is in a thread of its own. A filesystem that hangs blocks that thread, and
nothing else: the watcher goes on with what it knows itself.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.runs.node_records import NodeRecord, read_nodes
from launcher.watch.hang import UNWATCHED, find_quantile
from launcher.watch.model import JobState, NodeEvidence, NodeReport, ProcessState, Rank, RankEvidence
from launcher.watch.run_files import (
    ReportCache,
    StackRequest,
    Stored,
    count_hangs,
    is_silent,
    read_report,
    write_job_state,
    write_report,
)
from launcher.watch.worker import Worker

STUCK = 10.0
"""Seconds in one call to a filesystem, after which it is said to hang."""
_OLD = 6.0
"""Age in seconds of a report whose node may have ended."""
_MOST_TASKS = 100
"""Tasks that wait, at most: while the filesystem hangs, further ones are dropped."""
_TWIN_LOOKS = 60
"""Reports in which nodes of one host name are looked for: all nodes' ranks start at about the same time."""


@dataclass(frozen=True, slots=True)
class SharedView:
    """What was found in the run directory last."""

    job: Stored[JobState] | None = None
    reports: tuple[Stored[NodeReport], ...] = ()
    """All nodes', as far as they were asked for."""
    hangs: int = 0
    """The highest number of a hang that has a folder."""
    ended: tuple[NodeRecord, ...] = ()
    """Nodes that have ended their part of this attempt, if reports are missing or old."""
    request: Stored[StackRequest] | None = None

    def find_word(self, own: NodeReport, now: float, begin: float) -> JobState | None:
        """Return what another node that judges has told since this watcher's start, at `begin`.

        The run directory, and even the number of the attempt, can be those of a job of yesterday. Ages are by
        the filesystem's clock and within one node's: the nodes' clocks may differ. Times are monotonic.
        """
        if self.job is None:
            return None
        job, written = self.job.value, self.job.seen
        if job.attempt != own.attempt or job.host == own.host or job.state == "ended" or written < begin:
            return None
        hangs = tuple(hang for hang in job.hangs if written - (job.time - hang.time) >= begin)
        return replace(job, hangs=hangs)


@dataclass(frozen=True, slots=True)
class JobView:
    """The job as this node sees it."""

    fresh: tuple[NodeReport, ...]
    """Of this attempt, by node rank; this node's own is the one of now."""
    silent: tuple[NodeReport, ...] = ()
    """The last reports of nodes that have reported in this attempt, and do so no more: their ranks' idle
    times go on."""
    ended: tuple[NodeRecord, ...] = ()
    """Nodes whose ranks have all ended, and with them the task that reported."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks of nodes that are heard of."""
        return [rank for report in self.fresh for rank in report.ranks]

    def list_ended_ranks(self) -> list[NodeEvidence]:
        """Return what is known of the ranks that ended with 0 on nodes that have ended."""
        found = []
        for record in self.ended:
            gone = ProcessState(0, "X")
            ranks = (
                RankEvidence(rank, 0, record.host, 0, "ended", 0, None, 0.0, gone, exit_code=0)
                for rank, _ in record.clean
            )
            found.append(NodeEvidence(record.host, record.node_rank, 0, record.ended, 0.0, tuple(ranks)))
        return found

    def describe(
        self,
        own: NodeReport,
        *,
        hanging: bool,
        notes: Sequence[str] = (),
        **judged: Any,  # noqa: ANN401
    ) -> JobState:
        """Return what is known of the job, with the fields of JobState that only the judge knows."""
        ages = [one.step_age for one in self.ranks if one.phase not in UNWATCHED and one.step_age is not None]
        has_begun = any(one.step for one in self.ranks)
        missing = own.nodes - len(self.fresh) - len(self.silent) - len(self.ended)
        late = (f"{missing} of {own.nodes} nodes have not reported yet",) if missing > 0 else ()
        return JobState(
            time=own.time,
            host=own.host,
            attempt=own.attempt,
            state="hanging" if hanging else "running" if has_begun else "starting",
            step_age=min(ages, default=None),
            p50=find_quantile([one.p50 for one in self.ranks if one.p50 is not None], 0.5),
            nodes=own.nodes,
            silent=tuple(report.host for report in self.silent),
            notes=(*late, *notes),
            **judged,
        )


def make_job_view(own: NodeReport, shared: SharedView | None, now: float) -> JobView:
    """Join this node's report of now with what the others have written; `now` is monotonic."""
    if shared is None:
        return JobView((own,))
    fresh, silent = [own], []
    ended = tuple(record for record in shared.ended if record.host != own.host)
    gone = {own.host, *(record.host for record in ended)}
    for stored in shared.reports:
        report, age = stored.value, now - stored.seen
        if report.host in gone or report.attempt != own.attempt:
            continue
        if is_silent(age, max(own.interval, report.interval)):
            ranks = (one if one.idle is None else replace(one, idle=one.idle + age) for one in report.ranks)
            silent.append(replace(report, ranks=tuple(ranks)))
        else:
            fresh.append(report)
    fresh.sort(key=lambda report: report.node_rank)
    return JobView(tuple(fresh), tuple(silent), ended)


def is_judge(own: NodeReport, shared: SharedView | None, now: float, *, stuck: bool) -> bool:
    """Tell whether this node judges: the first one does, and the first that is heard of if it is silent.

    Only a node whose own ranks stand still takes over, and one whose run directory hangs judges what it sees.
    """
    if own.node_rank == 0 or own.nodes == 1 or stuck:
        return True
    if shared is None or own.stalled_since is None:
        return False
    job = shared.job
    is_judged = job and job.value.attempt == own.attempt and job.value.host != own.host
    if job and is_judged and not is_silent(now - job.seen, own.interval):
        return False
    return make_job_view(own, shared, now).fresh[0].host == own.host


# The run directory's thread


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is to be written and read."""

    report: NodeReport
    state: JobState | None
    """What is known of the job, if this node judges."""
    reads_all: bool
    """Read all nodes' reports."""


class SharedFiles:
    """Reads and writes in the run directory, without ever waiting for it."""

    def __init__(self, run_path: Path) -> None:
        self.run_path = run_path
        self.view: SharedView | None = None
        """None until something was written and read."""
        self.trouble = ""
        """Why the last exchange failed."""
        self.twin: int | None = None
        """Rank of another node that writes this node's report, since it has the same host name."""
        self._cache = ReportCache(run_path, own=True)
        self._last_other: float | None = None
        """Time of another node's word on the job that was read last."""
        self._exchange: Exchange | None = None
        self._worker: Worker[Callable[[], None]] = Worker("run-directory", self._do, _MOST_TASKS)

    def submit(self, exchange: Exchange) -> None:
        """Have a report written, and others read; one that still waits is replaced."""
        self._exchange = exchange
        self._worker.put(self._carry_out)

    def add_task(self, task: Callable[[], None]) -> None:
        """Have something done there; an exception of it is kept as `trouble`."""
        self._worker.put(task)

    def is_stuck(self, now: float) -> bool:
        """Tell whether the filesystem hangs; `now` is monotonic."""
        since = self._worker.busy_since
        return since is not None and now - since > STUCK

    def is_idle(self) -> bool:
        """Tell whether nothing is left to do."""
        return self._worker.wait_idle(0.0)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until all is done, at most so long; tell whether it is."""
        return self._worker.wait_idle(seconds)

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except (OSError, ValueError) as error:
            self.trouble = str(error)
        except Exception as error:  # this thread's end would look like a filesystem that hangs
            self.trouble = f"{type(error).__name__}: {error}"

    def _carry_out(self) -> None:
        """Write this node's report, and the job's state if it judges; read the others'. Raises OSError."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:  # done with the one before, which it replaced
            return
        own = exchange.report
        if self.view and own.nodes > 1 and own.number <= _TWIN_LOOKS and self.twin is None:
            found = read_report(self.run_path, own.host, own=True)
            if found and found.node_rank != own.node_rank:  # since this node wrote it
                self.twin = found.node_rank
        clock = write_report(self.run_path, own)
        stored = self._cache.read_job(clock)
        job = stored.value if stored else None
        other = job.time if job and job.host != own.host and job.attempt == own.attempt else None
        if exchange.state and other in (None, self._last_other):  # what another node has told is read first
            write_job_state(self.run_path, exchange.state)
        self._last_other = other
        reports = self._cache.read_reports(clock) if exchange.reads_all else ()
        hangs = count_hangs(self.run_path) if exchange.state else 0
        now = time.monotonic()
        told = [one for one in reports if one.value.attempt == own.attempt and now - one.seen < _OLD]
        looks = exchange.reads_all and len(told) < own.nodes
        ended = tuple(read_nodes(self.run_path, own.attempt)) if looks else ()
        request = self._cache.read_request(clock)
        self.view, self.trouble = SharedView(stored, reports, hangs, ended, request), ""
