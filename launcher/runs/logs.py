"""The ranks' log files: new lines as they are written, and the last lines of one."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.runs.rundir import RunDir

CHUNK = 1 << 20


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
    partial: dict[Path, bytes] = field(default_factory=dict)

    def watch_rank(self, rank: int, attempt: int) -> None:
        """Add a rank's two files; a file that has been watched is left as it is."""
        for ending in ("out", "err"):
            self.offsets.setdefault(self.run.rank_log(rank, attempt, ending), 0)

    def read_lines(self, *, final: bool = False) -> Iterator[Line]:
        """Give the new whole lines; `final` gives an unfinished last line too."""
        for path in list(self.offsets):
            rank, stream = int(path.stem.partition("-")[2]), path.suffix[1:]
            for raw in self.read_new(path, final=final):
                # Of a progress bar that redraws itself with \r, the last state is enough.
                text = raw.decode(errors="replace").removesuffix("\r").rpartition("\r")[2]
                yield Line(rank, stream, text)

    def read_new(self, path: Path, *, final: bool) -> list[bytes]:
        """Return the new lines of one file, without their ends; a file that is not there yet has none."""
        data = self.partial.get(path, b"") + read_from(path, self.offsets[path])
        self.offsets[path] += len(data) - len(self.partial.get(path, b""))
        lines = data.split(b"\n")
        self.partial[path] = b"" if final else lines[-1]
        return [*lines[:-1], lines[-1]] if final and lines[-1] else lines[:-1]


def read_from(path: Path, offset: int) -> bytes:
    """Return what a file holds from an offset on; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size <= offset:
                return b""
            file.seek(offset)
            return file.read()
    except OSError:
        return b""


def read_tail(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a log; empty where there is none."""
    try:
        start = max(0, path.stat().st_size - CHUNK)
    except OSError:
        return []
    lines = read_from(path, start).decode(errors="replace").splitlines()
    return [line.rpartition("\r")[2] for line in lines[-count:]]
