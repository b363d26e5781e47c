"""What tables on a terminal have in common: columns that give way to its width, and short figures."""

from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from launcher.text import escape_text

GAP = 2
"""Columns between two columns of a table."""


def make_table(
    titles: Collection[str],
    *,
    right: Collection[str] = (),
    wrapped: Collection[str] = (),
    widths: Mapping[str, int] | None = None,
    gap: int = GAP,
) -> Table:
    """Return a table without lines; columns are cut at their width unless they are `wrapped`."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(
            title,
            justify="right" if title in right else "left",
            no_wrap=title not in wrapped,
            overflow="fold" if title in wrapped else "ellipsis",
            max_width=widths.get(title) if widths else None,
        )
    return table


def fit_columns(
    sizes: Mapping[str, int], drops: Sequence[str], width: int, least: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the columns that fit a width, with theirs; `drops` are left out one after the other.

    Columns in `least` are narrowed down to that before others go, the last of them first.
    """
    fitted, least = dict(sizes), least or {}
    for title in drops:
        needed = sum(min(size, least.get(name, size)) for name, size in fitted.items())
        if needed + GAP * (len(fitted) - 1) <= width:
            break
        fitted.pop(title, None)
    flexible = [name for name in least if name in fitted]
    room = width - GAP * (len(fitted) - 1) - sum(fitted[name] for name in fitted if name not in least)
    for at, name in enumerate(flexible):
        kept = sum(min(fitted[other], least[other]) for other in flexible[at + 1 :])
        fitted[name] = max(1, min(fitted[name], room - kept))
        room -= fitted[name]
    return fitted


def measure_columns(rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Return the columns of rows that are not all empty, with the widths that they would like."""
    return {
        title: max(len(title), *(len(row[title]) for row in rows))
        for title in rows[0]
        if any(row[title] for row in rows)
    }


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a text; a file or a pipe gets it on one line."""
    wrap = not console.is_terminal
    console.print(escape_text(text), style=style, markup=False, highlight=False, soft_wrap=wrap)


def shorten_seconds(seconds: float) -> str:
    """Return a duration in six characters at most: `0.8ms`, `123ms`, `12.3s`, `3m20s`, `2h05m`, `3d`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f}ms"
    return f"{seconds:.{2 if seconds < 9.95 else 1}f}s" if seconds < 99.95 else shorten_age(seconds)


def shorten_age(seconds: float) -> str:
    """Return how long ago something was, in six characters at most: `0s`, `45s`, `3m20s`, `2h05m`, `3d`."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def shorten_bytes(size: float) -> str:
    """Return bytes with a binary prefix in at most five characters: `512`, `1.5K`, `377G`."""
    for unit in ("", "K", "M", "G", "T"):
        if size < 999.5:
            return f"{size:.3g}{unit}" if size < 9.95 else f"{size:.0f}{unit}"
        size /= 1024
    return f"{size:.0f}P"
