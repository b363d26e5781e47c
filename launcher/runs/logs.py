"""The ranks' log files: new lines as they are written, and the last lines of one."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.descriptors import open_file
from launcher.runs.rundir import RunDir

CHUNK = 1 << 20
"""Bytes that are read at once, and that a line can have."""
BACKWARDS = 64 << 20
"""Bytes that are searched for the beginning of the last lines."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a rank's output."""

    rank: int
    stream: str
    """`out` or `err`."""
    text: str


@dataclass(slots=True)
class Follower:
    """Reads what has been added to the logs of this node's ranks since the last call."""

    run: RunDir
    offsets: dict[Path, int] = field(default_factory=dict)
    earlier: dict[Path, int] = field(default_factory=dict)
    """Sizes of the logs that an earlier start into the same directory has left."""
    partial: dict[Path, bytes] = field(default_factory=dict)
    is_new: bool = False
    """The attempt's folder was made for this start alone, so that nothing has to be looked for."""

    def __post_init__(self) -> None:
        """Note what is there already."""
        for path in () if self.is_new else self.run.path.glob("logs/*/rank-*"):
            self.earlier[path] = measure_file(path)

    def watch_rank(self, rank: int, attempt: int) -> None:
        """Add a rank's two files; a file that has been watched is left as it is."""
        for ending in ("out", "err"):
            path = self.run.rank_log(rank, attempt, ending)
            self.offsets.setdefault(path, self.earlier.get(path, 0))

    def read_lines(self, *, final: bool = False) -> Iterator[Line]:
        """Give the new whole lines; `final` gives all that is left, an unfinished last line too."""
        for path in list(self.offsets):
            rank, stream = int(path.stem.partition("-")[2]), path.suffix[1:]
            while lines := self.read_new(path):
                yield from (Line(rank, stream, decode_line(raw)) for raw in lines)
                if not final:
                    break
            if final and (rest := self.partial.pop(path, b"")):
                yield Line(rank, stream, decode_line(rest))

    def read_new(self, path: Path) -> list[bytes]:
        """Return some new lines of one file, without their ends; a file that is not there yet has none.

        A file that has become shorter is read from its start.
        """
        lines: list[bytes] = []
        while not lines:
            data, offset = read_from(path, self.offsets[path])
            if not data:
                break
            if offset < self.offsets[path]:
                self.partial[path] = b""
            self.offsets[path] = offset + len(data)
            *lines, rest = (self.partial.get(path, b"") + data).split(b"\n")
            # Of a line without end, such as a progress bar's, only the last part is kept.
            self.partial[path] = rest if len(rest) <= CHUNK else rest.rpartition(b"\r")[2][-CHUNK:]
        return lines


def decode_line(raw: bytes) -> str:
    """Return a line as text; of a progress bar that redraws its line, the last state is enough."""
    return raw.decode(errors="replace").removesuffix("\r").rpartition("\r")[2]


def measure_file(path: Path) -> int:
    """Return a file's size in bytes; 0 where there is none. A symbolic link is not followed here, or read."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def read_from(path: Path, offset: int) -> tuple[bytes, int]:
    """Return what a file holds from an offset on, at most CHUNK bytes, and the offset.

    That is 0 where the file is shorter; there are no bytes where it cannot be read. A file that has not
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


def find_tail(path: Path, count: int) -> int:
    """Return the offset of the last `count` (1 or more) lines of a log; at most BACKWARDS before its end."""
    size = measure_file(path)
    least = max(0, size - BACKWARDS)
    try:
        with os.fdopen(open_file(path), "rb") as file:
            end = size - 1  # the last byte ends a line, or is in one that has no end yet
            while end > least:
                begin = max(least, end - CHUNK)
                file.seek(begin)
                data = file.read(end - begin)
                at = len(data)
                while (at := data.rfind(b"\n", 0, at)) >= 0:
                    count -= 1
                    if count == 0:
                        return begin + at + 1
                end = begin
    except OSError:
        return size
    return least


def read_tail(path: Path, count: int, begin: int = 0) -> list[str]:
    """Return the last `count` lines of a log, from byte `begin` on; empty where there are none."""
    start = max(begin, measure_file(path) - CHUNK)
    lines = read_from(path, start)[0].removesuffix(b"\n").split(b"\n")
    return [decode_line(raw) for raw in lines[len(lines) - min(count, len(lines)) :]] if any(lines) else []
