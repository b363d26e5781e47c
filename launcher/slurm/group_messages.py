"""The lines between a SLURM job's first node and its tasks that start, watch and end the ranks together.

A report is a line of a task's stderr, which srun brings to the first node; an order is a line of the tasks'
stdin, of which srun gives each task a copy (see `launcher.launch.signal_channel`).
"""

import json
import re
from dataclasses import asdict, dataclass

from launcher.codec import load
from launcher.launch.coordinator import GroupStart, JobEnd, Order

NUMBERS = {"ready": 1, "failed": 3, "ended": 1, "taken": 1, "alive": 0, "signalled": 1}
"""How many numbers each kind of report has."""
REPORT = re.compile(
    rf"(?P<before>.*?)launch-task: (?P<kind>{'|'.join(NUMBERS)}) (?P<host>\S+)"
    r"(?P<numbers>(?: -?\d{1,10})*)\s*"
)
"""A task's report; what stands before it is the start of a line that somebody else has not ended."""
START, END = "START", "END"
"""`START {json of a GroupStart}`; `END 1` if ranks have failed, else `END 0`."""
ASK_ALIVE = "ASK alive"
"""Each task says at once that it is there."""
LARGEST_NUMBER = 1 << 31


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node's task tells the first node."""

    kind: str
    """`ready` LOCAL_SIZE, `failed` RESTART RANK CODE, `ended` RESTART, `taken` RESTART (port), `alive`,
    `signalled` NUMBER (by a signal that the first node has not sent)."""
    host: str
    numbers: tuple[int, ...] = ()


def render_task_report(report: NodeReport) -> str:
    """Return a report as a line without its end."""
    return " ".join(("launch-task:", report.kind, report.host, *map(str, report.numbers)))


def find_report(line: str) -> tuple[str, NodeReport] | None:
    """Return what stands before a report in a line, and the report; None if there is none.

    srun's `--label` puts the task's number before it. A line that only looks like a report is none.
    """
    found = REPORT.fullmatch(line)
    if not found:
        return None
    numbers = tuple(map(int, found["numbers"].split()))
    if len(numbers) != NUMBERS[found["kind"]] or any(abs(number) >= LARGEST_NUMBER for number in numbers):
        return None
    return found["before"], NodeReport(found["kind"], found["host"], numbers)


def render_order(order: Order) -> str:
    """Return an order as a line without its end."""
    if isinstance(order, JobEnd):
        return f"{END} {int(order.failed)}"
    return f"{START} {json.dumps(asdict(order), separators=(',', ':'))}"


def parse_group_order(line: str) -> Order | None:
    """Read an order; None for another line, or one that is not whole."""
    word, _, text = line.partition(" ")
    if word == END and text in ("0", "1"):
        return JobEnd(failed=text == "1")
    if word != START:
        return None
    try:
        return load(GroupStart, text)
    except ValueError:
        return None
