"""When ranks came to their collectives and to the ends of their steps: read, packed into reports, unpacked.

A recorder with 2,000 entries takes the server in its rank 25 to 40 ms, without the GIL, and the reader 15 ms.
So it is read often as long as much is to be learned, then seldom.
"""

import base64
import struct
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

from launcher.watch.flight_recorder import (
    ServerError,
    as_number,
    is_collective,
    load_trace,
    name_group,
    post_handler,
    read_members,
)
from launcher.watch.model import CollectiveTimes, Heartbeat

DURATION, ENQUEUED = "duration", "enqueued"
"""What marks have for the time of a collective: minus its duration, or when it was enqueued."""
STEP_ENDS = ""
"""The group that stands for ends of steps; their sequence numbers are the steps'."""


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


# Packed marks

_MOST_MARKS = 4096
"""Of a rank; more are not believed."""
_COLUMNS = 4
_UNIT = 1e6
"""Times are kept in whole microseconds."""


def pack_marks(rank: int, measure: str, marks: Sequence[Mark]) -> CollectiveTimes:
    """Pack marks, about 4 bytes each: differences from one to the next, in columns, compressed.

    Raises OverflowError for numbers beyond 64 bits.
    """
    groups = tuple(dict.fromkeys(mark.group for mark in marks))
    numbers = [groups.index(mark.group) for mark in marks]
    before, sequences = [0] * len(groups), []
    for number, mark in zip(numbers, marks, strict=True):
        sequences.append(mark.sequence - before[number])
        before[number] = mark.sequence
    steps = [b - a for a, b in pairwise([0, *(mark.step for mark in marks)])]
    times = [b - a for a, b in pairwise([0, *(round(mark.time * _UNIT) for mark in marks)])]
    try:
        data = struct.pack(f"<{_COLUMNS * len(marks)}q", *steps, *numbers, *sequences, *times)
    except struct.error as error:
        raise OverflowError(str(error)) from None
    return CollectiveTimes(rank, measure, groups, base64.b85encode(zlib.compress(data, 6)).decode())


def unpack_marks(times: CollectiveTimes) -> tuple[Mark, ...]:
    """Return the marks of a rank; raises ValueError for what `pack_marks` cannot have written."""
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b85decode(times.marks), 8 * _COLUMNS * _MOST_MARKS)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) % (8 * _COLUMNS) or unzip.unconsumed_tail or not unzip.eof:
        raise ValueError("marks are cut off or too many")
    count = len(data) // 8 // _COLUMNS
    values = struct.unpack(f"<{_COLUMNS * count}q", data)
    steps, numbers, sequences, moments = (values[at * count : (at + 1) * count] for at in range(_COLUMNS))
    if not all(0 <= number < len(times.groups) for number in numbers):
        raise ValueError("marks of an unknown group")
    last, found = [0] * len(times.groups), []
    rows = zip(accumulate(steps), numbers, sequences, accumulate(moments), strict=True)
    for step, number, sequence, moment in rows:
        last[number] += sequence
        found.append(Mark(step, times.groups[number], last[number], moment / _UNIT))
    return tuple(found)


# Reading

_HANDLER = "fr_trace_json"
_TIMEOUT = 2.0
"""Seconds for a rank's answer; after that many for all ranks the others are not asked."""
_MOST_PACKED, _LEAST_PACKED = 1024, 128
"""Marks of a rank in a report: the most, and what large jobs come down to."""
_ALL_PACKED = 1 << 17
"""Marks of all ranks of a job, as a goal."""


