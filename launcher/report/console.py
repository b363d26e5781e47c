"""What people see while a job runs: the ranks' output with its origin, a progress bar, our own messages."""

import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from launcher.report.tables import make_console
from launcher.report.viewer import Stream, ViewOptions, open_stream
from launcher.runs.progress import Progress as Step
from launcher.runs.progress import ProgressReader
from launcher.runs.rank_logs import Chunk
from launcher.text import escape_text

ERASE = b"\r\x1b[K"
"""Empties the row that the cursor is in (ECMA-48)."""
OVERWRITTEN = re.compile(rb"[^\n]*\r(?=[^\n])")
"""Former states of a line that is drawn again and again, such as a progress bar's."""
COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
HOLD = 1.0
"""Seconds that the beginning of a line waits for its end before it is written to a pipe or a file."""
MOST_HELD = 1 << 16
"""Bytes that wait."""
REDRAW = 0.1
"""Seconds between two states of the bar."""
DRAWS = re.compile(rb"\r[^\r\n]|\x1b(?:[^\[]|\[[0-9;:]*[^0-9;:m])")
"""How a program draws on a terminal by itself: it goes back in the line, or sends more than colours."""
BAR_WIDTH = 20
TIME_WIDTH = 7
"""Columns of the time that is left: `-:--:--`, `0:05:54`."""


@dataclass(frozen=True, slots=True)
class Source:
    """One stream of one rank, or our own."""

    rank: int
    stream: str
    """`out` or `err`."""
    prefix: bytes
    """Stands at the beginning of each line; empty if there is one rank."""


class Sink:
    """Where stdout, stderr or both lead to.

    Sources with a prefix share it, and whole lines of theirs are written. An unfinished line is shown at the
    bottom of a terminal until it is whole; elsewhere it is written once it has waited for HOLD seconds, and
    is ended by a newline if another source prints then. A source without a prefix has the sink for itself:
    its bytes pass as they are.
    """

    def __init__(self, stream: Stream, newline: bytes = b"\n") -> None:
        self.stream = stream
        self.erases = stream.is_screen
        self.newline = newline
        """Ends our own lines; a terminal in raw mode wants a carriage return too."""
        self.footer = b""
        """Our own line at the bottom, shown while no line of the ranks is unfinished."""
        self.drawn = b""
        """What is at the bottom of the screen: an unfinished line, or the footer."""
        self.open: Source | None = None
        """Whose unfinished line was written last."""
        self.cut = set[Source]()
        """Sources whose unfinished line was ended by a newline of ours."""
        self.rows: dict[Source, tuple[bytes, float]] = {}
        """Unfinished lines that wait, the newest last, and since when, in monotonic seconds."""

    def write_chunk(self, source: Source, data: bytes) -> None:
        """Write what a source has printed, but for its unfinished line."""
        if not source.prefix:
            self.open = None if data.endswith(b"\n") else source
            self.write_parts(data)
            return
        before, since = self.rows.pop(source, (b"", time.monotonic()))
        data = before + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > MOST_HELD:
            end = len(data)
        whole, rest = data[:end], data[end:]
        if self.erases:
            whole, rest = OVERWRITTEN.sub(b"", whole), OVERWRITTEN.sub(b"", rest)
        if rest:
            self.rows[source] = (rest, time.monotonic() if end else since)
        self.write_lines(source, whole)

    def write_lines(self, source: Source, data: bytes) -> None:
        """Write lines with their prefix; the last may be the beginning of one."""
        before = b""
        if data and source in self.cut:
            self.cut.discard(source)
            data = data.removeprefix(b"\n")  # it has been written already
        if data:
            if self.open != source:
                before = self.break_line() + source.prefix
            ends = data.endswith(b"\n")
            data = data[:-1].replace(b"\n", b"\n" + source.prefix) + data[-1:]
            self.open = None if ends else source
        self.write_parts(before, data)

    def write_waiting(self, *, final: bool, ends_lines: bool) -> None:
        """Write the unfinished lines that have waited long enough, in the end all of them."""
        due = math.inf if final else time.monotonic() - HOLD
        for source, (data, since) in sorted(self.rows.items(), key=lambda item: item[0] != self.open):
            if since <= due and (final or not self.erases):
                del self.rows[source]
                self.write_lines(source, data)
                if ends_lines:
                    self.end_line()

    def write_message(self, text: bytes) -> None:
        """Write whole lines of our own."""
        self.write_parts(self.break_line(), text.replace(b"\n", self.newline))

    def show_footer(self, footer: bytes) -> None:
        """Draw another footer; an empty one takes it away."""
        self.footer = footer
        self.write_parts()

    def end_line(self) -> None:
        """End an unfinished line; what its source prints later begins another one."""
        self.write_parts(self.break_line())

    def break_line(self) -> bytes:
        """Return what ends the unfinished line that was written last, if there is one."""
        if self.open is None:
            return b""
        self.cut.add(self.open)
        self.open = None
        return self.newline

    def write_parts(self, *parts: bytes) -> None:
        """Write in one go, in the place of what is at the bottom, and that again below it."""
        bottom = b""
        if self.erases and self.open is None:
            bottom = self.footer
            if self.rows:
                source, (row, _) = next(reversed(self.rows.items()))
                bottom = fit_row(source.prefix + row, (self.stream.columns or 80) - 1)
        if any(parts) or bottom != self.drawn:
            self.stream.write(b"".join((ERASE if self.drawn else b"", *parts, bottom)))
            self.drawn = bottom


