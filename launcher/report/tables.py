"""Consoles and tables: columns that give way to its width, short figures, and those of runs and nodes."""

import errno
import os
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.text import clean_text, describe_time, escape_text, format_size, quote_word

if TYPE_CHECKING:
    from launcher.runs.node_history import NodeEvent, NodeHistory
    from launcher.runs.run_status import RunStatus

GAP = 2
"""Columns between two columns of a table."""
STATE_COLOURS = {
    "running": "green",
    "queued": "cyan",
    "succeeded": "",
    "failed": "bold red",
    "stopped": "yellow",
    "lost": "bold red",
    "unknown": "red",
}
_RUN_DROPS = ("last line", "restarts", "last step", "time", "job", "nodes", "reason", "step")
"""Columns in the order in which they are left out if the console is narrow."""
_LEAST = {"reason": 16, "last line": 16}
"""Columns that share what the others leave, with their least; the reason says what to do, and is first."""
_LONGEST = 400
"""Characters of a text; what a damaged file holds may be longer."""
_LONG_LIST = 20
"""Characters of a list of nodes in a row."""
_TROUBLES = ("runs", "sick", "lost", "hang", "slow", "warning")
_TROUBLE_COLOURS = {
    **dict.fromkeys(("sick", "lost"), "bold red"),
    "hang": "red",
    **dict.fromkeys(("slow", "warning"), "yellow"),
}


class PipeAwareConsole(Console):
    """A console that raises BrokenPipeError when its reader has left, while rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich in place of the error."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_console(*, stderr: bool = True) -> Console:
    """Return a console; if it is no terminal, one so wide that tables do not wrap."""
    console = PipeAwareConsole(stderr=stderr, highlight=False)
    return console if console.is_terminal else PipeAwareConsole(stderr=stderr, highlight=False, width=160)


@contextmanager
def show_spinner(text: str) -> Iterator[None]:
    """Show what goes on, on a terminal alone."""
    console = make_console()
    spinner = "dots" if console.encoding.startswith("utf") else "line"
    with console.status(Text(text), spinner=spinner) if console.is_terminal else nullcontext():
        yield


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
    """Return bytes with a binary prefix in at most six characters: `1.5K`, `32.4M`, `377G`."""
    return format_size(size / 1024).removesuffix("iB").replace(" ", "")


# launch status and launch nodes


def print_runs(console: Console, runs: Sequence["RunStatus"]) -> None:
    """Print a row for each run; columns are left out and texts cut if the console is narrow."""
    rows, styles = [], []
    for run in runs:
        hangs = bool(run.watch and run.watch.get("state") == "hanging")
        age = run.watch.get("step_age") if run.watch and run.state == "running" else None
        short = run.nodelist and len(run.nodelist) <= _LONG_LIST
        step = "" if run.step is None else f"{run.step}/{run.total}" if run.total else str(run.step)
        rows.append(
            {
                "run": clean_text(run.run, _LONGEST),
                "job": run.job_id or "",
                "state": f"{run.state} (hanging)" if hangs else run.state,
                "nodes": f"{run.nodes} {clean_text(run.nodelist)}" if short else str(run.nodes or ""),
                "step": step,
                "restarts": str(run.restarts or ""),
                "last step": shorten_age(age) if isinstance(age, float) else "",
                "time": "" if run.seconds is None else describe_time(run.seconds),
                "reason": clean_text(run.reason, _LONGEST),
                "last line": clean_text(run.last_line, _LONGEST),
            }
        )
        styles.append({"state": STATE_COLOURS["failed" if hangs else run.state], "last line": "dim"})
    widths = fit_columns(measure_columns(rows), _RUN_DROPS, console.width, _LEAST)
    right = ("step", "restarts", "last step", "time")
    table = make_table(widths, right=right, wrapped={*widths} - {*_LEAST}, widths=widths)
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*(Text(row[title] or "-", style.get(title, "")) for title in widths))
    console.print(table)


def print_details(console: Console, run: "RunStatus") -> None:
    """Print all there is to know of one run, below its row."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, *texts in _list_details(run):
        grid.add_row(Text(label, "bold"), Text("  ".join(clean_text(text, _LONGEST) for text in texts)))
    console.print()
    console.print(grid)


