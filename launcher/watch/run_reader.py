"""A run as those see it who watch it from outside: its nodes' reports, its progress, one rank in detail.

All of it is read from its directory; what cannot be read is left out.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cpulist import format_cpulist
from launcher.protocol import name_applied_file
from launcher.runs.progress import Progress, find_printed_step, read_mtime
from launcher.runs.rank_logs import measure_file, read_tail
from launcher.runs.records import Applied, compare_rank, describe_memory
from launcher.watch.model import JobState, NodeEvidence, NodeReport, ProcessState
from launcher.watch.run_files import (
    ANSWER,
    EVIDENCE,
    ReportCache,
    is_silent,
    read_planned,
    read_value,
    watch_path,
)

if TYPE_CHECKING:
    from launcher.plan.model import RankPlan

_MOST_SEEN = 64
"""Printed steps over which their rate is measured."""
_LINES = 200
"""Last lines of a rank's output."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's last report."""

    report: NodeReport
    age: float
    """Seconds since its file was written."""

    @property
    def is_silent(self) -> bool:
        """Whether the next reports are overdue: once all of a node's ranks have ended, none follows."""
        if self.report.ranks and all(rank.phase == "exited" for rank in self.report.ranks):
            return False
        return is_silent(self.age, self.report.interval)

    def measure_step_age(self, at_report: float) -> float:
        """Return how long ago a step was that was so long ago at the report.

        Meanwhile there may have been others, unless the node is silent.
        """
        return at_report + self.age if self.is_silent else at_report


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """What the directory of a run tells at one moment."""

    nodes: tuple[NodeView, ...] = ()
    """Those of the newest attempt, by node rank."""
    job: JobState | None = None
    progress: Progress | None = None
    """The newest step that rank 0 has printed."""
    step_seconds: float | None = None
    """Between two printed steps, as far as they were seen to come."""


class RunReader:
    """Reads a run again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cache = ReportCache(path)
        self._seen: deque[tuple[float, int]] = deque(maxlen=_MOST_SEEN)
        """When printed steps came, in monotonic seconds, and their numbers."""

    def read(self) -> RunSnapshot:
        """Return how the run stands now.

        A node that only an earlier attempt had is left out; one of the newest attempt that is silent stays.
        """
        reports, job = self._cache.read_reports(), self._cache.read(JobState)
        progress, seen = find_printed_step(self.path), self._seen
        now = time.monotonic()
        if progress and seen and progress.step < seen[-1][1]:
            seen.clear()
        if progress and (not seen or progress.step > seen[-1][1]):
            seen.append((now, progress.step))
        views = [NodeView(one.value, max(0.0, now - one.seen)) for one in reports]
        newest = max((view.report.attempt for view in views), default=0)
        return RunSnapshot(
            tuple(view for view in views if view.report.attempt == newest or not view.is_silent),
            job.value if job else None,
            progress,
            (seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1]) if len(seen) > 1 else None,
        )


# One rank


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A process as it was at one moment."""

    process: ProcessState
    age: float
    """Seconds since then."""
    origin: str
    """Why it was looked at."""


@dataclass(frozen=True, slots=True)
class RankDetails:
    """One rank beside its row in a report: its stacks, its last lines, its plan against what it has."""

    rank: int
    placement: str = ""
    """What it has, in words; empty if it left no record."""
    differences: tuple[str, ...] = ()
    """Where that is not what was planned, and what its shim could not apply."""
    snapshot: ProcessSnapshot | None = None
    """The newest look at its process, by the times of files: for a hang, or asked for."""
    lines: tuple[str, ...] = ()
    """The last ones of the stream that it wrote to last."""
    stream: str = ""
    """`out` or `err`."""


def read_details(run_path: Path, rank: int, local_rank: int, host: str, attempt: int) -> RankDetails:
    """Read what a run's directory has of a rank."""
    record = read_value(Applied, run_path / name_applied_file(rank))
    plan = next((one for one in read_planned(run_path, host) if one.local_rank == local_rank), None)
    differences = [*record.problems] if record else ["it left no record of its placement"]
    if record and plan:
        differences += [line for line in compare_rank(plan, record) if line not in differences]
    looks = []
    for name, origin in ((EVIDENCE, "for a hang"), (ANSWER, "asked for")):
        path = watch_path(run_path) / f"{name}{host}.json"
        evidence, written = read_value(NodeEvidence, path), read_mtime(path)
        age = max(0.0, time.time() - (written or 0))
        known = [one for one in (evidence.ranks if evidence else ()) if one.rank == rank]
        looks += [ProcessSnapshot(one.process, age, origin) for one in known]
    folder = run_path / "logs" / str(attempt)
    logs = [folder / f"rank-{rank}.{ending}" for ending in ("out", "err")]
    newest = max(filter(measure_file, logs), key=lambda log: read_mtime(log) or 0, default=None)
    return RankDetails(
        rank,
        _describe_placement(record, plan) if record else "",
        tuple(differences),
        min(looks, key=lambda one: one.age, default=None),
        tuple(read_tail(newest, _LINES)) if newest else (),
        newest.suffix[1:] if newest else "",
    )


def _describe_placement(record: Applied, plan: "RankPlan | None") -> str:
    """Return where a rank runs: `CPUs 0-7, memory preferred 0, GPU …, 4 DataLoader workers`."""
    parts = [f"CPUs {record.cpus}", f"memory {describe_memory(record.memory)}"]
    parts += [f"GPU {record.gpu}"] if record.gpu else []
    parts += [f"{record.num_workers} DataLoader workers"] if record.num_workers is not None else []
    if plan and plan.worker_cpus != plan.cpus:
        parts.append(f"its workers on CPUs {format_cpulist(plan.worker_cpus)}")
    return ", ".join(parts)
