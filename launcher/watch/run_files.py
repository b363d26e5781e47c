"""The files of watching in a run directory: each node's report and evidence, and what is known of the job.

    watch/node-HOST.json       model.NodeReport, every watch.interval
    watch/evidence-HOST.json   model.NodeEvidence, once for each hang
    watch/job.json             model.JobState, by the node that judges
    watch/stack-request.json   StackRequest, by `launch watch`, from any machine; the newest one counts
    watch/stack-HOST.json      model.NodeEvidence of that rank, by the watcher of its node
    hang-N/                    the verdict on hang N, what each node has gathered, and all stacks as text

Each is written whole or not at all. Those who read them may be on another node than those who write: how old
a report is follows from the times of files on the filesystem that they share, not from the nodes' clocks.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from launcher.codec import dump, load
from launcher.files import LARGEST, open_below, read_file, write_whole
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.model import Hang, JobState, NodeEvidence, NodeReport, ProcessState, RankEvidence

FOLDER = "watch"
JOB_STATE = "job.json"
_REPORT, EVIDENCE, _ANSWER = "node-", "evidence-", "stack-"
_REQUEST = "stack-request.json"
_HANG = re.compile(r"hang-([1-9]\d{0,5})")
REQUEST_PATIENCE = 30.0
"""Seconds after which a request for a stack is no longer answered: who asked has gone on."""
_MISSED, _LEAST_SILENCE = 3, 10.0
"""A node is silent once so many of its reports are missing, and at least so many seconds have passed."""
T = TypeVar("T")


def is_silent(age: float, interval: float) -> bool:
    """Tell whether a node whose last report is `age` seconds old is heard of no more."""
    return age > max(_MISSED * interval, _LEAST_SILENCE)


def watch_path(run_path: Path) -> Path:
    """Return the folder of reports in a run directory."""
    return run_path / FOLDER


def hang_path(run_path: Path, number: int) -> Path:
    """Return the folder of a hang in a run directory."""
    return run_path / f"hang-{number}"


def count_hangs(run_path: Path) -> int:
    """Return the highest number of a hang that has a folder; 0 if there is none. Raises OSError."""
    found = (_HANG.fullmatch(name) for name in os.listdir(run_path))  # noqa: PTH208 - names alone
    return max((int(match[1]) for match in found if match), default=0)


# Writing


def _write(run_path: Path, folder: str, name: str, data: str) -> float:
    """Write a file into a folder of the run, made if it is missing; return its time. Raises OSError."""
    with closing_descriptor(open_below(run_path, folder)) as at:
        write_whole(at, name, (data.rstrip("\n") + "\n").encode("utf-8", "replace"))
        return os.stat(name, dir_fd=at).st_mtime


def write_report(run_path: Path, report: NodeReport) -> float:
    """Write a node's report; return the time of its file. Raises OSError."""
    return _write(run_path, FOLDER, f"{_REPORT}{report.host}.json", dump(report))


def write_job_state(run_path: Path, state: JobState) -> None:
    """Write what is known of the job; raises OSError."""
    _write(run_path, FOLDER, JOB_STATE, dump(state))


def write_evidence(run_path: Path, evidence: NodeEvidence) -> None:
    """Write what a node has gathered for a hang; raises OSError."""
    _write(run_path, FOLDER, f"{EVIDENCE}{evidence.host}.json", dump(evidence))


def write_hang(run_path: Path, hang: Hang, evidence: Sequence[NodeEvidence] = ()) -> None:
    """Write a hang's verdict, or what has become of it, and what is known of it; raises OSError."""
    folder = hang_path(run_path, hang.number).name
    _write(run_path, folder, "verdict.json", dump(hang, indent=1))
    for node in evidence:
        _write(run_path, folder, f"{EVIDENCE}{node.host}.json", dump(replace(node, number=hang.number)))
        for rank in node.ranks:
            _write(run_path, folder, f"stacks-{node.host}-rank-{rank.rank}.txt", _describe_stacks(rank))


def _describe_stacks(rank: RankEvidence) -> str:
    """Return a rank's stacks, and those of its children, as text."""
    where = f"rank {rank.rank} on {rank.host}, {rank.phase}, step {rank.step}"
    lines = [f"{where}, {rank.idle:.0f} s without progress", *_list_process(rank.process, "process")]
    for child in rank.children:
        lines += ["", *_list_process(child, "child")]
    return "\n".join([*lines, *(f"note: {note}" for note in rank.notes)])


def _list_process(process: ProcessState, what: str) -> Iterator[str]:
    """Give the lines of one process."""
    inside = (process.system_call or process.wait_channel) if process.state in "SD" else ""
    state = f"state {process.state}" + (f", in {inside}" if inside else "")
    yield f"{what} {process.pid} {process.command}".rstrip() + f": {state}"
    for stack in process.stacks:
        main = " (main)" if stack.is_current else ""
        yield f"  thread {stack.thread}{main}, innermost first:"
        for frame in stack.frames:
            yield f"    {frame.file}:{frame.line} in {frame.function}"


