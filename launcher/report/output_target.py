"""A terminal, pipe or file that output goes to, and its last line: whose it is, and what stands in it."""

import re
import time
from dataclasses import dataclass, field

from rich.cells import cell_len

from launcher.report.byte_stream import Stream

ERASE = b"\r\x1b[K"
"""Empties the row that the cursor is in (ECMA-48)."""
RETURN = re.compile(rb"\r(?=[^\n])")
COLOURS = re.compile(rb"\x1b\[[0-9;:]*m")
MOST_ROW = 4096
"""Bytes of an unfinished line that are kept to be drawn again: more than fit into a row."""
PRECEDENCE = 1.0
"""Seconds for which other sources wait for more of an unfinished line that they would break."""
LONGEST_WAIT = 10.0
"""Seconds for which they wait for all of a line that grows."""


@dataclass(frozen=True, slots=True)
class Source:
    """One stream of one rank, or our own."""

    rank: int
    stream: str
    """`out` or `err`."""
    prefix: bytes
    """Stands at the beginning of each line; empty if there is one rank."""


@dataclass(slots=True)
class Sink:
    """Where stdout, stderr or both lead to.

    Bytes pass as they are. Sources with a prefix share the sink: if one prints while another's line is
    unfinished, that line is erased and drawn again below, or ended by a newline if it cannot be. A source
    without a prefix has the sink for itself.
    """

    erases: bool
    """It is a terminal on which a line can be erased."""
    newline: bytes = b"\n"
    """Ends our own lines; a terminal in raw mode wants a carriage return too."""
    footer: bytes = b""
    """Our own line at the bottom, drawn while no line of the ranks is unfinished."""
    drawn: bool = False
    """The footer is on the screen."""
    open: Source | None = None
    """Whose unfinished line is the last."""
    opened: float = 0.0
    """Since when it has been the last, in monotonic seconds."""
    grown: float = 0.0
    """When something was last added to it."""
    redrawn: bool = False
    """It goes back to its beginning, as a progress bar does."""
    row: bytes | None = None
    """What stands in it, without the prefix; None if it is too long to be drawn again."""
    erased: dict[Source, bytes] = field(default_factory=dict)
    """Unfinished lines that are not on the screen at the moment."""
    cut: set[Source] = field(default_factory=set)
    """Sources whose unfinished line was ended by a newline of ours."""

    def write_chunk(self, stream: Stream, source: Source, data: bytes) -> None:
        """Write what a source has printed."""
        if not source.prefix:
            self.open = None if data.endswith(b"\n") else source
            self.write_parts(stream, self.hide(), data)
            return
        before = b"" if self.open in (None, source) else self.interrupt(stream)
        self.note_growth(source, data)
        data = self.erased.pop(source, b"") + data
        if source in self.cut:
            self.cut.discard(source)
            data = data.removeprefix(b"\n")  # it has been written already
        marked = self.mark(source, data) if data else b""
        self.write_parts(stream, self.hide(), before, marked, self.redraw())

    def write_message(self, stream: Stream, text: bytes) -> None:
        """Write whole lines of our own."""
        before = b"" if self.open is None else self.interrupt(stream)
        self.write_parts(stream, self.hide(), before, text.replace(b"\n", self.newline), self.redraw())

    def show_footer(self, stream: Stream, footer: bytes) -> None:
        """Draw another footer; an empty one takes it away."""
        if footer != self.footer:
            self.footer = footer
            self.write_parts(stream, self.hide())

    def end_line(self, stream: Stream) -> None:
        """End an unfinished line; what its source prints later begins another one."""
        if self.open:
            self.cut.add(self.open)
            self.open = None
            self.write_parts(stream, self.hide(), self.newline)

    def write_parts(self, stream: Stream, *parts: bytes) -> None:
        """Write in one go, with the footer below it."""
        self.drawn = bool(self.footer) and self.open is None
        stream.write(b"".join((*parts, self.footer if self.drawn else b"")))

    def hide(self) -> bytes:
        """Return what erases the footer."""
        return ERASE if self.drawn else b""

    def mark(self, source: Source, data: bytes) -> bytes:
        """Return what a source has printed with its prefix at every line's start, and keep the last line."""
        goes_on = self.open == source
        returned = goes_on and self.erases and self.row is not None and self.row.endswith(b"\r")
        begins = not goes_on or (returned and not data.startswith(b"\n"))
        tail = data[data.rfind(b"\n") + 1 :]
        self.row = self.find_row(data, tail, goes_on=goes_on)
        self.open = source if tail else None
        if self.erases and b"\r" in data:
            data = RETURN.sub(lambda _: b"\r" + source.prefix, data)
        marked = data.replace(b"\n", b"\n" + source.prefix)
        if not tail:
            marked = marked[: -len(source.prefix)]
        return source.prefix + marked if begins else marked

    def find_row(self, data: bytes, tail: bytes, *, goes_on: bool) -> bytes | None:
        """Return what stands in the last line after some data, `tail` being what follows its last newline."""
        if not self.erases:
            return None
        if goes_on and len(tail) == len(data):
            if self.row is None and b"\r" not in tail[:-1]:
                return None
            tail = (self.row or b"") + tail
        state = tail[tail.rfind(b"\r", 0, -1) + 1 :]
        return state if len(state) <= MOST_ROW else None

    def interrupt(self, stream: Stream) -> bytes:
        """Return what makes room for another line than the unfinished one."""
        source, row, erasable = self.open, self.row, self.can_erase(stream)
        self.open = None
        if source is None or not source.prefix:
            return self.newline
        if erasable:
            self.erased[source] = row or b""
            return ERASE
        self.cut.add(source)
        return self.newline

    def can_erase(self, stream: Stream) -> bool:
        """Tell whether the unfinished line can be erased and drawn again."""
        if not (self.erases and self.open) or self.row is None:
            return False
        return measure_row(self.open.prefix + self.row) < stream.columns

    def note_growth(self, source: Source, data: bytes) -> None:
        """Note when the unfinished line began that a source's data leave, and how it goes on."""
        self.grown = time.monotonic()
        begin = data.rfind(b"\n") + 1
        if begin or self.open != source:
            self.opened, self.redrawn = self.grown, False
        self.redrawn = self.redrawn or data.find(b"\r", begin) >= 0

    def awaits_rest(self) -> bool:
        """Tell whether the rest of the unfinished line is likely to come soon.

        A line that grows is waited for longer than one that is drawn anew, which may go on for hours.
        """
        now = time.monotonic()
        if now - self.opened < PRECEDENCE:
            return True
        return not self.redrawn and now - self.grown < PRECEDENCE and now - self.opened < LONGEST_WAIT

    def find_cut(self, stream: Stream) -> Source | None:
        """Return whose unfinished line would be ended by a newline of ours if another source printed now."""
        return self.open if self.open and self.open.prefix and not self.can_erase(stream) else None

    def redraw(self) -> bytes:
        """Return the line that was erased last, if there is room for it."""
        if self.open or not self.erased:
            return b""
        self.open, self.row = self.erased.popitem()
        return self.open.prefix + (self.row or b"")


def measure_row(row: bytes) -> int:
    """Return the cells that a line takes; very many if it holds more than text and colours."""
    text = COLOURS.sub(b"", row.removesuffix(b"\r")).decode(errors="replace")
    return cell_len(text) if text.isprintable() else MOST_ROW
