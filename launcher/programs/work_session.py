"""A run of node_work.py: how long each piece of work is to take, what time is left, and what is printed."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from launcher.programs.work_processes import Answer, Measurement, WorkProcess, ask_all

SLACK = 0.5
"""Seconds that are kept for the end."""
GRACE = 5.0
"""Seconds that a piece of work may take beyond those to measure before it counts as hung."""
NO_TIME = "no time was left"


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds to measure."""

    matmul: float
    again: float
    """Each further time, for CPUs."""
    repeats: int
    """Further times at most."""
    memory: float
    copies: float
    peers: float
    all_reduce: float
    pair: float


KINDS = {
    "light": Durations(2.0, 1.0, 3, 0.5, 0.6, 0.4, 0.6, 1.0),
    "deep": Durations(8.0, 2.0, 5, 3.0, 3.0, 2.0, 3.0, 3.0),
}


ENOUGH = {"light": 8.0, "deep": 27.0}
"""Seconds for a run in which nothing has to be shortened."""


def choose_durations(kind: str, seconds: float) -> Durations:
    """Return how long to measure in a run of so many seconds."""
    factor = min(1.0, max(0.05, seconds / ENOUGH[kind]))
    scaled = {
        name: value if name == "repeats" else value * factor for name, value in asdict(KINDS[kind]).items()
    }
    return Durations(**scaled)


@dataclass(frozen=True, slots=True)
class WorkSession:
    """What a run has to keep to."""

    durations: Durations
    deadline: float
    """Monotonic time at which it has to be at its end."""
    out: TextIO

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - SLACK - time.monotonic()

    def print_line(self, value: dict[str, object]) -> None:
        """Print a line of JSON."""
        print(json.dumps(value), file=self.out, flush=True)

    def report(self, *found: Measurement) -> None:
        """Print results."""
        for one in found:
            self.print_line(asdict(one))

    def ask(
        self,
        processes: Sequence[WorkProcess],
        function: Callable[..., object],
        arguments: Callable[[int], tuple[object, ...]],
        seconds: float,
        *,
        grace: float = GRACE,
        least: float = GRACE,
    ) -> list[Answer]:
        """Have all processes call a function that takes about `seconds`; one answer for each.

        If the run's time is over before `grace`, being late speaks against a device only if others have
        answered, and `least` seconds of grace have passed.
        """
        limit = seconds + grace
        if self.left < seconds:
            return [Answer(problem=one.problem, reason=NO_TIME) for one in processes]
        given = min(limit, self.left)
        answers = ask_all(processes, function, arguments, given)
        is_alone = all(one.is_late for one in answers)
        if given < limit and (is_alone or given < seconds + least):
            return [Answer(reason=NO_TIME) if one.is_late else one for one in answers]
        return answers


def report_missing_results(measure: str, where: str, answer: Answer, device: str = "") -> Measurement:
    """Return the result of work that has given no value."""
    problem = "" if answer.reason else answer.problem or "it has no result"
    return Measurement(measure, where, problem=problem, reason=answer.reason, device=device)
