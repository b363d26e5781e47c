"""`launch watch` on a terminal, by Textual: a table of ranks or nodes, or one rank with its stack and log."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.events import Key
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Static

from launcher.report.tables import shorten_age
from launcher.report.watch import (
    COLUMNS,
    SLOWEST,
    Order,
    TableView,
    View,
    arrange,
    find_rank,
    list_job_lines,
    list_output_lines,
    list_rank_lines,
    list_stack_lines,
)
from launcher.text import clean_text

_LOOK_SECONDS = 1.0
"""Seconds between two looks at a run."""
_LATE = 5.0
"""Seconds after which a look at the run directory that is not over is told of."""
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FAR = 10**6
_KEYS = (
    ("up, down", "choose a row; Page Up, Page Down, Home, End"),
    ("Enter", "open it: a node's ranks, or a rank with its stack and last lines"),
    ("Esc", "back"),
    ("s, left, right", "sort by the next or the former column, or by its letter; first: the slowest"),
    ("r", "the other way round"),
    ("t", "take the stack of the rank that is open again"),
    ("p", "stop the picture, and go on"),
    ("q", "quit; the job goes on"),
)


class _Help(ModalScreen[None]):
    """What keys do, and what the columns mean."""

    def compose(self) -> ComposeResult:
        lines = [Text("keys", "bold"), *(Text(f"  {key:<16}{meaning}") for key, meaning in _KEYS)]
        lines.append(Text("columns, and the letters that sort by them", "bold"))
        lines += [Text(f"  {one.letter} {one.title:<9} {one.meaning}") for one in COLUMNS]
        with VerticalScroll(can_focus=False):
            yield Static(Group(*lines))
        yield Static(Text("up, down: more  any other key: back", "dim"), classes="footer")

    def on_key(self, event: Key) -> None:
        lines = {"up": -3, "down": 3, "pageup": -10, "pagedown": 10}.get(event.key)
        if lines is None:
            self.dismiss()
        else:
            self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class WatchApp(App[int]):
    """Shows a run until the user quits, a signal comes, or the run has ended; returns the signal, or None.

    The run is looked at once a second in a thread: a filesystem that is stuck must not stop the keys.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen, Static, VerticalScroll { background: ansi_default; color: ansi_default; }
    #head { max-height: 50%; height: auto; }
    #table { height: 1fr; overflow: hidden; }
    #rank { height: auto; max-height: 50%; margin-top: 1; }
    #stack { height: auto; max-height: 40%; scrollbar-size-vertical: 1; }
    #output { height: 1fr; scrollbar-size-vertical: 1; }
    .footer { dock: bottom; height: 1; }
    """
    BINDINGS: ClassVar = [
        ("q", "quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
        ("up,k", "move(-1)"),
        ("down,j", "move(1)"),
        ("pageup", "page(-1)"),
        ("pagedown,space", "page(1)"),
        ("home", f"move({-_FAR})"),
        ("end", f"move({_FAR})"),
        ("enter", "open"),
        ("escape,backspace", "leave"),
        ("s,right", "sort_next(1)"),
        ("left", "sort_next(-1)"),
        ("r", "reverse"),
        ("t", "stack"),
        ("p", "pause"),
        ("question_mark", "help"),
        *((column.letter, f"sort('{column.title}')") for column in COLUMNS),
    ]

    class News(Message):
        """What a look at the run has found."""

        def __init__(self, view: View) -> None:
            self.view = view
            super().__init__()

    def __init__(self, view: View, rank: int | None, look: Callable[[int | None, bool], View]) -> None:
        """Begin with a view of the run, and the rank that is open.

        `look` returns what is known now, with the details of a rank; it asks for its stack if it is told so.
        """
        super().__init__(ansi_color=True)
        self.view = view
        self.rank = rank
        self.host: str | None = None
        """The node whose ranks are shown; None is all of the job."""
        self.order = Order()
        self.is_paused = False
        self.chosen: tuple[str, int | None] | None = None
        """The row that the cursor is on; None is the first, whichever that is."""
        self.at = 0
        self.shown: TableView
        self.look = look
        self.error: Exception | None = None
        """Why the thread has ended."""
        self._asks_stack = rank is not None
        self._looking_since: float | None = None
        self._hurry = threading.Event()
        self._closing = False
        self._top = 0
        """The first row that the table has."""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="table")
        yield Static(id="rank")
        for name in ("stack", "output"):
            with VerticalScroll(id=name, can_focus=False):
                yield Static()
        yield Static(id="footer", classes="footer")

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
        while not self._closing:
            asks, self._asks_stack = self._asks_stack, False
            self._looking_since = time.monotonic()
            try:
                self.post_message(self.News(self.look(self.rank, asks)))
            except Exception as error:
                self.error = error
                with contextlib.suppress(RuntimeError):
                    self.call_from_thread(self.exit)
                return
            self._looking_since = None
            self._hurry.wait(_LOOK_SECONDS)
            self._hurry.clear()

    def on_watch_app_news(self, news: News) -> None:
        view = news.view
        self.view = replace(self.view, details=view.details) if self.is_paused else view
        # A manifest that cannot be read now may be read again later.
        if not view.run.is_live and view.run.state != "unknown":
            self.view = view
            self.exit()
        else:
            self.show()

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    # What is shown

    def show(self) -> None:
        """Show what is known, as the keys have chosen it."""
        if not self._is_whole():
            return
        self.shown = arrange(self.view.snapshot, self.order, self.host)
        keys = [row.key for row in self.shown.rows]
        if self.chosen is None:
            self.at = 0
        elif self.chosen in keys:
            self.at = keys.index(self.chosen)
        self.at = max(0, min(self.at, len(keys) - 1))
        row, details = find_rank(self.view.snapshot, self.rank), self.view.details
        self.query_one("#table").display = row is None and bool(keys)
        for name in ("#rank", "#stack", "#output"):
            self.query_one(name).display = row is not None
        if row is None:
            self._show_table()
        else:
            self.query_one("#rank", Static).update(Group(*list_rank_lines(row, details, self.size.width)))
        if row and details and details.rank == self.rank:
            stack, output = self.query_one("#stack"), self.query_one("#output")
            stack.query_one(Static).update(Group(*list_stack_lines(details, self.size.width - 1)))
            output.query_one(Static).update(Group(*list_output_lines(details)))
            self.call_after_refresh(output.scroll_end, animate=False)
        elif row:
            self.query_one("#stack").query_one(Static).update("")
            self.query_one("#output").query_one(Static).update("")
        self._show_lines()

    def _is_whole(self) -> bool:
        """Tell whether all widgets are there: in the end they go before the last message and the timer."""
        return len(self.query("#head, #table, #rank, #stack, #output, #footer")) == 6

    def _show_lines(self) -> None:
        """Show the lines above and below."""
        if not self._is_whole():
            return
        lines = list_job_lines(self.view, self.size.width)
        lines = lines[:1] if self.rank is not None else lines
        since = self._looking_since
        if since is not None and time.monotonic() - since > _LATE:
            late = shorten_age(time.monotonic() - since)
            lines.append(Text(f"the run directory has not answered for {late}"))
        if self.view.message:
            lines.append(Text(clean_text(self.view.message, 400)))
        self.query_one("#head", Static).update(Group(*lines))
        parts = ["paused"] if self.is_paused else []
        if self.rank is not None:
            parts += ["Esc back", "up, down other ranks", "t stack"]
        else:
            parts += [f"node {clean_text(self.host)}"] if self.host else []
            parts += [f"row {self.at + 1} of {len(self.shown.rows)}"] if self.shown.rows else []
            way = ", reversed" if self.order.reverse else ""
            parts += [f"by {self.order.title or 'slowest'}{way}", "s sort", "Enter open"]
            parts += ["Esc all nodes"] if self.host else []
        text = Text("  ".join([*parts, "p pause", "? help", "q quit"]), no_wrap=True, overflow="ellipsis")
        text.stylize("yellow" if self.is_paused else "dim")
        self.query_one("#footer", Static).update(text)

    def _show_table(self) -> None:
        """Show the rows around the cursor that there is room for."""
        table = self.query_one("#table", Static)
        room = max(1, (table.size.height or self.size.height) - 1)
        last = max(0, len(self.shown.rows) - room)
        self._top = min(max(self._top, self.at - room + 1), self.at, last)
        rows = self.shown.rows[self._top : self._top + room]
        chosen = self.shown.rows[self.at] if rows else None
        table.update(self.shown.render(self.size.width, rows, chosen))

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    # What keys do

    def action_interrupt(self) -> None:
        self.exit(signal.SIGINT)

    def action_help(self) -> None:
        self.push_screen(_Help())

    def action_pause(self) -> None:
        self.is_paused = not self.is_paused
        self._hurry.set()
        self._show_lines()

    def action_stack(self) -> None:
        self._open(self.rank)

    def _open(self, rank: int | None) -> None:
        """Open a rank, and have its stack taken, or close it."""
        self.rank = rank
        self._asks_stack = rank is not None
        self._hurry.set()
        self.show()

    def action_open(self) -> None:
        if self.rank is not None or not self.shown.rows:
            return
        row = self.shown.rows[self.at]
        if not row.is_node:
            self.chosen = row.key
            self._open(row.ranks[0].rank)
        elif row.ranks and self.host is None:
            self.host, self.chosen = row.key[0], None
            self.show()

    def action_leave(self) -> None:
        if self.rank is None:
            self.chosen = (self.host, None) if self.host is not None else None
            self.host = None
        self._open(None)

    def action_move(self, rows: int) -> None:
        """Move the cursor; if a rank is open, to the next one."""
        last = len(self.shown.rows) - 1
        if last < 0:
            return
        self.at = max(0, min(self.at + rows, last))
        row = self.shown.rows[self.at]
        self.chosen = row.key
        if self.rank is not None and row.ranks:
            self._open(row.ranks[0].rank)
        else:
            self._show_table()
            self._show_lines()

    def action_page(self, pages: int) -> None:
        if self.rank is None:
            self.action_move(pages * max(1, self.query_one("#table").size.height - 1))
        else:
            self.query_one("#stack").scroll_relative(y=pages * 5, animate=False)

    def action_reverse(self) -> None:
        self._sort(replace(self.order, reverse=not self.order.reverse))

    def action_sort_next(self, columns: int) -> None:
        titles = [SLOWEST, *(column.title for column in self.shown.columns)]
        at = titles.index(self.order.title) if self.order.title in titles else 0
        self._sort(Order(titles[(at + columns) % len(titles)]))

    def action_sort(self, title: str) -> None:
        """Sort by a column, and the other way round if it is that already."""
        if any(column.title == title for column in self.shown.columns):
            self._sort(Order(title, title == self.order.title and not self.order.reverse))

    def _sort(self, order: Order) -> None:
        self.order = order
        self.show()
