"""What `launch tune` shows: each trial as it ends, then the table and a plot of them."""

import contextlib
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.text import count_things, format_size
from launcher.tune.search import UNITS, Trial

BAR = 40
"""Columns of the longest bar."""
FULL, WAITING = ("█", "#"), ("░", ".")
"""Marks of a bar, for consoles with block characters and without."""


def announce_trial(console: Console, text: str) -> contextlib.AbstractContextManager[object]:
    """Show what is being tried: only on a terminal, where the line is removed again."""
    if not console.is_terminal:
        return contextlib.nullcontext()
    return console.status(Text(text), spinner="dots" if console.encoding.startswith("utf") else "line")


def describe_trial(trial: Trial) -> str:
    """Return a trial in a line."""
    if trial.failure:
        return f"{count_things(trial.workers, 'worker')}: {trial.failure}"
    what = f"{format_rate(trial.rate)} {UNITS[trial.unit]}/s, {trial.wait:.0%} of the time waiting for data"
    return f"{count_things(trial.workers, 'worker')}: {what} ({trial.steps} {UNITS[trial.unit]})"


def format_rate(rate: float) -> str:
    """Return a throughput with three digits."""
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def tabulate(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Return the rows of the table with its head, in the order of the workers."""
    ordered = sorted(trials, key=lambda trial: trial.workers)
    unit = UNITS[next((trial for trial in ordered if trial.rate), ordered[0]).unit]
    rows: list[tuple[str, ...]] = [("workers", f"{unit}/s", "waiting for data", "memory", unit)]
    for trial in ordered:
        if trial.failure:
            rows.append((str(trial.workers), "-", "-", "-", "-"))
            continue
        memory = format_size(trial.memory_kib) if trial.memory_kib else "unknown"
        rows.append(
            (str(trial.workers), format_rate(trial.rate), f"{trial.wait:.0%}", memory, str(trial.steps))
        )
    return rows


def print_trials(console: Console, trials: Sequence[Trial], chosen: Trial | None) -> None:
    """Print the table of the trials, and a plot: bars as long as throughput, and what waiting costs."""
    print_rows(console, tabulate(trials), {str(chosen.workers): "chosen"} if chosen else {})
    measured = sorted((trial for trial in trials if trial.rate), key=lambda trial: trial.workers)
    if not measured:
        return
    console.print()
    for trial in measured:
        console.print(draw_rate(trial, max(each.rate for each in measured), console.encoding))
    full, waiting = choose_marks(console.encoding)
    console.print(f"{full} {UNITS[measured[0].unit]}/s  {waiting} what waiting for data costs of the best")


def print_rows(console: Console, rows: Sequence[Sequence[str]], remarks: Mapping[str, str]) -> None:
    """Print a table with its head; a remark stands behind the row that begins with its key."""
    head, *body = rows
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    for row in body:
        table.add_row(*row, Text(remarks.get(row[0], "")))
    console.print(table)


def draw_rate(trial: Trial, best: float, encoding: str) -> Text:
    """Return the bar of a trial; the part to the best that its waiting explains has another mark."""
    full, waiting = choose_marks(encoding)
    length = round(BAR * trial.rate / best)
    possible = min(best, trial.rate / max(1 - trial.wait, 1e-3))
    lost = round(BAR * possible / best) - length
    text = Text(f"{trial.workers:>7}  ")
    text.append(full * length, style="green").append(waiting * lost, style="yellow")
    return text.append(f" {format_rate(trial.rate)}")


def choose_marks(encoding: str) -> tuple[str, str]:
    """Return the marks of throughput and of waiting that a console can show."""
    plain = not encoding.startswith("utf")
    return FULL[plain], WAITING[plain]
