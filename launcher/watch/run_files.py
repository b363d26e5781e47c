"""The files of watching in a run directory: each node's report and evidence, and what is known of the job.

    watch/node-HOST.json       model.NodeReport, every watch.interval
    watch/evidence-HOST.json   model.NodeEvidence, once for each hang
    watch/job.json             model.JobState, by the node that judges
    watch/stack-request.json   StackRequest, by `launch watch`, from any machine; the newest one counts
    watch/stack-HOST.json      model.NodeEvidence of that rank, by the watcher of its node
    hang-N/                    the verdict on hang N, what each node has gathered, and all stacks as text

Each is written whole or not at all. Those who read them may be on another node than those who write: how old
a report is follows from the times of files on the filesystem that they share, not from the nodes' clocks.
Those who watch never wait for that filesystem: a thread of its own reads and writes.
"""

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from launcher.codec import dump, load
from launcher.files import LARGEST, open_below, read_file, write_whole
from launcher.protocol import name_plan_file
from launcher.runs.records import NodeRecord, read_nodes, read_ranks
from launcher.watch.model import Hang, JobState, NodeEvidence, NodeReport, RankEvidence

if TYPE_CHECKING:
    from launcher.plan.model import RankPlan

FOLDER = "watch"
_REPORT, EVIDENCE, ANSWER = "node-", "evidence-", "stack-"
_MISSED, _LEAST_SILENCE = 3, 10.0
"""A node is silent once so many of its reports are missing, and at least so many seconds have passed."""
_HANG = re.compile(r"hang-([1-9]\d{0,5})")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StackRequest:
    """Of a rank's stack, by somebody who looks at the run."""

    rank: int
    number: int
    """Greater than that of any request before, which it replaces."""


_NAMES: dict[type, str] = {JobState: "job.json", StackRequest: "stack-request.json"}


def is_silent(age: float, interval: float) -> bool:
    """Tell whether a node whose last report is `age` seconds old is heard of no more."""
    return age > max(_MISSED * interval, _LEAST_SILENCE)


def watch_path(run_path: Path) -> Path:
    """Return the folder of reports in a run directory."""
    return run_path / FOLDER


# Writing


def _write(run_path: Path, folder: str, name: str, data: str) -> float:
    """Write a file into a folder of the run, made if it is missing; return its time. Raises OSError."""
    with open_below(run_path, folder) as at:
        write_whole(at, name, (data.rstrip("\n") + "\n").encode("utf-8", "replace"))
        return os.stat(name, dir_fd=at).st_mtime


def write_value(run_path: Path, value: NodeReport | NodeEvidence | JobState | StackRequest) -> float:
    """Write a value into its file in `watch/`; return the time of the file. Raises OSError.

    Evidence that is of no hang (number 0) answers a request for a stack.
    """
    if isinstance(value, NodeReport):
        name = f"{_REPORT}{value.host}.json"
    elif isinstance(value, NodeEvidence):
        name = f"{EVIDENCE if value.number else ANSWER}{value.host}.json"
    else:
        name = _NAMES[type(value)]
    return _write(run_path, FOLDER, name, dump(value))


def write_hang(run_path: Path, hang: Hang, evidence: Sequence[NodeEvidence] = ()) -> None:
    """Write a hang's verdict, or what has become of it, and what is known of it; raises OSError."""
    folder = hang.folder
    _write(run_path, folder, "verdict.json", dump(hang, indent=1))
    for node in evidence:
        _write(run_path, folder, f"{EVIDENCE}{node.host}.json", dump(replace(node, number=hang.number)))
        for rank in node.ranks:
            name = f"stacks-{node.host}-rank-{rank.rank}.txt"
            _write(run_path, folder, name, "\n".join(_list_stacks(rank)))


def _list_stacks(rank: RankEvidence) -> Iterator[str]:
    """Give the lines of a rank's stacks, and of those of its children."""
    where = f"rank {rank.rank} on {rank.host}, {rank.phase}, step {rank.step}"
    yield f"{where}, {rank.idle or 0:.0f} s without progress"
    for process in (rank.process, *rank.children):
        what = "process" if process is rank.process else "\nchild"
        inside = process.system_call or process.wait_channel
        where = f", in {inside}" if inside else ""
        yield f"{what} {process.pid} {process.command}: state {process.state}{where}"
        for stack in process.stacks:
            main = " (main)" if stack.is_current else ""
            yield f"  thread {stack.thread}{main}, innermost first:"
            for frame in stack.frames:
                yield f"    {frame.file}:{frame.line} in {frame.function}"
    for note in rank.notes:
        yield f"note: {note}"


