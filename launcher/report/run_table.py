"""Runs for people: a row for each, and one in detail."""

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report.preflight_lines import describe_preflight
from launcher.report.short_values import shorten_age
from launcher.runs.run_status import RunStatus
from launcher.text import clean_text, describe_time, quote_word

COLOURS = {
    "running": "green",
    "queued": "cyan",
    "succeeded": "",
    "failed": "bold red",
    "stopped": "yellow",
    "lost": "bold red",
    "unknown": "red",
}
FLEXIBLE = ("reason", "last line")
"""Columns that share what the others leave."""
DROPS = ("last line", "restarts", "last step", "time", "job", "nodes", "reason", "step")
"""Columns in the order in which they are left out if the console is narrow."""
RIGHT = ("step", "restarts", "last step", "time")
GAP = 2
LEAST = 16
"""Characters below which a flexible column is not worth its room."""
LONGEST = 400
LONG_LIST = 20
"""Characters of a list of nodes in a row."""


def print_runs(console: Console, runs: Sequence[RunStatus]) -> None:
    """Print a row for each run; columns are left out and texts cut if the console is narrow."""
    rows = [make_run_row(run) for run in runs]
    widths = choose_widths(rows, console.width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for title, width in widths.items():
        table.add_column(
            title,
            justify="right" if title in RIGHT else "left",
            no_wrap=True,
            overflow="ellipsis" if title in FLEXIBLE else "fold",
            max_width=width,
        )
    for run, row in zip(runs, rows, strict=True):
        style = {"state": COLOURS["failed" if is_hanging(run) else run.state], "last line": "dim"}
        table.add_row(*(Text(row[title] or "-", style.get(title, "")) for title in widths))
    console.print(table)


def make_run_row(run: RunStatus) -> dict[str, str]:
    """Return the cells of one run by their titles."""
    return {
        "run": clean_text(run.run, LONGEST),
        "job": run.job_id or "",
        "state": f"{run.state} (hanging)" if is_hanging(run) else run.state,
        "nodes": describe_nodes(run),
        "step": format_step(run),
        "restarts": str(run.restarts or ""),
        "last step": format_step_age(run),
        "time": "" if run.seconds is None else describe_time(run.seconds),
        "reason": clean_text(run.reason, LONGEST),
        "last line": clean_text(run.last_line, LONGEST),
    }


def format_step_age(run: RunStatus) -> str:
    """How long ago a rank of a run that goes on made a step: `4s`; empty if nothing is known of it."""
    age = run.watch.get("step_age") if run.watch and run.state == "running" else None
    return shorten_age(age) if isinstance(age, float) else ""


def is_hanging(run: RunStatus) -> bool:
    """Tell whether a run's ranks hang, as far as watching knows."""
    return bool(run.watch and run.watch.get("state") == "hanging")


def describe_nodes(run: RunStatus) -> str:
    """How many nodes, and which if that is short: `4 n[0-3]`."""
    if not run.nodes:
        return ""
    short = run.nodelist and len(run.nodelist) <= LONG_LIST
    return f"{run.nodes} {clean_text(run.nodelist)}" if short else str(run.nodes)


def format_step(run: RunStatus) -> str:
    """The step that rank 0 has come to: `120/400`."""
    if run.step is None:
        return ""
    return f"{run.step}/{run.total}" if run.total else str(run.step)


def choose_widths(rows: Sequence[dict[str, str]], width: int) -> dict[str, int]:
    """Choose the columns for a console's width, and how wide each may be; empty ones are left out."""
    sizes = {
        title: max(len(title), *(len(row[title]) for row in rows))
        for title in rows[0]
        if any(row[title] for row in rows)
    }
    for title in DROPS:
        needed = sum(min(size, LEAST) if name in FLEXIBLE else size for name, size in sizes.items())
        if needed + GAP * (len(sizes) - 1) <= width:
            break
        sizes.pop(title, None)
    left = width - GAP * (len(sizes) - 1) - sum(s for name, s in sizes.items() if name not in FLEXIBLE)
    # The reason comes first: it says what to do.
    for title in FLEXIBLE:
        if title in sizes:
            others = LEAST if title == "reason" and "last line" in sizes else 0
            sizes[title] = max(1, min(sizes[title], left - others))
            left -= sizes[title]
    return sizes


def print_details(console: Console, run: RunStatus) -> None:
    """Print all there is to know of one run, below its row."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in list_details(run):
        grid.add_row(Text(label, "bold"), Text(text))
    console.print()
    console.print(grid)


def list_details(run: RunStatus) -> Iterator[tuple[str, str]]:
    """Give the lines of one run: what it is about, and what there is to say."""
    yield "directory", clean_text(run.path, LONGEST)
    yield "command", clean_text(shlex.join(run.command), LONGEST)
    if run.job_id:
        where = f" in {run.partition}" if run.partition else ""
        yield "job", clean_text(f"{run.job_id}{where}" + (f", {run.slurm_state}" if run.slurm_state else ""))
    if run.nodes:
        yield "nodes", f"{run.nodes}: {clean_text(run.nodelist, LONGEST)}" if run.nodelist else str(run.nodes)
    yield from list_spares(run)
    if run.reason:
        yield "reason", clean_text(run.reason, LONGEST)
    if run.expected_start:
        yield "expected start", shorten_time(run.expected_start)
    if not run.attempts:
        yield "submitted", shorten_time(run.started)
    for number, attempt in enumerate(run.attempts):
        # A manifest that nobody completed says that its attempt goes on.
        state = run.state if attempt.state == "running" else attempt.state
        until = shorten_time(attempt.ended) or ("now" if state == "running" else "?")
        words = f"{state}: {attempt.reason}" if attempt.reason else state
        times = f"{shorten_time(attempt.started)} to {until}"
        yield "" if number else "attempts", f"{times}  {clean_text(words, LONGEST)}"
    yield from list_failure(run)
    if run.preflight:
        yield "preflight", clean_text(describe_preflight(run.preflight), LONGEST)
    if run.watch and run.state == "running":
        yield "watch", f"launch watch {quote_word(run.path)}"
    if run.last_line:
        yield "last line", clean_text(run.last_line, LONGEST)
    yield "output", f"launch logs {quote_word(run.path)}"


def list_spares(run: RunStatus) -> Iterator[tuple[str, str]]:
    """Give the nodes that wait, and those that have taken the places of others."""
    if run.spares and run.is_live:
        yield "spare nodes", f"{len(run.spares)}: {clean_text(','.join(run.spares), LONGEST)}"
    for number, one in enumerate(run.replacements):
        when, evidence = shorten_time(str(one.get("time"))), one.get("evidence")
        words = f"{when}  {one.get('spare')} in the place of {one.get('lost')}: {evidence}"
        yield "" if number else "replaced nodes", clean_text(words, LONGEST)


def shorten_time(text: str) -> str:
    """A time of the manifest's to the second: `2026-08-01 12:00:00`; as it is if it is none."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return clean_text(text)


def list_failure(run: RunStatus) -> Iterator[tuple[str, str]]:
    """Give who failed first, and its last lines."""
    failure = run.first_failure
    if not failure:
        return
    who = f"rank {failure.get('rank')} on {failure.get('host')} (local rank {failure.get('local_rank')})"
    yield "first failure", clean_text(f"{who} {failure.get('reason')}", LONGEST)
    lines = failure.get("last_lines")
    for line in lines if isinstance(lines, list) else ():
        yield "", f"| {clean_text(str(line), LONGEST)}"
