"""Evidence of one node for a hang: what ranks last did, stacks, torch's flight recorder, the kernel, GPUs.

Nothing of it needs a hung rank's help. All ranks are looked at at once, each in a thread of its own that is
left behind if it does not end in time; what it has found by then counts.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.decode import DecodeError
from launcher.watch.flight_recorder import parse_trace
from launcher.watch.kernel_state import (
    KernelLook,
    catches_signal,
    compare_looks,
    list_descendants,
    look_at_process,
)
from launcher.watch.model import (
    GpuSample,
    GroupState,
    Heartbeat,
    NodeEvidence,
    ProcessState,
    RankEvidence,
    Stack,
)
from launcher.watch.nccl_ras import ask_ras
from launcher.watch.rank_server import ServerError, UnknownHandlerError, post_handler, read_store_wait
from launcher.watch.stacks import (
    STACK_SIGNAL,
    check_signal,
    find_main,
    request_from_py_spy,
    request_from_server,
    request_stacks,
)

DEADLINE = 3.0
"""Seconds after which gathering ends with what there is."""
BETWEEN = 1.0
"""Seconds between two looks at a process, to see whether it stands."""
STACK_PATIENCE = 0.8
CHILD_PATIENCE = 0.2
SERVER_PATIENCE = 0.7
PY_SPY_PATIENCE = 0.8
ALL_CHILDREN = 0.8
"""Seconds for the stacks of all children of a rank."""
CANNOT_ANSWER = {
    "T": "it is stopped and cannot answer",
    "t": "a debugger has stopped it",
    "D": "it waits in the kernel (state D) and cannot answer",
    "Z": "it has ended",
    "X": "it has ended",
}
"""States in which a process gets no signal and runs no server."""


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """What the watcher knows of a rank before it looks."""

    rank: int
    local_rank: int
    attempt: int
    pid: int
    host: str
    exit_code: int | None = None
    """If it has ended."""
    start: int = 0
    """When the process started, in clock ticks since boot (/proc/PID/stat); 0 if not known."""


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


def gather(
    folder: Path,
    ranks: Sequence[WatchedRank],
    heartbeats: Mapping[int, Heartbeat],
    *,
    sample_gpu: Callable[[int], GpuSample | None] | None = None,
    deadline: float = DEADLINE,
) -> tuple[RankEvidence, ...]:
    """Return the evidence of a node's ranks, at the latest about `deadline` seconds after the call.

    `folder` has the ranks' heartbeats, stacks and sockets; `heartbeats` are by rank; `sample_gpu` is called
    with a local rank. torch's raw flight recorder of each rank is kept in the folder, as
    `rank-RANK.trace.json`.
    """
    ends = time.monotonic() + deadline
    descendants = list_descendants([rank.pid for rank in ranks if rank.exit_code is None])
    found = {rank.rank: Findings() for rank in ranks}
    threads = [
        threading.Thread(
            target=gather_rank,
            args=(found[rank.rank], folder, rank, heartbeats.get(rank.rank)),
            kwargs={"children": descendants.get(rank.pid, ()), "sample_gpu": sample_gpu},
            name=f"evidence-{rank.rank}",
            daemon=True,
        )
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(ends - time.monotonic(), 0))
    return tuple(make_evidence(found[rank.rank], rank, heartbeats.get(rank.rank)) for rank in ranks)


def gather_node(
    folder: Path,
    ranks: Sequence[WatchedRank],
    heartbeats: Mapping[int, Heartbeat],
    *,
    host: str,
    node_rank: int,
    number: int,
    sample_gpu: Callable[[int], GpuSample | None] | None = None,
) -> NodeEvidence:
    """Return what `gather` finds with what NCCL's RAS says, as one node's evidence for hang `number`."""
    start, answers = time.monotonic(), []
    thread = threading.Thread(target=lambda: answers.append(ask_ras()), name="nccl-ras", daemon=True)
    thread.start()
    found = gather(folder, ranks, heartbeats, sample_gpu=sample_gpu)
    thread.join(max(start + DEADLINE - time.monotonic(), 0))
    nccl, notes = answers[0] if answers else ("", ("NCCL's RAS did not answer in time",))
    seconds = round(time.monotonic() - start, 3)
    return NodeEvidence(host, node_rank, number, time.time(), seconds, found, nccl, notes)


def gather_rank(
    found: Findings,
    folder: Path,
    rank: WatchedRank,
    heartbeat: Heartbeat | None,
    *,
    children: Sequence[int],
    sample_gpu: Callable[[int], GpuSample | None] | None,
) -> None:
    """Look at one rank, step by step; a step that fails leaves a note."""
    if rank.exit_code is not None:
        found.is_done = True
        return
    found.first = look_at_process(rank.pid, rank.start)
    looks = {pid: look_at_process(pid) for pid in children}
    can_answer = found.first.process.state not in CANNOT_ANSWER
    if not can_answer:
        found.notes.append(CANNOT_ANSWER[found.first.process.state])
    can_dump = heartbeat is not None and heartbeat.can_dump
    path, socket_path = folder / f"rank-{rank.rank}.stack", folder / f"rank-{rank.rank}.sock"
    if can_answer:
        read_stacks(found, rank.pid, path if can_dump else None)
        if not found.stacks and may_take_gil(rank.pid, heartbeat):
            read_other_stacks(found, rank.pid, socket_path)
        read_server(found, socket_path, folder / f"rank-{rank.rank}.trace.json")
    child_stacks = read_child_stacks(looks, path) if can_dump else {}
    begin = time.monotonic()  # what answering has cost a rank is not its own work
    found.first = look_at_process(rank.pid, found.first.start)
    looks = {pid: look_at_process(pid, look.start) for pid, look in looks.items()}
    time.sleep(BETWEEN)
    found.process = look_again(found.first, begin)
    found.children = tuple(
        replace(look_again(look, begin), stacks=child_stacks.get(pid, ())) for pid, look in looks.items()
    )
    if found.stack_source == "faulthandler" and not check_signal(rank.pid, path):
        compare_stacks(found, request_stacks(rank.pid, path, STACK_PATIENCE))
    if sample_gpu is not None:
        with suppress(Exception):
            found.gpu = sample_gpu(rank.local_rank)
    found.is_done = True


def look_again(first: KernelLook, begin: float) -> ProcessState:
    """Look at a process a second time."""
    return compare_looks(first, look_at_process(first.process.pid), time.monotonic() - begin)


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
        reason = "it did not react to the stack signal"
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
        kept.write_bytes(trace)
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


def compare_stacks(found: Findings, second: tuple[Stack, ...]) -> None:
    """Note whether the main thread is at another place in a second sample."""
    before, after = find_main(found.stacks), find_main(second)
    found.stack_changes = before is not None and after is not None and before.frames != after.frames


def make_evidence(found: Findings, rank: WatchedRank, heartbeat: Heartbeat | None) -> RankEvidence:
    """Return a rank's evidence from what its thread has found by now."""
    now = time.time()
    process = found.process or (found.first.process if found.first else ProcessState(rank.pid, "X"))
    notes = list(found.notes)
    if not found.is_done:
        notes.append("its evidence was not complete in time")
    phase, step, step_age, idle = "unwatched", 0, None, 0.0
    if heartbeat is not None:
        phase, step, notes = heartbeat.phase, heartbeat.step, [*notes, *heartbeat.notes]
        step_age = now - heartbeat.step_time if heartbeat.step_time else None
        idle = max(now - max(heartbeat.activity_time, heartbeat.phase_since), 0.0)
    return RankEvidence(
        rank=rank.rank,
        local_rank=rank.local_rank,
        host=rank.host,
        pid=rank.pid,
        phase="exited" if rank.exit_code is not None else phase,
        step=step,
        step_age=step_age,
        idle=idle,
        process=replace(
            process, stacks=found.stacks, stack_source=found.stack_source, stack_changes=found.stack_changes
        ),
        children=found.children,
        groups=found.groups,
        answered=found.answered,
        store_wait=found.store_wait,
        store_operation=found.store_operation,
        gpu=found.gpu,
        exit_code=rank.exit_code,
        notes=tuple(notes),
    )
