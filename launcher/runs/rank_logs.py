"""Log files: what is appended to them, as bytes or as lines, their last lines, and a whole run's output."""

import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.files import open_file
from launcher.runs.records import AppliedReader
from launcher.runs.run_directory import list_logs

CHUNK = 1 << 20
"""Bytes that are read at once."""
LONGEST = 4 << 20
"""Bytes of a line that are kept in memory; a longer one comes in pieces."""
BACKWARDS = 16 << 20
"""Bytes that are searched for the beginning of the last lines."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some bytes of a rank's output, as they are."""

    rank: int
    stream: str
    """`out` or `err`."""
    data: bytes


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
class Follower:
    """Reads what is appended to files, as bytes."""

    skipped: Mapping[Path, int] = field(default_factory=dict)
    """Bytes at the start of files that are not read: what an earlier start into a run directory has left."""
    offsets: dict[Path, int] = field(default_factory=dict)
    """How far each file has been read."""

    def watch(self, path: Path, begin: int = 0) -> None:
        """Add a file, which need not be there yet; one that is watched already is left as it is."""
        self.offsets.setdefault(path, max(begin, self.skipped.get(path, 0)))

    def read_turn(self) -> Iterator[Chunk]:
        """Give what is new of each file in turn: a chunk, and more while that ends within a line.

        So a long line that is there already is not torn apart by other ranks' output.
        """
        for path in list(self.offsets):
            rank, stream = read_rank(path), path.suffix[1:]
            while data := self.read_chunk(path):
                yield Chunk(rank or 0, stream, data)
                if len(data) < CHUNK or data.endswith(b"\n"):
                    break

    def read_chunk(self, path: Path) -> bytes:
        """Return what is new of one file, at most CHUNK bytes, cut after its last line if it is that much.

        A file that is not there yet has nothing; one that has become shorter is read from its start.
        """
        data, offset = read_from(path, self.offsets[path])
        if len(data) == CHUNK and (end := data.rfind(b"\n") + 1):
            data = data[:end]
        if data:
            self.offsets[path] = offset + len(data)
        return data


@dataclass(slots=True)
class LineFollower(Follower):
    """Puts lines together from what is added to files."""

    partial: dict[Path, bytes] = field(default_factory=dict)
    """Beginnings of lines that have no end yet."""

    def read_lines(self, *, final: bool = False) -> Iterator[Output]:
        """Give some new whole lines of each file; `final` gives all that is left, unfinished lines too.

        Of a line without end that is drawn again and again, such as a progress bar's, the last state is
        kept, and the others come as a piece; so does the beginning of a very long line.
        """
        for path in list(self.offsets):
            rank, stream = read_rank(path), path.suffix[1:]
            while True:
                begin = self.offsets[path]
                data = self.read_chunk(path)
                if self.offsets[path] < begin + len(data):  # the file has been cut
                    self.partial.pop(path, None)
                if not data:
                    break
                data = self.partial.pop(path, b"") + data
                end = data.rfind(b"\n") + 1
                if len(data) - end > CHUNK:
                    end = data.rfind(b"\r", end, -1) + 1 or end
                if len(data) - end > LONGEST:
                    end = len(data)
                self.partial[path] = data[end:]
                yield from (Output(raw, rank, stream) for raw in io.BytesIO(data[:end]).readlines())
                if end and not final:
                    break
            if final and (rest := self.partial.pop(path, b"")):
                yield Output(rest, rank, stream)


def decode_line(raw: bytes | bytearray) -> str:
    """Return a line as text, without its end; of a bar that redraws its line, the last state is enough."""
    return raw.removesuffix(b"\n").decode(errors="replace").removesuffix("\r").rpartition("\r")[2]


def measure_file(path: Path) -> int:
    """Return a file's size in bytes; 0 if there is none. A symbolic link is not followed here, or read."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def read_from(path: Path, offset: int) -> tuple[bytes, int]:
    """Return what a file holds from an offset on, at most CHUNK bytes, and the offset.

    That is 0 if the file is shorter; there are no bytes if it cannot be read. A file that has not
    grown is not opened, which on a network filesystem would cost a round trip.
    """
    if measure_file(path) == offset:
        return b"", offset
    try:
        with os.fdopen(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            offset = offset if offset <= size else 0
            file.seek(offset)
            return file.read(CHUNK), offset
    except OSError:
        return b"", offset


def measure_logs(path: Path) -> dict[Path, int]:
    """Return the sizes of the ranks' logs in a run directory."""
    return {log: measure_file(log) for log in path.glob("logs/*/rank-*")}


