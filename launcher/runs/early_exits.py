"""Ranks that ended with 0 while others went on: the first event of many a failure, which no rank reports."""

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.runs.attempt_progress import find_last_step
from launcher.runs.run_directory import RunDir
from launcher.text import name_some

LONG_BEFORE = 30.0
"""Seconds before a stop: a rank that ended with 0 later than that may have ended as all others would have."""
MOST = 4
"""Ranks and nodes that are named in a sentence."""


@dataclass(frozen=True, slots=True)
class CleanEnd:
    """A rank that has ended with 0."""

    rank: int
    host: str
    time: float
    """Seconds since the epoch."""
    attempt: int
    """Whose folder has its logs."""


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """The ranks that ended with 0 before the first failure."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    others: int
    """Ranks that went on; 0 if that is not known."""
    step: int | None
    """The last one that these ranks have printed; None if they print none."""
    reached: int | None
    """The last one of rank 0, if they print none."""

    def describe(self) -> str:
        """Say it: `rank 3 on n1 ended with 0 at step 40 while 7 ranks went on`."""
        who = f"rank{'' if len(self.ranks) == 1 else 's'} {name_some([*map(str, self.ranks)], MOST)}"
        at = "" if self.step is None else f" at step {self.step}"
        others = {0: "others", 1: "1 rank"}.get(self.others, f"{self.others} ranks")
        came = "" if self.reached is None else f" (rank 0 came to step {self.reached})"
        return f"{who} on {name_some(self.hosts, MOST)} ended with 0{at} while {others} went on{came}"


def find_early_exits(run: RunDir, ends: Iterable[CleanEnd], before: float, world: int) -> EarlyEnd | None:
    """Return the ranks that ended with 0 before a time (seconds since the epoch); None if none did.

    `world` is the number of ranks, 0 if it is not known. Ranks that have printed their last step have
    ended as they should.
    """
    early = sorted((end for end in ends if end.time < before), key=lambda end: end.rank)
    if not early or len(early) == world:
        return None
    first = min(early, key=lambda end: end.time)
    step = find_last_step(run, first.rank, first.attempt)
    if step and step.total is not None and step.step >= step.total:
        return None
    reached = None if step else find_last_step(run, 0, first.attempt)
    return EarlyEnd(
        tuple(end.rank for end in early),
        tuple(dict.fromkeys(end.host for end in early)),
        max(world - len(early), 0),
        step.step if step else None,
        reached.step if reached else None,
    )
