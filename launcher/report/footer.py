"""The line at the bottom of a terminal: a training program's progress, or what a waiting job waits for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from launcher.runs.progress import Progress as Step

if TYPE_CHECKING:
    from launcher.report.console import JobConsole


BAR_WIDTH = 20
TIME_WIDTH = 7
"""Columns of the time that is left: `-:--:--`, `0:05:54`."""
ESTIMATE_PERIOD = 3600.0
"""Seconds over which the speed is averaged: Rich forgets older steps, and one step may take minutes."""


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
class StatusLine:
    """A line at the bottom of the terminal; nothing if there is none."""

    console: "JobConsole"
    text: str = ""

    def show(self, text: str) -> None:
        """Show a text in place of the former one; an empty one takes the line away."""
        if text != self.text:
            self.text = text
            self.console.show_footer(render_row(self.console.console, Text(text)) if text else "")

    def close(self) -> None:
        """Take the line away."""
        self.show("")
