"""What people see while a job runs: the ranks' lines with their origin, a progress bar, our own messages."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from launcher.runs.logs import Line
from launcher.runs.progress import Progress as Step
from launcher.runs.progress import parse_progress

MODES = ("rank0", "all", "none")
"""Values of `logs.console`."""


@dataclass(slots=True)
class JobConsole:
    """Prints lines and progress; goes on in silence when the terminal is gone."""

    mode: str
    host: str
    console: Console
    """Where our own messages and the bar go: stderr."""
    bar: Progress | None = None
    steps: list[Step] = field(default_factory=list)
    """Logging steps of rank 0 so far."""
    gone: bool = False

    def show_line(self, line: Line) -> None:
        """Print a rank's line where the mode says so, and read progress from rank 0's."""
        if line.rank == 0 and (step := parse_progress(line.text)):
            self.steps.append(step)
            self.show_step(step)
        if self.mode == "all" or (self.mode == "rank0" and line.rank == 0):
            stream = sys.stdout if line.stream == "out" else sys.stderr
            self.write(stream, f"[{self.host}:{line.rank}] {line.text}\n")

    def say(self, text: str) -> None:
        """Print one of our own lines."""
        self.write(sys.stderr, f"launch: {text}\n")

    def write(self, stream: TextIO, text: str) -> None:
        """Write to a stream that may have been closed, and that may not know all characters."""
        if self.gone:
            return
        try:
            stream.write(
                text.encode(stream.encoding or "utf-8", "replace").decode(stream.encoding or "utf-8")
            )
            stream.flush()
        except (OSError, ValueError):
            self.gone = True

    def guard(self, show: Callable[[Console], None]) -> None:
        """Let rich print something, unless the terminal is gone."""
        if self.gone:
            return
        try:
            show(self.console)
        except (OSError, UnicodeError):
            self.gone = True

    def show_step(self, step: Step) -> None:
        """Move the bar; it appears with the first logging step, and on a terminal alone."""
        if self.gone or not self.console.is_terminal or not step.total:
            return
        try:
            if self.bar is None:
                self.bar = make_bar(self.console)
                self.bar.start()
                self.bar.add_task("training", total=step.total, metrics="")
            metrics = "  ".join(f"{name} {value}" for name, value in step.metrics if name != "lr")
            self.bar.update(self.bar.task_ids[0], completed=step.step, total=step.total, metrics=metrics)
        except OSError:
            self.gone = True

    def close(self) -> None:
        """Take the bar down."""
        if self.bar:
            bar, self.bar = self.bar, None
            try:
                bar.stop()
            except OSError:
                self.gone = True


def make_bar(console: Console) -> Progress:
    """Return a bar whose printing lets other lines pass above it."""
    return Progress(
        SpinnerColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[metrics]}", markup=False),
        TimeRemainingColumn(),
        console=console,
    )


def make_console(*, stderr: bool = True) -> Console:
    """Return a console; where it is no terminal, one so wide that tables do not wrap."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=160)