def find_tail(path: Path, count: int) -> int:
    """Return the offset of the last `count` (1 or more) lines of a log; at most BACKWARDS before its end."""
    size = measure_file(path)
    least = max(0, size - BACKWARDS)
    try:
        with os.fdopen(open_file(path), "rb") as file:
            file.seek(least)
            data = file.read(size - least)
    except OSError:
        return size
    at = len(data) - 1  # the last byte ends a line, or is in one that has no end yet
    for _ in range(count):
        if (at := data.rfind(b"\n", 0, at)) < 0:
            return least
    return least + at + 1


def read_tail(path: Path, count: int, begin: int = 0) -> list[str]:
    """Return the last `count` lines of a log, from byte `begin` on; empty if there are none."""
    start = max(begin, measure_file(path) - CHUNK)
    lines = read_from(path, start)[0].removesuffix(b"\n").split(b"\n")
    return [decode_line(raw) for raw in lines[len(lines) - min(count, len(lines)) :]] if any(lines) else []


RANK_LOG = re.compile(r"rank-([0-9]{1,9})\.(?:out|err)")


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
    follower: LineFollower = field(default_factory=LineFollower)
    reader: AppliedReader = field(init=False)
    hosts: dict[int | None, str] = field(default_factory=dict)
    """Where each rank of the attempt runs."""

    def __post_init__(self) -> None:
        """Look at nothing yet."""
        self.reader = AppliedReader(self.path, own=False)

    def read_lines(self, *, final: bool = False) -> Iterator[Output]:
        """Give the new lines; `final` gives all that is left, and how a job ended that never had a rank."""
        attempts, first = self.find_attempts(), self.attempt is None
        for attempt, logs in attempts.items():
            if attempt != self.attempt:  # the one before it has been read to its end
                self.follower = LineFollower()
                self.hosts.clear()
                if self.attempt is not None:
                    yield Output(f"attempt {attempt}".encode(), remark=True)
                self.attempt = attempt
            for log in logs:
                begin = find_tail(log, self.lines) if first and self.lines is not None else 0
                self.follower.watch(log, begin)
            self.hosts |= {record.rank: record.host for record in self.reader.read_new()}
            for line in self.follower.read_lines(final=final or attempt != max(attempts)):
                yield replace(line, host=self.hosts.get(line.rank, "?"))
        newest = max(list_attempts(self.path), default=None)
        if final and (newest is None or not list_rank_logs(self.path, newest)):
            # What there is to know is in the job's own log; else in what torchrun's agents said.
            found = [log for log in find_logs(self.path, "slurm-") if measure_file(log)]
            found = found or [log for log in find_logs(self.path, "agent-") if measure_file(log)]
            for log in found:
                if len(found) > 1:
                    yield Output(os.fsencode(f"{log.name}:"), remark=True)
                begin = find_tail(log, self.lines) if self.lines else 0
                yield from LineFollower(offsets={log: begin}).read_lines(final=True)

    def find_attempts(self) -> dict[int, list[Path]]:
        """Return the ranks' logs by attempt, from the one that is read; at first, of the last alone."""
        found: dict[int, list[Path]] = {}
        for attempt in sorted(list_attempts(self.path)):
            if self.attempt is None or attempt >= self.attempt:
                logs = list_rank_logs(self.path, attempt)
                if logs := [log for log in logs if self.rank in (None, read_rank(log))]:
                    found[attempt] = sorted(logs, key=lambda log: (read_rank(log), log.suffix != ".out"))
        return {attempt: found[attempt] for attempt in [*found][-1 if self.attempt is None else 0 :]}


def list_attempts(path: Path) -> list[int]:
    """Return the numbers of a run's attempts that have a folder for logs."""
    return [int(name) for name in list_logs(path) if name.isdecimal()]


def list_rank_logs(path: Path, attempt: int) -> list[Path]:
    """Return the logs of the ranks of an attempt."""
    names = list_logs(path, str(attempt))
    return [path / "logs" / str(attempt) / name for name in names if RANK_LOG.fullmatch(name)]


def read_rank(log: Path) -> int | None:
    """Return the rank whose log this is; None for a log of ours."""
    found = RANK_LOG.fullmatch(log.name)
    return int(found[1]) if found else None


def find_logs(path: Path, prefix: str) -> list[Path]:
    """Return the logs of a run's jobs (`slurm-`), or of its nodes' agents (`agent-`)."""
    names = [name for name in sorted(list_logs(path)) if name.startswith(prefix)]
    return [path / "logs" / name for name in names if name.endswith((".out", ".log"))]
