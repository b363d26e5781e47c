"""When the flight recorders of ranks are read: often as long as much is to be learned, then seldom. Pure."""

from collections.abc import Sequence
from statistics import median

from launcher.watch.watch_model import Heartbeat

QUICK = 5
"""Seconds between readings at the beginning, and after steps have become longer."""
SLOWEST = 640
"""Seconds between readings at most: QUICK doubled again and again, so that the moments of nodes coincide."""
MAX_COST = 0.0005
"""Cores that readings may take from a rank later on."""
QUICK_SECONDS, QUICK_STEPS, QUICK_LIMIT = 60, 100, 600
"""Readings are quick for so many seconds and so many steps, whichever is longer, up to a limit in seconds."""
LONGER = 1.03
"""Steps that last so many times as long as before have become longer."""
RECENT = 20
"""Steps whose median is compared."""


class ReadingTimes:
    """Says when it is time, at multiples of QUICK on the clock, so that all nodes read at the same moments.

    A straggler makes the steps of all ranks longer: nothing is missed while they are not.
    """

    def __init__(self) -> None:
        self.last = 0
        """Moment of the last reading, in units of QUICK since the epoch."""
        self.quick_since: float | None = None
        self.quick_step = 0
        """Since when, and since which step, readings are quick."""
        self.usual = 0.0
        """Seconds of a step that new ones are compared with."""

    def is_due(self, beats: Sequence[Heartbeat], now: float, cost: float) -> bool:
        """Tell whether to read; if so it counts as done.

        `now` is in seconds since the epoch, `cost` the seconds that the last reading took from a rank.
        """
        beat = max(beats, key=lambda one: len(one.durations), default=None)
        if beat is None or len(beat.durations) < 2:
            return False
        self.note_steps(beat, now)
        moment = int(now // QUICK)
        every = 1 if self.is_quick(beat.step, now) else choose_reading_interval(cost) // QUICK
        due = moment // every != self.last // every
        if due:
            self.last = moment
        return due

    def note_steps(self, beat: Heartbeat, now: float) -> None:
        """Begin quick readings with the first steps, and if steps have become longer."""
        current = median(beat.durations[-RECENT:])
        if self.quick_since is None or (not self.is_quick(beat.step, now) and current > LONGER * self.usual):
            self.quick_since, self.quick_step, self.usual = now, beat.step, current
        elif not self.is_quick(beat.step, now):
            self.usual = min(self.usual, current)
        else:
            self.usual = current

    def is_quick(self, step: int, now: float) -> bool:
        """Tell whether readings are quick."""
        if self.quick_since is None:
            return False
        age = now - self.quick_since
        return age < QUICK_SECONDS or (age < QUICK_LIMIT and step < self.quick_step + QUICK_STEPS)


def choose_reading_interval(cost: float) -> int:
    """Return the seconds between readings that keep their cost within MAX_COST, as far as SLOWEST goes."""
    interval = QUICK
    while interval < SLOWEST and cost > MAX_COST * interval:
        interval *= 2
    return interval