# Reading: with `own`, which is for what acts upon a value, that of another user counts as missing


def read_value(kind: type[T], path: Path, *, own: bool = False) -> T | None:
    """Read one of these values; None for what is not there, damaged, or another user's."""
    try:
        return load(kind, read_file(path, LARGEST, own=own))
    except (OSError, ValueError):
        return None


def read_planned(run_path: Path, host: str, *, own: bool = False) -> "tuple[RankPlan, ...]":
    """Read the plans of a node's ranks; none if they cannot be read."""
    try:
        return read_ranks(read_file(run_path / name_plan_file(host), LARGEST, own=own))
    except (OSError, ValueError):
        return ()


def read_job_state(run_path: Path, *, own: bool = False) -> JobState | None:
    """Read what is known of a job; None if nothing is, or it cannot be read."""
    return read_value(JobState, watch_path(run_path) / _NAMES[JobState], own=own)


def _list_names(folder: Path, beginning: str) -> list[str]:
    """Return the names of JSON files that begin so; none if the folder cannot be read.

    Listing makes a network filesystem ask its server again, which looking at a name may not.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names alone
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(beginning) and name.endswith(".json"))


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """A value as it was found in a file."""

    value: T
    seen: float
    """When its file was written, on this process's monotonic clock."""
    stamp: tuple[int, int, int] = (0, 0, 0)
    """Time of change, inode and size."""


class ReportCache:
    """What nodes have written, and what is known of the job, each file read when it has changed.

    Of 1,000 nodes, a look costs one listing. A file that cannot be read has its last value and age, until
    it can. When a file was written follows from its time and the filesystem's clock, if the caller knows
    that by a file of its own. Else it follows from when it was seen to change, and at the first look from
    this machine's clock, which may be another one.
    """

    def __init__(self, run_path: Path, folder: str = FOLDER, *, own: bool = False) -> None:
        """`folder` is that of reports, or of a hang, which has evidence alone."""
        self.folder = run_path / folder
        self.own = own
        self._found: dict[type, dict[str, Stored[Any]]] = {}

    def read_reports(self, clock: float | None = None) -> tuple[Stored[NodeReport], ...]:
        """Return the nodes' reports, by node rank."""
        found = self._update(NodeReport, _list_names(self.folder, _REPORT), clock)
        return tuple(sorted(found.values(), key=lambda one: (one.value.node_rank, one.value.host)))

    def read_evidence(self, number: int) -> tuple[NodeEvidence, ...]:
        """Return what nodes have gathered for a question, or a hang, by node rank."""
        found = self._update(NodeEvidence, _list_names(self.folder, EVIDENCE), None).values()
        chosen = (one.value for one in found if one.value.number == number)
        return tuple(sorted(chosen, key=lambda one: (one.node_rank, one.host)))

    def read(self, kind: type[T], clock: float | None = None) -> Stored[T] | None:
        """Return what is known of the job, or the last request for a stack; None if there is none."""
        return self._update(kind, [_NAMES[kind]], clock).get(_NAMES[kind])

    def _update(self, kind: type[T], names: Iterable[str], clock: float | None) -> dict[str, Stored[T]]:
        """Return the values of these files, and forget those of others."""
        states: dict[str, os.stat_result] = {}
        for name in names:
            with suppress(OSError):
                states[name] = (self.folder / name).lstat()
        now, known = time.monotonic(), self._found.get(kind, {})
        guess = max([time.time(), *(state.st_mtime for state in states.values())])
        found: dict[str, Stored[T]] = {}
        for name, state in states.items():
            stamp = (state.st_mtime_ns, state.st_ino, state.st_size)
            before = known.get(name)
            if before and before.stamp == stamp:
                found[name] = before
                continue
            value = read_value(kind, self.folder / name, own=self.own)
            if value is None and before:  # the next look reads it again
                found[name] = before
            if value is not None:
                age = (guess if clock is None else clock) - state.st_mtime
                seen = now if before and clock is None else now - age
                found[name] = Stored(value, seen, stamp)
        self._found[kind] = found
        return found


# Without ever waiting for the filesystem

