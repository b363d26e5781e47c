"""Log files: what is appended to them, as bytes or as lines, and the last lines of one."""

import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.files import open_file

CHUNK = 1 << 20
"""Bytes that are read at once."""
LONGEST = 64 << 20
"""Bytes of a line that are kept in memory; a longer one comes in pieces."""
BACKWARDS = 64 << 20
"""Bytes that are searched for the beginning of the last lines."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some bytes of a rank's output, as they are."""

    rank: int
    stream: str
    """`out` or `err`."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a rank's output, or a piece of one that is very long."""

    rank: int
    stream: str
    """`out` or `err`."""
    raw: bytes
    """As it is, with its end; a piece has none."""


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

    def read_turn(self, may_show: Callable[[int, str], bool] = lambda *_: True) -> Iterator[Chunk]:
        """Give what is new of each file in turn: a chunk, and more while that ends within a line.

        So a long line that is there already is not torn apart by other ranks' output. `may_show` is asked
        just before each file, by rank and stream.
        """
        for path in list(self.offsets):
            rank, stream = int(path.stem.partition("-")[2]), path.suffix[1:]
            if not may_show(rank, stream):
                continue
            while data := self.read_chunk(path):
                yield Chunk(rank, stream, data)
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
class LineFollower:
    """Puts lines together from what is added to files."""

    follower: Follower
    partial: dict[Path, bytearray] = field(default_factory=dict)
    """Beginnings of lines that have no end yet."""

    def read_lines(self, *, final: bool = False) -> Iterator[Line]:
        """Give the new whole lines; `final` gives all that is left, an unfinished last line too."""
        for path in list(self.follower.offsets):
            rank, stream = int(path.stem.partition("-")[2]), path.suffix[1:]
            while lines := self.read_new(path):
                yield from (Line(rank, stream, raw) for raw in lines)
                if not final:
                    break
            if final and (rest := self.partial.pop(path, b"")):
                yield Line(rank, stream, bytes(rest))

    def read_new(self, path: Path) -> list[bytes]:
        """Return some new lines of one file, with their ends."""
        lines: list[bytes] = []
        while not lines:
            begin = self.follower.offsets[path]
            data = self.follower.read_chunk(path)
            if not data:
                break
            if self.follower.offsets[path] < begin + len(data):  # the file has been cut
                self.partial.pop(path, None)
            lines = self.join_lines(path, data)
        return lines

    def join_lines(self, path: Path, data: bytes) -> list[bytes]:
        """Return the lines that some bytes of a file complete, and keep what is left.

        Of a line without end that is drawn anew again and again, such as a progress bar's, the last state is
        kept, and the others come as a piece.
        """
        lines = io.BytesIO(data).readlines()
        rest = b"" if data.endswith(b"\n") else lines.pop()
        partial = self.partial.setdefault(path, bytearray())
        if lines:
            lines[0] = bytes(partial) + lines[0]
            partial.clear()
        partial += rest
        if len(partial) > CHUNK and (at := partial.rfind(b"\r", 0, -1)) >= 0:
            lines.append(bytes(partial[: at + 1]))
            del partial[: at + 1]
        if len(partial) > LONGEST:
            lines.append(bytes(partial))
            partial.clear()
        return lines


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
    """Return the last `count` lines of a log, from byte `begin` on; empty if there are none."""
    start = max(begin, measure_file(path) - CHUNK)
    lines = read_from(path, start)[0].removesuffix(b"\n").split(b"\n")
    return [decode_line(raw) for raw in lines[len(lines) - min(count, len(lines)) :]] if any(lines) else []
