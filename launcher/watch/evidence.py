"""Evidence of one node for a hang: what ranks last did, stacks, torch's flight recorder, the kernel, GPUs.

Nothing of it needs a hung rank's help. All ranks are looked at at once, each in a thread of its own that is
left behind if it does not end in time; what it has found by then counts.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.watch.kernel_state import KernelLook, compare_looks, list_descendants, look_at_process
from launcher.watch.nccl_ras import ask_ras
from launcher.watch.rank_answers import (
    CANNOT_ANSWER,
    Findings,
    compare_stacks,
    may_take_gil,
    read_child_stacks,
    read_other_stacks,
    read_server,
    read_stacks,
)
from launcher.watch.watch_model import GpuSample, Heartbeat, NodeEvidence, ProcessState, RankEvidence, Stack

DEADLINE = 3.0
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
    start: int = 0
    """When the process started, in clock ticks since boot (/proc/PID/stat); 0 if not known."""


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
    found = gather_ranks(folder, ranks, heartbeats, sample_gpu=sample_gpu)
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
    if rank.exit_code is None:
        found.first = look_at_process(rank.pid, rank.start)
        looks = {pid: look_at_process(pid) for pid in children}
        stacks = ask_rank(found, folder, rank, heartbeat, looks)
        compare_activity(found, rank.pid, looks, stacks)
        if found.stack_source == "faulthandler":
            compare_stacks(found, rank.pid, folder / f"rank-{rank.rank}.stack")
        if sample_gpu is not None:
            with suppress(Exception):
                found.gpu = sample_gpu(rank.local_rank)
    found.is_done = True


def ask_rank(
    found: Findings,
    folder: Path,
    rank: WatchedRank,
    heartbeat: Heartbeat | None,
    looks: Mapping[int, KernelLook],
) -> dict[int, tuple[Stack, ...]]:
    """Get what a rank that can answer answers; return its children's stacks."""
    state = found.first.process.state if found.first else "X"
    can_dump = heartbeat is not None and heartbeat.can_dump
    path, socket_path = folder / f"rank-{rank.rank}.stack", folder / f"rank-{rank.rank}.sock"
    if state in CANNOT_ANSWER:
        found.notes.append(CANNOT_ANSWER[state])
    else:
        read_stacks(found, rank.pid, path if can_dump else None)
        if not found.stacks and may_take_gil(rank.pid, heartbeat):
            read_other_stacks(found, rank.pid, socket_path)
        read_server(found, socket_path, folder / f"rank-{rank.rank}.trace.json")
    return read_child_stacks(looks, path) if can_dump else {}


def compare_activity(
    found: Findings, pid: int, looks: Mapping[int, KernelLook], stacks: Mapping[int, tuple[Stack, ...]]
) -> None:
    """See what a rank and its children do within BETWEEN; what answering has cost them does not count."""
    begin = time.monotonic()
    found.first = look_at_process(pid, found.first.start if found.first else 0)
    looks = {child: look_at_process(child, look.start) for child, look in looks.items()}
    time.sleep(BETWEEN)
    found.process = look_again(found.first, begin)
    found.children = tuple(
        replace(look_again(look, begin), stacks=stacks.get(child, ())) for child, look in looks.items()
    )


def look_again(first: KernelLook, begin: float) -> ProcessState:
    """Look at a process a second time."""
    return compare_looks(first, look_at_process(first.process.pid), time.monotonic() - begin)


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
