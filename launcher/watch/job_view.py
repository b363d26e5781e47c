"""The job as its judging node sees it: what it finds in the run directory, and what that says together.

All reading and writing there is in a thread of its own. A filesystem that hangs blocks that thread, and
nothing else: the watcher goes on with what it knows itself.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.runs.node_records import NodeRecord, read_nodes
from launcher.watch.model import JobState, NodeEvidence, NodeReport, ProcessState, Rank, RankEvidence
from launcher.watch.run_files import (
    ReportCache,
    StackRequest,
    Stored,
    count_hangs,
    is_silent,
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


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in the run directory last."""

    job: Stored[JobState] | None = None
    """What the judging node has told."""
    reports: tuple[Stored[NodeReport], ...] = ()
    """All nodes', for the judging node, and where ranks stand still."""
    hangs: int = 0
    """The highest number of a hang that has a folder."""
    ended: tuple[NodeRecord, ...] = ()
    """Nodes that have ended their part of this attempt, if reports are missing or old."""
    request: Stored[StackRequest] | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """The job as the judging node sees it."""

    fresh: tuple[NodeReport, ...]
    """Of this attempt, by node rank; this node's own is the one of now."""
    silent: tuple[NodeReport, ...] = ()
    """The last reports of nodes that have reported in this attempt, and do so no more: their ranks' idle
    times go on."""
    ended: tuple[NodeEvidence, ...] = ()
    """Ranks that ended with 0, of nodes whose ranks have all ended, and with them the task that reported."""
    hangs: int = 0
    """The highest number of a hang so far."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks of nodes that are heard of."""
        return [rank for report in self.fresh for rank in report.ranks]


def make_job_view(own: NodeReport, found: Found | None, now: float) -> JobView:
    """Join this node's report of now with what the others have written; `now` is monotonic."""
    if found is None:
        return JobView((own,))
    fresh, silent, ended = [own], [], []
    records = [record for record in found.ended if record.host != own.host]
    for record in records:
        gone: dict[str, Any] = {"host": record.host, "process": ProcessState(0, "X"), "exit_code": 0}
        ranks = [RankEvidence(rank, 0, 0, own.attempt, "ended", 0, None, **gone) for rank, _ in record.clean]
        ended.append(NodeEvidence(record.host, record.node_rank, 0, record.ended, 0.0, tuple(ranks)))
    known = {own.host, *(record.host for record in records)}
    for stored in found.reports:
        report, age = stored.value, now - stored.seen
        if report.host in known or report.attempt != own.attempt:
            continue
        if is_silent(age, max(own.interval, report.interval)):
            idle = (one if one.idle is None else replace(one, idle=one.idle + age) for one in report.ranks)
            silent.append(replace(report, ranks=tuple(idle)))
        else:
            fresh.append(report)
    fresh.sort(key=lambda report: report.node_rank)
    return JobView(tuple(fresh), tuple(silent), tuple(ended), found.hangs)


def is_judge(own: NodeReport, found: Found | None, now: float) -> bool:
    """Tell whether this node judges: the first one does, and the first that is heard of if it is silent.

    Only a node whose own ranks stand still takes over.
    """
    if own.node_rank == 0 or found is None or own.stalled_since is None:
        return own.node_rank == 0
    told = found.job
    is_others = told and told.value.attempt == own.attempt and told.value.host != own.host
    if told and is_others and not is_silent(now - told.seen, own.interval):
        return False
    return make_job_view(own, found, now).fresh[0].host == own.host


class SharedFiles:
    """Reads and writes in the run directory, without ever waiting for it."""

    def __init__(self, run_path: Path) -> None:
        self.run_path = run_path
        self.found: Found | None = None
        """None until something was written and read."""
        self.trouble = ""
        """Why the last exchange failed."""
        self._cache = ReportCache(run_path, own=True)
        self._last_other: float | None = None
        """Time of another node's word on the job that was read last."""
        self._next: tuple[NodeReport, JobState | None] | None = None
        self.worker: Worker[Callable[[], None]] = Worker("run-directory", self._do, _MOST_TASKS)

    def submit(self, report: NodeReport, state: JobState | None) -> None:
        """Have a report written, with the job's state by the node that judges, and what others wrote read.

        One that still waits is replaced.
        """
        self._next = report, state
        self.worker.put(self._exchange)

    def is_stuck(self, now: float) -> bool:
        """Tell whether the filesystem hangs; `now` is monotonic."""
        since = self.worker.busy_since
        return since is not None and now - since > STUCK

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except (OSError, ValueError) as error:
            self.trouble = str(error)
        except Exception as error:  # this thread's end would look like a filesystem that hangs
            self.trouble = f"{type(error).__name__}: {error}"

    def _exchange(self) -> None:
        """Write and read; raises OSError."""
        if self._next is None:  # done with the one before, which it replaced
            return
        (own, state), self._next = self._next, None
        clock, cache = write_report(self.run_path, own), self._cache
        job = cache.read_job(clock)
        is_others = job and job.value.host != own.host and job.value.attempt == own.attempt
        other = job.value.time if job and is_others else None
        if state and other in (None, self._last_other):  # what another node has told is read first
            write_job_state(self.run_path, state)
        self._last_other = other
        reads_all = own.nodes > 1 and (state is not None or own.stalled_since is not None)
        reports, now = cache.read_reports(clock) if reads_all else (), time.monotonic()
        told = [one for one in reports if one.value.attempt == own.attempt and now - one.seen < _OLD]
        looks = reads_all and len(told) < own.nodes
        ended = tuple(read_nodes(self.run_path, own.attempt)) if looks else ()
        hangs = count_hangs(self.run_path) if state else 0
        found = Found(job, reports, hangs, ended, cache.read_request(clock))
        self.found, self.trouble = found, ""
