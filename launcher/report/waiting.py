"""What a terminal shows of jobs that wait: one line that is kept up to date."""

from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from launcher.report.console import JobConsole


@dataclass(slots=True)
class StatusLine:
    """A line at the bottom of the terminal; nothing where there is none."""

    console: JobConsole
    text: str = ""
    live: Live | None = None

    def show(self, text: str) -> None:
        """Show a text in place of the former one; an empty one takes the line away."""
        if not text:
            self.close()
        elif text != self.text and self.console.console.is_terminal:
            self.text = text
            self.console.guard(self.draw)

    def draw(self, console: Console) -> None:
        """Draw the line, which other lines pass above."""
        dots = "dots" if console.encoding.startswith("utf") else "line"
        spinner = Spinner(dots, Text(self.text, no_wrap=True, overflow="ellipsis"))
        if self.live is None:
            self.live = Live(
                spinner, console=console, transient=True, redirect_stdout=False, refresh_per_second=4
            )
            self.live.start()
        else:
            self.live.update(spinner)

    def close(self) -> None:
        """Take the line away."""
        if self.live:
            live, self.live, self.text = self.live, None, ""
            self.console.guard(lambda _: live.stop())
