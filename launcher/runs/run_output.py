"""A run's output as its directory has it: the ranks' lines over the attempts, or the job's own log."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.runs.applied_records import AppliedReader
from launcher.runs.attempt_progress import find_agent_logs, find_job_logs
from launcher.runs.rank_logs import Follower, LineFollower, decode_line, find_tail, measure_file
from launcher.runs.run_directory import list_logs

RANK_LOG = re.compile(r"rank-[0-9]{1,9}\.(?:out|err)")


@dataclass(frozen=True, slots=True)
class Output:
    """A line, or a piece of a very long one, and whose it is."""

    raw: bytes
    """As it was printed, with its end; a piece, and a log's last line, may have none."""
    rank: int | None = None
    """None for the job's own log, and for a remark of ours."""
    stream: str = ""
    """Of a rank's: `out` or `err`."""
    host: str = ""
    remark: bool = False
    """Not from a log: something that happened."""

    @property
    def text(self) -> str:
        """The line for people."""
        return decode_line(self.raw)


@dataclass(slots=True)
class RunOutputReader:
    """Reads what a run's ranks print, from the last attempt on that has any output."""

    path: Path
    rank: int | None = None
    """The one rank to read; None is all of them."""
    lines: int | None = None
    """Of what is there at first, so many last lines of each file; None is all."""
    attempt: int | None = None
    """The attempt that is read; None before there is one."""
    follower: LineFollower = field(init=False)
    reader: AppliedReader = field(init=False)
    hosts: dict[int, str] = field(default_factory=dict)
    """Where each rank of the attempt runs."""

    def __post_init__(self) -> None:
        """Look at nothing yet."""
        self.follower = LineFollower(Follower())
        self.reader = AppliedReader(self.path, own=False)

    def read_lines(self, *, final: bool = False) -> Iterator[Output]:
        """Give the new lines; `final` gives all that is left, and how a job ended that never had a rank."""
        attempts = self.find_attempts()
        first = self.attempt is None
        for attempt, logs in attempts.items():
            if attempt != self.attempt:
                yield from self.begin_attempt(attempt)
            for log in logs:
                begin = find_tail(log, self.lines) if first and self.lines is not None else 0
                self.follower.follower.watch(log, begin)
            yield from self.read_ranks(final=final or attempt != max(attempts))
        if final and self.is_without_ranks():
            yield from self.read_own()

    def find_attempts(self) -> dict[int, list[Path]]:
        """Return the ranks' logs by attempt, from the one that is read; at first, of the last alone."""
        found: dict[int, list[Path]] = {}
        for folder in self.list_folders():
            if self.attempt is None or int(folder.name) >= self.attempt:
                logs = [log for log in list_rank_logs(folder) if self.rank in (None, read_rank(log))]
                found[int(folder.name)] = sorted(logs, key=lambda log: (read_rank(log), log.suffix != ".out"))
        with_logs = [attempt for attempt in sorted(found) if found[attempt]]
        return {attempt: found[attempt] for attempt in with_logs[-1 if self.attempt is None else 0 :]}

    def list_folders(self) -> list[Path]:
        """Return the attempts' folders."""
        return [self.path / "logs" / name for name in list_logs(self.path) if name.isdecimal()]

    def begin_attempt(self, attempt: int) -> Iterator[Output]:
        """Turn to another attempt; the one before it has been read to its end."""
        self.follower.follower.offsets.clear()
        self.follower.partial.clear()
        self.hosts.clear()
        if self.attempt is not None:
            yield Output(f"attempt {attempt}".encode(), remark=True)
        self.attempt = attempt

    def read_ranks(self, *, final: bool) -> Iterator[Output]:
        """Give the new lines of the attempt's ranks."""
        self.hosts |= {record.rank: record.host for record in self.reader.read_new()}
        for line in self.follower.read_lines(final=final):
            yield Output(line.raw, line.rank, line.stream, self.hosts.get(line.rank, "?"))

    def is_without_ranks(self) -> bool:
        """Tell whether the newest attempt has no rank's log: what there is to know is in the job's own."""
        newest = max(self.list_folders(), key=lambda folder: int(folder.name), default=None)
        return newest is None or not list_rank_logs(newest)

    def read_own(self) -> Iterator[Output]:
        """Give the job's own log; else what torchrun's agents said."""
        logs = find_own_logs(self.path)
        for log in logs:
            if len(logs) > 1:
                yield Output(os.fsencode(f"{log.name}:"), remark=True)
            start = find_tail(log, self.lines) if self.lines else 0
            follower = LineFollower(Follower(offsets={log: start}))
            while lines := follower.read_new(log):
                yield from map(Output, lines)
            if rest := follower.partial.get(log):
                yield Output(bytes(rest))


def list_rank_logs(folder: Path) -> list[Path]:
    """Return the logs of the ranks of an attempt."""
    logs = [folder / name for name in list_logs(folder.parents[1], folder.name)]
    return [log for log in logs if RANK_LOG.fullmatch(log.name)]


def read_rank(log: Path) -> int:
    """Return the rank whose log this is."""
    return int(log.stem.partition("-")[2])


def find_own_logs(path: Path) -> list[Path]:
    """Return the logs of a run's jobs, each with something in it; else those of its agents."""
    jobs = [log for log in find_job_logs(path) if measure_file(log)]
    return jobs or [log for log in find_agent_logs(path) if measure_file(log)]
