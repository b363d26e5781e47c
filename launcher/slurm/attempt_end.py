"""What an attempt was: how its step ended, what SLURM did to the job, and the class of the end."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.errors import EXIT_HANG, EXIT_MACHINE
from launcher.launch.signals import STOPPING
from launcher.runs.node_records import NodeRecord, RankFailure
from launcher.runs.progress import AttemptProgress, EarlyEnd
from launcher.slurm.commands import RUNNING, JobState

if TYPE_CHECKING:
    from launcher.config.settings import RequeueConfig

FOLLOWS = re.compile(
    r"gloo/transport|lost the connection|Connection (closed|reset) by|remote process exited|Broken pipe"
    r"|ncclRemoteError|Socket (closed|Timeout)",
    re.IGNORECASE,
)
"""What ranks say that failed because another one did."""
EXITS = {"node_failure": EXIT_MACHINE, "sick_node": EXIT_MACHINE, "hang": EXIT_HANG}
"""Exit codes of classes that have one of their own."""
OF_RANKS = ("crash", "stopped")
"""Classes of an end in which a rank may have been the first to fail."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """How the step of one attempt ended, as the batch script's process saw it."""

    srun_exitcode: int
    """As subprocess gives it: -n for signal n."""
    records: tuple[NodeRecord, ...]
    missing: tuple[str, ...]
    """Hosts that left no record."""
    signals: tuple[tuple[int, float], ...]
    """Signals to the batch script's process, and when, in seconds since the epoch."""
    checkpointed: bool
    """The ranks were sent the checkpoint signal."""
    srun_lines: tuple[str, ...] = ()
    """What srun complained of: its own lines on stderr."""
    signalled: tuple[tuple[str, int], ...] = ()
    """Nodes (or srun), and the stopping signals that their tasks got before any had ended; none is ours."""
    cancelled: bool = False
    """SLURM said that the step was cancelled, before any task had ended."""
    sickness: tuple[str, ...] = ()
    """What preflight found, if that is why the ranks were not started."""
    sick: tuple[str, ...] = ()
    """Nodes that the next attempt is to do without."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended: all that is known of it."""

    step: StepReport | None
    """None while the step is still ending."""
    kill: str
    """How SLURM ends the job, see `classify_kill`; empty if it does not."""
    cause: str | None
    """Class of the end; None for a success."""
    advance: AttemptProgress
    lost: tuple[str, ...] = ()
    """Lost nodes."""
    node_states: tuple[tuple[str, str], ...] = ()
    """Nodes that left no record or are down, with sinfo's words for them."""
    killed_tasks: tuple[tuple[str, str], ...] = ()
    """Nodes that are there, but whose task ended by itself without a record, with srun's word."""
    restart_requested: bool = False
    """The first rank that failed had an exit code that asks for another start (`exit_codes`)."""
    early: EarlyEnd | None = None
    """Ranks that ended with 0 before the first failure."""
    trouble: str = ""
    """What is wrong with the run directory, see `release_space`."""

    @property
    def first(self) -> tuple[NodeRecord, RankFailure] | None:
        """The first rank that failed by itself, and its node; what befell a node comes before any rank."""
        of_ranks = (self.restart_requested or self.cause in OF_RANKS) and not self.signalled
        return find_first_failure(self.step.records) if self.step and of_ranks else None

    @property
    def signalled(self) -> tuple[tuple[str, int], ...]:
        """The nodes whose tasks got a signal from outside, if that is why the attempt ended."""
        return self.step.signalled if self.step and self.cause == "stopped" else ()

    @property
    def hang(self) -> str:
        """The hang for which the ranks were ended, in words; empty if that is not why the attempt ended."""
        records = self.step.records if self.step and self.cause == "hang" else ()
        return next((record.hang for record in records if record.hang), "")

    @property
    def exit_code(self) -> int:
        """Exit code of the job, from the first of these that there is.

        0 for a success; 3 for a lost node, or one that preflight found sick; 124 for a hang; 128+n for a
        signal that a node got from outside; the code of the first rank that failed; after a crash without
        one, that of a failed node, or srun's; else 128+n for the signal that ended the job.
        """
        if self.cause is None:
            return 0
        if self.cause in EXITS:
            return EXITS[self.cause]
        first, step = self.first, self.step
        if self.signalled:
            return 128 + self.signalled[0][1]
        if first:
            return first[1].status
        if self.cause == "crash" and step:
            codes = [record.exit_code for record in find_failed(step.records) if record.exit_code]
            return next(
                iter(codes), EXIT_MACHINE if self.trouble else abs(step.srun_exitcode) or EXIT_MACHINE
            )
        stops = [number for number, _ in step.signals if number in STOPPING] if step else []
        return 128 + next(iter(stops), signal.SIGTERM)