class CollectiveReader:
    """Reads the recorders of a node's ranks if it is time to."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """`folder` has the sockets of the ranks' servers; `ranks` is how many ranks the job has."""
        self.folder = folder
        self.limit = max(_LEAST_PACKED, min(_MOST_PACKED, _ALL_PACKED // max(1, ranks)))
        self.moments = ReadingTimes()
        self.found: tuple[CollectiveTimes, ...] = ()
        self.cost = 0.0
        """Seconds that the last reading took of the slowest rank."""
        self.pids: dict[int, int] = {}
        """Of the ranks; new ones have no past."""
        self.thread: threading.Thread | None = None

    def read(self, beats: Sequence[Heartbeat], now: float) -> tuple[CollectiveTimes, ...]:
        """Return the marks of the ranks with these heartbeats, as of the last reading.

        If it is time, another reading begins in a thread. `now` is the time since the epoch. Ranks whose
        recorders cannot be had are missing.
        """
        if any(self.pids.get(beat.rank, beat.pid) != beat.pid for beat in beats):
            self.pids, self.found, self.moments = {}, (), ReadingTimes()
        self.pids |= {beat.rank: beat.pid for beat in beats}
        is_reading = self.thread is not None and self.thread.is_alive()
        if not is_reading and self.moments.is_due(beats, now, self.cost):
            self.thread = threading.Thread(target=self.fetch, args=(tuple(beats),), daemon=True)
            self.thread.start()
        return self.found

    def fetch(self, beats: Sequence[Heartbeat]) -> None:
        """Ask all ranks, one after the other."""
        begin, costs, found = time.monotonic(), [0.0], []
        for beat in beats:
            if (start := time.monotonic()) - begin > _TIMEOUT:
                break
            try:
                trace = post_handler(self.folder / f"rank-{beat.rank}.sock", _HANDLER, _TIMEOUT)
                costs.append(time.monotonic() - start)
                times = condense(trace, beat, self.limit)
            except (ServerError, ValueError, OverflowError):
                continue
            if times is not None:
                found.append(times)
        self.cost = max(costs)
        self.found = tuple(found)


def condense(trace: bytes, beat: Heartbeat, limit: int) -> CollectiveTimes | None:
    """Return the marks of a rank's last whole steps; None if there is none with a collective.

    At most `limit` marks are kept. Point-to-point operations do not count: their ends
    differ from rank to rank. Raises DecodeError.
    """
    entries, _, configs = load_trace(trace)
    entries = [entry for entry in entries if is_collective(entry)]
    timed = [entry for entry in entries if isinstance(entry.get("duration_ms"), int | float)]
    measure = DURATION if entries and 2 * len(timed) > len(entries) else ENQUEUED
    ends, first = beat.step_ends, beat.step - len(beat.step_ends) + 1
    marks = [(end, Mark(first + index, STEP_ENDS, first + index, end)) for index, end in enumerate(ends)]
    oldest = float("inf")
    for entry in timed if measure == DURATION else entries:
        created = as_number(entry.get("time_created_ns")) / 1e9
        value = -float(entry["duration_ms"]) / 1e3 if measure == DURATION else created
        name, description = name_group(entry)
        members = read_members(configs, name)
        group = f"{name or description}{list(members) if members else ''}"[:200]
        oldest = min(oldest, created)
        if (index := bisect_left(ends, created)) < len(ends):
            marks.append((created, Mark(first + index, group, as_number(entry["collective_seq_id"]), value)))
    marks.sort(key=lambda item: item[0])
    # From the end of a step, after which all collectives are known, as many steps as the limit allows.
    starts = [at for at, (when, mark) in enumerate(marks) if not mark.group and when >= oldest]
    start = next((at for at in starts[:-1] if len(marks) - at <= limit), None)
    chosen = [] if start is None else [mark for _, mark in marks[start:]]
    has_calls = any(mark.group != STEP_ENDS for mark in chosen)
    return pack_marks(beat.rank, measure, chosen) if has_calls else None


# When to read

QUICK = 5
"""Seconds between readings at the beginning, and after steps have become longer."""
_SLOWEST = 640
"""Seconds between readings at most: QUICK doubled again and again, so that the moments of nodes coincide."""
_MAX_COST = 0.0005
"""Cores that readings may take from a rank later on."""
_QUICK_SECONDS, _QUICK_STEPS, _QUICK_LIMIT = 60, 100, 600
"""Readings are quick for so many seconds and so many steps, whichever is longer, up to a limit in seconds."""
_LONGER = 1.03
"""Steps that last so many times as long as before have become longer."""
_RECENT = 20
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
        current, is_quick = median(beat.durations[-_RECENT:]), self._is_quick(beat.step, now)
        if self.quick_since is None or (not is_quick and current > _LONGER * self.usual):
            self.quick_since, self.quick_step, self.usual, is_quick = now, beat.step, current, True
        else:
            self.usual = current if is_quick else min(self.usual, current)
        moment = int(now // QUICK)
        every = 1 if is_quick else choose_reading_interval(cost) // QUICK
        due = moment // every != self.last // every
        if due:
            self.last = moment
        return due

    def _is_quick(self, step: int, now: float) -> bool:
        if self.quick_since is None:
            return False
        age = now - self.quick_since
        return age < _QUICK_SECONDS or (age < _QUICK_LIMIT and step < self.quick_step + _QUICK_STEPS)


def choose_reading_interval(cost: float) -> int:
    """Return the seconds between readings that keep their cost within MAX_COST, as far as SLOWEST goes."""
    interval = QUICK
    while interval < _SLOWEST and cost > _MAX_COST * interval:
        interval *= 2
    return interval
