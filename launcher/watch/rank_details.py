"""One rank in detail, from the run's directory: its stacks, its last lines, its plan against what it has."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.codec import load
from launcher.cpulist import format_cpulist
from launcher.files import LARGEST, read_file
from launcher.protocol import name_applied_file, name_plan_file
from launcher.runs.progress import read_change
from launcher.runs.rank_logs import measure_file, read_tail
from launcher.runs.run_records import Applied, compare_rank, describe_memory, read_ranks
from launcher.watch.node_reports import EVIDENCE, watch_path
from launcher.watch.stack_requests import ANSWER
from launcher.watch.watch_model import NodeEvidence, ProcessState

if TYPE_CHECKING:
    from launcher.plan.model import RankPlan

LINES = 200
"""Last lines of a rank's output."""


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A process as it was at one moment."""

    process: ProcessState
    age: float
    """Seconds since then."""
    origin: str
    """Why it was looked at."""


@dataclass(frozen=True, slots=True)
class RankDetails:
    """What there is to know of one rank beside its row."""

    rank: int
    attempt: int
    placement: str = ""
    """What it has, in words; empty if it left no record."""
    differences: tuple[str, ...] = ()
    """Where that is not what was planned, and what its shim could not apply."""
    snapshot: ProcessSnapshot | None = None
    lines: tuple[str, ...] = ()
    """The last ones of the stream that it wrote to last."""
    stream: str = ""
    """`out` or `err`."""


def read_details(run_path: Path, rank: int, local_rank: int, host: str, attempt: int) -> RankDetails:
    """Read what a run's directory has of a rank; what cannot be read is left out."""
    record = read_applied_record(run_path, rank)
    plan = read_plan(run_path, host, local_rank)
    differences = [*(record.problems if record else ())]
    if record and plan:
        differences += [line for line in compare_rank(plan, record) if line not in differences]
    elif not record:
        differences.append("it left no record of its placement")
    stream, lines = read_lines(run_path, rank, attempt)
    return RankDetails(
        rank,
        attempt,
        describe_placement(record, plan),
        tuple(differences),
        find_process_snapshot(run_path, rank, host),
        lines,
        stream,
    )


def read_applied_record(run_path: Path, rank: int) -> Applied | None:
    """Return what a rank's shim has recorded; None if that cannot be read."""
    try:
        return load(Applied, read_file(run_path / name_applied_file(rank), LARGEST))
    except (OSError, ValueError):
        return None


def read_plan(run_path: Path, host: str, local_rank: int) -> "RankPlan | None":
    """Return a rank's part of its node's plan; None if that cannot be read."""
    try:
        ranks = read_ranks(read_file(run_path / name_plan_file(host), LARGEST))
    except (OSError, ValueError):
        return None
    return next((one for one in ranks if one.local_rank == local_rank), None)


def describe_placement(record: Applied | None, plan: "RankPlan | None") -> str:
    """Return where a rank runs: `CPUs 0-7, memory preferred 0, GPU …, 4 DataLoader workers`."""
    if record is None:
        return ""
    parts = [f"CPUs {record.cpus}", f"memory {describe_memory(record.memory)}"]
    parts += [f"GPU {record.gpu}"] if record.gpu else []
    parts += [f"{record.num_workers} DataLoader workers"] if record.num_workers is not None else []
    if plan and plan.worker_cpus != plan.cpus:
        parts.append(f"its workers on CPUs {format_cpulist(plan.worker_cpus)}")
    return ", ".join(parts)


def find_process_snapshot(run_path: Path, rank: int, host: str) -> ProcessSnapshot | None:
    """Return the newest look at a rank's process, by the times of files: for a hang, or asked for."""
    found = [read_snapshot(watch_path(run_path) / f"{name}{host}.json", rank) for name in (EVIDENCE, ANSWER)]
    return min((one for one in found if one), key=lambda one: one.age, default=None)


def read_snapshot(path: Path, rank: int) -> ProcessSnapshot | None:
    """Return what a file of evidence has of a rank; None if it has nothing of it, or cannot be read."""
    try:
        age = max(0.0, time.time() - os.lstat(path).st_mtime)
        evidence = load(NodeEvidence, read_file(path, LARGEST))
    except (OSError, ValueError):
        return None
    process = next((one.process for one in evidence.ranks if one.rank == rank), None)
    origin = "for a hang" if path.name.startswith(EVIDENCE) else "asked for"
    return ProcessSnapshot(process, age, origin) if process else None


def read_lines(run_path: Path, rank: int, attempt: int) -> tuple[str, tuple[str, ...]]:
    """Return the stream that a rank wrote to last, and its last lines."""
    folder = run_path / "logs" / str(attempt)
    logs = [folder / f"rank-{rank}.{ending}" for ending in ("out", "err")]
    written = [log for log in logs if measure_file(log)]
    if not written:
        return "", ()
    newest = max(written, key=read_change)
    return newest.suffix[1:], tuple(read_tail(newest, LINES))
