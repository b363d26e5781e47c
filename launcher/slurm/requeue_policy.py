"""The policy at an attempt's end: why it ended, whether the job is requeued, when ranks have to stop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.config.schema import RequeueConfig

RUNNING = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
"""States of a job that SLURM has not begun to end."""
DESCRIPTIONS = {
    "preempted": "preempted",
    "timeout": "time limit",
    "node_failure": "node failure",
    "stopped": "stopped from outside",
    "requested": "the program asks for another start",
    "crash": "the program failed",
    "requeued": "requeued from outside",
    "cancelled": "cancelled",
}
"""Classes of an attempt's end, and how people are told of them."""
LIMITED = ("preempted", "timeout", "node_failure", "stopped", "requested", "crash")
"""Those for which `cluster.requeue` says how often the job is requeued."""
TAKEN = ("preempted", "requeued")
"""Those of attempts that had no say in how long they ran."""
EARLY = 60.0
"""Seconds that SLURM may send a job's signal too early (sbatch(1), --signal)."""
SLACK = 30.0
"""Seconds that slurmctld may be late to tell, and clocks may differ."""
CLOSING = 15.0
"""Seconds before the time limit that are the head's own: records, manifest, requeue."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What SLURM says of the job itself, asked at the attempt's end."""

    state: str
    reason: str
    restarts: int
    """Requeues so far, one that is under way among them."""
    end_time: float | None
    """Time limit, in seconds since the epoch, infinite for none; the time of the end where SLURM is ending
    the job; None where SLURM does not tell."""
    preempted: bool
    """SLURM has set a time at which the job has to make room, or had to."""


@dataclass(frozen=True, slots=True)
class EndFacts:
    """How the step of an attempt ended."""

    succeeded: bool
    """Exit code 0 on all nodes, or on enough of an elastic job's."""
    finished: bool | None
    """The last step that was printed is the last of all; None where the program does not tell."""
    failed: bool
    """A rank failed by itself, before a stop was asked for."""
    lost: bool
    """A node was lost."""
    asked: bool
    """The head was sent a signal to stop."""
    near_limit: bool
    """The ranks were sent the checkpoint signal because the time limit was near."""
    preempted: bool = False
    """SLURM says that the job had to make room for another one."""
    outside: bool = False
    """The first event was a signal to one node's task or rank, sent by neither the head nor SLURM's queue."""
    requested: bool = False
    """The first rank that failed had one of the exit codes that ask for another start."""
    ended: bool = False
    """A user has ended the step, but not the job: by a signal to the head, or by `scancel JOB.STEP`."""


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An earlier attempt that was followed by another one."""

    cause: str
    advanced: bool | None
    """It made progress; None where that cannot be judged."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How often a job is requeued for each reason, and how long in all."""

    allowed: Mapping[str, int]
    """Times for each class in LIMITED."""
    no_progress: int
    """Attempts in a row; 0 does not look at progress."""
    limit: int
    """Attempts in all."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of the job."""

    requeue: bool
    cause: str | None
    """The attempt's class; `no_progress` or `limit` where that is why the job stops; None for a success."""
    why: str
    """For people."""


def check_requeue(policy: "RequeueConfig") -> None:
    """Check `cluster.requeue`; raises UsageError."""
    least = {**dict.fromkeys(LIMITED, 0), "no_progress": 0, "limit": 1}
    for name, number in least.items():
        if (given := getattr(policy, name)) < number:
            raise UsageError(f"cluster.requeue.{name}={given}: give a number of at least {number}")
    odd = [code for code in policy.exit_codes if not 0 < code < 256]
    if odd:
        raise UsageError(
            f"cluster.requeue.exit_codes={policy.exit_codes}: {odd[0]} is no exit code of a failure, give"
            " numbers from 1 to 255"
        )


