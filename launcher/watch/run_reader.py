"""A run as those see it who watch it from outside: its nodes' reports, its progress, one rank in detail.

All of it is read from its directory; what cannot be read is left out.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cpulist import format_cpulist
from launcher.files import LARGEST, read_file
from launcher.protocol import name_applied_file, name_plan_file
from launcher.runs.progress import Progress, ProgressReader, list_attempts, read_change
from launcher.runs.rank_logs import measure_file, read_from, read_tail
from launcher.runs.run_records import Applied, compare_rank, describe_memory, read_ranks
from launcher.watch.model import JobState, NodeReport
from launcher.watch.run_files import ProcessSnapshot, ReportCache, find_process, is_silent, read_value

if TYPE_CHECKING:
    from launcher.plan.model import RankPlan

_TAIL = 256 << 10
"""Bytes before the end of rank 0's logs from which on its progress is read."""
_RATE_SECONDS = 120.0
"""Seconds over which the rate of printed steps is measured."""
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
    job_age: float = 0.0
    """Seconds since the judging node has written what it knows."""


class RunReader:
    """Reads a run again and again."""

    def __init__(self, path: Path) -> None:
        self._cache = ReportCache(path)
        self._printed = _PrintedSteps(path)

    def read(self) -> RunSnapshot:
        """Return how the run stands now.

        A node that only an earlier attempt had is left out; one of the newest attempt that is silent stays.
        """
        reports, job = self._cache.read_reports(), self._cache.read_job()
        self._printed.update()
        now = time.monotonic()
        views = [NodeView(one.value, max(0.0, now - one.seen)) for one in reports]
        newest = max((view.report.attempt for view in views), default=0)
        return RunSnapshot(
            tuple(view for view in views if view.report.attempt == newest or not view.is_silent),
            job.value if job else None,
            self._printed.newest,
            self._printed.measure_step_seconds(),
            now - job.seen if job else 0.0,
        )


class _PrintedSteps:
    """Follows the steps that rank 0 prints, from the end of its newest logs on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt = -1
        self.reader = ProgressReader()
        self.offsets: dict[Path, int] = {}
        self.seen: deque[tuple[float, int]] = deque()
        """When steps came, in monotonic seconds, and their numbers."""

    def update(self) -> None:
        """Read what rank 0 has printed since the last call.

        Until a new attempt has come to a step, the last one's counts.
        """
        attempt = max(list_attempts(self.path), default=-1)
        if attempt != self.attempt:
            self.attempt = attempt
            folder = self.path / "logs" / str(attempt)
            paths = [folder / f"rank-0.{ending}" for ending in ("out", "err")]
            self.offsets = {path: max(0, measure_file(path) - _TAIL) for path in paths}
            self.seen.clear()
        has_grown = False
        for path in self.offsets:
            while True:
                data, offset = read_from(path, self.offsets[path])
                self.offsets[path] = offset + len(data)
                if not data:
                    break
                has_grown = self.reader.add(path.name, data) or has_grown
        if not has_grown or not (step := self.newest):
            return
        now = time.monotonic()
        if self.seen and step.step < self.seen[-1][1]:
            self.seen.clear()
        if not self.seen or step.step > self.seen[-1][1]:
            self.seen.append((now, step.step))
        while len(self.seen) > 2 and now - self.seen[0][0] > _RATE_SECONDS:
            self.seen.popleft()

    @property
    def newest(self) -> Progress | None:
        """The newest step."""
        return self.reader.steps[-1] if self.reader.steps else None

    def measure_step_seconds(self) -> float | None:
        """Return the seconds from one step to the next; None before two were seen to come."""
        if len(self.seen) < 2:
            return None
        (begin, first), (end, last) = self.seen[0], self.seen[-1]
        return (end - begin) / (last - first) if end > begin else None


# One rank


@dataclass(frozen=True, slots=True)
class RankDetails:
    """One rank beside its row in a report: its stacks, its last lines, its plan against what it has."""

    rank: int
    attempt: int
    placement: str = ""
    """What it has, in words; empty if it left no record."""
    differences: tuple[str, ...] = ()
    """Where that is not what was planned, and what its shim could not apply."""
    snapshot: ProcessSnapshot | None = None
    lines: tuple[str, ...] = ()
    """The last ones of the stream that it wrote to last."""
    stream: str = ""
    """`out` or `err`."""


def read_details(run_path: Path, rank: int, local_rank: int, host: str, attempt: int) -> RankDetails:
    """Read what a run's directory has of a rank."""
    record = read_value(Applied, run_path / name_applied_file(rank))
    try:
        plans = read_ranks(read_file(run_path / name_plan_file(host), LARGEST))
    except (OSError, ValueError):
        plans = ()
    plan = next((one for one in plans if one.local_rank == local_rank), None)
    differences = [*record.problems] if record else ["it left no record of its placement"]
    if record and plan:
        differences += [line for line in compare_rank(plan, record) if line not in differences]
    folder = run_path / "logs" / str(attempt)
    logs = [folder / f"rank-{rank}.{ending}" for ending in ("out", "err")]
    newest = max((log for log in logs if measure_file(log)), key=read_change, default=None)
    return RankDetails(
        rank,
        attempt,
        _describe_placement(record, plan) if record else "",
        tuple(differences),
        find_process(run_path, rank, host),
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
