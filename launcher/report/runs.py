"""Runs and nodes for people: `launch status` and `launch nodes`."""

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report.tables import GAP, fit_columns, make_table, measure_columns, shorten_age
from launcher.runs.node_history import NodeEvent, NodeHistory
from launcher.runs.run_status import RunStatus
from launcher.text import clean_text, describe_time, quote_word

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


def print_runs(console: Console, runs: Sequence[RunStatus]) -> None:
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


def print_details(console: Console, run: RunStatus) -> None:
    """Print all there is to know of one run, below its row."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, *texts in _list_details(run):
        grid.add_row(Text(label, "bold"), Text("  ".join(clean_text(text, _LONGEST) for text in texts)))
    console.print()
    console.print(grid)


def _list_details(run: RunStatus) -> Iterator[tuple[str, ...]]:
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
        who = f"rank {failure.get('rank')} on {failure.get('host')} (local rank {failure.get('local_rank')})"
        yield "first failure", f"{who} {failure.get('reason')}"
        lines = failure.get("last_lines")
        for line in lines if isinstance(lines, list) else ():
            yield "", f"| {line}"
    if run.preflight:
        yield "preflight", describe_preflight(run.preflight)
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


def print_nodes(console: Console, nodes: Sequence[NodeHistory], *, detailed: bool) -> None:
    """Print a row for each node; `detailed` adds the events of each that had any, the newest first."""
    titles = [{"hang": "hangs", "warning": "warnings"}.get(name, name) for name in _TROUBLES]
    table = make_table(("node", *titles, "seen", "last trouble"), right=(*titles, "seen"))
    now = time.time()
    for node in nodes:
        counts = [(int(getattr(node, name)), _TROUBLE_COLOURS.get(name, "")) for name in _TROUBLES]
        cells = [Text(str(value or "-"), colour if value else "dim") for value, colour in counts]
        seen = "-" if node.last_seen is None else shorten_age(max(now - node.last_seen, 0.0))
        last = Text("-", "dim")
        if node.events:
            last = Text(f"{node.events[0].kind}: {clean_text(node.events[0].text, _LONGEST)}")
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


def _date_event(event: NodeEvent) -> str:
    """Return when an event was, in local time; `?` for no time, or one that no calendar has here."""
    try:
        return "?" if event.time is None else f"{datetime.fromtimestamp(event.time):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "?"


def describe_preflight(account: Mapping[str, object]) -> str:
    """Return a manifest's account in a line; what is odd in it is left out."""
    if problem := account.get("problem"):
        return f"{account.get('kind')}: the nodes were not checked: {problem}"
    seconds, findings, sick = account.get("seconds"), account.get("findings"), account.get("sick")
    took = f" in {describe_time(seconds)}" if isinstance(seconds, int | float) else ""
    listed = [each for each in findings if isinstance(each, dict)] if isinstance(findings, list) else []
    shown = "; ".join(f"{each.get('host')}: {each.get('subject')}: {each.get('what')}" for each in listed[:3])
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    state = f"{len(sick)} sick" if isinstance(sick, list) and sick else "none sick"
    nodes = account.get("nodes")
    what = f": {shown}{more}" if shown else ""
    return f"{account.get('kind')} checks of {nodes} {'node' if nodes == 1 else 'nodes'}{took}: {state}{what}"
