"""A job that is followed: what its manifest, SLURM and its log say of it, and when it has ended."""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from launcher.files import open_file
from launcher.report.console import JobConsole, Source
from launcher.runs.manifest import CLOSED, read_job, read_manifest, take_dict
from launcher.runs.rank_logs import Follower
from launcher.runs.run_directory import RunDir, explain_missing_end
from launcher.slurm.client import ENDED, JobState
from launcher.slurm.pending_jobs import Answer, QueuePosition, describe_wait

PATIENCE = 5.0
"""Seconds that a network filesystem has to show what was written, and SLURM to notice an end."""
SILENT = ("COMPLETING", "STAGE_OUT", "SIGNALING", "REQUEUED")
"""States that pass by themselves."""
QUIET = 5.0
"""Seconds without a new line after which a log counts as complete."""
FRESH = 2.0
"""Seconds for which a size that a network filesystem tells is believed."""
OWN_PREFIX = b"launch: "
"""How the lines of the batch script's process begin; the last line of a job is one."""
OTHER_RANKS = re.compile(rb"^\[[^][\s]+:(?!0\] )\d+\] .*\n", re.MULTILINE)
"""Lines of other ranks than rank 0."""
RANKS = Source(0, "out", b"")
"""The log has the ranks' lines with their origin already."""
MOST_KEPT = 1 << 16
"""Bytes of a marked line; a longer one is none."""


@dataclass(slots=True)
class FollowedJob:
    """What is known of one job."""

    run_path: Path
    job_id: str
    state: JobState | None = None
    """SLURM's newest word; None before the first, and for a job that SLURM has forgotten."""
    position: QueuePosition | None = None
    forgotten: bool = False
    outcome: Mapping[str, object] = field(default_factory=dict)
    """The manifest's."""
    last_shown: tuple[object, ...] = ()
    """What the last line was about."""
    ran: bool = False
    ending: float | None = None
    """When there was first a sign of the end, in monotonic seconds."""
    status: int | None = None
    """Its exit code, once it has ended."""

    def update_state(self, answer: Answer) -> str:
        """Take what SLURM says, and return a line about what is new; empty if nothing is."""
        self.state = state = answer.jobs.get(self.job_id)
        self.position, self.forgotten = answer.position, state is None
        if state is None or state.state in ENDED or state.state in SILENT:
            return ""
        if self.is_final and state.state == "RUNNING":  # it has ended; SLURM is slower to tell
            return ""
        pending = state.state == "PENDING"
        key = (state.state, state.reason if pending else state.nodelist, state.restarts)
        if key == self.last_shown or (pending and not state.reason):
            return ""
        self.last_shown = key
        line = f"job {self.job_id} {self.describe_state(state)}"
        self.ran = self.ran or not pending
        return line

    def describe_state(self, state: JobState) -> str:
        """Say in which state it is, and what that means."""
        if state.state == "PENDING":
            wait = describe_wait(state, self.position, datetime.now())
            if not (self.ran or state.restarts):
                return f"waits: {wait}"
            cause = str(self.outcome.get("cause") or "") if self.outcome.get("state") == "requeued" else ""
            return f"is back in the queue{f' ({cause})' if cause else ''}: {wait}"
        where = f" on {state.nodelist}" if state.nodelist else ""
        again = (
            f", after {state.restarts} requeue{'s' if state.restarts > 1 else ''}" if state.restarts else ""
        )
        return f"is {state.state.lower()}{where}{again}"

    def update_outcome(self) -> bool:
        """Read how the run stands, and tell whether that is news."""
        before = self.outcome.get("state")
        self.outcome = read_outcome(self.run_path, self.job_id) or self.outcome
        return self.outcome.get("state") != before

    @property
    def is_final(self) -> bool:
        """Whether the manifest tells the end."""
        return self.outcome.get("state") in CLOSED

    @property
    def is_over(self) -> bool:
        """Whether SLURM says that it has ended, or knows nothing of it any more."""
        return self.forgotten or (self.state is not None and self.state.state in ENDED)

    @property
    def has_run(self) -> bool:
        """Whether its last attempt may have begun: SLURM shows no nodes of a job that ended before it ran."""
        return self.state is None or bool(self.state.nodelist)

    def find_exit_code(self) -> str | None:
        """Find its exit code once it has ended; returns what there is to say of that, None before the end.

        The manifest's exit code counts, or SLURM's if the job ended without one or never began.
        """
        if not (self.is_final or self.is_over):
            self.ending = None
            return None
        now = time.monotonic()
        self.ending = self.ending or now
        late = now - self.ending > PATIENCE
        leaving = self.is_over or (self.state is not None and self.state.state == "COMPLETING")
        if self.is_final and (leaving or late):
            self.status = read_code(
                self.outcome.get("exit_code"), 0 if self.outcome["state"] == "succeeded" else 1
            )
            return ""
        if not self.is_over or not (late or not self.has_run):
            return None
        return self.use_slurm_state()

    def use_slurm_state(self) -> str:
        """Find the exit code by SLURM's word alone, and say what that is."""
        if self.state is None:
            self.status = 1
            return f"SLURM has forgotten job {self.job_id}, and {self.run_path} does not tell how it ended"
        done = self.state.state == "COMPLETED"
        self.status = self.state.exit_code or (0 if done else 1)
        reason = f" ({self.state.reason})" if self.state.reason else ""
        silence = explain_missing_end(RunDir(self.run_path))
        more = f"; {silence}" if silence else ""
        return f"job {self.job_id} ended{self.describe_where_ended()}: {self.state.state}{reason}{more}"

    def describe_where_ended(self) -> str:
        """Say that a job ended in the queue, perhaps after some attempts, if SLURM shows no nodes for it."""
        if self.has_run:
            return ""
        count = (self.state.restarts if self.state else 0) or int(self.ran)
        attempts = f"{count} attempt{'' if count == 1 else 's'}"
        return f" in the queue, after {attempts}" if count else " before it ran"

    def describe_end(self) -> str:
        """Say how it ended, in a line: the last one of an array's member."""
        failure = self.outcome.get("first_failure")
        why = (
            f": rank {failure['rank']} on {failure['host']} {failure['reason']}"
            if isinstance(failure, dict)
            else ""
        )
        word = str(self.outcome.get("state")) if self.is_final else "ended"
        code = f" with exit code {self.status}" if self.status else ""
        return f"job {self.job_id} {word}{code}{why} ({self.run_path})"


