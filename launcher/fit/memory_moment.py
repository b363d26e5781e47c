"""Moments of a training step at which memory can be at its peak, and the parts of the highest of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.fit.fit_model import MemoryPart, Range

NOTHING = Range(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Moment:
    """What is allocated at one moment, in bytes."""

    name: str
    weights: Range = NOTHING
    gradients: Range = NOTHING
    optimizer: Range = NOTHING
    activations: Range = NOTHING
    logits: Range = NOTHING
    temporary: Range = NOTHING
    communication: Range = NOTHING

    @property
    def total(self) -> Range:
        """All of it."""
        return add_ranges([getattr(self, name) for name in PART_NAMES])


PART_NAMES = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "temporary",
    "communication",
)


def add_ranges(ranges: Sequence[Range]) -> Range:
    """Add both ends and the middle of ranges."""
    total = NOTHING
    for one in ranges:
        total += one
    return total


def make_exact(value: float) -> Range:
    """Make a range of one value, never negative."""
    number = max(0, round(value))
    return Range(number, number, number)


def make_range(low: float, expected: float, high: float) -> Range:
    """Make a range of bytes, never negative and in order."""
    middle = max(0, round(expected))
    return Range(min(middle, max(0, round(low))), middle, max(middle, round(high)))


def choose_peak_moment(moments: Sequence[Moment]) -> Moment:
    """Give the moment with the highest expected total.

    Another one's high end may be higher: what it has more is added to the high end of `temporary`, so that
    the high ends together bound all moments.
    """
    peak = max(moments, key=lambda moment: moment.total.expected)
    more = max(moment.total.high for moment in moments) - peak.total.high
    temporary = peak.temporary
    return replace(peak, temporary=Range(temporary.low, temporary.expected, temporary.high + more))


def list_parts(moment: Moment, notes: dict[str, str]) -> tuple[MemoryPart, ...]:
    """List the parts of a moment with their notes."""
    return tuple(MemoryPart(name, getattr(moment, name), notes.get(name, "")) for name in PART_NAMES)