# Reading: with `own`, which is for what acts upon a value, that of another user counts as missing


def read_value(kind: type[T], path: Path, *, own: bool = False) -> T | None:
    """Read one of these values; None for what is not there, damaged, or another user's."""
    try:
        return load(kind, read_file(path, LARGEST, own=own))
    except (OSError, ValueError):
        return None


def read_job_state(run_path: Path, *, own: bool = False) -> JobState | None:
    """Read what is known of a job; None if nothing is, or it cannot be read."""
    return read_value(JobState, watch_path(run_path) / JOB_STATE, own=own)


def read_report(run_path: Path, host: str, *, own: bool = False) -> NodeReport | None:
    """Read one node's report; None if there is none that can be read."""
    return read_value(NodeReport, watch_path(run_path) / f"{_REPORT}{host}.json", own=own)


def read_evidence(folder: Path, number: int, *, own: bool = False) -> tuple[NodeEvidence, ...]:
    """Read what nodes have gathered for a hang, by node rank; `folder` is that of reports, or of the hang."""
    found = (read_value(NodeEvidence, folder / name, own=own) for name in _list_names(folder, EVIDENCE))
    chosen = [value for value in found if value is not None and value.number == number]
    return tuple(sorted(chosen, key=lambda one: (one.node_rank, one.host)))


def read_reports(run_path: Path) -> tuple[NodeReport, ...]:
    """Read all nodes' reports, by node rank; those that cannot be read count as missing."""
    return tuple(one.value for one in ReportCache(run_path).read_reports())


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
class StackRequest:
    """Of a rank's stack, by somebody who looks at the run."""

    rank: int
    number: int
    """Greater than that of any request before, which it replaces."""


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """A value as it was found in a file."""

    value: T
    seen: float
    """When its file was written, on this process's monotonic clock."""
    stamp: tuple[int, int, int] = (0, 0, 0)
    """Time of change, inode and size."""


class ReportCache:
    """All nodes' reports, and what is known of the job, each read when it has changed.

    Of 1,000 nodes, a look costs one listing. A file that is damaged has its last value. When a file was
    written follows from its time and the filesystem's clock, if the caller knows that by a file of its own.
    Else it follows from when it was seen to change, and at the first look from this machine's clock, which
    may be another one.
    """

    def __init__(self, run_path: Path, *, own: bool = False) -> None:
        self.folder = watch_path(run_path)
        self.own = own
        self._found: dict[type, dict[str, Stored[Any]]] = {}

    def read_reports(self, clock: float | None = None) -> tuple[Stored[NodeReport], ...]:
        """Return the nodes' reports, by node rank."""
        found = self._update(NodeReport, _list_names(self.folder, _REPORT), clock)
        return tuple(sorted(found.values(), key=lambda one: (one.value.node_rank, one.value.host)))

    def read_job(self, clock: float | None = None) -> Stored[JobState] | None:
        """Return what is known of the job; None if nothing is."""
        return self._update(JobState, [JOB_STATE], clock).get(JOB_STATE)

    def read_request(self, clock: float) -> Stored[StackRequest] | None:
        """Return the last request for a stack, by this user alone with `own`."""
        return self._update(StackRequest, [_REQUEST], clock).get(_REQUEST)

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
            if value is None and before:
                value = before.value
            if value is not None:
                age = (guess if clock is None else clock) - state.st_mtime
                seen = now if before and clock is None else now - age
                found[name] = Stored(value, seen, stamp)
        self._found[kind] = found
        return found


# A rank's stack for somebody who looks at the run


def write_stack_request(run_path: Path, rank: int) -> int:
    """Ask for a rank's stack; return the request's number. Raises OSError, also for another user's run."""
    request = StackRequest(rank, time.time_ns())
    _write(run_path, FOLDER, _REQUEST, dump(request))
    return request.number


def write_stack_answer(run_path: Path, evidence: NodeEvidence) -> None:
    """Write what a node has gathered for a request; raises OSError."""
    _write(run_path, FOLDER, f"{_ANSWER}{evidence.host}.json", dump(evidence))


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A process as it was at one moment."""

    process: ProcessState
    age: float
    """Seconds since then."""
    origin: str
    """Why it was looked at."""


def find_process(run_path: Path, rank: int, host: str) -> ProcessSnapshot | None:
    """Return the newest look at a rank's process, by the times of files: for a hang, or asked for."""
    found = []
    for name, origin in ((EVIDENCE, "for a hang"), (_ANSWER, "asked for")):
        path = watch_path(run_path) / f"{name}{host}.json"
        try:
            age = max(0.0, time.time() - path.lstat().st_mtime)
        except OSError:
            continue
        evidence = read_value(NodeEvidence, path)
        processes = [one.process for one in evidence.ranks if one.rank == rank] if evidence else []
        found += [ProcessSnapshot(process, age, origin) for process in processes]
    return min(found, key=lambda one: one.age, default=None)
