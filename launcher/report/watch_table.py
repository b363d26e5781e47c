"""The table of `launch watch`: a row for each rank or node, the slowest first, as many columns as fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table
from rich.text import Text

from launcher.report.watch_columns import (
    ALARM,
    COLUMNS,
    WARN,
    Cell,
    Column,
    Row,
    measure_own_time,
)
from launcher.watch.run_reader import NodeView, RunSnapshot
from launcher.watch.watch_model import RankState

MOST_RANKS = 32
"""Ranks of a job from which on a row is a node."""
NEWEST = 3
"""Stragglers that are marked, as they are those that are told of above the table."""
GAP = 2
BUCKETS = 20
"""Own times that differ by less than one part of so many of their median keep the order of ranks."""
DROPS = (
    *("power", "clock", "net", "temp", "cpu", "own", "p99", "sm", "rss", "delay", "mem", "held by"),
    *("gpu", "p50", "xid", "data", "step", "others", "last", "phase"),
)
"""Titles in the order in which columns are left out if the terminal is narrow."""
SLOWEST = ""
"""The order without a column's title: the slowest first."""


@dataclass(frozen=True, slots=True)
class Order:
    """How rows are sorted."""

    title: str = SLOWEST
    """A column's."""
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Marks:
    """Ranks that stand out."""

    culprits: frozenset[int] = frozenset()
    """Those that hold the others up, in a hang that goes on."""
    stragglers: frozenset[int] = frozenset()

    def find_style(self, row: Row) -> str:
        """Return how the row's rank is shown."""
        ranks = {rank.rank for rank in row.ranks}
        return ALARM if ranks & self.culprits else f"bold {WARN}" if ranks & self.stragglers else ""


def find_marks(snapshot: RunSnapshot) -> Marks:
    """Return the ranks that the job's state names."""
    job = snapshot.job
    if job is None:
        return Marks()
    hang = job.hangs[-1] if job.hangs and job.state == "hanging" else None
    culprits = frozenset(hang.verdict.ranks) if hang and hang.recovered is None else frozenset()
    return Marks(culprits, frozenset(one.rank for one in job.stragglers[-NEWEST:]))


def shows_nodes(nodes: Sequence[NodeView]) -> bool:
    """Tell whether a row is a node."""
    return len(nodes) > 1 and sum(len(view.report.ranks) for view in nodes) > MOST_RANKS


def make_rows(nodes: Sequence[NodeView], marks: Marks, *, by_node: bool) -> list[Row]:
    """Return a row for each node, or for each rank; a node without ranks has a row too."""
    rows = []
    for view in nodes:
        ranks = view.report.ranks
        if by_node or not ranks:
            rows.append(Row(view, tuple(sorted(ranks, key=lambda one: order_rank(one, marks))), is_node=True))
        else:
            rows += [Row(view, (rank,)) for rank in ranks]
    return rows


def order_rank(rank: RankState, marks: Marks) -> tuple[bool, bool, bool, float, int]:
    """Order the ranks of a node, the slowest first."""
    own = measure_own_time(rank) or 0.0
    return (
        rank.rank not in marks.culprits,
        not rank.exit_code,
        rank.rank not in marks.stragglers,
        -own,
        rank.rank,
    )


def sort_rows(rows: Sequence[Row], order: Order, marks: Marks) -> list[Row]:
    """Sort rows: the worst first, those without a value last, and equal ones by rank."""
    by_rank = sorted(rows, key=lambda row: min((rank.rank for rank in row.ranks), default=0))
    column = next((column for column in COLUMNS if column.title == order.title), None)
    if column is None:
        found = sort_slowest(by_rank, marks)
        return found[::-1] if order.reverse else found
    cells = [(column.read(row), row) for row in by_rank]
    with_value = [(cell.value, row) for cell, row in cells if cell is not None]
    downwards = column.ascending == order.reverse
    with_value.sort(key=lambda pair: pair[0], reverse=downwards)
    return [row for _, row in with_value] + [row for cell, row in cells if cell is None]


def sort_slowest(rows: Sequence[Row], marks: Marks) -> list[Row]:
    """Put first who holds the others up, who is gone, stragglers, and then those with the longest own time.

    Own times that hardly differ do not order rows, which would change places with each report.
    """
    own = [max((t for rank in row.ranks if (t := measure_own_time(rank)) is not None), default=None)
           for row in rows]  # fmt: skip
    usual = median([time for time in own if time is not None] or [0.0])

    def slowness(pair: tuple[Row, float | None]) -> tuple[bool, bool, bool, bool, int]:
        row, time = pair
        ranks = {rank.rank for rank in row.ranks}
        return (
            not ranks & marks.culprits,
            not row.view.is_silent,
            not any(rank.exit_code for rank in row.ranks),
            not ranks & marks.stragglers,
            -round((time or 0.0) / usual * BUCKETS) if usual else 0,
        )

    return [row for row, _ in sorted(zip(rows, own, strict=True), key=slowness)]


def choose_watch_columns(rows: Sequence[Row], order: Order, *, by_node: bool) -> list[Column]:
    """Return the columns that there are values for; of a job on one node without that node's name."""
    several = by_node or any(row.view.report.nodes > 1 for row in rows)
    found = [
        column
        for column in COLUMNS
        if (column.title == order.title or any(column.read(row) is not None for row in rows))
        and (column.title != "node" or several)
    ]
    # What a node's row is about comes first.
    return sorted(found, key=lambda column: column.title != "node") if by_node else found


def fit_columns(
    columns: Sequence[Column], cells: Sequence[Sequence[Cell | None]], width: int, order: Order
) -> dict[int, int]:
    """Choose which columns are shown, by their number, and how wide they are; the least important go."""
    sizes = {
        number: max(
            len(column.title) + (column.title == order.title),
            column.width,
            *(len(cell.text) for row in cells if (cell := row[number])),
        )
        for number, column in enumerate(columns)
    }
    titles = {column.title: number for number, column in enumerate(columns)}
    for title in (*(title for title in DROPS if title != order.title), order.title):
        if sum(sizes.values()) + GAP * (len(sizes) - 1) <= width:
            break
        sizes.pop(titles.get(title, -1), None)
    return sizes


def render_rows(
    rows: Sequence[Row],
    columns: Sequence[Column],
    order: Order,
    marks: Marks,
    width: int,
    *,
    chosen: int | None,
) -> Table:
    """Return the table of some rows; `chosen` is the number of the one that the cursor is on."""
    cells = [[column.read(row) for column in columns] for row in rows]
    sizes = fit_columns(columns, cells, width, order)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", expand=False)
    for number, size in sizes.items():
        column = columns[number]
        mark = ("^" if column.ascending != order.reverse else "v") if column.title == order.title else ""
        table.add_column(
            Text(column.title + mark, "underline" if mark else ""),
            justify="left" if column.is_text else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=size,
        )
    for at, (row, shown) in enumerate(zip(rows, cells, strict=True)):
        style = "reverse" if at == chosen else "dim" if row.view.is_silent else ""
        texts = [render_cell(columns[number], shown[number], row, marks) for number in sizes]
        table.add_row(*texts, style=style)
    return table


def render_cell(column: Column, cell: Cell | None, row: Row, marks: Marks) -> Text:
    """Return a cell; a row that stands out is marked by its rank."""
    if cell is None:
        return Text("-", "dim")
    style = marks.find_style(row) if column.title in ("rank", "node") else ""
    return Text(cell.text, style or cell.style)
