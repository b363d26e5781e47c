"""The proof as JSON for programs and as Markdown for people, rewritten whenever something is new."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.records import FAILED, LEFT_OUT, PASSED, Cell, Check, Row
from tests.gpu.running import RUNNING, Outcome

SCHEMA = 1
"""Version of the JSON form."""
LONGEST = 400
"""Characters of a text in Markdown."""
JSON, MARKDOWN = "proof.json", "proof.md"


@dataclass(frozen=True, slots=True)
class Proof:
    """All that is known so far."""

    command: str
    started: str
    cpu: bool
    facts: Mapping[str, object]
    """What the machine and its torch are."""
    outcomes: Sequence[Outcome]


def write_report(proof: Proof, output: Path) -> None:
    """Write both files, whole or not at all; raises OSError."""
    replace_file(output / JSON, json.dumps(render_json(proof), indent=1) + "\n")
    replace_file(output / MARKDOWN, render_markdown(proof))


def replace_file(path: Path, text: str) -> None:
    """Write a file so that it is never seen in part."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def render_json(proof: Proof) -> dict[str, object]:
    """The JSON form: steps in the order in which they run."""
    return {
        "schema": SCHEMA,
        "command": proof.command,
        "started": proof.started,
        "cpu": proof.cpu,
        "machine": dict(proof.facts),
        "steps": [render_outcome(outcome) for outcome in proof.outcomes],
    }


def render_outcome(outcome: Outcome) -> dict[str, object]:
    """A step's JSON form."""
    return {
        "name": outcome.step.name,
        "title": outcome.step.title,
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 1),
        "limit": outcome.limit,
        "checks": [
            {"name": check.name, "status": check.status, "detail": check.detail} for check in outcome.checks
        ],
        "tables": {
            name: [dict(row.values) for row in rows] for name, rows in group_rows(outcome.rows).items()
        },
    }


def group_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their table, in order."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.table, []).append(row)
    return grouped


def render_markdown(proof: Proof) -> str:
    """A table of the steps; then, for each, its figures, and what failed or was left out."""
    kind = " without a GPU (`--cpu`)" if proof.cpu else ""
    facts = "\n".join(f"- {name}: {show_fact(value)}" for name, value in proof.facts.items())
    lines = [f"# Proof{kind}", "", f"`{proof.command}`, begun {proof.started}", "", facts, ""]
    lines += render_steps(proof.outcomes)
    for outcome in proof.outcomes:
        lines += render_details(outcome)
    return "\n".join(lines) + "\n"


def render_steps(outcomes: Sequence[Outcome]) -> list[str]:
    """The table of steps."""
    head = ["| step | | s | of at most | checks | why |", "|---|---|---|---|---|---|"]
    return head + [render_line(outcome) for outcome in outcomes]


def render_line(outcome: Outcome) -> str:
    """A step's line in the table of steps."""
    checks = ", ".join(
        f"{number} {status}"
        for status in (PASSED, FAILED, LEFT_OUT)
        if (number := sum(check.status == status for check in outcome.checks))
    )
    seconds = f"{outcome.seconds:.1f}" if outcome.seconds else ""
    limit = f"{outcome.limit:.0f}" if outcome.limit else ""
    cells = (outcome.step.name, outcome.status, seconds, limit, checks, clean_cell(outcome.reason))
    return f"| {' | '.join(cells)} |"


def render_details(outcome: Outcome) -> list[str]:
    """A step's figures, and its checks that did not pass."""
    others = [check for check in outcome.checks if check.status != PASSED]
    if not outcome.rows and not others and outcome.status != RUNNING:
        return []
    lines = ["", f"## {outcome.step.name}: {outcome.step.title}"]
    for name, rows in group_rows(outcome.rows).items():
        lines += ["", name, "", *render_table(rows)]
    if others:
        lines += [
            "",
            *(render_check(check) for check in sorted(others, key=lambda one: one.status != FAILED)),
        ]
    return lines


def render_check(check: Check) -> str:
    """A check that did not pass, as a line of a list."""
    return f"- {check.status}: {check.name}: {clean_cell(check.detail)}"


def render_table(rows: Sequence[Row]) -> list[str]:
    """Rows as a table; it has all columns that any of them has."""
    columns = list(dict.fromkeys(name for row in rows for name, _ in row.values))
    head = " | ".join(name.replace("_", " ") for name in columns)
    lines = [f"| {head} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        values = dict(row.values)
        lines.append(f"| {' | '.join(show_cell(values.get(name)) for name in columns)} |")
    return lines


def show_cell(value: Cell) -> str:
    """A value for people: four figures are enough."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return clean_cell(str(value))


def clean_cell(text: str) -> str:
    """A text that fits into a table: its two ends if it is long, since JSON and log have the whole."""
    plain = " ".join(text.split())
    short = plain if len(plain) <= LONGEST else f"{plain[: LONGEST // 2]} … {plain[-LONGEST // 2 :]}"
    return short.replace("|", "\\|")


def show_fact(value: object) -> str:
    """A fact for people."""
    if isinstance(value, list):
        return "; ".join(", ".join(f"{v}" for v in one.values()) for one in value) or "none"
    return "none" if value in (None, "") else str(value)