def fit_row(row: bytes, width: int) -> bytes:
    """Return a line as it can be shown in one row; one that does not fit is cut, and has no colours."""
    row = row.removesuffix(b"\r")
    plain = COLOURS.sub("", row.decode(errors="replace"))
    if plain.isprintable() and cell_len(plain) <= width:
        return row + b"\x1b[0m" if b"\x1b" in row else row
    text = Text("".join(char if char.isprintable() else " " for char in plain))
    text.truncate(width, overflow="ellipsis")
    return text.plain.encode()


def render_bar(step: Step, begun: tuple[float, int], width: int, *, blocks: bool) -> str:
    """Return the row for a step: how many are done, a bar, the newest metrics and the time that is left.

    Steps, bar and time keep their width and place; the metrics get what is left of the row. `begun` is when
    the first step was shown, and which it was.
    """
    total, seconds, made = step.total or 1, time.monotonic() - begun[0], step.step - begun[1]
    left = "-:--:--"
    if made > 0 and step.step <= total:
        left = str(timedelta(seconds=round((total - step.step) * seconds / made)))
    bar = ("━" if blocks else "-") * min(BAR_WIDTH, BAR_WIDTH * step.step // total)
    head = f"step {step.step:>{len(str(total))}}/{total} {bar:{BAR_WIDTH}} "
    room = max(width - len(head) - max(TIME_WIDTH, len(left)) - 1, 0)
    metrics = [f"{name} {value}" for name, value in step.metrics if name != "lr"]
    while len(metrics) > 1 and len("  ".join(metrics)) > room:
        metrics.pop()
    return f"{head}{'  '.join(metrics)[:room]:{room}} {left:>{TIME_WIDTH}}"[:width]


@dataclass(slots=True)
class JobConsole:
    """Shows the ranks' bytes as they are, and progress; goes on in silence when the terminal is gone."""

    options: ViewOptions
    logs: str = ""
    """Where all that the ranks print is kept."""
    is_raw: Callable[[], bool] = lambda: False
    """Tells whether the terminal of stdout is in raw mode."""
    console: Console = field(default_factory=make_console)
    """Renders what is not plain text, for stderr."""
    err: Sink = field(default_factory=lambda: Sink(open_stream("stderr")))
    out: Sink = field(default_factory=lambda: Sink(open_stream("stdout")))
    sources: dict[tuple[int, str], Source] = field(default_factory=dict)
    progress: ProgressReader = field(default_factory=ProgressReader)
    begun: tuple[float, int] | None = None
    """When the bar's first step was shown, and which it was; None without a bar."""
    moved: bool = False
    """There is a step that the bar does not show."""
    drawn: float = 0.0
    """When the bar was drawn, in monotonic seconds."""
    program_draws: bool = False
    """The program draws on the terminal by itself."""
    status: str = ""
    """What is shown at the bottom in place of a bar."""

    def __post_init__(self) -> None:
        """Have one sink for one terminal, pipe or file."""
        if self.out.stream.is_same_file(self.err.stream):
            self.out = self.err

    @property
    def taken(self) -> int:
        """Bytes that the readers of our output have taken."""
        return sum(sink.stream.taken for sink in {self.out, self.err})

    @property
    def is_within_line(self) -> bool:
        """Whether an unfinished line is where our own would go."""
        return self.err.open is not None

    def show_chunk(self, chunk: Chunk) -> None:
        """Show some of a rank's output if the mode says so, and read progress from rank 0's."""
        if chunk.rank == 0:
            self.note_progress(chunk.stream, chunk.data)
        mode, origin = self.options.mode, self.options.origin
        if mode == "all" or (mode == "rank0" and chunk.rank == 0):
            key = (chunk.rank, chunk.stream)
            if key not in self.sources:
                prefix = os.fsencode(f"[{origin(chunk.rank)}:{chunk.rank}] ") if origin else b""
                self.sources[key] = Source(*key, prefix)
            self.write_output(self.sources[key], chunk.data)

    def note_progress(self, stream: str, data: bytes) -> None:
        """Read progress from what rank 0 has printed."""
        self.moved = self.progress.add(stream, data) or self.moved

    def write_output(self, source: Source, data: bytes) -> None:
        """Write what a source has printed."""
        sink = self.out if source.stream == "out" else self.err
        if sink is self.err and sink.erases and not self.program_draws and DRAWS.search(data):
            self.program_draws = True
            sink.show_footer(b"")
        sink.write_chunk(source, data)

    def tick(self, *, final: bool = False) -> None:
        """Write what has waited long enough, and keep the bar up to date; to be called again and again.

        The bar appears with the first step, and not beside one of the program's.
        """
        for sink in (self.out, self.err):
            sink.write_waiting(final=final, ends_lines=self.options.shared)
        for sink in (self.out, self.err):
            stream = sink.stream
            if fault := stream.fault:
                stream.fault = None
                self.print_own_line(
                    f"warning: {stream.name} takes no more ({fault.strerror}): see {self.logs}"
                )
        if final or not self.moved or time.monotonic() - self.drawn < REDRAW:
            return
        step, self.moved = self.progress.steps[-1], False
        if step.total and not self.program_draws and self.err.erases:
            self.drawn = time.monotonic()
            self.begun = self.begun or (self.drawn, step.step)
            width, blocks = max(self.console.width - 1, 1), self.console.encoding.startswith("utf")
            self.show_footer(render_bar(step, self.begun, width, blocks=blocks))

    def show_footer(self, text: str) -> None:
        """Show a line at the bottom of the terminal, below all others; an empty one takes it away."""
        if self.err.erases:
            self.err.show_footer(self.encode(text))

    def show_status(self, text: str) -> None:
        """Show a text at the bottom in place of the former one; an empty one takes that away."""
        if text != self.status:
            self.status = text
            self.show_footer(fit_row(text.encode(), max(self.console.width - 1, 1)).decode())

    def print_own_line(self, text: str) -> None:
        """Print one of our own lines."""
        self.write_own_lines(self.encode(f"launch: {escape_text(text)}\n"))

    def write_own_lines(self, lines: bytes) -> None:
        """Write whole lines to stderr that are no rank's."""
        self.out.newline = b"\r\n" if self.is_raw() else b"\n"
        self.err.write_message(lines)

    def print_renderable(self, show: Callable[[Console], None]) -> None:
        """Have rich print something on stderr."""
        if self.err.stream.descriptor is None:
            return
        with self.console.capture() as captured:
            show(self.console)
        self.write_own_lines(self.encode(captured.get()))

    def encode(self, text: str) -> bytes:
        """Return a text as the reader of stderr knows it."""
        return text.encode(getattr(sys.stderr, "encoding", None) or "utf-8", "replace")

    def close(self) -> None:
        """Show what has waited, end the lines that something else follows, and take the bar down."""
        self.moved = self.progress.finish() or self.moved
        self.tick(final=True)
        if self.options.shared or self.options.followed:
            self.out.end_line()
            self.err.end_line()
        self.drop_bar()

    def drop_bar(self) -> None:
        """Take the bar down; the next step makes another one."""
        if self.begun:
            self.begun = None
            self.show_footer("")
