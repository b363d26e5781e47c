"""torch's server in a rank (`_WorkerServer`), asked over its Unix socket, and what its flight recorder tells.

It is experimental in torch: what it does not answer in time, or at all, is missing from the evidence.

The flight recorder tells which collectives of which group a rank has called, which are complete, and when the
rank came to them. Gloo's entries keep the state `scheduled` for ever and name no members; what is complete
follows from `pg_status`. NCCL adds states (`started`, `completed`) and, in `pg_config`, the
members. Point-to-point operations of gloo are not recorded at all.
"""

import base64
import json
import re
import socket
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, zip_longest
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from launcher.codec import DecodeError, parse_json, take_dict, take_list
from launcher.watch.model import Call, CollectiveTimes, GroupState, Heartbeat

TRACE = ("fr_trace_json", "dump_nccl_trace_json")
"""The flight recorder's handler, and its older name."""


class ServerError(Exception):
    """The server did not answer; the text says why."""


def post_handler(path: Path, timeout: float, *handlers: str) -> bytes:
    """Return the answer of the first of these handlers that the server has; raises ServerError.

    It is asked by HTTP/1.0, whose answers end with the connection. The timeout is for each read and write, so
    that a server that answers byte by byte may take longer.
    """
    for handler in handlers:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(max(timeout, 1e-3))
                link.connect(str(path))
                link.sendall(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
                head, _, data = b"".join(iter(lambda: link.recv(1 << 20), b"")).partition(b"\r\n\r\n")
        except TimeoutError:
            raise ServerError(f"no answer within {timeout:g} s") from None
        except OSError as error:
            raise ServerError(str(error)) from None
        status = head.partition(b"\r\n")[0].decode("ascii", "replace")
        if " 200 " in status:
            return data
        if " 404 " not in status:
            raise ServerError(f"answered with {status!r}" if status else "closed the connection")
    raise ServerError(f"it has no {handlers[0]}")


# The flight recorder

MOST_CALLS = 64
"""Collectives of a group that are kept, the last ones; a step of DDP has one for each bucket."""
_MOST_GROUPS = 256
_LONGEST = 200
"""Characters of names and sizes."""
DEFAULT_GROUP = "default group"
_DEFAULT_DESCRIPTIONS = ("default_pg", "default_process_group")
_UNDESCRIBED = ("", "undefined")
_POINT_TO_POINT = re.compile(r"\b(send|recv) \d+(?:->|<-)(\d+)$")
_TORCH_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_allv": "all_to_all",
}
"""Names in profiles that differ from the functions of `torch.distributed`."""
Entry = Mapping[str, Any]
"""What the recorder has of a call."""


def _load_trace(data: bytes) -> tuple[Sequence[Entry], Entry, Entry]:
    """Return the entries, `pg_status` and `pg_config` of an answer; raises DecodeError.

    An unknown form of single entries leaves them out.
    """
    trace = parse_json(data)
    if not isinstance(trace, dict):
        raise DecodeError("the flight recorder's answer is no object")
    entries = [entry for entry in take_list(trace, "entries") if isinstance(entry, dict)]
    return entries, take_dict(trace, "pg_status"), take_dict(trace, "pg_config")


def parse_trace(data: bytes) -> tuple[GroupState, ...]:
    """Return the state of each process group from a flight recorder; raises DecodeError."""
    entries, statuses, configs = _load_trace(data)
    by_group: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        by_group.setdefault((str(entry.get("pg_id", "")), *_name_group(entry)), []).append(entry)
    found = []
    for (number, name, description), group in by_group.items():
        status = take_dict(statuses, number)
        completed = _as_number(status.get("last_completed_collective"))
        calls = _list_calls(group, completed)
        enqueued = [_as_number(status.get("last_enqueued_collective")), *(one.sequence for one in calls)]
        completed = max((call.sequence for call in calls if call.is_complete), default=completed)
        members = _read_members(configs, name)
        state = GroupState(
            name=_show_group(name, description),
            ranks=members,
            last_enqueued=max(enqueued),
            last_completed=min(completed, max(enqueued)),
            key=name or description,
            calls=calls,
            exchanges=_list_exchanges(group, members),
        )
        if state.last_enqueued > 0 or state.exchanges:
            found.append(state)
    return tuple(found[:_MOST_GROUPS])


def _name_group(entry: Entry) -> tuple[str, str]:
    """Return torch's name of an entry's group and its description."""
    names = [str(part)[:_LONGEST] for part in take_list(entry, "process_group")]
    name, description, *_ = [*names, "", ""]
    return name, description


def _read_members(configs: Entry, name: str) -> tuple[int, ...]:
    """Return a group's global ranks, which are a text as `[0, 1, 2]`; empty if they are not known."""
    ranks = take_dict(configs, name).get("ranks", "") if name else ""
    return tuple(int(number) for number in re.findall(r"\d+", str(ranks)[: 1 << 16]))


