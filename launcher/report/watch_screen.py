"""What `launch watch` shows: the table, one node, one rank or the help, as the keys have chosen it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.console import Group, RenderableType
from rich.text import Text

from launcher.report.rank_screen import cut, render_help, render_rank
from launcher.report.tables import shorten_age
from launcher.report.watch_columns import COLUMNS, Column, Row
from launcher.report.watch_lines import render_lines
from launcher.report.watch_table import (
    SLOWEST,
    Marks,
    Order,
    choose_watch_columns,
    find_marks,
    make_rows,
    render_rows,
    shows_nodes,
    sort_rows,
)
from launcher.runs.run_status import RunStatus
from launcher.text import clean_text
from launcher.watch.rank_details import RankDetails
from launcher.watch.run_reader import RunSnapshot

KEYS = (
    ("up, down", "choose a row; Page Up, Page Down, Home, End"),
    ("Enter", "open it: a node's ranks, or a rank with its stack and last lines"),
    ("Esc", "back"),
    ("s, left, right", "sort by the next or the former column, or by its letter; first: the slowest"),
    ("r", "the other way round"),
    ("t", "take the stack of the rank that is open again"),
    ("p", "stop the picture, and go on"),
    ("q", "quit; the job goes on"),
)
LETTERS = {column.letter: column.title for column in COLUMNS}
ENDLESS = 1000
"""Lines of what is printed once."""
LATE = 5.0
"""Seconds after which a look at the run directory that is not over is told of."""
RowKey = tuple[str, int | None]
"""A node, and its rank if the row is one's."""


@dataclass(frozen=True, slots=True)
class View:
    """What is known of the run at one moment."""

    run: RunStatus
    snapshot: RunSnapshot
    details: RankDetails | None = None
    """Of the rank that is open."""
    message: str = ""
    """Why there is no table, or what else is to be said."""