def find_first_failure(records: Sequence[NodeRecord]) -> tuple[NodeRecord, RankFailure] | None:
    """Return the first failure over all nodes, and its node; None if no rank failed.

    A rank that failed by itself (see `failed_by_itself`) comes before one that only followed another.
    """

    def order(found: tuple[NodeRecord, RankFailure]) -> tuple[bool, float]:
        return not failed_by_itself(found[1]), found[1].time

    return min(((record, record.failure) for record in records if record.failure), key=order, default=None)


def failed_by_itself(failure: RankFailure) -> bool:
    """Tell whether a rank failed by itself: not by SIGTERM, nor since it had lost another rank."""
    follows = any(FOLLOWS.search(line) for line in failure.lines)
    return not (was_terminated(failure) or (failure.exitcode > 0 and follows))


def was_terminated(failure: RankFailure) -> bool:
    """Tell whether a rank ended by SIGTERM, or as a shell says that it did (143)."""
    return failure.status == 128 + signal.SIGTERM


def find_failed(records: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Return the nodes on which a rank, or the agent, failed by itself rather than by SIGTERM."""
    return [
        record
        for record in records
        if record.state == "failed" and (record.failure is None or not was_terminated(record.failure))
    ]


@dataclass(frozen=True, slots=True)
class EndFacts:
    """What `classify_end` looks at."""

    succeeded: bool = False
    """Exit code 0 on all nodes, or on enough of an elastic job's."""
    finished: bool | None = None
    """The last step that was printed is the last of all; None if the program does not tell."""
    failed: bool = False
    """A rank failed by itself, before a stop was asked for."""
    lost: bool = False
    """A node was lost."""
    stop_requested: bool = False
    """The batch script's process got a signal to stop."""
    near_limit: bool = False
    """The ranks were sent the checkpoint signal because the time limit was near."""
    preempted: bool = False
    """SLURM says that the job had to make room for another one."""
    stopped_from_outside: bool = False
    """The first event was a signal to one node's task or rank, sent neither by us nor by SLURM's queue."""
    restart_requested: bool = False
    """The first rank that failed had one of the exit codes that ask for another start."""
    hung: bool = False
    """The ranks hung, and were ended for it."""
    sick: bool = False
    """The ranks were not started, since preflight found a node sick."""
    cancelled_by_user: bool = False
    """A user has ended the step, but not the job: by a signal to the batch script, or `scancel JOB.STEP`."""


def classify_kill(status: JobState | None, restarts: int) -> str:
    """Say how SLURM is ending the job whose attempt began after `restarts` requeues.

    `requeued`: by a preemption, `scontrol requeue`, or for a lost node, and it comes back by itself.
    `preempted`: it makes room, and comes back only if it is requeued: within GraceTime, when SLURM sends
    SIGTERM to the steps alone, and with PreemptMode=CANCEL. `timeout`, `cancelled`. Empty: not at all, or
    SLURM does not tell.

    Tried with SLURM 22.05: the state is COMPLETING in all of these cases.
    """
    if status is None:
        return ""
    if status.restarts > restarts:
        return "requeued"
    if status.preempted:
        return "preempted"
    if "TimeLimit" in (status.reason, status.state) or status.state == "TIMEOUT":
        return "timeout"
    return "" if status.state in RUNNING else "cancelled"


def classify_end(facts: EndFacts, kill: str) -> str | None:
    """Return the class of an attempt's end; None for a success.

    All ranks ended with 0: that is a success, whatever signals came before. But what an administrator, or the
    program itself, has put back into the queue begins again, and what a user has ended is cancelled, unless
    the last step was the last of all.
    """
    done = facts.succeeded and (facts.finished or (facts.preempted and not facts.lost))
    if kill == "requeued" and not done:
        taken = "preempted" if facts.preempted else "requeued"
        return "node_failure" if facts.lost else taken
    by_user = kill == "cancelled" or (facts.cancelled_by_user and not kill)
    if facts.succeeded and (facts.finished or not by_user):
        return None
    events = (
        (bool(kill), kill),
        (facts.sick, "sick_node"),
        (facts.lost, "node_failure"),
        (facts.hung, "hang"),
        (facts.stopped_from_outside, "stopped"),
        (facts.restart_requested, "timeout" if facts.near_limit else "requested"),
        (facts.failed, "crash"),
        (facts.near_limit, "timeout"),
        (facts.stop_requested or facts.cancelled_by_user, "cancelled"),
    )
    return next((cause for happened, cause in events if happened), "crash")


DESCRIPTIONS = {
    "preempted": "preempted",
    "timeout": "time limit",
    "node_failure": "node failure",
    "sick_node": "preflight found a sick node",
    "stopped": "stopped from outside",
    "requested": "the program asks for another start",
    "hang": "the ranks hung",
    "crash": "the program failed",
    "requeued": "requeued from outside",
    "cancelled": "cancelled",
}
"""Classes of an attempt's end, and how people are told of them."""
LIMITED = ("preempted", "timeout", "node_failure", "sick_node", "stopped", "requested", "hang", "crash")
"""Those for which `cluster.requeue` says how often the job is requeued."""
NOT_COUNTED = ("preempted", "requeued", "sick_node")
"""Those of attempts that had no say in how long they ran."""
SIGNAL_EARLY = 60.0
"""Seconds that SLURM may send a job's signal too early (sbatch(1), --signal)."""
CLOCK_SLACK = 30.0
"""Seconds that slurmctld may be late to tell, and clocks may differ."""
CLOSING_TIME = 15.0
"""Seconds before the time limit for the batch script's process: records, manifest, requeue."""


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An earlier attempt that was followed by another one."""

    cause: str
    advanced: bool | None
    """It made progress; None if that cannot be judged."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done after an attempt."""

    requeue: bool
    cause: str | None
    """The attempt's class, or `no_progress` or `limit` if that is why the job stops; None for a success."""
    reason: str
    """For people."""


def decide_requeue(
    cause: str | None, policy: "RequeueConfig", past: Sequence[PastAttempt], advanced: bool | None
) -> Decision:
    """Decide what is to be done after an attempt of this class; `past` are the attempts before it.

    Attempts that were preempted, requeued from outside, or not begun for a sick node, do not count as lacking
    progress, nor do they end a row of such: others decided how long they ran.
    """
    if cause is None:
        return Decision(False, None, "succeeded")
    text = DESCRIPTIONS[cause]
    if cause == "cancelled":
        return Decision(False, cause, text)
    idle = count_idle([*past, PastAttempt(cause, advanced)])
    if 0 < policy.no_progress <= idle:
        reason = f"no progress in {idle} attempts in a row (cluster.requeue.no_progress={policy.no_progress})"
        return Decision(False, "no_progress", reason)
    if cause in LIMITED:
        allowed, before = getattr(policy, cause), sum(attempt.cause == cause for attempt in past)
        if before >= allowed:
            often = f" after {before} of them" if allowed > 0 else ""
            return Decision(False, cause, f"{text}: not requeued{often} (cluster.requeue.{cause}={allowed})")
    number = len(past) + 1
    if number >= policy.limit:
        return Decision(False, "limit", f"{text}: not requeued (cluster.requeue.limit={policy.limit})")
    again = text if cause == "requeued" else f"{text}: requeued"
    return Decision(True, cause, f"{again} (attempt {number + 1} of at most {policy.limit})")


def count_idle(attempts: Sequence[PastAttempt]) -> int:
    """Count the last attempts without progress, those left out whose nodes were taken from them."""
    idle = 0
    for attempt in reversed(attempts):
        if attempt.cause in NOT_COUNTED and not attempt.advanced:
            continue
        if attempt.advanced is not False:
            break
        idle += 1
    return idle


def is_near_limit(now: float, end_time: float | None, seconds: float) -> bool:
    """Tell whether a checkpoint signal that came now is the time limit's, rather than a user's own.

    `seconds` is how long before the limit it was ordered. If SLURM does not tell of the limit (None), it
    is taken for the limit's; if there is none (infinite), it is a user's.
    """
    return end_time is None or now >= end_time - seconds - SIGNAL_EARLY - CLOCK_SLACK


def choose_stop_time(now: float, end_time: float | None, seconds: float, grace: float) -> float | None:
    """Return when ranks that got the checkpoint signal now are to be stopped by SIGTERM; epoch seconds.

    None: the signal was a user's own, and the program goes on. Else as late as leaves the ranks `grace`
    seconds from SIGTERM to SIGKILL, and CLOSING_TIME seconds before the limit; but at least half of
    the time that is left is for the checkpoint. `end_time` is the job's real limit, `seconds` how long
    before it the signal was ordered, which is used if the limit is not known.
    """
    if not is_near_limit(now, end_time, seconds):
        return None
    left = max((now + seconds if end_time is None else end_time) - now, 0.0)
    return now + max(left / 2, left - grace - CLOSING_TIME)
