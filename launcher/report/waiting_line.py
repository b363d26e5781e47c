"""What a terminal shows of jobs that wait: one line that is kept up to date."""

from dataclasses import dataclass

from rich.text import Text

from launcher.report.console import JobConsole
from launcher.report.progress_bar import render_row


@dataclass(slots=True)
class StatusLine:
    """A line at the bottom of the terminal; nothing where there is none."""

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
