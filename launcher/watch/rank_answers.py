"""What a rank answers by itself and by its children: stacks, the flight recorder, waits in the store.

Each step has its own timeout, and leaves a note if it fails.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.decode import DecodeError
from launcher.watch.flight_recorder import parse_trace
from launcher.watch.kernel_state import KernelLook, catches_signal
from launcher.watch.rank_server import ServerError, UnknownHandlerError, post_handler, read_store_wait
from launcher.watch.stacks import (
    STACK_SIGNAL,
    check_signal,
    find_main,
    request_from_py_spy,
    request_from_server,
    request_stacks,
)
from launcher.watch.watch_model import GpuSample, GroupState, Heartbeat, ProcessState, Stack

STACK_PATIENCE = 0.8
CHILD_PATIENCE = 0.2
SERVER_PATIENCE = 0.7
PY_SPY_PATIENCE = 0.8
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


def read_stacks(found: Findings, pid: int, path: Path | None) -> None:
    """Get a rank's stacks by the signal; `path` is None without a handler."""
    reason = "its hook has no handler for stacks" if path is None else check_signal(pid, path)
    if path is not None and not reason:
        found.stacks, found.stack_source = request_stacks(pid, path, STACK_PATIENCE), "faulthandler"
        reason = check_signal(pid, path) or "it did not react to the stack signal"
    if not found.stacks:
        found.stack_source = ""
        found.notes.append(f"no stacks from faulthandler: {reason}")


def read_other_stacks(found: Findings, pid: int, socket_path: Path) -> None:
    """Get a rank's stacks from torch's server, or from py-spy."""
    try:
        found.stacks, found.stack_source = request_from_server(socket_path, SERVER_PATIENCE), "torch"
    except ServerError as error:
        found.notes.append(f"no stacks from torch's server: {error}")
    if not found.stacks and (stacks := request_from_py_spy(pid, PY_SPY_PATIENCE)):
        found.stacks, found.stack_source = stacks, "py-spy"


def read_server(found: Findings, socket_path: Path, kept: Path) -> None:
    """Get a rank's flight recorder and its waits in the store, and keep the raw recorder as a file."""
    try:
        trace = read_trace(socket_path)
        found.groups, found.answered = parse_trace(trace), True
        keep_trace(kept, trace)
    except (ServerError, DecodeError) as error:
        found.notes.append(f"no flight recorder from torch's server: {error}")
    except OSError as error:
        found.notes.append(f"its flight recorder is not kept: {error.strerror}")
    if not (found.answered or socket_path.exists()):
        return
    try:
        found.store_wait, found.store_operation = read_store_wait(socket_path, SERVER_PATIENCE)
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


def read_trace(socket_path: Path) -> bytes:
    """Return the answer of the flight recorder, by its older name if that is all there is."""
    try:
        return post_handler(socket_path, "fr_trace_json", SERVER_PATIENCE)
    except UnknownHandlerError:
        return post_handler(socket_path, "dump_nccl_trace_json", SERVER_PATIENCE)


def read_child_stacks(looks: Mapping[int, KernelLook], path: Path) -> dict[int, tuple[Stack, ...]]:
    """Return the stacks of children that have the rank's handler and file, asked one after the other."""
    stacks: dict[int, tuple[Stack, ...]] = {}
    ends = time.monotonic() + ALL_CHILDREN
    for pid, look in looks.items():
        if time.monotonic() > ends:
            break
        if look.process.state in CANNOT_ANSWER or check_signal(pid, path):
            continue
        if found := request_stacks(pid, path, CHILD_PATIENCE):
            stacks[pid] = found
    return stacks


def compare_stacks(found: Findings, pid: int, path: Path) -> None:
    """Note whether the main thread is at another place in a second sample."""
    if not check_signal(pid, path):
        before, after = find_main(found.stacks), find_main(request_stacks(pid, path, STACK_PATIENCE))
        found.stack_changes = before is not None and after is not None and before.frames != after.frames
