"""The bar of a training program's progress: one row of text, drawn by whoever has the terminal."""

from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from launcher.runs.progress import Progress as Step


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
