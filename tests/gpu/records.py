"""What a step of the proof finds, written as it comes: a file with one JSON object on each line."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
"""What can be said of a check."""
Cell = str | int | float | bool | None
"""A value in a table."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that was to hold."""

    name: str
    status: str
    detail: str = ""
    """What was found where it does not hold, or why it was left out."""


@dataclass(frozen=True, slots=True)
class Row:
    """Figures: a row of one of the step's tables."""

    table: str
    values: tuple[tuple[str, Cell], ...]
    """Columns with their values, in order."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes what a step finds; each line is complete once it is written."""

    path: Path

    def check(self, name: str, holds: bool, detail: str = "") -> bool:
        """Record whether something holds, with what was found; returns `holds`."""
        self.write(check=name, status=PASSED if holds else FAILED, detail=detail)
        return holds

    def leave_out(self, name: str, reason: str) -> None:
        """Record that a check was not made."""
        self.write(check=name, status=LEFT_OUT, detail=reason)

    def row(self, table: str, **values: Cell) -> None:
        """Record a row of a table; underscores in names of columns are shown as blanks."""
        self.write(table=table, values=values)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Do a part of the step: if it raises, that is a failed check, and the step goes on."""
        try:
            yield
        except Exception as error:  # whatever it is, the other parts are worth their time
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {error}")

    def write(self, **record: object) -> None:
        """Append a record."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> tuple[tuple[Check, ...], tuple[Row, ...]]:
    """Return the checks and rows of a file; a last line that was cut off does not count."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    checks = tuple(Check(one["check"], one["status"], one["detail"]) for one in records if "check" in one)
    rows = tuple(Row(one["table"], tuple(one["values"].items())) for one in records if "table" in one)
    return checks, rows
