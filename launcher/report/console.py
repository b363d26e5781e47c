"""What people see while a job runs: the ranks' lines with their origin, a progress bar, our own messages."""

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from launcher.runs.logs import Line
from launcher.runs.progress import Progress as Step
from launcher.runs.progress import parse_progress
from launcher.terminal import escape_text


@dataclass(slots=True)
class JobConsole:
    """Prints lines and progress; goes on in silence when the terminal is gone."""

    mode: str
    host: str
    console: Console
    """Where our own messages and the bar go: stderr."""
    bar: Progress | None = None
    steps: list[Step] = field(default_factory=list)
    """Rank 0's first logging step and its last, with the newest value of each metric."""
    gone: set[str] = field(default_factory=set)
    """Streams whose reader has left: `out`, `err`."""

    def show_line(self, line: Line) -> None:
        """Print a rank's line where the mode says so, and read progress from rank 0's."""
        if line.rank == 0:
            self.note_progress(line.text)
        if self.mode == "all" or (self.mode == "rank0" and line.rank == 0):
            self.write(line.stream, f"[{self.host}:{line.rank}] {line.text}\n")

    def note_progress(self, text: str) -> None:
        """Read progress from a line of rank 0's, and show it."""
        if step := parse_progress(text):
            step = merge_steps(self.steps[-1], step) if self.steps else step
            self.steps[1:] = [step]
            self.show_step(step)

    def say(self, text: str) -> None:
        """Print one of our own lines."""
        self.write("err", f"launch: {escape_text(text)}\n")

    def write(self, name: str, text: str) -> None:
        """Write to `out` or `err`, which may have been closed, and may not know all characters."""
        if name in self.gone:
            return
        stream = sys.stdout if name == "out" else sys.stderr
        encoding = stream.encoding or "utf-8"
        try:
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()
        except (OSError, ValueError):
            self.gone.add(name)

    def guard(self, show: Callable[[Console], None]) -> None:
        """Let rich print something, unless the terminal is gone."""
        if "err" in self.gone:
            return
        try:
            show(self.console)
        except (OSError, ValueError):
            self.gone.add("err")

    def show_step(self, step: Step) -> None:
        """Move the bar; it appears with the first logging step, and on a terminal alone."""
        if self.console.is_terminal and step.total:
            self.guard(lambda console: self.draw_bar(console, step))

    def draw_bar(self, console: Console, step: Step) -> None:
        """Make the bar where there is none yet, and put a step into it."""
        if self.bar is None:
            self.bar = make_bar(console)
            self.bar.start()
            self.bar.add_task("training", total=step.total, metrics="")
        metrics = "  ".join(f"{name} {value}" for name, value in step.metrics if name != "lr")
        self.bar.update(self.bar.task_ids[0], completed=step.step, total=step.total, metrics=metrics)

    def close(self) -> None:
        """Take the bar down."""
        if self.bar:
            bar, self.bar = self.bar, None
            self.guard(lambda _: bar.stop())


def merge_steps(earlier: Step, step: Step) -> Step:
    """Return a step that keeps the metrics of an earlier one which it does not tell itself."""
    return replace(step, metrics=tuple({**dict(earlier.metrics), **dict(step.metrics)}.items()))


def make_bar(console: Console) -> Progress:
    """Return a bar whose printing lets other lines pass above it; those for a file still go to the file."""
    return Progress(
        SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[metrics]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        redirect_stdout=sys.stdout.isatty(),
    )


class FrankConsole(Console):
    """A console that raises BrokenPipeError when its reader has left, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich in place of the error."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_console(*, stderr: bool = True) -> Console:
    """Return a console; where it is no terminal, one so wide that tables do not wrap."""
    console = FrankConsole(stderr=stderr, highlight=False)
    return console if console.is_terminal else FrankConsole(stderr=stderr, highlight=False, width=160)
