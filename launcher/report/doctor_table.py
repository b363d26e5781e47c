"""The doctor's findings for people: subjects with problems first, and all that was checked."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.doctor.finding import LEVELS, Finding
from launcher.text import escape_text

MARKS = {"error": "✗", "warning": "!", "note": "i", "unknown": "?", "ok": "✓"}
PLAIN = {"error": "x", "warning": "!", "note": "i", "unknown": "?", "ok": "+"}
"""Marks for terminals whose encoding has no others."""
COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan", "unknown": "dim", "ok": "green"}
LONGEST = 400
"""Characters of a text; what a damaged file holds may be longer."""


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print a list grouped by subject, the one with the worst finding first, and a line that counts them."""
    marks = MARKS if console.encoding.startswith("utf") else PLAIN
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    shown = ""
    for finding in order_findings(findings):
        subject = "" if finding.subject == shown else finding.subject
        shown = finding.subject
        mark = Text(marks[finding.level], COLOURS[finding.level])
        table.add_row(mark, Text(subject, "bold"), Text(escape_text(finding.what, LONGEST)))
        for label, text in (("why", finding.why), ("fix", finding.fix)):
            if text:
                style = "dim" if label == "why" else ""
                table.add_row("", "", Text(f"{label}: {escape_text(text, LONGEST)}", style))
    console.print(table)
    console.print(Text(summarise_findings(findings)))


def order_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Sort by the worst level of the subject, then by level; else the order stays."""
    ranks = {level: rank for rank, level in enumerate(LEVELS)}
    worst: dict[str, int] = {}
    for finding in findings:
        worst[finding.subject] = min(worst.get(finding.subject, len(LEVELS)), ranks[finding.level])
    subjects = list(worst)
    return sorted(
        findings,
        key=lambda one: (worst[one.subject], subjects.index(one.subject), ranks[one.level]),
    )


def summarise_findings(findings: Sequence[Finding]) -> str:
    """The last line: `2 warnings, 1 note; 15 checks passed, 3 could not be made`."""
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    problems = [
        f"{counts[level]} {level}{'s' if counts[level] > 1 else ''}"
        for level in ("error", "warning", "note")
        if counts[level]
    ]
    rest = [f"{counts['ok']} check{'' if counts['ok'] == 1 else 's'} passed"]
    rest += [f"{counts['unknown']} could not be made"] if counts["unknown"] else []
    return f"{', '.join(problems) or 'nothing to mend'}; {', '.join(rest)}"
