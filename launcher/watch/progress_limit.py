"""How long ranks may make no progress before they are looked at: pure values in, pure values out.

Progress is a step, a batch from a DataLoader, or a change of phase. The limit is not the verdict: past it,
evidence is gathered, and a rank that works for the others is no hang.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST = 20.0
"""Seconds: below it, the garbage collector, a short checkpoint or a busy filesystem would cause looks."""
FACTOR = 10.0
"""Times the slow steps. What a healthy step can take beyond its p99 is far less (a straggler is 1.1)."""
SLOW_SHARE = 0.99
FEW = 3
"""Steps up to which the slowest counts: a program of steps of minutes must not be taken for hung in its
second. From then on the slowest 1%, at least one, is left out: the first step compiles and allocates."""
LEARNED_FACTOR, MOST_LEARNED = 1.5, 120.0
"""Times a pause that was taken for a hang and passed by itself; a longer one than that is told again."""
FLOORS = {
    "compiling": 1800.0,  # torch.compile of large models takes up to half an hour, and kernels are tuned
    "saving": 600.0,  # a checkpoint over a slow network; torch's own timeout is 600 s too
    "evaluating": 600.0,
}
"""Seconds that ranks in these phases have at least: what they do looks like a standstill from outside."""
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


def choose_limit(setting: object, slow_step: float, learned: float = 0.0) -> float:
    """Return the seconds without progress after which ranks are looked at.

    `setting` is `watch.hang_seconds`; `learned` is the longest pause that was told as a hang and passed.
    """
    if isinstance(setting, int | float):
        return float(setting)
    return max(LEAST, FACTOR * slow_step, LEARNED_FACTOR * min(learned, MOST_LEARNED))


def extend_limit(limit: float, phase: str) -> float:
    """Return the limit for a rank in a phase."""
    return max(limit, FLOORS.get(phase, 0.0))


def list_stalled(ranks: Sequence[RankProgress], limit: float) -> tuple[RankProgress, ...]:
    """Return the ranks of the job that have made no progress for too long.

    A rank that has never made a step counts only if no rank that has made one goes on: a program can have
    ranks that make none.
    """
    watched = [rank for rank in ranks if rank.phase not in UNWATCHED and rank.idle is not None]
    stalled = [rank for rank in watched if is_over(rank, extend_limit(limit, rank.phase))]
    if any(rank.step and not is_over(rank, limit) for rank in watched):
        stalled = [rank for rank in stalled if rank.step]
    return tuple(stalled)


def is_over(rank: RankProgress, limit: float) -> bool:
    """Tell whether a rank has been without progress for longer than a limit."""
    return rank.idle is not None and rank.idle > limit


def has_time(rank: RankProgress, limit: float) -> bool:
    """Tell whether a rank is within what its phase allows beyond the limit, as in a checkpoint."""
    return rank.phase in FLOORS and not is_over(rank, extend_limit(limit, rank.phase))


def find_stall_begin(stalled: Iterable[RankProgress], now: float) -> float | None:
    """Return since when the last of some stalled ranks has made no progress, by a clock that reads `now`."""
    idle = [rank.idle for rank in stalled if rank.idle is not None]
    return now - min(idle) if idle else None