def classify_kill(word: JobStatus | None, restarts: int) -> str:
    """Say how SLURM is ending the job whose attempt began after `restarts` requeues.

    `requeued`: by a preemption, `scontrol requeue`, or for a lost node, and it comes back by itself.
    `preempted`: it makes room, and comes back only if it is requeued: within GraceTime, when SLURM sends
    SIGTERM to the steps alone, and with PreemptMode=CANCEL. `timeout`, `cancelled`. Empty: not at all, or
    SLURM does not tell.

    Tried with SLURM 22.05, where the state is COMPLETING in all of these cases.
    """
    if word is None:
        return ""
    if word.restarts > restarts:
        return "requeued"
    if word.preempted:
        return "preempted"
    if "TimeLimit" in (word.reason, word.state) or word.state == "TIMEOUT":
        return "timeout"
    return "" if word.state in RUNNING else "cancelled"


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
    by_user = kill == "cancelled" or (facts.ended and not kill)
    if facts.succeeded and (facts.finished or not by_user):
        return None
    events = (
        (bool(kill), kill),
        (facts.lost, "node_failure"),
        (facts.outside, "stopped"),
        (facts.requested, "timeout" if facts.near_limit else "requested"),
        (facts.failed, "crash"),
        (facts.near_limit, "timeout"),
        (facts.asked or facts.ended, "cancelled"),
    )
    return next((cause for happened, cause in events if happened), "crash")


def decide_requeue(
    cause: str | None, policy: Policy, past: Sequence[PastAttempt], advanced: bool | None
) -> Decision:
    """Decide what becomes of a job after an attempt of this class; `past` are the attempts before it.

    Attempts that were preempted, or requeued from outside, do not count as lacking progress, nor do they end
    a row of such: they had no say in how long they ran. A requeue from outside is not refused but by `limit`.
    """
    if cause is None:
        return Decision(False, None, "succeeded")
    if cause == "cancelled":
        return Decision(False, cause, DESCRIPTIONS[cause])
    number = len(past) + 1
    idle = count_idle([*past, PastAttempt(cause, advanced)])
    if 0 < policy.no_progress <= idle:
        why = f"no progress in {idle} attempts in a row (cluster.requeue.no_progress={policy.no_progress})"
        return Decision(False, "no_progress", why)
    allowed = policy.allowed.get(cause, 0)
    before = sum(attempt.cause == cause for attempt in past)
    if cause in LIMITED and before >= allowed:
        often = f" after {before} of them" if allowed > 0 else ""
        return Decision(
            False, cause, f"{DESCRIPTIONS[cause]}: not requeued{often} (cluster.requeue.{cause}={allowed})"
        )
    if number >= policy.limit:
        return Decision(
            False, "limit", f"{DESCRIPTIONS[cause]}: not requeued (cluster.requeue.limit={policy.limit})"
        )
    again = DESCRIPTIONS[cause] if cause == "requeued" else f"{DESCRIPTIONS[cause]}: requeued"
    return Decision(True, cause, f"{again} (attempt {number + 1} of at most {policy.limit})")


def count_idle(attempts: Sequence[PastAttempt]) -> int:
    """Count the last attempts without progress, those left out whose nodes were taken from them."""
    idle = 0
    for attempt in reversed(attempts):
        if attempt.cause in TAKEN and not attempt.advanced:
            continue
        if attempt.advanced is not False:
            break
        idle += 1
    return idle


def is_near_limit(now: float, end_time: float | None, seconds: float) -> bool:
    """Tell whether a checkpoint signal that came now is the time limit's, rather than a user's own.

    `seconds` is how long before the limit it was ordered. Where SLURM does not tell of the limit (None), it
    is taken for the limit's; where there is none (infinite), it is a user's.
    """
    return end_time is None or now >= end_time - seconds - EARLY - SLACK


def choose_stop_time(now: float, end_time: float | None, seconds: float, grace: float) -> float | None:
    """Return when ranks that got the checkpoint signal now are to be stopped by SIGTERM; epoch seconds.

    None: the signal was a user's own, and the program goes on. Else as late as leaves the ranks `grace`
    seconds from SIGTERM to SIGKILL, and the head its own time, before the limit; but at least half of
    the time that is left is for the checkpoint. `end_time` is the job's real limit, `seconds` how long
    before it the signal was ordered, which is used where the limit is not known.
    """
    if not is_near_limit(now, end_time, seconds):
        return None
    left = max((now + seconds if end_time is None else end_time) - now, 0.0)
    return now + max(left / 2, left - grace - CLOSING)
