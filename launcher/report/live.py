"""`launch watch` on a terminal, by Textual: a table of ranks or nodes, or one rank with its stack and log."""

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.timer import Timer
from textual.widgets import DataTable, Footer, Static

from launcher.report.tables import shorten_age
from launcher.report.watch import View, arrange, find_rank, list_job_lines, list_rank_lines
from launcher.text import clean_text, count_things

_LOOK_SECONDS = 1.0
"""Seconds between two looks at a run."""
_LATE = 5.0
"""Seconds after which a look at the run directory that is not over is told of."""
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _Table(DataTable[Text]):
    """A table whose Home and End lead to the first and the last row."""

    BINDINGS: ClassVar = [
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]


class WatchApp(App[int]):
    """Shows a run until the user quits, a signal comes, or the run has ended; returns the signal, or None.

    The run is looked at once a second in a thread: a filesystem that is stuck must not stop the keys.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen, Static, VerticalScroll, _Table { background: ansi_default; color: ansi_default; }
    #head { max-height: 50%; height: auto; }
    _Table { height: 1fr; scrollbar-size: 0 0; margin-top: 1; }
    _Table > .datatable--header { background: ansi_default; color: ansi_default; text-style: bold; }
    _Table > .datatable--cursor { background: ansi_default; color: ansi_default; text-style: reverse; }
    #rank { height: 1fr; scrollbar-size-vertical: 1; margin-top: 1; }
    """
    BINDINGS: ClassVar = [
        ("escape,backspace", "leave", "back"),
        ("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", "sort", show=False),
        ("t", "stack", "stack"),
        ("p", "pause", "pause"),
        ("q", "quit", "quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, view: View, rank: int | None, look: Callable[[int | None, bool], View]) -> None:
        """Begin with a view of the run, and the rank that is open.

        `look` returns what is known now, with the details of a rank; it asks for its stack if it is told so.
        """
        super().__init__(ansi_color=True)
        self.view = view
        self.rank = rank
        self.host: str | None = None
        """The node whose ranks are shown; None is all of the job."""
        self.sort = ""
        """The title of the column that orders the rows; empty for the slowest first."""
        self.is_paused = False
        self.chosen: tuple[str, int | None] | None = None
        """The row that the user has put the cursor on; None is the first, whichever that is."""
        self.at = 0
        """Where the cursor was put; elsewhere it is by a key."""
        self.shown = arrange(view.snapshot)
        self.look = look
        self.error: Exception | None = None
        """Why the thread has ended."""
        self._asks_stack = rank is not None
        self._looking_since: float | None = None
        self._hurry = threading.Event()
        self._closing = False

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield _Table(cursor_type="row", cell_padding=1)
        with VerticalScroll(id="rank"):
            yield Static()
        yield Footer()

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                    loop.add_signal_handler(number, self.exit, number)
        threading.Thread(target=self._look_again_and_again, daemon=True).start()
        self.set_interval(_LOOK_SECONDS, self._show_lines)
        self.show()

    def on_unmount(self) -> None:
        self._closing = True
        self._hurry.set()

    def _look_again_and_again(self) -> None:
        """Look, and wait: the thread's body."""
        terminal = select.poll()
        terminal.register(sys.__stderr__ or 2, 0)
        while not self._closing:
            if terminal.poll(0):  # it is gone, and Textual waits for good to write to it
                os._exit(128 + signal.SIGHUP)
            asks, self._asks_stack = self._asks_stack, False
            self._looking_since = time.monotonic()
            try:
                self.call_later(self.take_view, self.look(self.rank, asks))
            except Exception as error:
                self.error = error
                with contextlib.suppress(RuntimeError):
                    self.call_from_thread(self.exit)
                return
            self._looking_since = None
            self._hurry.wait(_LOOK_SECONDS)
            self._hurry.clear()

    def take_view(self, view: View) -> None:
        """Show what a look at the run has found."""
        self.view = replace(self.view, details=view.details) if self.is_paused else view
        # A manifest that cannot be read now may be read again later.
        if not view.run.is_live and view.run.state != "unknown":
            self.view = view
            self.exit()
        else:
            self.show()

    def set_timer(self, *values: Any, **options: Any) -> Timer:  # noqa: ANN401 - those of Textual's
        """Call a function after a delay, also if that is over before the timer begins to wait.

        Textual 8.2 skips such a call. It applies the window's size by one, and asks for no other before that
        has come: on a busy machine it would keep a former size for good.
        """
        timer = super().set_timer(*values, **options)
        timer._skip = False
        return timer

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    def show(self) -> None:
        """Show what is known, as the keys have chosen it."""
        if not self.query("Footer"):  # in the end widgets go before the last message and the timer
            return
        row = find_rank(self.view.snapshot, self.rank)
        table, rank = self.query_one(_Table), self.query_one("#rank")
        if table.cursor_row != self.at and table.cursor_row < len(self.shown.rows):
            self.chosen = self.shown.rows[table.cursor_row].key
        self.shown = arrange(self.view.snapshot, self.sort, self.host)
        table.display = row is None and bool(self.shown.rows)
        rank.display = row is not None
        if row is None:
            widths = self.shown.fit(self.size.width - 2)
            table.clear(columns=True)
            for title, width in widths.items():
                table.add_column(Text(title, "underline" if title == self.sort else ""), width=width)
            for one in self.shown.rows:
                table.add_row(*self.shown.render_row(one, widths))
            keys = [one.key for one in self.shown.rows]
            self.at = keys.index(self.chosen) if self.chosen in keys else 0
            table.move_cursor(row=self.at, animate=False)
            table.focus()
        else:
            lines = list_rank_lines(row, self.view.details, self.size.width - 1)
            rank.query_one(Static).update(Group(*lines))
            rank.focus()
        self._show_lines()

    def _show_lines(self) -> None:
        """Show the lines above the table."""
        if not self.query("#head"):
            return
        lines = list_job_lines(self.view, self.size.width)
        lines = lines[:1] if self.rank is not None else lines
        since = self._looking_since
        if since is not None and time.monotonic() - since > _LATE:
            late = shorten_age(time.monotonic() - since)
            lines.append(Text(f"the run directory has not answered for {late}"))
        if self.view.message:
            lines.append(Text(clean_text(self.view.message, 400)))
        parts = ["paused"] if self.is_paused else []
        parts += [f"node {clean_text(self.host)}"] if self.host and self.rank is None else []
        if self.shown.rows and self.rank is None:
            parts.append(
                f"{count_things(len(self.shown.rows), 'row')}, by {self.sort or 'slowest'}: Enter opens one"
            )
        lines.append(Text("  ".join(parts), "yellow" if self.is_paused else "dim"))
        self.query_one("#head", Static).update(Group(*lines))

    # What keys do

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter, or a click: open a node's ranks, or a rank."""
        row = self.shown.rows[self.at if event.cursor_row >= len(self.shown.rows) else event.cursor_row]
        self.at = event.cursor_row
        self.chosen = row.key
        if not row.is_node:
            self._open(row.ranks[0].rank)
        elif row.ranks and self.host is None:
            self.host, self.chosen = row.key[0], None
            self.show()

    def action_interrupt(self) -> None:
        self.exit(signal.SIGINT)

    def action_pause(self) -> None:
        self.is_paused = not self.is_paused
        self._hurry.set()
        self._show_lines()

    def action_stack(self) -> None:
        self._open(self.rank)

    def action_leave(self) -> None:
        if self.rank is None:
            self.chosen = (self.host, None) if self.host is not None else None
            self.host = None
        self._open(None)

    def _open(self, rank: int | None) -> None:
        """Open a rank, and have its stack taken, or close it."""
        self.rank = rank
        self._asks_stack = rank is not None
        self._hurry.set()
        self.show()

    def action_sort(self, columns: int) -> None:
        """Sort by the next or the former column."""
        titles = ["", *self.shown.titles]
        at = titles.index(self.sort) if self.sort in titles else 0
        self.sort = titles[(at + columns) % len(titles)]
        self.show()
