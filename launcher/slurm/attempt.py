"""An attempt, how its step ended, and what is seen of its end: the values that the judgement is made from."""

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.runs.advance import Advance, measure_advance
from launcher.runs.early_exits import EarlyEnd
from launcher.runs.node_records import NodeFailure, NodeRecord
from launcher.runs.run_directory import RunDir
from launcher.slurm.attempt_history import Manifest, count_unrecorded, follow_trail, judge_advance
from launcher.slurm.job_request import JobRequest
from launcher.slurm.own_job import count_restarts, name_job
from launcher.slurm.requeue_policy import Verdict

FOLLOWS = re.compile(
    r"gloo/transport|lost the connection|Connection (closed|reset) by|remote process exited|Broken pipe"
    r"|ncclRemoteError|Socket (closed|Timeout)",
    re.IGNORECASE,
)
"""What ranks say that failed because another one did."""
OF_RANKS = ("crash", "stopped")
"""Classes of an end in which a rank may have been the first to fail."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How the step of one attempt ended, as the head saw it."""

    srun_exitcode: int
    """As subprocess gives it: -n for signal n."""
    records: tuple[NodeRecord, ...]
    missing: tuple[str, ...]
    """Hosts that left no record."""
    signals: tuple[tuple[int, float], ...]
    """What the head was sent, and when, in seconds since the epoch."""
    checkpointed: bool
    """The ranks were sent the checkpoint signal."""
    said: tuple[str, ...] = ()
    """What srun complained of: its own lines on stderr."""
    signalled: tuple[tuple[str, int], ...] = ()
    """Nodes, and the stopping signals that their tasks got before any task had ended; none is the head's."""
    cancelled: bool = False
    """SLURM said that the step was cancelled, before any task had ended."""


@dataclass(frozen=True, slots=True)
class Sight:
    """All that is known of an attempt's end."""

    end: StepEnd | None
    """None while the step is still ending."""
    kill: str
    """How SLURM is ending the job, see `read_kill`; empty where it is not."""
    cause: str | None
    """Class of the end; None for a success."""
    lost: tuple[str, ...]
    states: tuple[tuple[str, str], ...]
    """Nodes that left no record or are down, with sinfo's words for them."""
    killed: tuple[tuple[str, str], ...]
    """Nodes that are there, but whose task ended by itself without a record, with srun's word."""
    advance: Advance
    requested: bool = False
    """The first rank that failed had an exit code that asks for another start (`exit_codes`)."""
    early: EarlyEnd | None = None
    """Ranks that ended with 0 before the first failure."""
    trouble: str = ""
    """What is wrong with the run directory, see `free_room`."""

    @property
    def first(self) -> tuple[NodeRecord, NodeFailure] | None:
        """The first rank that failed by itself, and its node; what befell a node comes before any rank."""
        of_ranks = (self.requested or self.cause in OF_RANKS) and not self.signalled
        return find_first(self.end.records) if self.end and of_ranks else None

    @property
    def signalled(self) -> tuple[tuple[str, int], ...]:
        """The nodes whose tasks got a signal from outside, where that is why the attempt ended."""
        return self.end.signalled if self.end and self.cause == "stopped" else ()


@dataclass(slots=True)
class Attempt:
    """An attempt that is running."""

    request: JobRequest
    run: RunDir
    environ: Mapping[str, str]
    hosts: tuple[str, ...]
    manifest: Manifest
    requeues: bool
    """The job is ours to requeue; not so where `launch` runs in somebody's allocation."""
    started: float = field(default_factory=time.time)
    foreseen: tuple[Sight, Verdict] | None = None
    """What was settled when SLURM began to end the job."""

    @property
    def job_id(self) -> str:
        """SLURM's id of the job; `12_3` for an array's member."""
        return name_job(self.environ)

    @property
    def restarts(self) -> int:
        """How often the job had been requeued when this attempt began."""
        return count_restarts(self.environ)

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on with fewer nodes."""
        return self.request.min_nodes < self.request.max_nodes

    @property
    def trail(self) -> tuple[Manifest, ...]:
        """The attempts before this one, each requeued into the next; a start by hand begins anew."""
        return follow_trail(self.manifest, self.job_id)

    @property
    def unrecorded(self) -> int:
        """Attempts that SLURM counts and the manifest lacks, since it could not be written."""
        return count_unrecorded(self.manifest, self.job_id, self.restarts)

    def measure(self) -> tuple[Advance, bool | None]:
        """Return how far it has come, and whether that is progress; None where nothing tells."""
        advance = measure_advance(self.run, self.request.progress_patterns)
        return advance, judge_advance(advance, self.trail)


def find_first(records: Sequence[NodeRecord]) -> tuple[NodeRecord, NodeFailure] | None:
    """Return the first failure over nodes: not by SIGTERM, nor for want of another rank, if there is such."""

    def order(found: tuple[NodeRecord, NodeFailure]) -> tuple[bool, float]:
        return not is_own(found[1]), found[1].time

    return min(((record, record.failure) for record in records if record.failure), key=order, default=None)


def is_own(failure: NodeFailure) -> bool:
    """Tell whether a rank failed by itself: not by SIGTERM, nor for want of another rank."""
    follows = any(FOLLOWS.search(line) for line in failure.lines)
    return not (is_stop(failure) or (failure.exitcode > 0 and follows))


def is_stop(failure: NodeFailure) -> bool:
    """Tell whether a rank ended by SIGTERM, or as a shell says that it did (143)."""
    return failure.status == 128 + signal.SIGTERM
