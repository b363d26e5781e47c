"""Evidence of one node for a hang: what ranks last did, stacks, torch's flight recorder, the kernel, GPUs.

Nothing of it needs a hung rank's help. All ranks are looked at at once, each in a thread of its own that is
left behind if it does not end in time; what it has found by then counts. What a rank does is measured first.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.watch.kernel_state import KernelLook, compare_looks, list_descendants, look_at_process
from launcher.watch.rank_answers import (
    CANNOT_ANSWER,
    Deadline,
    Findings,
    compare_stacks,
    mark_locks,
    may_take_gil,
    read_child_stacks,
    read_server,
    read_server_stacks,
    read_stacks,
)
from launcher.watch.watch_model import GpuSample, Heartbeat, NodeEvidence, ProcessState, RankEvidence

DEADLINE = 4.0
"""Seconds after which gathering ends with what there is."""
BETWEEN = 1.0
"""Seconds between two looks at a process, to see whether it stands."""


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


def gather_ranks(
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
    `rank-RANK.trace.json`, unless it is large.
    """
    ends = Deadline(time.monotonic() + deadline)
    descendants = list_descendants([rank.pid for rank in ranks if rank.exit_code is None])
    found = {rank.rank: Findings() for rank in ranks}
    threads = [
        threading.Thread(
            target=gather_rank,
            args=(found[rank.rank], folder, rank, heartbeats.get(rank.rank)),
            kwargs={"children": descendants.get(rank.pid, ()), "sample_gpu": sample_gpu, "ends": ends},
            name=f"evidence-{rank.rank}",
            daemon=True,
        )
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ends.limit(deadline))
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
    """Return what `gather_ranks` finds, as one node's evidence for hang `number`."""
    start = time.monotonic()
    found = gather_ranks(folder, ranks, heartbeats, sample_gpu=sample_gpu)
    return NodeEvidence(host, node_rank, number, time.time(), round(time.monotonic() - start, 3), found)


def gather_rank(
    found: Findings,
    folder: Path,
    rank: WatchedRank,
    heartbeat: Heartbeat | None,
    *,
    children: Sequence[int],
    sample_gpu: Callable[[int], GpuSample | None] | None,
    ends: Deadline,
) -> None:
    """Look at one rank, step by step; a step that fails leaves a note."""
    if rank.exit_code is None:
        if sample_gpu is not None:
            with suppress(Exception):
                found.gpu = sample_gpu(rank.local_rank)
        measure_activity(found, rank.pid, children)
        ask_rank(found, folder, rank, heartbeat, ends)
    found.is_done = True


def measure_activity(found: Findings, pid: int, children: Sequence[int]) -> None:
    """See what a rank and its children do within BETWEEN, before they are asked for anything."""
    begin = time.monotonic()
    first = found.first = look_at_process(pid)
    looks = [look_at_process(child) for child in children]
    time.sleep(BETWEEN)

    def look_again(look: KernelLook) -> ProcessState:
        return compare_looks(look, look_at_process(look.process.pid), time.monotonic() - begin)

    found.children = tuple(map(look_again, looks))
    found.process = look_again(first)


def ask_rank(
    found: Findings, folder: Path, rank: WatchedRank, heartbeat: Heartbeat | None, ends: Deadline
) -> None:
    """Get what a rank that can answer answers, and its children's stacks."""
    state = found.process.state if found.process else "X"
    can_dump = heartbeat is not None and heartbeat.can_dump
    path, socket_path = folder / f"rank-{rank.rank}.stack", folder / f"rank-{rank.rank}.sock"
    if state in CANNOT_ANSWER:
        found.notes.append(CANNOT_ANSWER[state])
    else:
        read_stacks(found, rank.pid, path if can_dump else None, ends)
        read_server(found, socket_path, folder / f"rank-{rank.rank}.trace.json", ends)
        if not found.stacks and may_take_gil(rank.pid, heartbeat):
            read_server_stacks(found, socket_path, ends)
    if can_dump:
        stacks = read_child_stacks(
            [child for child in found.children if child.state not in "TtZX"], path, ends
        )
        found.children = tuple(replace(one, stacks=stacks.get(one.pid, ())) for one in found.children)
    if found.stack_source == "faulthandler":
        compare_stacks(found, rank.pid, path, ends)
    found.stacks = mark_locks(found.stacks)


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
        is_measured=found.process is not None or rank.exit_code is not None,
        notes=tuple(notes),
    )