@dataclass(slots=True)
class WatchScreen:
    """Where the user is, and what there is to see; keys change it."""

    view: View
    order: Order = field(default_factory=Order)
    host: str | None = None
    """The node whose ranks are shown; None is all of the job."""
    rank: int | None = None
    """The rank that is open."""
    shows_help: bool = False
    is_paused: bool = False
    asked: int = 0
    """How often a stack was asked for."""
    chosen: RowKey | None = None
    """The row that the cursor is on; None is the first, whichever that is."""
    at: int = 0
    """Where that row was."""
    top: int = 0
    """The first row that is on the screen."""
    page: int = 10
    """Rows that fit."""
    rows: list[Row] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)

    def __post_init__(self) -> None:
        """Sort what there is."""
        self.update(self.view)

    def update(self, view: View) -> None:
        """Take what is known now."""
        if not self.is_paused or self.view.details != view.details:
            self.view = replace(self.view, details=view.details) if self.is_paused else view
        self.arrange()

    def arrange(self) -> None:
        """Sort the rows, and find the one that the cursor is on again."""
        snapshot = self.view.snapshot
        self.marks = find_marks(snapshot)
        nodes = [view for view in snapshot.nodes if self.host in (None, view.report.host)]
        by_node = self.host is None and shows_nodes(snapshot.nodes)
        self.rows = sort_rows(make_rows(nodes, self.marks, by_node=by_node), self.order, self.marks)
        self.columns = choose_watch_columns(self.rows, self.order, by_node=by_node)
        keys = [find_key(row) for row in self.rows]
        if self.chosen is None:
            self.at = 0
        elif self.chosen in keys:
            self.at = keys.index(self.chosen)
        self.at = max(0, min(self.at, len(keys) - 1))

    def press(self, key: str) -> bool:
        """Do what a key asks; False to quit."""
        if key == "q":
            return False
        if key == "?" or self.shows_help:
            self.shows_help = not self.shows_help
        elif key == "t":
            self.asked += 1
        elif key == "p":
            self.is_paused = not self.is_paused
        elif key == "escape":
            self.go_back()
        elif key == "enter":
            self.open_row()
        else:
            self.move(key)
            self.sort(key)
        return True

    def go_back(self) -> None:
        """Close the rank, or else the node."""
        if self.rank is not None:
            self.rank = None
        elif self.host is not None:
            self.chosen, self.host = (self.host, None), None
        else:
            self.chosen = None
        self.arrange()

    def open_row(self) -> None:
        """Open the node or the rank that the cursor is on."""
        if self.rank is not None or not self.rows:
            return
        row = self.rows[self.at]
        if not row.is_node:
            self.rank = row.ranks[0].rank
            self.chosen = find_key(row)
        elif row.ranks and self.host is None:
            self.host, self.chosen, self.top = row.host, None, 0
            self.arrange()

    def move(self, key: str) -> None:
        """Move the cursor; if a rank is open, to the next one."""
        last = len(self.rows) - 1
        moves = {
            "up": self.at - 1,
            "k": self.at - 1,
            "down": self.at + 1,
            "j": self.at + 1,
            "page-up": self.at - self.page,
            "page-down": self.at + self.page,
            "home": 0,
            "end": last,
        }
        if key not in moves or last < 0:
            return
        self.at = max(0, min(moves[key], last))
        self.chosen = find_key(self.rows[self.at])
        if self.rank is not None and self.rows[self.at].ranks:
            self.rank = self.rows[self.at].ranks[0].rank

    def sort(self, key: str) -> None:
        """Sort by another column, or the other way round."""
        titles = [SLOWEST, *(column.title for column in self.columns)]
        at = titles.index(self.order.title) if self.order.title in titles else 0
        if key in ("s", "right"):
            self.order = Order(titles[(at + 1) % len(titles)])
        elif key == "left":
            self.order = Order(titles[at - 1])
        elif key == "r":
            self.order = replace(self.order, reverse=not self.order.reverse)
        elif LETTERS.get(key) in titles:
            title = LETTERS[key]
            self.order = Order(title, title == self.order.title and not self.order.reverse)
        else:
            return
        self.arrange()

    def render(self, width: int, height: int, waits: float = 0.0) -> RenderableType:
        """Return the screen; `waits` are the seconds for which the run directory has not answered."""
        if self.shows_help:
            return Group(*render_help(width, KEYS)[: height - 1], self.render_footer(width))
        lines = render_lines(self.view.run, self.view.snapshot, width)
        if self.rank is not None and (row := self.find_rank()):
            said = [cut(clean_text(self.view.message, 400), width)] if self.view.message else [Text()]
            body = render_rank(row, self.view.details, width, height - 3)
            return Group(lines[0], *said, *body, *pad(body, height - 3), self.render_footer(width))
        if waits > LATE:
            lines.append(cut(f"the run directory has not answered for {shorten_age(waits)}", width))
        if self.view.message:
            lines.append(cut(clean_text(self.view.message, 400), width))
        if not self.rows:
            return Group(*lines, *pad(lines, height - 1), self.render_footer(width))
        lines = lines[: max(1, height - 7)]
        self.page = max(1, height - len(lines) - 3)
        self.top = choose_top(self.top, self.at, self.page, len(self.rows))
        shown = self.rows[self.top : self.top + self.page]
        table = render_rows(shown, self.columns, self.order, self.marks, width, chosen=self.at - self.top)
        blank = [Text()] * (self.page - len(shown))
        return Group(*lines, Text(), table, *blank, self.render_footer(width))

    def render_whole(self, width: int) -> RenderableType:
        """Return all of the table, or of the rank, to be printed once."""
        lines = render_lines(self.view.run, self.view.snapshot, width)
        if self.rank is not None and (row := self.find_rank()):
            return Group(lines[0], Text(), *render_rank(row, self.view.details, width, ENDLESS))
        lines += [cut(clean_text(self.view.message, 400), width)] if self.view.message else []
        if not self.rows:
            return Group(*lines)
        table = render_rows(self.rows, self.columns, self.order, self.marks, width, chosen=None)
        return Group(*lines, Text(), table)

    def find_rank(self) -> Row | None:
        """Return the row of the rank that is open."""
        for view in self.view.snapshot.nodes:
            for rank in view.report.ranks:
                if rank.rank == self.rank:
                    return Row(view, (rank,))
        return None

    def render_footer(self, width: int) -> Text:
        """Return the last line: where one is, and the keys."""
        parts = ["paused"] if self.is_paused else []
        parts += [f"node {clean_text(self.host)}"] if self.host and self.rank is None else []
        if self.shows_help:
            parts.append("any key: back")
        elif self.rank is not None:
            parts += ["Esc back", "up, down other ranks", "t stack"]
        else:
            parts += [f"rows {self.top + 1}-{min(self.top + self.page, len(self.rows))} of {len(self.rows)}"
                      ] if len(self.rows) > self.page else []  # fmt: skip
            way = ", reversed" if self.order.reverse else ""
            parts += [f"by {self.order.title or 'slowest'}{way}", "s sort", "Enter open"]
            parts += ["Esc all nodes"] if self.host else []
        footer = cut("  ".join([*parts, "p pause", "? help", "q quit"]), width)
        footer.stylize("dim" if not self.is_paused else "yellow")
        return footer


def find_key(row: Row) -> RowKey:
    """Return what a row is known by."""
    return row.host, None if row.is_node else row.ranks[0].rank


def choose_top(top: int, at: int, page: int, count: int) -> int:
    """Return the first row to show so that the cursor's is among them."""
    top = min(top, at, max(0, count - page))
    return max(top, at - page + 1)


def pad(lines: Sequence[RenderableType], height: int) -> list[Text]:
    """Return empty lines that fill a screen."""
    return [Text()] * max(0, height - len(lines))