def read_code(value: object, default: int) -> int:
    """Return a manifest's exit code; one that is missing or damaged is the default."""
    return value if isinstance(value, int) else default


def read_outcome(run_path: Path, job_id: str) -> Mapping[str, object]:
    """Return the outcome that a manifest tells of a job; empty if it tells none."""
    manifest = read_manifest(run_path)
    return take_dict(manifest, "outcome") if read_job(manifest) == job_id else {}


@dataclass(slots=True)
class MarkedLines:
    """Gives marked lines whole, and everything else at once, with what is unfinished."""

    marks: tuple[bytes, ...]
    """Beginnings of the lines."""
    kept: bytes = b""
    """The beginning of a line that is marked, or may be."""
    begins: bool = True
    """The next byte begins a line."""

    def split(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        """Give the pieces of some bytes in their order: whether it is a marked line, and the piece."""
        data, self.kept, at = self.kept + data, b"", 0
        while at < len(data):
            end = data.find(b"\n", at) + 1
            line = data[at : end or None] if self.begins else b""
            if line.startswith(self.marks) and end:
                yield True, line
                at = end
                continue
            if line and not end and self.may_be_marked(line):
                self.kept = line
                return
            begin, at = at, self.find_next(data, at)
            self.begins = data[at - 1 : at] == b"\n"
            yield False, data[begin:at]

    def may_be_marked(self, line: bytes) -> bool:
        """Tell whether an unfinished line is marked, or can become so."""
        return len(line) < MOST_KEPT and any(line.startswith(m) or m.startswith(line) for m in self.marks)

    def find_next(self, data: bytes, at: int) -> int:
        """Return the position of the next line that is marked or may be; else the end."""
        found = [position + 1 for mark in self.marks if (position := data.find(b"\n" + mark, at)) >= 0]
        last = data.rfind(b"\n", at) + 1
        if last and last < len(data) and self.may_be_marked(data[last:]):
            found.append(last)
        return min(found, default=len(data))

    def finish(self) -> bytes:
        """Return what was kept of a line that has no end."""
        kept, self.kept = self.kept, b""
        return kept


@dataclass(slots=True)
class JobLog:
    """Shows what is added to the log: ranks' output on stdout, launch's on stderr, rank 0's progress."""

    run: RunDir
    job_id: str
    console: JobConsole
    follower: Follower = field(init=False)
    lines: MarkedLines = field(default_factory=lambda: MarkedLines((OWN_PREFIX,)))
    ends_with_launch_line: bool = False
    """The last line is launch's."""
    changed: float = field(default_factory=time.monotonic)
    """When something last came, in monotonic seconds."""
    opened: float = 0.0
    """When the file was last opened for its size."""

    def __post_init__(self) -> None:
        """Begin at the log's start: each job has its own."""
        self.follower = Follower()
        self.follower.watch(self.path)

    @property
    def path(self) -> Path:
        """The file, which every attempt appends to."""
        return self.run.path / "logs" / f"slurm-{self.job_id}.out"

    def read_new(self) -> bytes:
        """Return some of what is new."""
        self.refresh_size()
        data = self.follower.read_chunk(self.path)
        if data:
            self.changed = time.monotonic()
        return data

    def refresh_size(self) -> None:
        """Open the file now and then: NFS asks the server then, else it may believe its cache for 60 s."""
        now = time.monotonic()
        if now - self.opened > FRESH:
            self.opened = now
            with contextlib.suppress(OSError):
                os.close(open_file(self.path))

    def show(self, data: bytes) -> None:
        """Show some of the log."""
        for is_own, piece in self.lines.split(data):
            self.ends_with_launch_line = is_own
            if is_own:
                self.console.write_own_lines(piece)
            else:
                self.console.note_progress("out", OTHER_RANKS.sub(b"", piece))
                self.console.write_output(RANKS, piece)

    def show_rest(self) -> None:
        """Show a last line of launch's that has no end."""
        if rest := self.lines.finish():
            self.console.write_output(RANKS, rest)

    def is_complete(self, ended: float) -> bool:
        """Tell whether nothing more is to be expected of a job, and when its end was noticed.

        A network filesystem shows lines some seconds later than the manifest that was written before them.
        """
        quiet = time.monotonic() - max(ended, self.changed) > QUIET
        return quiet or (self.ends_with_launch_line and not self.lines.kept)
