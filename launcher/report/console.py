"""What people see while a job runs: the ranks' output with its origin, a progress bar, our own messages."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from launcher.report.byte_stream import Stream, open_stream
from launcher.report.footer import StepBar
from launcher.report.output_target import Sink, Source
from launcher.runs.progress import ProgressReader
from launcher.runs.rank_logs import Chunk, Follower
from launcher.text import escape_text

HOLD = 0.03
"""Seconds that the beginning of a line waits for its end, if several sources share a terminal or pipe."""
HOLD_SHARED = 1.0
"""The same if other nodes write to the same file."""
MOST_HELD = 1 << 16
"""Bytes that wait."""
REDRAW = 0.1
"""Seconds between two states of the bar."""
DRAWS = re.compile(rb"\r[^\r\n]|\x1b(?:[^\[]|\[[0-9;:]*[^0-9;:m])")
"""How a program draws on a terminal by itself: it goes back in the line, or sends more than colours."""


@dataclass(slots=True)
class JobConsole:
    """Shows the ranks' bytes as they are, and progress; goes on in silence when the terminal is gone."""

    mode: str
    """`rank0`, `all` or `none`."""
    console: Console
    """Renders what is not plain text, for stderr."""
    logs: str = ""
    """Where all that the ranks print is kept."""
    origin: Callable[[int], str] | None = None
    """Tells what stands before each line of a rank's; None if there is one rank, whose output is alone."""
    shared: bool = False
    """Other nodes write to where the output goes: only whole lines are written."""
    followed: bool = False
    """Others write to where the output went, after this: its last line is given an end."""
    is_raw: Callable[[], bool] = lambda: False
    """Tells whether the terminal of stdout is in raw mode."""
    out: Stream = field(default_factory=lambda: open_stream("stdout"))
    err: Stream = field(default_factory=lambda: open_stream("stderr"))
    out_sink: Sink = field(init=False)
    err_sink: Sink = field(init=False)
    sources: dict[tuple[int, str], Source] = field(default_factory=dict)
    held: dict[Source, tuple[bytes, float]] = field(default_factory=dict)
    """Beginnings of lines that wait, and since when, in monotonic seconds."""
    progress: ProgressReader = field(default_factory=ProgressReader)
    bar: StepBar | None = None
    moved: bool = False
    """There is a step that the bar does not show."""
    drawn: float = 0.0
    """When the bar was drawn, in monotonic seconds."""
    program_draws: bool = False
    """The program draws on the terminal by itself."""

    def __post_init__(self) -> None:
        """See where the streams lead."""
        self.err_sink = Sink(self.err.is_screen)
        joined = self.out.is_same_file(self.err)
        self.out_sink = self.err_sink if joined else Sink(self.out.is_screen)

    @property
    def is_within_line(self) -> bool:
        """Whether an unfinished line is where our own would go."""
        return self.err_sink.open is not None

    def show_turn(self, follower: Follower, *, final: bool) -> bool:
        """Show some of what is new in the ranks' files; False if there is nothing."""
        busy = False
        for chunk in follower.read_turn(self.may_show):
            self.show_chunk(chunk)
            busy = True
        if busy or not final:
            return busy
        for chunk in follower.read_turn():
            self.show_chunk(chunk)
            busy = True
        return busy

    def may_show(self, rank: int, stream: str) -> bool:
        """Tell whether a rank's stream may be shown now; not while that would break a line just begun."""
        for target, sink in ((self.out, self.out_sink), (self.err, self.err_sink)):
            source = sink.find_cut(target)
            if source and sink.awaits_rest():
                return (source.rank, source.stream) == (rank, stream)
        return True

    def show_chunk(self, chunk: Chunk) -> None:
        """Show some of a rank's output if the mode says so, and read progress from rank 0's."""
        if chunk.rank == 0:
            self.note_progress(chunk.stream, chunk.data)
        if self.mode == "all" or (self.mode == "rank0" and chunk.rank == 0):
            source = self.find_source(chunk.rank, chunk.stream)
            data = self.hold_end(source, chunk.data) if source.prefix else chunk.data
            if data:
                self.write_output(source, data)

    def note_progress(self, stream: str, data: bytes) -> None:
        """Read progress from what rank 0 has printed."""
        self.moved = self.progress.add(stream, data) or self.moved

    def find_source(self, rank: int, stream: str) -> Source:
        """Return the source that a rank's stream is."""
        found = self.sources.get((rank, stream))
        if found is None:
            prefix = os.fsencode(f"[{self.origin(rank)}:{rank}] ") if self.origin else b""
            found = self.sources[rank, stream] = Source(rank, stream, prefix)
        return found

    def hold_end(self, source: Source, data: bytes) -> bytes:
        """Keep back the beginning of a line that has no end yet, and return what is before it.

        Its end mostly comes at once: a print() is two writes.
        """
        before, since = self.held.pop(source, (b"", time.monotonic()))
        data = before + data
        end = max(data.rfind(b"\n"), -1 if self.shared else data.rfind(b"\r")) + 1
        if 0 < len(data) - end <= MOST_HELD:
            self.held[source] = (data[end:], time.monotonic() if end else since)
            return data[:end]
        return data

    def write_output(self, source: Source, data: bytes) -> None:
        """Write what a source has printed."""
        stream, sink = (self.out, self.out_sink) if source.stream == "out" else (self.err, self.err_sink)
        if sink is self.err_sink and sink.erases and not self.program_draws and DRAWS.search(data):
            self.program_draws = True
            sink.show_footer(self.err, b"")
        sink.write_chunk(stream, source, data)

    def tick(self, *, final: bool = False) -> None:
        """Write what has waited long enough, and keep the bar up to date; to be called again and again."""
        due = time.monotonic() - (HOLD_SHARED if self.shared else HOLD)
        unfinished = (self.out_sink.open, self.err_sink.open)
        for source, (data, since) in sorted(self.held.items(), key=lambda item: item[0] not in unfinished):
            if final or (since <= due and self.may_show(source.rank, source.stream)):
                del self.held[source]
                self.write_output(source, data)
                if self.shared:
                    self.end_lines()
        for stream in (self.out, self.err):
            if stream.fault:
                fault, stream.fault = stream.fault, None
                self.print_own_line(
                    f"warning: {stream.name} takes no more ({fault.strerror}): see {self.logs}"
                )
        if not final and self.moved and time.monotonic() - self.drawn >= REDRAW:
            self.draw_progress()

    def draw_progress(self) -> None:
        """Draw the newest step; the bar appears with the first, and not beside one of the program's."""
        step, self.moved = self.progress.steps[-1], False
        if not step.total or self.program_draws or not self.err_sink.erases:
            return
        self.bar = self.bar or StepBar()
        self.drawn = time.monotonic()
        self.show_footer(self.bar.render_bar(self.console, step))

    def show_footer(self, text: str) -> None:
        """Show a line at the bottom of the terminal, below all others; an empty one takes it away."""
        if self.err_sink.erases:
            self.err_sink.show_footer(self.err, self.encode(text))

    def print_own_line(self, text: str) -> None:
        """Print one of our own lines."""
        self.write_own_lines(self.encode(f"launch: {escape_text(text)}\n"))

    def write_own_lines(self, lines: bytes) -> None:
        """Write whole lines to stderr that are no rank's."""
        self.out_sink.newline = b"\r\n" if self.is_raw() else b"\n"
        self.err_sink.write_message(self.err, lines)

    def print_renderable(self, show: Callable[[Console], None]) -> None:
        """Have rich print something on stderr."""
        if self.err.descriptor is None:
            return
        with self.console.capture() as captured:
            show(self.console)
        self.write_own_lines(self.encode(captured.get()))

    def encode(self, text: str) -> bytes:
        """Return a text as the reader of stderr knows it."""
        return text.encode(getattr(sys.stderr, "encoding", None) or "utf-8", "replace")

    def end_lines(self) -> None:
        """End the lines that are unfinished, since something else follows them."""
        self.out_sink.end_line(self.out)
        self.err_sink.end_line(self.err)

    def begin_line(self) -> None:
        """Let what others write to stderr begin on a line of its own."""
        if self.err_sink.open:
            self.write_own_lines(b"")

    def close(self) -> None:
        """Show what has waited, and take the bar down."""
        self.moved = self.progress.finish() or self.moved
        self.tick(final=True)
        if self.shared or self.followed:
            self.end_lines()
        self.drop_bar()

    def drop_bar(self) -> None:
        """Take the bar down; the next step makes another one."""
        if self.bar:
            self.bar = None
            self.show_footer("")


class PipeAwareConsole(Console):
    """A console that raises BrokenPipeError when its reader has left, while rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich in place of the error."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_console(*, stderr: bool = True) -> Console:
    """Return a console; if it is no terminal, one so wide that tables do not wrap."""
    console = PipeAwareConsole(stderr=stderr, highlight=False)
    return console if console.is_terminal else PipeAwareConsole(stderr=stderr, highlight=False, width=160)
