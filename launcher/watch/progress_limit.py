"""How long ranks may make no progress before a notice, and before it is a hang: pure values in and out.

Progress is a step, a batch from a DataLoader, or a change of phase. Activity is more: CPU, bytes that are
read, written or sent, a busy GPU, another stack, anywhere in a rank's process tree.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST_NOTICE = 20.0
"""Seconds: below it, the garbage collector, a short checkpoint or a busy filesystem would cause notices."""
FACTOR = 10.0
"""Times the slow steps. What a healthy step can take beyond its p99 is far less (a straggler is 1.1)."""
SLOW_SHARE = 0.99
FEW = 3
"""Steps up to which the slowest counts: a program of steps of minutes must not be taken for hung in its
second. From then on the slowest 1%, at least one, is left out: the first step compiles and allocates."""
PAUSES_TO_NOTICE, PAUSES_TO_HANG = 2.0, 3.0
"""Times the longest pause that has ended by itself."""
HANG_SECONDS = 60.0
"""Seconds without activity, if others wait."""
NOBODY_WAITS, WORKING, COMPILING = 3.0, 10.0, 30.0
"""Times that: where nobody waits in a collective; for ranks that work, or whose phase looks like a standstill
from outside (torch's own timeout is 10 minutes); and for `torch.compile` of large models."""
PATIENT_PHASES = {"compiling": COMPILING, "saving": WORKING, "evaluating": WORKING}
UNWATCHED = ("ended", "exited", "unwatched")
"""Phases of ranks from which no progress is due."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """What counts of a rank."""

    rank: int
    phase: str
    """As in `model.RankState`."""
    step: int
    idle: float | None
    """Seconds without progress."""


def find_quantile(values: Sequence[float], share: float) -> float | None:
    """Return the least of some values that is not less than a share of them; None if there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def find_slow_step(durations: Sequence[float]) -> float:
    """Return the seconds of a slow step (p99); 0 if there was none yet."""
    if len(durations) <= FEW:
        return max(durations, default=0.0)
    kept = sorted(durations)[: min(len(durations) - 1, math.ceil(SLOW_SHARE * len(durations)))]
    return kept[-1]


def choose_limit(setting: object, slow_step: float, longest_pause: float = 0.0) -> float:
    """Return the seconds without progress after which ranks are looked at, and a notice is given.

    `setting` is `watch.hang_seconds`; a notice does not come after the hang that it sets.
    """
    limit = max(LEAST_NOTICE, FACTOR * slow_step, PAUSES_TO_NOTICE * longest_pause)
    return min(limit, float(setting)) if isinstance(setting, int | float) else limit


def choose_hang_time(
    setting: object, longest_pause: float, *, phase: str, has_begun: bool, is_working: bool, has_waiting: bool
) -> float:
    """Return the seconds after which ranks that hold up others, or all ranks, are hung.

    They are counted without activity; without progress if they work. `phase` is theirs, `has_begun` tells
    whether a step was made, and `has_waiting` whether others wait for them in a collective.
    """
    is_fixed = isinstance(setting, int | float)
    unit = float(setting) if isinstance(setting, int | float) else HANG_SECONDS
    learned = 0.0 if is_fixed else PAUSES_TO_HANG * longest_pause
    times = PATIENT_PHASES.get(phase, 0.0)
    if is_working or not has_begun:
        times = max(times, WORKING)
    return max(unit * (times or (1.0 if has_waiting else NOBODY_WAITS)), learned)


def list_stalled(ranks: Sequence[RankProgress], limit: float) -> tuple[RankProgress, ...]:
    """Return the ranks of the job that have made no progress for too long.

    A rank that has never made a step counts only if no rank that has made one goes on: a program can have
    ranks that make none.
    """
    watched = [rank for rank in ranks if rank.phase not in UNWATCHED and rank.idle is not None]
    stalled = [rank for rank in watched if is_over(rank, limit)]
    if any(rank.step and not is_over(rank, limit) for rank in watched):
        stalled = [rank for rank in stalled if rank.step]
    return tuple(stalled)


def is_over(rank: RankProgress, limit: float) -> bool:
    """Tell whether a rank has been without progress for longer than a limit."""
    return rank.idle is not None and rank.idle > limit


def find_stall_begin(stalled: Iterable[RankProgress], now: float) -> float | None:
    """Return since when the last of some stalled ranks has made no progress, by a clock that reads `now`."""
    idle = [rank.idle for rank in stalled if rank.idle is not None]
    return now - min(idle) if idle else None
