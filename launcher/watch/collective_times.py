"""When the ranks of this node came to their collectives: from torch's flight recorder, read seldom.

A recorder with 2,000 entries takes the server in its rank 25 to 40 ms, without the GIL, and the reader 15 ms.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.codec import parse_json
from launcher.watch.collective_marks import DURATION, ENQUEUED, STEP_ENDS, Mark, pack_marks
from launcher.watch.flight_recorder import as_list, as_mapping, as_number, name_group, read_members
from launcher.watch.rank_server import ServerError, post_handler
from launcher.watch.reading_times import ReadingTimes
from launcher.watch.watch_model import CollectiveTimes, Heartbeat

HANDLER = "fr_trace_json"
TIMEOUT = 2.0
"""Seconds for a rank's answer; after that many for all ranks the others are not asked."""
MOST_PACKED, LEAST_PACKED = 1024, 128
"""Marks of a rank in a report: the most, and what large jobs come down to."""
ALL_PACKED = 1 << 17
"""Marks of all ranks of a job, as a goal."""


class CollectiveReader:
    """Reads the recorders of a node's ranks if it is time to."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """`folder` has the sockets of the ranks' servers; `ranks` is how many ranks the job has."""
        self.folder = folder
        self.limit = max(LEAST_PACKED, min(MOST_PACKED, ALL_PACKED // max(1, ranks)))
        self.moments = ReadingTimes()
        self.found: tuple[CollectiveTimes, ...] = ()
        self.cost = 0.0
        """Seconds that the last reading took of the slowest rank."""
        self.pids: dict[int, int] = {}
        """Of the ranks; new ones begin anew."""
        self.thread: threading.Thread | None = None

    def read(self, beats: Sequence[Heartbeat], now: float) -> tuple[CollectiveTimes, ...]:
        """Return the marks of the ranks with these heartbeats, as of the last reading.

        If it is time, another reading begins in a thread. `now` is the time since the epoch. Ranks whose
        recorders cannot be had are missing.
        """
        if any(self.pids.get(beat.rank, beat.pid) != beat.pid for beat in beats):
            self.pids, self.found, self.moments = {}, (), ReadingTimes()
        self.pids |= {beat.rank: beat.pid for beat in beats}
        if not self.is_reading() and self.moments.is_due(beats, now, self.cost):
            self.thread = threading.Thread(target=self.fetch, args=(tuple(beats),), daemon=True)
            self.thread.start()
        return self.found

    def is_reading(self) -> bool:
        """Tell whether a reading is under way."""
        return self.thread is not None and self.thread.is_alive()

    def fetch(self, beats: Sequence[Heartbeat]) -> None:
        """Ask all ranks, one after the other."""
        begin, costs, found = time.monotonic(), [0.0], []
        for beat in beats:
            if time.monotonic() - begin > TIMEOUT:
                break
            start = time.monotonic()
            try:
                trace = post_handler(self.folder / f"rank-{beat.rank}.sock", HANDLER, TIMEOUT)
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
    parsed = as_mapping(parse_json(trace))
    configs = as_mapping(parsed.get("pg_config"))
    entries = [entry for entry in map(as_mapping, as_list(parsed.get("entries"))) if is_collective(entry)]
    timed = [entry for entry in entries if isinstance(entry.get("duration_ms"), int | float)]
    measure = DURATION if entries and 2 * len(timed) > len(entries) else ENQUEUED
    calls = [build_call(entry, measure, configs) for entry in (timed if measure == DURATION else entries)]
    marks = place_in_steps(calls, beat)
    steps = choose_steps(marks, limit)
    has_calls = any(mark.group != STEP_ENDS for mark in steps)
    return pack_marks(beat.rank, measure, steps) if has_calls else None


def is_collective(entry: Mapping[str, Any]) -> bool:
    """Tell whether an entry is one of all ranks of a group."""
    return entry.get("is_p2p") is not True and as_number(entry.get("collective_seq_id")) > 0


def build_call(
    entry: Mapping[str, Any], measure: str, configs: Mapping[str, Any]
) -> tuple[float, str, int, float]:
    """Return when a rank enqueued a collective, its group, its number, and the time that its mark has."""
    name, description = name_group(entry)
    members = read_members(as_mapping(configs.get(name))) if name else ()
    group = f"{name or description}{list(members) if members else ''}"[:200]
    created = as_number(entry.get("time_created_ns")) / 1e9
    value = -float(entry["duration_ms"]) / 1e3 if measure == DURATION else created
    return created, group, as_number(entry.get("collective_seq_id")), value


def place_in_steps(calls: Sequence[tuple[float, str, int, float]], beat: Heartbeat) -> list[Mark]:
    """Return collectives and ends of steps in the order of time, from one end of a step to the last."""
    ends = beat.step_ends
    first = beat.step - len(ends) + 1
    marks = [(end, Mark(first + index, STEP_ENDS, first + index, end)) for index, end in enumerate(ends)]
    for created, group, sequence, value in calls:
        index = bisect_left(ends, created)
        if index < len(ends):
            marks.append((created, Mark(first + index, group, sequence, value)))
    marks.sort(key=lambda item: item[0])
    oldest = min((created for created, *_ in calls), default=0.0)
    start = next(
        (at for at, (when, mark) in enumerate(marks) if not mark.group and when >= oldest), len(marks)
    )
    return [mark for _, mark in marks[start:]]


def choose_steps(marks: Sequence[Mark], limit: int) -> Sequence[Mark]:
    """Return the last whole steps that have so many marks at most, with the end of the step before them."""
    starts = [at for at, mark in enumerate(marks) if not mark.group]
    start = next((at for at in starts[:-1] if len(marks) - at <= limit), None)
    return () if start is None else marks[start:]