def _show_group(name: str, description: str) -> str:
    """Return a group's name for people: `default group`, `mesh_dp`, `1`."""
    if description in _DEFAULT_DESCRIPTIONS or (name == "0" and description in _UNDESCRIBED):
        return DEFAULT_GROUP
    short = name if len(name) <= 12 else f"{name[:8]}…"  # a hash of the members
    return short if description in _UNDESCRIBED else description


def _list_calls(entries: Sequence[Entry], completed: int) -> tuple[Call, ...]:
    """Return the last collectives of one group, ascending, without point-to-point operations."""
    calls: dict[int, Call] = {}
    for entry in filter(_is_collective, entries):
        sequence = _as_number(entry.get("collective_seq_id"))
        is_complete = sequence <= completed or entry.get("state") == "completed"
        operation = str(entry.get("profiling_name", "")).rpartition(":")[2][:_LONGEST]  # `gloo:all_reduce`
        # `[2, 3] Float, [5] Int`
        sizes = zip_longest(take_list(entry, "input_sizes"), take_list(entry, "input_dtypes"))
        shown = ", ".join(
            f"{json.dumps(size)} {kind or ''}".rstrip() for size, kind in sizes if size is not None
        )
        shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
        calls[sequence] = Call(sequence, _TORCH_NAMES.get(operation, operation), shown, is_complete)
    return tuple(calls[sequence] for sequence in sorted(calls)[-MOST_CALLS:])


