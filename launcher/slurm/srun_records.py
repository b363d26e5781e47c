"""The node records of `agent=srun`, made on the first node from what srun printed."""

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.errors import EXIT_MACHINE
from launcher.launch.failure import describe_exit
from launcher.launch.outcome import tail_rank
from launcher.launch.processes import RankProcess
from launcher.launch.signals import name_signal
from launcher.runs.node_records import NodeRecord, RankFailure, refuse_node, write_node
from launcher.runs.rank_logs import measure_file
from launcher.runs.run_directory import RunDir
from launcher.slurm.rendezvous import PORT_TAKEN
from launcher.slurm.srun_messages import SrunReport

INSTANT = 1e-6
"""Seconds between two failures that srun has told of in one line."""
MEMORY = (
    "was killed, or another process of the job on its node was, at the job's memory limit (SLURM: Out Of"
    " Memory): ask for more with cluster.mem"
)


@dataclass(frozen=True, slots=True)
class RankStepEnd:
    """A step that has ended."""

    run: RunDir
    hosts: tuple[str, ...]
    """In the order of their ranks."""
    ranks: int
    """On each node."""
    tail: int
    """Lines of a failed rank's log."""
    exitcode: int
    """srun's."""
    srun_report: SrunReport
    stop: tuple[int, float] | None
    """The first stopping signal to the batch script's process or the ranks, and when (s since the epoch)."""
    started: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    time: float
    exitcode: int
    memory: bool


def record_nodes(step: RankStepEnd) -> list[NodeRecord]:
    """Return a record for every node that was not lost, and write those for which the disk has room."""
    ends = list(list_ends(step))
    records = []
    for node, host in enumerate(step.hosts):
        if host in step.srun_report.lost:
            continue
        record = make_node_record(step, ends, node)
        records.append(record)
        with contextlib.suppress(OSError):
            write_node(step.run.path, step.run.first_attempt, record)
    return records


def list_ends(step: RankStepEnd) -> Iterator[RankEnd]:
    """Give the ranks' ends in their order.

    Of ranks that one line tells of, the one comes first whose log fell silent first: the others' last words
    are those on the loss of their peer.
    """
    for at, end in step.srun_report.ends:
        silent = sorted((find_silence(step.run, rank), rank) for rank in end.tasks)
        for position, (_, rank) in enumerate(silent):
            yield RankEnd(rank, at + position * INSTANT, end.exitcode, end.memory)


def find_silence(run: RunDir, rank: int) -> float:
    """Return when a rank last wrote to its log, in seconds since the epoch; 0 if it never did."""
    times = [0.0]
    for ending in ("out", "err"):
        with contextlib.suppress(OSError):
            times.append(run.rank_log(rank, run.first_attempt, ending).stat().st_mtime)
    return max(times)


def make_node_record(step: RankStepEnd, ends: list[RankEnd], node: int) -> NodeRecord:
    """Return the record of one node."""
    srun_report = step.srun_report
    node_ends = [end for end in ends if end.rank // step.ranks == node and end.exitcode]
    number, since = step.stop or (signal.SIGTERM, -math.inf if srun_report.cancelled_first else math.inf)
    # What comes after a signal that stops is no failure. By SIGTERM srun ends the others, but not the first.
    first = [] if srun_report.lost else ends[:1]
    clean = tuple((rank, at) for rank, at in srun_report.clean.items() if rank // step.ranks == node)
    failed = (end for end in node_ends if (end in first or not has_stopped(end)) and end.time < since)
    failure, message, rank_failure = next(failed, None), "", None
    state, status, stop_signal = "stopped", 128 + number, name_signal(number)
    if step.exitcode == 0 or len(clean) == step.ranks:
        state, status, stop_signal = "succeeded", 0, ""
    elif failure and is_port_taken(step.run, failure):
        return make_port_record(step.hosts[node], step.started)
    elif failure:
        rank_failure = describe_rank_failure(step, failure)
        state, status, stop_signal = "failed", rank_failure.status, ""
    elif not ends and not srun_report.cancelled and step.stop is None:
        state, status, stop_signal, message = "failed", EXIT_MACHINE, "", quote_srun(step)
    return NodeRecord(
        *(step.hosts[node], node, state, status, stop_signal or None, message, rank_failure, 0),
        *(step.started, time.time(), step.ranks, clean),
    )


def has_stopped(end: RankEnd) -> bool:
    """Tell whether a rank ended by SIGTERM, or as a shell says that it did (143)."""
    return end.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def make_port_record(host: str, started: float) -> NodeRecord:
    """Return the record of a first node that cannot serve the ranks: another port is chosen."""
    message = "the port where the ranks are to meet is not free"
    return refuse_node(host, 0, PORT_TAKEN, message, started)


def is_port_taken(run: RunDir, end: RankEnd) -> bool:
    """Tell whether rank 0's shim has found the port taken, which it does before it opens its logs."""
    log = run.rank_log(0, run.first_attempt, "err")
    return end.rank == 0 and end.exitcode == PORT_TAKEN and not measure_file(log)


def describe_rank_failure(step: RankStepEnd, end: RankEnd) -> RankFailure:
    """Return the first failure of a node with the end of its log."""
    attempt = step.run.first_attempt
    process = RankProcess(end.rank, end.rank % step.ranks, attempt, 0)
    log, lines = tail_rank(step.run, process, step.tail)
    reason = MEMORY if end.memory else describe_exit(end.exitcode)
    return RankFailure(
        end.rank, process.local_rank, end.time, end.exitcode, reason, log, tuple(lines), attempt
    )


def quote_srun(step: RankStepEnd) -> str:
    """Say how srun ended that started no rank, with its last words."""
    code, message = step.exitcode, [line for line in step.srun_report.lines if not line.startswith("Try ")]
    how = name_signal(-code) if code < 0 else f"code {code}"
    return f"srun ended with {how}: {message[-1] if message else 'it printed nothing'}"
