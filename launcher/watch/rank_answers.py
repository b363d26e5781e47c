"""What a rank answers by itself and by its children: stacks, the flight recorder, waits in the store.

Each step has its own timeout, within the deadline of all, and leaves a note if it fails.
"""

import linecache
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.codec import DecodeError
from launcher.watch.flight_recorder import parse_trace
from launcher.watch.kernel_state import KernelLook, catches_signal
from launcher.watch.rank_server import ServerError, UnknownHandlerError, post_handler, read_store_wait
from launcher.watch.stacks import (
    STACK_SIGNAL,
    check_signal,
    find_main,
    request_from_server,
    request_stacks,
)
from launcher.watch.watch_model import Frame, GpuSample, GroupState, Heartbeat, ProcessState, Stack

STACK_PATIENCE = 0.8
CHILD_PATIENCE = 0.2
SERVER_PATIENCE = 0.7
ALL_CHILDREN = 0.8
"""Seconds for the stacks of all children of a rank."""
LARGEST_KEPT = 1 << 20
"""Bytes of a rank's raw flight recorder that are kept."""
CANNOT_ANSWER = {
    "T": "it is stopped and cannot answer",
    "t": "a debugger has stopped it",
    "Z": "it has ended",
    "X": "it has ended",
}
"""States in which a process gets no signal and runs no server. In state D, its other threads do."""
TAKES_LOCK = re.compile(r"\s*(with\s+[\w.\[\]]+\s*:|.*\.acquire\(\)$)")
"""A line that waits for nothing but a lock, if it waits: `with open(path):` could wait for a file."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When gathering ends, in monotonic seconds."""

    time: float

    def limit(self, seconds: float) -> float:
        """Return so many seconds, or those that are left."""
        return min(seconds, max(self.time - time.monotonic(), 0.0))


@dataclass(slots=True)
class Findings:
    """What a rank's thread has found so far; it is read when time is up, in whatever state it is."""

    first: KernelLook | None = None
    process: ProcessState | None = None
    stacks: tuple[Stack, ...] = ()
    stack_source: str = ""
    stack_changes: bool = False
    children: tuple[ProcessState, ...] = ()
    groups: tuple[GroupState, ...] = ()
    answered: bool = False
    store_wait: bool = False
    store_operation: str = ""
    gpu: GpuSample | None = None
    notes: list[str] = field(default_factory=list)
    is_done: bool = False


def may_take_gil(pid: int, heartbeat: Heartbeat | None) -> bool:
    """Tell whether torch's server may be asked for stacks.

    Its thread takes the GIL for that. In an interpreter that has begun to end, a thread that does is ended,
    and torch's C++ code aborts the process then. The handler for stacks is gone by that time.
    """
    if heartbeat is None or heartbeat.phase == "ended":
        return False
    return not heartbeat.can_dump or catches_signal(pid, STACK_SIGNAL)


def read_stacks(found: Findings, pid: int, path: Path | None, ends: Deadline) -> None:
    """Get a rank's stacks by the signal; `path` is None without a handler."""
    reason = "its hook has no handler for stacks" if path is None else check_signal(pid, path)
    if path is not None and not reason:
        found.stack_source = "faulthandler"
        found.stacks = request_stacks(pid, path, ends.limit(STACK_PATIENCE))
        reason = check_signal(pid, path) or "it did not react to the stack signal"
    if not found.stacks:
        found.stack_source = ""
        found.notes.append(f"no stacks from faulthandler: {reason}")


def read_server_stacks(found: Findings, socket_path: Path, ends: Deadline) -> None:
    """Get a rank's stacks from torch's server."""
    try:
        stacks = request_from_server(socket_path, ends.limit(SERVER_PATIENCE))
        found.stacks, found.stack_source = stacks, "torch"
    except ServerError as error:
        found.notes.append(f"no stacks from torch's server: {error}")


def read_server(found: Findings, socket_path: Path, kept: Path, ends: Deadline) -> None:
    """Get a rank's flight recorder and its waits in the store, and keep the raw recorder as a file."""
    try:
        trace = read_trace(socket_path, ends.limit(SERVER_PATIENCE))
        found.groups, found.answered = parse_trace(trace), True
        keep_trace(kept, trace)
    except (ServerError, DecodeError) as error:
        found.notes.append(f"no flight recorder from torch's server: {error}")
    except OSError as error:
        found.notes.append(f"its flight recorder is not kept: {error.strerror}")
    if not (found.answered or socket_path.exists()):
        return
    try:
        patience = ends.limit(SERVER_PATIENCE)
        found.store_wait, found.store_operation = read_store_wait(socket_path, patience)
    except ServerError as error:
        found.notes.append(f"no waits in the store from torch's server: {error}")


def keep_trace(kept: Path, trace: bytes) -> None:
    """Write a raw flight recorder, or none if it is large: the file may be in memory that the ranks need.

    Raises OSError.
    """
    if len(trace) > LARGEST_KEPT:
        kept.unlink(missing_ok=True)
    else:
        kept.write_bytes(trace)


def read_trace(socket_path: Path, patience: float) -> bytes:
    """Return the answer of the flight recorder, by its older name if that is all there is."""
    try:
        return post_handler(socket_path, "fr_trace_json", patience)
    except UnknownHandlerError:
        return post_handler(socket_path, "dump_nccl_trace_json", patience)


def read_child_stacks(
    children: Sequence[ProcessState], path: Path, ends: Deadline
) -> dict[int, tuple[Stack, ...]]:
    """Return the stacks of children that have the rank's handler and file, asked one after the other."""
    stacks: dict[int, tuple[Stack, ...]] = {}
    end = time.monotonic() + ends.limit(ALL_CHILDREN)
    for child in children:
        if time.monotonic() > end:
            break
        if not check_signal(child.pid, path):
            stacks[child.pid] = request_stacks(child.pid, path, ends.limit(CHILD_PATIENCE))
    return stacks


def mark_locks(stacks: Sequence[Stack]) -> tuple[Stack, ...]:
    """Mark the threads whose line takes a lock, by the program's text."""
    return tuple(
        replace(stack, awaits_lock=bool(TAKES_LOCK.match(read_line(frame))))
        if (frame := stack.frames[0] if stack.frames else None)
        else stack
        for stack in stacks
    )


def read_line(frame: Frame) -> str:
    """Return a line of the program's text; empty if it cannot be had."""
    return linecache.getline(frame.file, frame.line).rstrip("\n") if frame.file.startswith("/") else ""


def compare_stacks(found: Findings, pid: int, path: Path, ends: Deadline) -> None:
    """Note whether the main thread is at another place in a second sample."""
    if (patience := ends.limit(STACK_PATIENCE)) > 0 and not check_signal(pid, path):
        before, after = find_main(found.stacks), find_main(request_stacks(pid, path, patience))
        found.stack_changes = before is not None and after is not None and before.frames != after.frames
