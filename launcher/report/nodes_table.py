"""Nodes over past runs, for people: a row for each, and the events of those that are named."""

import time
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report.short_values import shorten_age
from launcher.runs.node_history import NodeEvent, NodeHistory
from launcher.text import clean_text

COUNTS = ("runs", "sick", "lost", "hang", "slow", "warning")
TITLES = {"hang": "hangs", "warning": "warnings"}
COLOURS = {"sick": "bold red", "lost": "bold red", "hang": "red", "slow": "yellow", "warning": "yellow"}
GAP = 2
LONGEST = 300
"""Characters of an event's text: a manifest may be somebody else's."""


def print_nodes(console: Console, nodes: Sequence[NodeHistory], *, detailed: bool) -> None:
    """Print a row for each node; `detailed` adds the events of each that had any."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column("node", no_wrap=True)
    for name in COUNTS:
        table.add_column(TITLES.get(name, name), justify="right", no_wrap=True)
    table.add_column("seen", justify="right", no_wrap=True)
    table.add_column("last trouble", overflow="ellipsis", no_wrap=True, ratio=1)
    now = time.time()
    for node in nodes:
        seen = tell_age(node.last_seen, now)
        table.add_row(clean_text(node.host), *count_cells(node), seen, tell_last(node))
    console.print(table)
    for node in nodes if detailed else ():
        print_events(console, node)


def count_cells(node: NodeHistory) -> list[Text]:
    """Return the counts, with a dash for none."""
    values = [(int(getattr(node, name)), COLOURS.get(name, "")) for name in COUNTS]
    return [Text(str(value or "-"), colour if value else "dim") for value, colour in values]


def tell_age(moment: float | None, now: float) -> str:
    """Return how long ago something was: `3h`; a dash if that is not known."""
    return "-" if moment is None else shorten_age(max(now - moment, 0.0))


def tell_last(node: NodeHistory) -> Text:
    """Return the newest event in a line."""
    if not node.events:
        return Text("-", "dim")
    return Text(f"{node.events[0].kind}: {clean_text(node.events[0].text, LONGEST)}")


def print_events(console: Console, node: NodeHistory) -> None:
    """Print what befell a node, the newest first."""
    if not node.events:
        return
    grid = Table.grid(padding=(0, GAP, 0, 0))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for event in node.events:
        grid.add_row(
            date_event(event),
            clean_text(event.run, LONGEST),
            Text(event.kind, COLOURS.get(event.kind, "")),
            Text(clean_text(event.text, LONGEST)),
        )
    console.print()
    console.print(Text(clean_text(node.host), "bold"))
    console.print(grid)


def date_event(event: NodeEvent) -> str:
    """Return when an event was, in local time; `?` for no time, or one that no calendar has here."""
    try:
        return "?" if event.time is None else f"{datetime.fromtimestamp(event.time):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "?"