def _list_exchanges(entries: Sequence[Entry], members: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Return the point-to-point operations that are not complete, each once: `nccl:recv 3<-0` is with rank 0.

    The numbers are those within the group, which its members translate. Source: the names that torch's own
    analysis reads (torch.distributed.flight_recorder).
    """
    found: dict[tuple[str, int], None] = {}
    for entry in entries:
        is_open = entry.get("state") != "completed" and not entry.get("retired")
        match = _POINT_TO_POINT.search(str(entry.get("profiling_name", ""))[:_LONGEST])
        if entry.get("is_p2p") is True and is_open and match:
            other = int(match[2])
            found[match[1], members[other] if other < len(members) else other] = None
    return tuple(found)[-MOST_CALLS:]


def _is_collective(entry: Entry) -> bool:
    """Tell whether an entry is one of all ranks of a group."""
    return entry.get("is_p2p") is not True and _as_number(entry.get("collective_seq_id")) > 0


def _as_number(value: object) -> int:
    """Return a number, which torch may write as a text; -1 for anything else."""
    try:
        return int(str(value))
    except ValueError:
        return -1


# When ranks came to their collectives and to the ends of their steps: packed into reports, for excess.py.
# A mark is a row of four integers: the step in which it is (the first one is 1), the number of the group, the
# collective's sequence number in it, which is the same on all ranks, and the time in microseconds.

DURATION, ENQUEUED = "duration", "enqueued"
"""What marks have for the time of a collective: minus its duration, or when it was enqueued."""
STEP_ENDS = ""
"""The group that stands for ends of steps; their sequence numbers are the steps'."""


def _pack_marks(rank: int, measure: str, marks: Sequence[tuple[int, str, int, float]]) -> CollectiveTimes:
    """Pack marks (step, group, sequence, seconds): differences from one to the next, compressed."""
    groups = tuple(dict.fromkeys(group for _, group, _, _ in marks))
    rows = [(step, groups.index(group), number, round(time * 1e6)) for step, group, number, time in marks]
    changes = (new - old for column in zip(*rows, strict=True) for old, new in pairwise((0, *column)))
    data = b"".join(one.to_bytes(8, "little", signed=True) for one in changes)
    return CollectiveTimes(rank, measure, groups, base64.b85encode(zlib.compress(data)).decode())


# Reading

_TIMEOUT = 2.0
"""Seconds for a rank's answer; after that many for all ranks the others are not asked."""
_MOST_PACKED, _LEAST_PACKED = 1024, 128
"""Marks of a rank in a report: the most, and what large jobs come down to."""
_ALL_PACKED = 1 << 17
"""Marks of all ranks of a job, as a goal."""
_QUICK = 5
"""Seconds between readings at the beginning, and after steps have become longer."""
_SLOWEST = 128
"""Times that between readings at most: doubled again and again, so that the moments of nodes coincide."""
_MAX_COST = 0.0005
"""Cores that readings may take from a rank later on."""
_QUICK_SECONDS, _QUICK_STEPS, _QUICK_LIMIT = 60, 100, 600
"""Readings are quick for so many seconds and so many steps, whichever is longer, up to a limit in seconds."""
_LONGER = 1.03
"""Steps that last so many times as long as before have become longer."""
_RECENT = 20
"""Steps whose median is compared."""


class CollectiveReader:
    """Reads the recorders of a node's ranks if it is time to.

    That is at multiples of QUICK on the clock, so that all nodes read at the same moments. A straggler makes
    the steps of all ranks longer: nothing is missed while they are not.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        """`folder` has the sockets of the ranks' servers; `ranks` is how many ranks the job has."""
        self.folder = folder
        self.limit = max(_LEAST_PACKED, min(_MOST_PACKED, _ALL_PACKED // max(1, ranks)))
        self.cost = 0.0
        """Seconds that the last reading took of the slowest rank."""
        self.thread: threading.Thread | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin with new ranks."""
        self.found: tuple[CollectiveTimes, ...] = ()
        self.pids: dict[int, int] = {}
        self.last = 0
        """Moment of the last reading, in units of QUICK since the epoch."""
        self.quick_since, self.quick_step = -inf, 0
        """Since when, and since which step, readings are quick."""
        self.usual = 0.0
        """Seconds of a step that new ones are compared with."""

    def read(self, beats: Sequence[Heartbeat], now: float) -> tuple[CollectiveTimes, ...]:
        """Return the marks of the ranks with these heartbeats, as of the last reading.

        If it is time, another reading begins in a thread. `now` is the time since the epoch. Ranks whose
        recorders cannot be had are missing.
        """
        if any(self.pids.get(beat.rank, beat.pid) != beat.pid for beat in beats):
            self._forget()
        self.pids |= {beat.rank: beat.pid for beat in beats}
        is_reading = self.thread is not None and self.thread.is_alive()
        if not is_reading and self.is_due(beats, now):
            self.thread = threading.Thread(target=self.fetch, args=(tuple(beats),), daemon=True)
            self.thread.start()
        return self.found

    def is_due(self, beats: Sequence[Heartbeat], now: float) -> bool:
        """Tell whether to read; if so it counts as done."""
        beat = max(beats, key=lambda one: len(one.durations), default=None)
        if beat is None or len(beat.durations) < 2:
            return False
        current = median(beat.durations[-_RECENT:])
        age, steps = now - self.quick_since, beat.step - self.quick_step
        is_quick = age < _QUICK_SECONDS or (age < _QUICK_LIMIT and steps < _QUICK_STEPS)
        if not is_quick and current > _LONGER * self.usual:
            self.quick_since, self.quick_step, self.usual, is_quick = now, beat.step, current, True
        self.usual = current if is_quick else min(self.usual, current)
        every = 1
        while not is_quick and every < _SLOWEST and self.cost > _MAX_COST * _QUICK * every:
            every *= 2
        moment = int(now // _QUICK)
        due = moment // every != self.last // every
        self.last = moment if due else self.last
        return due

    def fetch(self, beats: Sequence[Heartbeat]) -> None:
        """Ask all ranks, one after the other."""
        begin, costs, found = time.monotonic(), [0.0], []
        for beat in beats:
            if (start := time.monotonic()) - begin > _TIMEOUT:
                break
            with suppress(ServerError, ValueError, OverflowError):
                trace = post_handler(self.folder / f"rank-{beat.rank}.sock", _TIMEOUT, *TRACE)
                costs.append(time.monotonic() - start)
                if times := condense(trace, beat, self.limit):
                    found.append(times)
        self.cost, self.found = max(costs), tuple(found)


def condense(trace: bytes, beat: Heartbeat, limit: int) -> CollectiveTimes | None:
    """Return the marks of a rank's last whole steps; None if there is none with a collective.

    At most `limit` marks are kept. Point-to-point operations do not count: their ends
    differ from rank to rank. Raises DecodeError.
    """
    entries, _, configs = _load_trace(trace)
    entries = [entry for entry in entries if _is_collective(entry)]
    timed = [entry for entry in entries if isinstance(entry.get("duration_ms"), int | float)]
    measure = DURATION if entries and 2 * len(timed) > len(entries) else ENQUEUED
    ends, first = beat.step_ends, beat.step - len(beat.step_ends) + 1
    marks = [(end, (first + index, STEP_ENDS, first + index, end)) for index, end in enumerate(ends)]
    oldest = inf
    for entry in timed if measure == DURATION else entries:
        created = _as_number(entry.get("time_created_ns")) / 1e9
        value = -float(entry["duration_ms"]) / 1e3 if measure == DURATION else created
        name, description = _name_group(entry)
        group = f"{name or description}{list(_read_members(configs, name)) or ''}"[:_LONGEST]
        oldest = min(oldest, created)
        if (index := bisect_left(ends, created)) < len(ends):
            marks.append((created, (first + index, group, _as_number(entry["collective_seq_id"]), value)))
    marks.sort(key=lambda item: item[0])
    # From the end of a step, after which all collectives are known, as many steps as the limit allows.
    starts = [at for at, (when, mark) in enumerate(marks) if mark[1] == STEP_ENDS and when >= oldest]
    start = next((at for at in starts[:-1] if len(marks) - at <= limit), None)
    chosen = [] if start is None else [mark for _, mark in marks[start:]]
    has_calls = any(group != STEP_ENDS for _, group, _, _ in chosen)
    return _pack_marks(beat.rank, measure, chosen) if has_calls else None
