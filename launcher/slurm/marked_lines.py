"""Lines that begin with a mark, told apart from all else in a stream of bytes that is read as it grows."""

from collections.abc import Iterator
from dataclasses import dataclass

MOST_KEPT = 1 << 16
"""Bytes of a marked line; a longer one is none."""


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
        """Return where the next line begins that is marked, or may be; else the end."""
        found = [place + 1 for mark in self.marks if (place := data.find(b"\n" + mark, at)) >= 0]
        last = data.rfind(b"\n", at) + 1
        if last and last < len(data) and self.may_be_marked(data[last:]):
            found.append(last)
        return min(found, default=len(data))

    def finish(self) -> bytes:
        """Return what was kept of a line that has no end."""
        kept, self.kept = self.kept, b""
        return kept
