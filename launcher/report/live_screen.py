"""Shows `launch watch` on the terminal until it is quit or the run has ended."""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from launcher.report.key_input import ENDING, KeyInput
from launcher.report.watch_screen import View, WatchScreen

TICK = 1.0
"""Seconds between two pictures if nothing happens."""


class Feed(Protocol):
    """Where views come from; none of its methods waits."""

    def take(self) -> View | None:
        """Return the newest view if it is new."""

    def want(self, rank: int | None, asked: int) -> None:
        """Ask for the details of a rank, and for its stack anew if `asked` has grown."""

    def measure_wait(self) -> float:
        """Return the seconds for which the last look at the run has gone on."""


@dataclass(slots=True)
class LiveScreen:
    """A screen on a terminal of its own (the alternate one), with what leads to changes of it."""

    console: Console
    screen: WatchScreen
    feed: Feed
    keys: KeyInput
    ended_by: int | None = None
    """The signal that ended it."""
    live: Live = field(init=False)

    def __post_init__(self) -> None:
        """Show nothing yet."""
        self.live = Live(
            console=self.console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def run(self) -> None:
        """Show the run until the user quits, a signal comes, or the run has ended."""
        self.live.start()
        try:
            while self.draw() and self.take_keys() and self.take_signals() and self.take_view():
                continue
        finally:
            self.live.stop()

    def draw(self) -> bool:
        """Draw the picture of now, as large as the terminal is now: COLUMNS is the size of another time."""
        with contextlib.suppress(OSError, ValueError):
            columns, lines = os.get_terminal_size(self.console.file.fileno())
            if columns and lines:
                self.console.size = ConsoleDimensions(columns, lines)
        width, height = self.console.size
        self.live.update(self.screen.render(width, height, self.feed.measure_wait()), refresh=True)
        return True

    def take_keys(self) -> bool:
        """Wait for keys and do what they ask; False to quit."""
        for key in self.keys.wait(TICK):
            if not self.screen.press(key):
                return False
        self.feed.want(self.screen.rank, self.screen.asked)
        return True

    def take_signals(self) -> bool:
        """Do what signals ask; False to quit."""
        for number in self.keys.take_signals():
            if number in ENDING:
                self.ended_by = number
                return False
            if number == signal.SIGTSTP:
                self.live.stop()
                self.keys.suspend()
                self.live.start()
            elif number == signal.SIGCONT:
                self.keys.take_terminal()
        return True

    def take_view(self) -> bool:
        """Take what is known now; False if the run has ended."""
        view = self.feed.take()
        if view is None:
            return True
        self.screen.update(view)
        # A manifest that cannot be read now may be read again later.
        return view.run.is_live or view.run.state == "unknown"
