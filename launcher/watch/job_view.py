"""What all nodes' reports say of the job together, and who judges it: pure values in, pure values out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from launcher.runs.node_records import NodeRecord
from launcher.watch.progress_limit import UNWATCHED, RankProgress, find_quantile
from launcher.watch.shared_files import SharedView
from launcher.watch.watch_model import (
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    ProcessState,
    RankEvidence,
    RankState,
)

FRESH_INTERVALS = 3
LEAST_FRESH = 6.0
"""A report counts as fresh for so many intervals, and at least so many seconds."""


@dataclass(frozen=True, slots=True)
class JobView:
    """The job as this node sees it."""

    fresh: tuple[NodeReport, ...]
    """Of this attempt, by node rank; this node's own is the one of now."""
    silent: tuple[NodeReport, ...]
    """The last reports of nodes that have reported in this attempt, and do so no more: their ranks' idle
    times go on."""
    ended: tuple[NodeRecord, ...] = ()
    """Nodes whose ranks have all ended, and with them the task that reported."""

    @property
    def reports(self) -> tuple[NodeReport, ...]:
        """All nodes' last reports."""
        return (*self.fresh, *self.silent)

    @property
    def ranks(self) -> tuple[RankState, ...]:
        """The ranks of nodes that are heard of."""
        return tuple(rank for report in self.fresh for rank in report.ranks)


def limit_age(interval: float) -> float:
    """Return the seconds for which a report counts as fresh."""
    return max(FRESH_INTERVALS * interval, LEAST_FRESH)


def make_job_view(own: NodeReport, view: SharedView | None, now: float) -> JobView:
    """Join this node's report of now with what the others have written; `now` is monotonic."""
    fresh: list[NodeReport] = [own]
    silent: list[NodeReport] = []
    ended = tuple(record for record in (view.ended if view else ()) if record.host != own.host)
    gone = {record.host for record in ended}
    for stored in view.reports if view else ():
        report = stored.report
        if report.host in {own.host, *gone} or report.attempt != own.attempt or view is None:
            continue
        age = view.written - stored.written + now - view.time
        if age <= limit_age(max(own.interval, report.interval)):
            fresh.append(report)
        else:
            silent.append(age_report(report, age))
    fresh.sort(key=lambda report: report.node_rank)
    return JobView(tuple(fresh), tuple(silent), ended)


def list_ended_ranks(view: JobView) -> list[NodeEvidence]:
    """Return what is known of the ranks that ended with 0 on nodes that have ended."""
    return [
        NodeEvidence(
            record.host,
            record.node_rank,
            number=0,
            time=record.ended,
            seconds=0.0,
            ranks=tuple(
                RankEvidence(
                    rank, 0, record.host, 0, "ended", 0, None, 0.0, ProcessState(0, "X"), exit_code=0
                )
                for rank, _ in record.clean
            ),
        )
        for record in view.ended
    ]


def age_report(report: NodeReport, seconds: float) -> NodeReport:
    """Return a report in which ranks have been idle for so many seconds more."""
    ranks = (rank if rank.idle is None else replace(rank, idle=rank.idle + seconds) for rank in report.ranks)
    return replace(report, ranks=tuple(ranks))


def find_word(own: NodeReport, view: SharedView | None, now: float, begin: float) -> JobState | None:
    """Return what another node that judges has told since this watcher's start, at `begin`; None for nothing.

    The run directory, and even the number of the attempt, can be those of a job of yesterday. Ages are by
    the filesystem's clock and within one node's: the nodes' clocks may differ.
    """
    job = view.job if view else None
    if view is None or job is None or job.attempt != own.attempt or job.host == own.host:
        return None
    age = view.job_age + now - view.time
    if job.state == "ended" or age > now - begin:
        return None
    hangs = tuple(hang for hang in job.hangs if age + job.time - hang.time <= now - begin)
    return replace(job, hangs=hangs)


def is_judge(own: NodeReport, view: SharedView | None, now: float, *, stuck: bool) -> bool:
    """Tell whether this node judges: the first one does, and the first that is heard of if it is silent.

    Only a node whose own ranks stand still takes over, and one whose run directory hangs judges what it sees.
    """
    if own.node_rank == 0 or own.nodes == 1 or stuck:
        return True
    if view is None or own.stalled_since is None:
        return False
    job = view.job
    age = view.job_age + now - view.time
    if job and job.attempt == own.attempt and job.host != own.host and age <= limit_age(own.interval):
        return False
    return make_job_view(own, view, now).fresh[0].host == own.host


def list_job_progress(view: JobView) -> tuple[RankProgress, ...]:
    """Return what counts of each rank of the job that is heard of."""
    return list_progress_of(view.fresh)


def list_progress_of(reports: Iterable[NodeReport]) -> tuple[RankProgress, ...]:
    """Return what counts of each rank of some nodes."""
    ranks = (rank for report in reports for rank in report.ranks)
    return tuple(RankProgress(rank.rank, rank.phase, rank.step, rank.idle) for rank in ranks)


def describe_job_state(
    own: NodeReport,
    view: JobView,
    hangs: Sequence[Hang],
    *,
    hanging: bool = False,
    restarts: int,
    asks: int,
    notes: Iterable[str],
) -> JobState:
    """Return what the judging node writes of the job."""
    watched = [rank for rank in view.ranks if rank.phase not in UNWATCHED]
    ages = [rank.step_age for rank in watched if rank.step_age is not None]
    medians = [rank.p50 for rank in view.ranks if rank.p50 is not None]
    step = max((rank.step for rank in view.ranks), default=0)
    silent = tuple(report.host for report in view.silent)
    missing = own.nodes - len(view.reports) - len(view.ended)
    late = (f"{missing} of {own.nodes} nodes have not reported yet",) if missing > 0 else ()
    return JobState(
        time=own.time,
        host=own.host,
        attempt=own.attempt,
        state="hanging" if hanging else "running" if step else "starting",
        step=step,
        step_age=min(ages, default=None),
        p50=find_quantile(medians, 0.5),
        nodes=own.nodes,
        silent=silent,
        hangs=tuple(hangs),
        restarts=restarts,
        notes=(*late, *notes),
        asks=asks,
    )
