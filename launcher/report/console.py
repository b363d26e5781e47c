"""What people see while a job runs: the ranks' output with its origin, a progress bar, our own messages."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from launcher.report.viewer import Stream, open_stream
from launcher.runs.progress import Progress as Step
from launcher.runs.progress import ProgressReader
from launcher.runs.rank_logs import Chunk, Follower
from launcher.text import escape_text

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
BAR_WIDTH = 20
TIME_WIDTH = 7
"""Columns of the time that is left: `-:--:--`, `0:05:54`."""
ESTIMATE_PERIOD = 3600.0
"""Seconds over which the speed is averaged: Rich forgets older steps, and one step may take minutes."""


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
            self.write_parts(stream, data)
            return
        before = b"" if self.open in (None, source) else self.interrupt(stream)
        self.note_growth(source, data)
        data = self.erased.pop(source, b"") + data
        if source in self.cut:
            self.cut.discard(source)
            data = data.removeprefix(b"\n")  # it has been written already
        marked = self.mark(source, data) if data else b""
        self.write_parts(stream, before, marked, self.redraw())

    def write_message(self, stream: Stream, text: bytes) -> None:
        """Write whole lines of our own."""
        before = b"" if self.open is None else self.interrupt(stream)
        self.write_parts(stream, before, text.replace(b"\n", self.newline), self.redraw())

    def show_footer(self, stream: Stream, footer: bytes) -> None:
        """Draw another footer; an empty one takes it away."""
        if footer != self.footer:
            self.footer = footer
            self.write_parts(stream)

    def end_line(self, stream: Stream) -> None:
        """End an unfinished line; what its source prints later begins another one."""
        if self.open:
            self.cut.add(self.open)
            self.open = None
            self.write_parts(stream, self.newline)

    def write_parts(self, stream: Stream, *parts: bytes) -> None:
        """Write in one go, in the place of the footer, and the footer below it."""
        before = ERASE if self.drawn else b""
        self.drawn = bool(self.footer) and self.open is None
        stream.write(b"".join((before, *parts, self.footer if self.drawn else b"")))

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


@dataclass(slots=True)
class StepBar:
    """Steps done and to do, a bar, the newest metrics and the time that is left.

    Steps, bar and time keep their width and place; the metrics get what is left of the row.
    """

    clock: Callable[[], float] = time.monotonic
    """Seconds, from which the time that is left is estimated."""
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        """Begin to measure the time."""
        self.progress = Progress(
            TextColumn("{task.fields[steps]}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn(
                "{task.fields[metrics]}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=TIME_WIDTH)),
            auto_refresh=False,
            expand=True,
            speed_estimate_period=ESTIMATE_PERIOD,
            get_time=self.clock,
        )
        self.progress.add_task("training", steps="", metrics="")

    def render_bar(self, console: Console, step: Step) -> str:
        """Return the row for a step."""
        total = str(step.total)
        steps = f"step {step.step:>{len(total)}}/{total}"
        room = console.width - len(steps) - BAR_WIDTH - TIME_WIDTH - 4  # gaps, and a cell that stays free
        metrics = fit_metrics([f"{name} {value}" for name, value in step.metrics if name != "lr"], room)
        task = self.progress.task_ids[0]
        self.progress.update(task, completed=step.step, total=step.total, steps=steps, metrics=metrics)
        return render_row(console, self.progress.get_renderable())


def fit_metrics(metrics: Sequence[str], room: int) -> str:
    """Return the first metrics that fit into some columns as a whole; the first of all in any case."""
    text = "".join(metrics[:1])
    for metric in metrics[1:]:
        if len(text) + 2 + len(metric) > room:
            break
        text += f"  {metric}"
    return text


def render_row(console: Console, content: RenderableType) -> str:
    """Return something that takes one row as text; a cell stays free, so that no terminal wraps."""
    with console.capture() as captured:
        console.print(content, width=max(console.width - 1, 1), height=1, no_wrap=True, overflow="ellipsis")
    return captured.get().partition("\n")[0].rstrip(" ")


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


@dataclass(slots=True)
class StatusLine:
    """A line at the bottom of the terminal; nothing if there is none."""

    console: JobConsole
    text: str = ""

    def show(self, text: str) -> None:
        """Show a text in place of the former one; an empty one takes the line away."""
        if text != self.text:
            self.text = text
            self.console.show_footer(render_row(self.console.console, Text(text)) if text else "")

    def close(self) -> None:
        """Take the line away."""
        self.show("")


class PipeAwareConsole(Console):
    """A console that raises BrokenPipeError when its reader has left, while rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich in place of the error."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_console(*, stderr: bool = True) -> Console:
    """Return a console; if it is no terminal, one so wide that tables do not wrap."""
    console = PipeAwareConsole(stderr=stderr, highlight=False)
    return console if console.is_terminal else PipeAwareConsole(stderr=stderr, highlight=False, width=160)
