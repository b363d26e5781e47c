"""Reads the heartbeats that the hooks of the ranks on this node write (see `launch_inprocess.heartbeat`)."""

import math
import os
import re
import struct
import time
from dataclasses import dataclass

from launcher.files import read_file, read_stat
from launcher.watch.watch_model import PHASES, Heartbeat

MAGIC = int.from_bytes(b"launchHB", "little")
LAYOUT, SIZE = 1, 8192
RING = 257
ENDS_AT, DURATIONS_AT, NOTES_AT = 32, 32 + RING, 32 + 2 * RING
MAX_NOTES = 1024
HEAD = struct.Struct("=7q qd qdd qd q qq")
"""The first 17 items."""
NAME = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.beat")
START_TIME, START_STACK = 22 - 3, 28 - 3
"""Indices of these fields of proc(5)'s stat in `read_stat`."""
MAX_READS = 3
"""Readings until two agree; of a rank that writes more often than that, the last one is taken."""


@dataclass(frozen=True, slots=True)
class BeatHead:
    """The items before the rings, as they are in the file; times are CLOCK_MONOTONIC's."""

    magic: int
    layout: int
    pid: int
    start_time: int
    start_stack: int
    rank: int
    local_rank: int
    phase: int
    phase_since: float
    step: int
    step_time: float
    activity_time: float
    batches: int
    data_wait: float
    dump_signal: int
    notes_size: int
    recorded: int


def read_heartbeat(path: str | os.PathLike[str]) -> Heartbeat | None:
    """Return what a rank's hook has written last; None if there is nothing, or nobody who writes it.

    That is so for a file that is not there or is none of ours, another user's, and one of a process that has
    ended or become another program. Times are converted to seconds since the epoch by the clocks of now.
    """
    try:
        data = read_twice(path)
        head = read_head(data)
        if head is None or not is_alive(head):
            return None
    except OSError:
        return None
    shift = time.time() - time.monotonic()
    steps = read_steps(data, head.recorded)
    return Heartbeat(
        rank=head.rank,
        local_rank=head.local_rank,
        pid=head.pid,
        phase=PHASES[head.phase],
        phase_since=head.phase_since + shift,
        step=head.step,
        step_time=head.step_time and head.step_time + shift,
        activity_time=max(head.activity_time, head.phase_since, head.step_time) + shift,
        batches=head.batches,
        data_wait=head.data_wait,
        durations=tuple(duration for _, duration in steps),
        step_ends=tuple(end + shift for end, _ in steps),
        can_dump=head.dump_signal > 0,
        notes=read_notes(data, head.notes_size),
    )


def read_twice(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a heartbeat, as two readings have them if possible; raises OSError."""
    data = read_file(path, SIZE, own=True)
    for _ in range(MAX_READS - 1):
        before, data = data, read_file(path, SIZE, own=True)
        if data == before:
            break
    return data


def read_head(data: bytes) -> BeatHead | None:
    """Return the items before the rings; None for what no hook of this version has written."""
    if len(data) != SIZE:
        return None
    head = BeatHead(*HEAD.unpack_from(data))
    numbers = (head.phase_since, head.step_time, head.activity_time, head.data_wait)
    counts = (head.rank, head.local_rank, head.step, head.batches, head.notes_size, head.recorded)
    is_known = head.magic == MAGIC and head.layout == LAYOUT and 0 <= head.phase < len(PHASES)
    is_sane = all(map(math.isfinite, numbers)) and min(counts) >= 0
    return head if is_known and is_sane else None


def is_alive(head: BeatHead) -> bool:
    """Tell whether the process that wrote this still runs the same program.

    The kernel shows the address of its stack, which an exec changes, to those alone who may trace it.
    """
    try:
        _, fields = read_stat(head.pid)
    except OSError:
        return False
    if fields[0] in "ZX" or int(fields[START_TIME]) != head.start_time:
        return False
    return head.start_stack == 0 or int(fields[START_STACK]) in (0, head.start_stack)


def read_steps(data: bytes, recorded: int) -> list[tuple[float, float]]:
    """Return the end and the duration of the steps in the rings, oldest first.

    Those that were written meanwhile are among them, in the places of the oldest.
    """
    ends, durations = (struct.unpack_from(f"={RING}d", data, 8 * at) for at in (ENDS_AT, DURATIONS_AT))
    places = [number % RING for number in range(max(0, recorded - (RING - 1)), recorded)]
    steps = [(ends[place], durations[place]) for place in places]
    return sorted(step for step in steps if all(map(math.isfinite, step)))


def read_notes(data: bytes, size: int) -> tuple[str, ...]:
    """Return the notes' lines."""
    text = data[8 * NOTES_AT : 8 * NOTES_AT + min(size, MAX_NOTES)].decode(errors="replace")
    return tuple(text.splitlines())
