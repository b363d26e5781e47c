"""A rank's marks: when it came to each collective and to the end of each step, packed for a node's report."""

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from launcher.watch.watch_model import CollectiveTimes

DURATION, ENQUEUED = "duration", "enqueued"
"""What marks have for the time of a collective: minus its duration, or when it was enqueued."""
STEP_ENDS = ""
"""The group that stands for ends of steps; their sequence numbers are the steps'."""
MOST_MARKS = 4096
"""Of a rank; more are not believed."""
COLUMNS = 4
UNIT = 1e6
"""Times are kept in whole microseconds."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A collective that a rank came to, or the end of a step."""

    step: int
    """The step in which it is; the first one is 1."""
    group: str
    """Process group; STEP_ENDS for the end of a step."""
    sequence: int
    """Number of the collective in its group, the same on all ranks of the group."""
    time: float
    """When the rank came to it, in seconds since the epoch on its node's clock; or minus its duration."""


def pack_marks(rank: int, measure: str, marks: Sequence[Mark]) -> CollectiveTimes:
    """Pack marks, about 4 bytes each: differences from one to the next, in columns, compressed.

    Raises OverflowError for numbers beyond 64 bits.
    """
    groups = tuple(dict.fromkeys(mark.group for mark in marks))
    number = {group: index for index, group in enumerate(groups)}
    rows = [(mark.step, number[mark.group], mark.sequence, round(mark.time * UNIT)) for mark in marks]
    columns = [[row[column] for row in rows] for column in range(COLUMNS)]
    columns[2] = shift_sequences(columns[1], columns[2], len(groups), pack=True)
    for index in (0, 3):
        columns[index] = [b - a for a, b in pairwise([0, *columns[index]])]
    try:
        data = struct.pack(f"<{COLUMNS * len(rows)}q", *(value for column in columns for value in column))
    except struct.error as error:
        raise OverflowError(str(error)) from None
    return CollectiveTimes(rank, measure, groups, base64.b85encode(zlib.compress(data, 6)).decode())


def unpack_marks(times: CollectiveTimes) -> tuple[Mark, ...]:
    """Return the marks of a rank; raises ValueError for what `pack_marks` cannot have written."""
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b85decode(times.marks), 8 * COLUMNS * MOST_MARKS)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) % (8 * COLUMNS) or unzip.unconsumed_tail or not unzip.eof:
        raise ValueError("marks are cut off or too many")
    values = struct.unpack(f"<{len(data) // 8}q", data)
    count = len(values) // COLUMNS
    steps, groups, sequences, moments = (
        (list(values[at : at + count]) for at in range(0, COLUMNS * count, count or 1))
        if count
        else ([], [], [], [])
    )
    if not all(0 <= group < len(times.groups) for group in groups):
        raise ValueError("marks of an unknown group")
    sequences = shift_sequences(groups, sequences, len(times.groups), pack=False)
    rows = zip(accumulate(steps), groups, sequences, accumulate(moments), strict=True)
    return tuple(
        Mark(step, times.groups[group], sequence, time / UNIT) for step, group, sequence, time in rows
    )


def shift_sequences(groups: Sequence[int], values: Sequence[int], count: int, *, pack: bool) -> list[int]:
    """Make sequence numbers differences from the one before in their group, or the reverse."""
    before, found = [0] * count, []
    for group, value in zip(groups, values, strict=True):
        found.append(value - before[group] if pack else value + before[group])
        before[group] = value if pack else found[-1]
    return found
