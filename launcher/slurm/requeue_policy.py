"""The requeue policy: whether the job is requeued after an attempt, and when ranks have to stop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.config.settings import RequeueConfig

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