STUCK = 10.0
"""Seconds in one call to a filesystem, after which it is said to hang."""
_OLD = 6.0
"""Age in seconds of a report whose node may have ended."""
_MOST_TASKS = 256
"""Tasks that wait, at most: while the filesystem hangs, further ones are dropped."""
_METRICS, _REPORTS = 0.5, 0.75
"""Shares of these places up to which metrics and reports wait; the rest is for what is known of hangs."""


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
    evidence: tuple[NodeEvidence, ...] = ()
    """What nodes have gathered for the question that is open, for the judging node."""
    request: Stored[StackRequest] | None = None


class Worker(Generic[T]):
    """Does work on items in their order; of too many, those that come last are dropped.

    The interpreter's end does not wait for it. The first failure is warned of, and later ones are silent.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[T], object],
        most: int,
        warn: Callable[[OSError], object] | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """`work` is called with each item, `finish` in the end; both raise OSError. `most` may wait."""
        self._work = work
        self._finish = finish
        self._warn = warn
        self._items: queue.Queue[tuple[T] | None] = queue.Queue(most)
        self.closing = threading.Event()
        """Somebody waits for the end."""
        self.busy_since: float | None = None
        """Monotonic time at which it began what it does now."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: T, share: float = 1.0) -> None:
        """Leave an item to the thread, unless such a share of the places is taken."""
        with suppress(queue.Full):
            if self._items.qsize() < share * self._items.maxsize:
                self._items.put_nowait((item,))

    def wait_idle(self, seconds: float) -> bool:
        """Wait until all is done, at most so long; tell whether it is."""
        with self._items.all_tasks_done:
            return self._items.all_tasks_done.wait_for(lambda: not self._items.unfinished_tasks, seconds)

    def close(self, timeout: float) -> None:
        """Have the rest done, and wait for that for so many seconds at most."""
        self.closing.set()
        end = time.monotonic() + timeout
        with suppress(queue.Full):
            self._items.put(None, timeout=timeout)
            self.thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while entry := self._items.get():
            self.busy_since = time.monotonic()
            try:
                self._work(entry[0])
            except OSError as error:
                if self._warn:
                    self._warn(error)
                    self._warn = None
            self.busy_since = None
            self._items.task_done()
        if self._finish:
            with suppress(OSError):
                self._finish()


class SharedFiles:
    """Reads and writes in the run directory, without ever waiting for it."""

    def __init__(self, run_path: Path) -> None:
        self.run_path = run_path
        self.found = Found()
        self.trouble = ""
        """Why the last exchange failed."""
        self._cache = ReportCache(run_path, own=True)
        self._next: tuple[NodeReport, JobState | None] | None = None
        self.worker: Worker[Callable[[], object]] = Worker("run-directory", self._do, _MOST_TASKS)

    def submit(self, report: NodeReport, state: JobState | None) -> None:
        """Have a report written, with the job's state by the node that judges, and what others wrote read.

        One that still waits is replaced.
        """
        self._next = report, state
        self.worker.put(self._exchange, _REPORTS)

    def put_metrics(self, write: Callable[[], object]) -> None:
        """Have a line of metrics written, if there is much room."""
        self.worker.put(write, _METRICS)

    def is_stuck(self, now: float) -> bool:
        """Tell whether the filesystem hangs; `now` is monotonic."""
        since = self.worker.busy_since
        return since is not None and now - since > STUCK

    def _do(self, task: Callable[[], object]) -> None:
        try:
            task()
        except Exception as error:  # this thread's end would look like a filesystem that hangs
            self.trouble = f"{type(error).__name__}: {error}"

    def _exchange(self) -> None:
        """Write and read; raises OSError."""
        if self._next is None:  # done with the one before, which it replaced
            return
        (own, state), self._next = self._next, None
        clock, cache = write_value(self.run_path, own), self._cache
        job = cache.read(JobState, clock)  # before it is replaced, if another node wrote it
        if state:
            write_value(self.run_path, state)
        reads_all = own.nodes > 1 and (state is not None or own.stalled_since is not None)
        reports, now = cache.read_reports(clock) if reads_all else (), time.monotonic()
        told = [one for one in reports if one.value.attempt == own.attempt and now - one.seen < _OLD]
        is_short = reads_all and len(told) < own.nodes
        ended = tuple(read_nodes(self.run_path, own.attempt)) if is_short else ()
        names = map(_HANG.fullmatch, os.listdir(self.run_path) if state else ())  # noqa: PTH208 - names alone
        hangs = max((int(name[1]) for name in names if name), default=0)
        asks = state.asks if state and reads_all else 0
        evidence = cache.read_evidence(asks) if asks else ()
        request = cache.read(StackRequest, clock)
        self.found, self.trouble = Found(job, reports, hangs, ended, evidence, request), ""