def _list_details(run: "RunStatus") -> Iterator[tuple[str, ...]]:
    """Give the lines of one run: what it is about, and what there is to say."""
    yield "directory", run.path
    yield "command", shlex.join(run.command)
    if run.job_id:
        where = f" in {run.partition}" if run.partition else ""
        yield "job", f"{run.job_id}{where}" + (f", {run.slurm_state}" if run.slurm_state else "")
    if run.nodes:
        yield "nodes", f"{run.nodes}: {run.nodelist}" if run.nodelist else str(run.nodes)
    if run.spares and run.is_live:
        yield "spare nodes", f"{len(run.spares)}: {','.join(run.spares)}"
    for number, one in enumerate(run.replacements):
        words = f"{one.get('spare')} in the place of {one.get('lost')}: {one.get('evidence')}"
        yield "" if number else "replaced nodes", shorten_time(str(one.get("time"))), words
    if run.reason:
        yield "reason", run.reason
    if run.expected_start:
        yield "expected start", shorten_time(run.expected_start)
    if not run.attempts:
        yield "submitted", shorten_time(run.started)
    for number, attempt in enumerate(run.attempts):
        # A manifest that nobody completed says that its attempt goes on.
        state = run.state if attempt.state == "running" else attempt.state
        until = shorten_time(attempt.ended) or ("now" if state == "running" else "?")
        words = f"{state}: {attempt.reason}" if attempt.reason else state
        yield "" if number else "attempts", f"{shorten_time(attempt.started)} to {until}", words
    if failure := run.first_failure:
        who = f"rank {failure.rank} on {failure.host} (local rank {failure.local_rank})"
        yield "first failure", f"{who} {failure.reason}"
        for line in failure.last_lines:
            yield "", f"| {line}"
    checked = run.preflight or {}
    lines, problem = checked.get("lines"), checked.get("problem")
    why = [f"the nodes were not checked: {problem}"] if problem else []
    for number, line in enumerate(lines if isinstance(lines, list) else why):
        yield "" if number else "preflight", str(line)
    if run.watch and run.state == "running":
        yield "watch", f"launch watch {quote_word(run.path)}"
    if run.last_line:
        yield "last line", run.last_line
    yield "output", f"launch logs {quote_word(run.path)}"


def shorten_time(text: str) -> str:
    """Return a time of the manifest's to the second: `2026-08-01 12:00:00`; as it is if it is none."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return clean_text(text)


def print_nodes(console: Console, nodes: Sequence["NodeHistory"], *, detailed: bool) -> None:
    """Print a row for each node; `detailed` adds the events of each that had any, the newest first."""
    titles = [{"hang": "hangs", "warning": "warnings"}.get(name, name) for name in _TROUBLES]
    trouble = "last trouble"  # the column that is narrowed: its texts are cut, not wrapped
    table = make_table(("node", *titles, "seen", trouble), right=(*titles, "seen"), wrapped=[trouble])
    now = time.time()
    for node in nodes:
        counts = [(int(getattr(node, name)), _TROUBLE_COLOURS.get(name, "")) for name in _TROUBLES]
        cells = [Text(str(value or "-"), colour if value else "dim") for value, colour in counts]
        seen = "-" if node.last_seen is None else shorten_age(max(now - node.last_seen, 0.0))
        last = Text("-", "dim")
        if node.events:
            words = f"{node.events[0].kind}: {clean_text(node.events[0].text, _LONGEST)}"
            last = Text(words, no_wrap=True, overflow="ellipsis")
        table.add_row(clean_text(node.host), *cells, seen, last)
    console.print(table)
    for node in nodes if detailed else ():
        if not node.events:
            continue
        grid = Table.grid(padding=(0, GAP, 0, 0))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for event in node.events:
            kind = Text(event.kind, _TROUBLE_COLOURS.get(event.kind, ""))
            run, text = clean_text(event.run, _LONGEST), Text(clean_text(event.text, _LONGEST))
            grid.add_row(_date_event(event), run, kind, text)
        console.print()
        console.print(Text(clean_text(node.host), "bold"))
        console.print(grid)


def _date_event(event: "NodeEvent") -> str:
    """Return when an event was, in local time; `?` for no time, or one that no calendar has here."""
    try:
        return "?" if event.time is None else f"{datetime.fromtimestamp(event.time):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "?"
