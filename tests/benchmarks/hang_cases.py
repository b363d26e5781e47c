"""The hangs of the matrix: who holds the others up, where, and what is to be told."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.watch.watch_model import Verdict

PROGRAM = Path(__file__).with_name("hang_program.py")
RANKS = 4
CULPRIT = 2
GROUPS: Mapping[str, frozenset[str]] = {
    "ddp": frozenset({"default group"}),
    "fsdp2": frozenset({"default group"}),
    "groups": frozenset({"pair-1", "default group"}),
}
"""In which groups others wait for the culprit, by program."""
OPERATIONS: Mapping[str, frozenset[str]] = {
    "ddp": frozenset({"all_reduce"}),
    "fsdp2": frozenset({"all_gather"}),
    "groups": frozenset({"all_reduce"}),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A hang, and what is right to say of it."""

    name: str
    what: str
    kinds: frozenset[str]
    """Right kinds of the verdict; empty if torch ends the program itself, so that nothing hangs."""
    ranks: tuple[int, ...] = (CULPRIT,)
    has_group: bool = True
    """Others wait in a collective of a group that can be named."""
    operations: frozenset[str] = frozenset()
    """In place of the program's own."""
    has_line: bool = True
    """A stack of the culprit can be had."""
    clusters_only: bool = False
    seconds: float = 60.0
    """After which it is to be called a hang, from its begin."""

    @property
    def lines(self) -> frozenset[int]:
        """On which lines of the program the culprit may stand."""
        found = enumerate(PROGRAM.read_text().splitlines(), 1)
        return frozenset(number for number, line in found if re.search(rf"# HANG HERE.* {self.name}\b", line))


ABSENT = frozenset({"absent"})
CASES = {
    case.name: case
    for case in (
        Case("sleep", "sleeps before a collective", ABSENT),
        Case("never-joins", "never joins at the start", ABSENT, has_group=False, seconds=600),
        Case("first-collective", "joins, and sleeps before the first collective", ABSENT, seconds=600),
        Case("gil", "C code that holds the GIL (`ctypes.PyDLL`)", ABSENT),
        Case("regex", "a regular expression that does not end, holds the GIL", ABSENT, seconds=600),
        Case("lock", "two threads, two locks", ABSENT, seconds=20),
        Case("worker-stuck", "a DataLoader worker is stuck", ABSENT),
        Case("worker-killed", "a DataLoader worker is killed", frozenset()),
        Case("pool-killed", "a worker of `multiprocessing.Pool` is killed", ABSENT),
        Case("loop", "an endless loop", ABSENT, seconds=600),
        Case("worker-loop", "a DataLoader worker computes for ever", ABSENT, seconds=600),
        Case("plain-loop", "an endless loop, without an optimizer", ABSENT, seconds=600),
        Case("eval-sleep", "an evaluation that sleeps in its loader", ABSENT),
        Case("fifo", "a read that never returns (FIFO) on one rank", ABSENT),
        Case(
            "disk-all",
            "the same on all ranks",
            frozenset({"standstill"}),
            tuple(range(RANKS)),
            has_group=False,
            seconds=180,
        ),
        Case("sigstop", "SIGSTOP", frozenset({"stopped"}), has_line=False, seconds=20),
        Case("mismatch-shape", "other shapes in an all_reduce", frozenset()),
        Case("mismatch-op", "one rank in a barrier, the others go on", frozenset({"mismatch"}), seconds=20),
        Case("left", "a rank leaves with 0 in a step", frozenset()),
        Case(
            "left-start",
            "a rank leaves with 0 before it has joined",
            frozenset({"exited"}),
            has_group=False,
            has_line=False,
            seconds=20,
        ),
        Case(
            "node-stopped",
            "a whole node is stopped",
            frozenset({"silent"}),
            has_line=False,
            clusters_only=True,
            seconds=180,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Marks:
    """What of a verdict is right; None for what this case does not ask for."""

    kind: bool
    rank: bool
    group: bool | None
    operation: bool | None
    line: bool | None

    @property
    def are_right(self) -> bool:
        """Whether nothing is wrong that people go by: rank, group, line."""
        return self.rank and self.group is not False and self.line is not False


def mark(case: Case, program: str, verdict: Verdict) -> Marks:
    """Hold a verdict against what the case expects."""
    frame = verdict.frame
    stands = frame is not None and Path(frame.file).name == PROGRAM.name and frame.line in case.lines
    operations = case.operations or OPERATIONS[program]
    asks_operation = case.has_group and case.name not in {"first-collective", "mismatch-op"}
    return Marks(
        kind=verdict.kind in case.kinds,
        rank=set(verdict.ranks) == set(case.ranks),
        group=verdict.group in GROUPS[program] if case.has_group else None,
        operation=verdict.operation in operations if asks_operation else None,
        line=stands if case.has_line else None,
    )
