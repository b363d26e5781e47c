"""Reads the heartbeats that the hooks of the ranks on this node write (see `launch_inprocess.heartbeat`)."""

import math
import os
import struct
import time
from types import SimpleNamespace

from launcher.files import read_file, read_stat
from launcher.watch.model import PHASES, Heartbeat
from launcher.watch.procfs import START

MAGIC = int.from_bytes(b"launchHB", "little")
LAYOUT, SIZE = 1, 8192
RING = 257
ENDS_AT, DURATIONS_AT, NOTES_AT = 32, 32 + RING, 32 + 2 * RING
MAX_NOTES = 1024
HEAD = struct.Struct("=7q qd qdd qd q qq")
"""The first 17 items."""
_START_STACK = 28 - 3
"""Index of this field of proc(5)'s stat in `read_stat`."""
_MAX_READS = 3
"""Readings until two agree; of a rank that writes more often than that, the last one is taken."""


HEAD_FIELDS = (
    *("magic", "layout", "pid", "start_time", "start_stack", "rank", "local_rank", "phase", "phase_since"),
    *("step", "step_time", "activity_time", "batches", "data_wait", "dump_signal", "notes_size", "recorded"),
)
"""The items before the rings, as they are in the file; times are CLOCK_MONOTONIC's."""


def read_heartbeat(path: str | os.PathLike[str]) -> Heartbeat | None:
    """Return what a rank's hook has written last; None if there is nothing, or nobody who writes it.

    That is so for a file that is not there or is none of ours, another user's, and one of a process that has
    ended or become another program. Times are converted to seconds since the epoch by the clocks of now.
    """
    try:
        data = read_file(path, SIZE, own=True)
        for _ in range(_MAX_READS - 1):
            before, data = data, read_file(path, SIZE, own=True)
            if data == before:
                break
        head = _read_head(data)
        if head is None:
            return None
        state, *_ = fields = read_stat(head.pid)[1]
    except OSError:
        return None
    # The kernel shows where a process's stack is, which an exec changes, to those alone who may trace it.
    stack = int(fields[_START_STACK])
    if (
        state in "ZX"
        or int(fields[START]) != head.start_time
        or (stack and head.start_stack not in (0, stack))
    ):
        return None
    # The rings' oldest places may have what was written meanwhile.
    ends, durations = (struct.unpack_from(f"={RING}d", data, 8 * at) for at in (ENDS_AT, DURATIONS_AT))
    places = [number % RING for number in range(max(0, head.recorded - (RING - 1)), head.recorded)]
    steps = sorted((ends[at], durations[at]) for at in places if math.isfinite(ends[at] + durations[at]))
    notes = data[8 * NOTES_AT : 8 * NOTES_AT + min(head.notes_size, MAX_NOTES)].decode(errors="replace")
    shift = time.time() - time.monotonic()
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
        notes=tuple(notes.splitlines()),
    )


def _read_head(data: bytes) -> SimpleNamespace | None:
    """Return the items before the rings; None for what no hook of this version has written."""
    if len(data) != SIZE:
        return None
    head = SimpleNamespace(**dict(zip(HEAD_FIELDS, HEAD.unpack_from(data), strict=True)))
    numbers = (head.phase_since, head.step_time, head.activity_time, head.data_wait)
    counts = (head.rank, head.local_rank, head.step, head.batches, head.notes_size, head.recorded)
    is_known = head.magic == MAGIC and head.layout == LAYOUT and 0 <= head.phase < len(PHASES)
    is_sane = all(map(math.isfinite, numbers)) and min(counts) >= 0
    return head if is_known and is_sane else None
