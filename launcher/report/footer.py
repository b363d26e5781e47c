"""The line at the bottom of a terminal: a training program's progress, or what a waiting job waits for."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from launcher.runs.progress import Progress as Step

if TYPE_CHECKING:
    from launcher.report.console import JobConsole


@dataclass(slots=True)
class StepBar:
    """Steps done and to do, the newest metrics, and the time that is left, which all but the metrics keep."""

    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        """Begin to measure the time."""
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn(
                "{task.fields[metrics]}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            auto_refresh=False,
            expand=True,
        )
        self.progress.add_task("training", metrics="")

    def render(self, console: Console, step: Step) -> str:
        """Return the row for a step."""
        metrics = "  ".join(f"{name} {value}" for name, value in step.metrics if name != "lr")
        task = self.progress.task_ids[0]
        self.progress.update(task, completed=step.step, total=step.total, metrics=metrics)
        return render_row(console, self.progress.get_renderable())


def render_row(console: Console, content: RenderableType) -> str:
    """Return something that takes one row as text; a cell stays free, so that no terminal wraps."""
    with console.capture() as captured:
        console.print(content, width=max(console.width - 1, 1), height=1, no_wrap=True, overflow="ellipsis")
    return captured.get().partition("\n")[0].rstrip(" ")


@dataclass(slots=True)
class StatusLine:
    """A line at the bottom of the terminal; nothing where there is none."""

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
