"""What each node's task would have recorded of an attempt, made by the head from what srun told."""

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.errors import EXIT_MACHINE
from launcher.launch.failure import Failure
from launcher.launch.outcome import tail_rank
from launcher.launch.signals import name_signal
from launcher.runs.node_records import NodeFailure, NodeRecord, refuse_node, write_node
from launcher.runs.rank_logs import measure_file
from launcher.runs.run_directory import RunDir
from launcher.slurm.rank_step import SrunReport
from launcher.slurm.rendezvous import PORT_TAKEN

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
    """By SLURM_NODEID."""
    ranks: int
    """On each node."""
    tail: int
    """Lines of a failed rank's log."""
    exitcode: int
    """srun's."""
    told: SrunReport
    stop: tuple[int, float] | None
    """The first stopping signal that the head or the ranks were sent, and when (s since the epoch)."""
    started: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    time: float
    exitcode: int
    memory: bool


def record_nodes(account: RankStepEnd) -> list[NodeRecord]:
    """Return a record for every node that was not lost, and write those for which the disk has room."""
    ends = list(list_ends(account))
    records = []
    for node, host in enumerate(account.hosts):
        if host in account.told.lost:
            continue
        record = make_node_record(account, ends, node)
        records.append(record)
        with contextlib.suppress(OSError):
            write_node(account.run.path, account.run.first_attempt, record)
    return records


def list_ends(account: RankStepEnd) -> Iterator[RankEnd]:
    """Give the ranks' ends in their order.

    Of ranks that one line tells of, the one comes first whose log fell silent first: the others' last words
    are those on the loss of their peer.
    """
    for told, end in account.told.ends:
        silent = sorted((find_silence(account.run, rank), rank) for rank in end.tasks)
        for place, (_, rank) in enumerate(silent):
            yield RankEnd(rank, told + place * INSTANT, end.exitcode, end.memory)


def find_silence(run: RunDir, rank: int) -> float:
    """Return when a rank last wrote to its log, in seconds since the epoch; 0 where it never did."""
    times = [0.0]
    for ending in ("out", "err"):
        with contextlib.suppress(OSError):
            times.append(run.rank_log(rank, run.first_attempt, ending).stat().st_mtime)
    return max(times)


def make_node_record(account: RankStepEnd, ends: list[RankEnd], node: int) -> NodeRecord:
    """Return the record of one node."""
    told = account.told
    own = [end for end in ends if end.rank // account.ranks == node and end.exitcode]
    number, since = account.stop or (signal.SIGTERM, -math.inf if told.cancelled_first else math.inf)
    # What comes after a signal that stops is no failure. By SIGTERM srun ends the others, but not the first.
    first = [] if told.lost else ends[:1]
    clean = tuple((rank, at) for rank, at in told.clean.items() if rank // account.ranks == node)
    failed = (end for end in own if (end in first or not has_stopped(end)) and end.time < since)
    failure, said, found = next(failed, None), "", None
    state, status, by = "stopped", 128 + number, name_signal(number)
    if account.exitcode == 0 or len(clean) == account.ranks:
        state, status, by = "succeeded", 0, ""
    elif failure and is_port_taken(account.run, failure):
        return make_port_record(account.hosts[node], account.started)
    elif failure:
        found = describe_rank_failure(account, failure)
        state, status, by = "failed", as_failure(account, failure).status, ""
    elif not ends and not told.cancelled and account.stop is None:
        state, status, by, said = "failed", EXIT_MACHINE, "", quote_srun(account)
    return NodeRecord(
        *(account.hosts[node], node, state, status, by or None, said, found, 0),
        *(account.started, time.time(), account.ranks, clean),
    )


def has_stopped(end: RankEnd) -> bool:
    """Tell whether a rank ended by SIGTERM, or as a shell says that it did (143)."""
    return end.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def make_port_record(host: str, started: float) -> NodeRecord:
    """Return the record of a first node that cannot serve the ranks: the head chooses another port."""
    said = "the port where the ranks are to meet is not free"
    return refuse_node(host, 0, PORT_TAKEN, said, started)


def is_port_taken(run: RunDir, end: RankEnd) -> bool:
    """Tell whether rank 0's shim has found the port taken, which it does before it opens its logs."""
    log = run.rank_log(0, run.first_attempt, "err")
    return end.rank == 0 and end.exitcode == PORT_TAKEN and not measure_file(log)


def as_failure(account: RankStepEnd, end: RankEnd) -> Failure:
    """Return a rank's end in the words of the launcher."""
    return Failure(end.rank, end.rank % account.ranks, account.run.first_attempt, 0, end.exitcode)


def describe_rank_failure(account: RankStepEnd, end: RankEnd) -> NodeFailure:
    """Return the first failure of a node with the end of its log."""
    failure = as_failure(account, end)
    log, lines = tail_rank(account.run, failure, account.tail)
    reason = MEMORY if end.memory else failure.describe()
    return NodeFailure(end.rank, failure.local_rank, end.time, end.exitcode, reason, log, tuple(lines))


def quote_srun(account: RankStepEnd) -> str:
    """Say how srun ended that started no rank, with its last words."""
    code, said = account.exitcode, [line for line in account.told.said if not line.startswith("Try ")]
    how = name_signal(-code) if code < 0 else f"code {code}"
    return f"srun ended with {how}: {said[-1] if said else 'it printed nothing'}"
