"""Findings for people: what `launch doctor` prints, and preflight's lines.

rich is loaded to print alone: preflight's lines are made before the ranks of a job start.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.doctor.model import LEVELS, Finding, PreflightReport
from launcher.text import count_things, describe_time, escape_text, name_some

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = {"error": "✗", "warning": "!", "note": "i", "unknown": "?", "ok": "✓"}
_PLAIN_MARKS = {**_MARKS, "error": "x", "ok": "+"}
"""For terminals whose encoding has no others."""
_LEVEL_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan", "unknown": "dim", "ok": "green"}
_MOST_LINES, _MOST_HOSTS = 12, 6
"""Findings of preflight that are told, and nodes that are named for one; the rest is in the run directory."""
_LONGEST = 400
"""Characters of a text."""


def print_findings(console: "Console", findings: Sequence[Finding], *, by_node: bool = False) -> None:
    """Print a list grouped by subject, the one with the worst finding first, and a line that counts them.

    With `by_node` the findings on the nodes of a job are grouped by node.
    """
    from rich.table import Table
    from rich.text import Text

    marks = _MARKS if console.encoding.startswith("utf") else _PLAIN_MARKS
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    groups: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda one: LEVELS.index(one.level)):
        name = (finding.host or "all nodes") if by_node else finding.subject
        groups.setdefault(name, []).append(finding)
    for name, group in groups.items():
        for number, finding in enumerate(group):
            mark = Text(marks[finding.level], _LEVEL_COLOURS[finding.level])
            what = f"{finding.subject}: {finding.what}" if by_node else finding.what
            grid.add_row(mark, Text("" if number else name, "bold"), Text(escape_text(what, _LONGEST)))
            if finding.why:
                grid.add_row("", "", Text(f"why: {escape_text(finding.why, _LONGEST)}", "dim"))
            if finding.fix:
                grid.add_row("", "", Text(f"fix: {escape_text(finding.fix, _LONGEST)}"))
    console.print(grid)
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    problems = [count_things(counts[level], level) for level in LEVELS[:3] if counts[level]]
    rest = [f"{count_things(counts['ok'], 'check')} passed"]
    rest += [f"{counts['unknown']} could not be made"] if counts["unknown"] else []
    console.print(Text(f"{', '.join(problems) or 'nothing to mend'}; {', '.join(rest)}"))


def list_preflight_lines(report: PreflightReport) -> tuple[str, ...]:
    """Say what was found, the worst first; nodes with the same finding share a line."""
    grouped: dict[Finding, tuple[Finding, list[str]]] = {}
    for one in report.findings:
        grouped.setdefault(replace(one, host=""), (one, []))[1].append(one.host)
    lines = []
    for level, word in (("error", "sick"), ("warning", "warning")):
        for finding, hosts in grouped.values():
            if finding.level == level:
                names = [host for host in hosts if host]
                where = f"{name_some(names, _MOST_HOSTS)}: " if names else ""
                fix = f"; fix: {finding.fix}" if finding.fix else ""
                lines.append(f"{word}: {where}{finding.subject}: {finding.what}{fix}")
    if len(lines) > _MOST_LINES:
        more = f"and {len(lines) - _MOST_LINES} more findings: see preflight/ in the run directory"
        lines = [*lines[:_MOST_LINES], more]
    return (*lines, summarise_preflight(report))


def summarise_preflight(report: PreflightReport) -> str:
    """Return the last line: kind, nodes, seconds, and how it stands."""
    hosts = {node.host for node in report.nodes} | {*report.silent}
    levels = {one.level for one in report.findings}
    unchecked = {one.host for one in report.findings if one.level == "unknown"}
    missing = unchecked - {*report.sick} - hosts
    state = "no node sick" if "warning" in levels else "all well"
    if report.sick:
        state = f"{len(report.sick)} sick ({name_some(report.sick, _MOST_HOSTS)})"
    elif "error" in levels:
        state = "a fault that no single node has"
    left = f", {len(missing)} not checked" if missing else ""
    nodes, took = count_things(len(hosts), "node"), describe_time(report.seconds)
    return f"{report.kind} checks of {nodes} in {took}: {state}{left}"
