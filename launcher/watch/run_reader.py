"""A run as those see it who watch it from outside: its nodes' reports and its progress, from its directory.

Files that have not changed are not read again: of 1,000 nodes, a look costs one listing of a folder.
"""

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from launcher.codec import load
from launcher.files import LARGEST, read_file
from launcher.runs.progress import Progress, ProgressReader, list_attempts
from launcher.runs.rank_logs import measure_file, read_from
from launcher.watch.node_reports import JOB_STATE, REPORT, watch_path
from launcher.watch.watch_model import JobState, NodeReport

MISSED = 3
"""Reports that may be missing before a node counts as silent."""
LEAST_SILENCE = 10.0
"""Seconds without a report that are no silence, however short the interval is."""
TAIL = 256 << 10
"""Bytes before the end of rank 0's logs from which on its progress is read."""
RATE_SECONDS = 120.0
"""Seconds over which the rate of printed steps is measured."""
T = TypeVar("T")


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
        return self.age > max(LEAST_SILENCE, MISSED * self.report.interval)

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


@dataclass(slots=True)
class StoredValue(Generic[T]):
    """A file that was read."""

    stamp: tuple[int, int, int]
    """Time of change, inode and size."""
    value: T | None
    """None if it cannot be read."""
    written: float
    """When it was written, on the reader's monotonic clock."""


@dataclass(slots=True)
class FileCache(Generic[T]):
    """Files of one type of value, each read when it has changed.

    How old a file is follows from when it was seen to change, and at the first look from its time and this
    machine's clock, which may be another than the filesystem's.
    """

    kind: type[T]
    found: dict[str, StoredValue[T]] = field(default_factory=dict)

    def update(self, folder: Path, entries: dict[str, os.stat_result]) -> None:
        """Read those files of a folder that have changed, and forget those that are gone."""
        now, clock = time.monotonic(), time.time()
        for name in set(self.found) - set(entries):
            del self.found[name]
        newest = max((status.st_mtime for status in entries.values()), default=clock)
        clock = max(clock, newest)
        for name, status in entries.items():
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            before = self.found.get(name)
            if before is not None and before.stamp == stamp:
                continue
            value = self.read(folder / name)
            if value is None and before is not None:
                value = before.value
            written = now if before is not None else now - (clock - status.st_mtime)
            self.found[name] = StoredValue(stamp, value, written)

    def read(self, path: Path) -> T | None:
        """Read one file; None if it is damaged or gone."""
        try:
            return load(self.kind, read_file(path, LARGEST))
        except (OSError, ValueError):
            return None


@dataclass(slots=True)
class PrintedSteps:
    """Follows the steps that rank 0 prints, from the end of its newest logs on."""

    path: Path
    attempt: int = -1
    reader: ProgressReader = field(default_factory=ProgressReader)
    offsets: dict[Path, int] = field(default_factory=dict)
    seen: deque[tuple[float, int]] = field(default_factory=deque)
    """When steps came, in monotonic seconds, and their numbers."""

    def update(self) -> None:
        """Read what rank 0 has printed since the last call."""
        attempt = max(list_attempts(self.path), default=-1)
        if attempt != self.attempt:
            self.begin_attempt(attempt)
        grown = [self.read_new(path) for path in self.offsets]
        if not any(grown) or not (step := self.newest):
            return
        now = time.monotonic()
        if self.seen and step.step < self.seen[-1][1]:
            self.seen.clear()
        if not self.seen or step.step > self.seen[-1][1]:
            self.seen.append((now, step.step))
        while len(self.seen) > 2 and now - self.seen[0][0] > RATE_SECONDS:
            self.seen.popleft()

    @property
    def newest(self) -> Progress | None:
        """The newest step."""
        return self.reader.steps[-1] if self.reader.steps else None

    def begin_attempt(self, attempt: int) -> None:
        """Turn to the logs of another attempt; until it has come to a step, the last one's counts."""
        self.attempt = attempt
        folder = self.path / "logs" / str(attempt)
        paths = [folder / f"rank-0.{ending}" for ending in ("out", "err")]
        self.offsets = {path: max(0, measure_file(path) - TAIL) for path in paths}
        self.seen.clear()

    def read_new(self, path: Path) -> bool:
        """Read what was added to a log, and tell whether there was a step in it."""
        found = False
        while True:
            data, offset = read_from(path, self.offsets[path])
            self.offsets[path] = offset + len(data)
            if not data:
                return found
            found = self.reader.add(path.name, data) or found

    @property
    def step_seconds(self) -> float | None:
        """Seconds from one step to the next; None before two were seen to come."""
        if len(self.seen) < 2:
            return None
        (begin, first), (end, last) = self.seen[0], self.seen[-1]
        return (end - begin) / (last - first) if end > begin else None


@dataclass(slots=True)
class RunReader:
    """Reads a run again and again."""

    path: Path
    reports: FileCache[NodeReport] = field(default_factory=lambda: FileCache(NodeReport))
    jobs: FileCache[JobState] = field(default_factory=lambda: FileCache(JobState))
    printed: PrintedSteps = field(init=False)

    def __post_init__(self) -> None:
        """Look at nothing yet."""
        self.printed = PrintedSteps(self.path)

    def read(self) -> RunSnapshot:
        """Return how the run stands now; what cannot be read is left out."""
        folder = watch_path(self.path)
        entries = list_entries(folder)
        self.reports.update(folder, {name: entries[name] for name in entries if is_report(name)})
        self.jobs.update(folder, {name: entries[name] for name in entries if name == JOB_STATE})
        self.printed.update()
        now = time.monotonic()
        views = [
            NodeView(one.value, max(0.0, now - one.written))
            for one in self.reports.found.values()
            if one.value is not None
        ]
        jobs = list(self.jobs.found.values())
        return RunSnapshot(
            choose_current(views),
            jobs[0].value if jobs else None,
            self.printed.newest,
            self.printed.step_seconds,
            now - jobs[0].written if jobs else 0.0,
        )


def is_report(name: str) -> bool:
    """Tell whether a file's name is a node report's."""
    return name.startswith(REPORT) and name.endswith(".json")


def list_entries(folder: Path) -> dict[str, os.stat_result]:
    """Return the reports in the folder of a run, and what is known of the job; none if it cannot be read.

    Listing it makes a network filesystem ask its server anew, which looking at a name may not.
    """
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if (is_report(entry.name) or entry.name == JOB_STATE) and entry.is_file(
                    follow_symlinks=False
                ):
                    found[entry.name] = entry.stat(follow_symlinks=False)
    except OSError:
        return found
    return found


def choose_current(views: list[NodeView]) -> tuple[NodeView, ...]:
    """Leave out nodes that only an earlier attempt had; a node of the last one that is silent stays."""
    newest = max((view.report.attempt for view in views), default=0)
    current = [view for view in views if view.report.attempt == newest or not view.is_silent]
    return tuple(sorted(current, key=lambda view: (view.report.node_rank, view.report.host)))
