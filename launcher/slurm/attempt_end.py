"""What an attempt was: how its step ended, what SLURM did to the job, the cause, and what follows.

Nothing but `diagnose` asks or reads anything.
"""

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.errors import EXIT_HANG, EXIT_MACHINE
from launcher.launch.signals import STOPPING, name_signal
from launcher.runs.progress import (
    LONG_BEFORE,
    AttemptProgress,
    CleanEnd,
    explain_early_exits,
    measure_attempt,
)
from launcher.runs.records import NodeRecord, RankFailure
from launcher.slurm.commands import LONG_TIMEOUT, RUNNING, SHORT_TIMEOUT, JobState, ask_down_nodes
from launcher.slurm.step import ENDED, NOT_STARTED, find_task_ends
from launcher.text import describe_first_failed_rank, name_some

if TYPE_CHECKING:
    from launcher.config.settings import RequeueConfig
    from launcher.slurm.attempt import Attempt

FOLLOWS = re.compile(
    r"gloo/transport|lost the connection|Connection (closed|reset) by|remote process exited|Broken pipe"
    r"|ncclRemoteError|Socket (closed|Timeout)",
    re.IGNORECASE,
)
"""What ranks say that failed because another one did."""
MAX_NAMED = 3
"""Sentences of the manifest's reason, and nodes that are named in one."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A class of an attempt's end."""

    text: str
    is_limited: bool = True
    """`cluster.requeue` says how often the job is requeued for it."""
    is_counted: bool = True
    """The attempt counts as one without progress if it made none; else others decided how long it ran."""
    exit_code: int | None = None
    """The job's, if the cause has one of its own."""


CAUSES = {
    "preempted": Cause("preempted", is_counted=False),
    "timeout": Cause("time limit"),
    "node_failure": Cause("node failure", exit_code=EXIT_MACHINE),
    "sick_node": Cause("preflight found a sick node", is_counted=False, exit_code=EXIT_MACHINE),
    "stopped": Cause("stopped from outside"),
    "requested": Cause("the program asks for another start"),
    "hang": Cause("the ranks hung", exit_code=EXIT_HANG),
    "crash": Cause("the program failed"),
    "requeued": Cause("requeued from outside", is_limited=False, is_counted=False),
    "cancelled": Cause("cancelled", is_limited=False),
}
LIMITED = tuple(name for name, cause in CAUSES.items() if cause.is_limited)
EVENTS = {
    "sick": "sick_node",
    "lost": "node_failure",
    "hung": "hang",
    "stopped_from_outside": "stopped",
    "restart_requested": "requested",
    "failed": "crash",
    "near_limit": "timeout",
    "stop_requested": "cancelled",
    "cancelled_by_user": "cancelled",
}
"""What can have happened, and the cause: the first of these that did decides.

`failed`: a rank failed by itself, before a stop was asked for. `near_limit`: the ranks were sent the
checkpoint signal because the time limit was near. `stopped_from_outside`: the first event was a signal to one
node's task or rank, sent neither by us nor by SLURM's queue. `cancelled_by_user`: a user has ended the step,
but not the job.
"""


def classify_kill(status: JobState | None, restarts: int) -> str:
    """Say how SLURM is ending the job whose attempt began after `restarts` requeues.

    `requeued`: by a preemption, `scontrol requeue`, or for a lost node, and it comes back by itself.
    `preempted`: it makes room, and comes back only if it is requeued: within GraceTime, when SLURM sends
    SIGTERM to the steps alone, and with PreemptMode=CANCEL. `timeout`, `cancelled`. Empty: not at all, or
    SLURM does not tell. The state is COMPLETING in all of these cases (SLURM 22.05).
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


def classify_end(facts: Collection[str], kill: str) -> str | None:
    """Return the cause of an attempt's end; None for a success.

    `facts` are names of `EVENTS`, and of `succeeded` (exit code 0 on all nodes, or on enough of an elastic
    job's), `finished` (the last step that was printed is the last of all) and `preempted`. All ranks ended
    with 0: that is a success, whatever signals came before. But what an administrator, or the program itself,
    has put back into the queue begins again, and what a user has ended is cancelled, unless the last step was
    the last of all.
    """
    succeeded, finished, lost = ("succeeded" in facts, "finished" in facts, "lost" in facts)
    preempted = "preempted" in facts
    if kill == "requeued" and not (succeeded and (finished or (preempted and not lost))):
        return "node_failure" if lost else "preempted" if preempted else "requeued"
    by_user = kill == "cancelled" or ("cancelled_by_user" in facts and not kill)
    if succeeded and (finished or not by_user):
        return None
    if kill:
        return kill
    cause = next((cause for fact, cause in EVENTS.items() if fact in facts), "crash")
    return "timeout" if cause == "requested" and "near_limit" in facts else cause


@dataclass(frozen=True, slots=True)
class StepReport:
    """How the step of one attempt ended, as the batch script's process saw it."""

    srun_exitcode: int
    """As subprocess gives it: -n for signal n."""
    records: tuple[NodeRecord, ...] = ()
    hosts: tuple[str, ...] = ()
    """Nodes of the ranks; none if the step was not started."""
    signals: tuple[tuple[int, float], ...] = ()
    """Signals to the batch script's process, and when, in seconds since the epoch."""
    near_limit: bool = False
    """The ranks were sent the checkpoint signal because the time limit was near."""
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

    @property
    def missing(self) -> list[str]:
        """Nodes that left no record."""
        reporting = {record.host for record in self.records}
        return [host for host in self.hosts if host not in reporting]

    @property
    def stops(self) -> list[int]:
        """The signals that asked for the end."""
        return [number for number, _ in self.signals if number in STOPPING]

    @property
    def first_failure(self) -> tuple[NodeRecord, RankFailure] | None:
        """The first failure over all nodes, and its node; None if no rank failed.

        A rank that failed by itself (see `failed_by_itself`) comes before one that only followed another.
        """
        found = [(record, record.failure) for record in self.records if record.failure]
        return min(found, key=lambda one: (not failed_by_itself(one[1]), one[1].time), default=None)

    @property
    def failed(self) -> list[NodeRecord]:
        """The nodes on which a rank, or the agent, failed by itself rather than by SIGTERM."""
        failed = [record for record in self.records if record.state == "failed"]
        return [record for record in failed if not (record.failure and was_terminated(record.failure))]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done after an attempt."""

    requeue: bool
    cause: str | None
    """The attempt's, or `no_progress` or `limit` if that is why the job stops; None for a success."""
    reason: str
    """For people."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended: all that is known of it."""

    step: StepReport | None
    """None while the step is still ending."""
    cause: str | None
    """None for a success."""
    decision: Decision
    advance: AttemptProgress
    kill: str = ""
    """How SLURM ends the job, see `classify_kill`; empty if it does not."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Lost nodes, and what tells of it."""
    first: tuple[NodeRecord, RankFailure] | None = None
    """The first rank that failed by itself, and its node, if that is the cause."""
    first_events: tuple[str, ...] = ()
    """What came before any failure: nothing could be written, or ranks ended with 0 before the others."""
    events: tuple[str, ...] = ()
    """What happened to nodes, to a rank or else to the agents; the first rank of a crash has more to it."""
    trouble: str = ""
    """What is wrong with the run directory, see `release_space`."""
    status: JobState | None = None
    """What SLURM has said of the job; None if it was not asked, or did not answer."""

    @property
    def exit_code(self) -> int:
        """The job's: 0 for a success; the cause's own; 128+n for a signal that a node got from outside; that
        of the first rank that failed; after a crash without one, that of a failed node, or srun's; else 128+n
        for the signal that ended the job.
        """
        if self.cause is None:
            return 0
        if (own := CAUSES[self.cause].exit_code) is not None:
            return own
        step = self.step
        if step and self.cause == "stopped" and step.signalled:
            return 128 + step.signalled[0][1]
        if self.first:
            return self.first[1].status
        if step and self.cause == "crash":
            codes = [record.exit_code for record in step.failed if record.exit_code]
            return (codes or [0 if self.trouble else abs(step.srun_exitcode)])[0] or EXIT_MACHINE
        return 128 + next(iter(step.stops if step else ()), signal.SIGTERM)

    def list_failure_lines(self) -> list[str]:
        """Say why the attempt ended, and which rank failed first, with the end of its log."""
        if self.cause == "sick_node":
            return []  # preflight has told of it
        told: list[str] = []
        if self.first and self.cause == "crash" and not self.events:
            record, failure = self.first
            where = f"rank {failure.rank} on {record.host} (local rank {failure.local_rank})"
            what = "failed after that" if self.first_events else "failed first"
            told = describe_first_failed_rank(where, failure.reason, failure.log, failure.lines, what)
        return [*self.first_events, *self.events, *told]

    @property
    def state(self) -> str:
        """The manifest's word: what SLURM has requeued is in the queue, whatever the policy says."""
        if self.decision.requeue or self.kill == "requeued":
            return "requeued"
        if self.cause is None:
            return "succeeded"
        ended = self.cause in ("cancelled", "preempted", "timeout") and self.decision.cause == self.cause
        return "stopped" if ended else "failed"

    def describe(self, first_attempt: int) -> dict[str, Any]:
        """Return the manifest's outcome; of many things that happened, its reason has the first ones."""
        step, state, failure = self.step, self.state, None
        stops = step.stops if step else [signal.SIGTERM]
        events = [*self.first_events, *self.events]
        if len(events) > MAX_NAMED:
            more = f" (and {len(events) - MAX_NAMED} more)"
            events = [*events[: MAX_NAMED - 1], events[MAX_NAMED - 1] + more]
        if self.first:
            record, failed = self.first
            failure = {**failed.to_json(record.host), "attempt": first_attempt + record.restarts}
        restarts = max((record.restarts for record in step.records), default=0) if step else 0
        return {
            "state": state,
            "cause": self.cause if state == "requeued" else self.decision.cause,
            "exit_code": self.exit_code,
            "signal": name_signal(stops[0]) if stops else None,
            "reason": None if self.cause is None else "; ".join([*events, self.decision.reason]),
            "events": list(self.first_events),
            "lost": list(self.lost),
            **({"sick": list(step.sick)} if step and step.sick else {}),
            "first_failure": failure,
            "attempts": 1 + first_attempt + restarts if step else None,
            "step": self.advance.step,
            "checkpoint": self.advance.newest,
        }


def failed_by_itself(failure: RankFailure) -> bool:
    """Tell whether a rank failed by itself: not by SIGTERM, nor since it had lost another rank."""
    follows = any(FOLLOWS.search(line) for line in failure.lines)
    return not (was_terminated(failure) or (failure.exitcode > 0 and follows))


def was_terminated(failure: RankFailure) -> bool:
    """Tell whether a rank ended by SIGTERM, or as a shell says that it did (143)."""
    return failure.status == 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An earlier attempt that was followed by another one."""

    cause: str | None
    advanced: bool | None
    """It made progress; None if that cannot be judged."""


def decide_requeue(
    cause: str | None,
    policy: "RequeueConfig",
    past: Sequence[PastAttempt],
    advanced: bool | None,
    number: int = 0,
) -> Decision:
    """Decide what is to be done after an attempt of this cause; `past` are the attempts before it.

    Attempts that were preempted, requeued from outside, or not begun for a sick node, do not count as lacking
    progress, nor do they end a row of such: others decided how long they ran. SLURM can know of more attempts
    than were recorded: then `number` is the attempt's own.
    """
    if cause is None:
        return Decision(False, None, "succeeded")
    text, idle = CAUSES[cause].text, 0
    if cause == "cancelled":
        return Decision(False, cause, text)
    for attempt in reversed([*past, PastAttempt(cause, advanced)]):
        if attempt.cause in CAUSES and not CAUSES[attempt.cause].is_counted and not attempt.advanced:
            continue
        if attempt.advanced is not False:
            break
        idle += 1
    if 0 < policy.no_progress <= idle:
        reason = f"no progress in {idle} attempts in a row (cluster.requeue.no_progress={policy.no_progress})"
        return Decision(False, "no_progress", reason)
    if cause in LIMITED:
        allowed, before = getattr(policy, cause), sum(attempt.cause == cause for attempt in past)
        if before >= allowed:
            often = f" after {before} of them" if allowed > 0 else ""
            return Decision(False, cause, f"{text}: not requeued{often} (cluster.requeue.{cause}={allowed})")
    number = max(number, len(past) + 1)
    if number >= policy.limit:
        return Decision(False, "limit", f"{text}: not requeued (cluster.requeue.limit={policy.limit})")
    again = text if cause == "requeued" else f"{text}: requeued"
    return Decision(True, cause, f"{again} (attempt {number + 1} of at most {policy.limit})")


def diagnose(
    attempt: "Attempt",
    step: StepReport | None,
    status: JobState | None = None,
    lost: Mapping[str, str] | None = None,
    trouble: str = "",
) -> AttemptEnd:
    """Find out how an attempt ended: from the nodes' records, srun, SLURM and the run directory.

    `step` is None while it still runs. `status` is what SLURM has said of the job, if it was asked before,
    and `lost` are nodes that are known to be lost, and what tells of it. `trouble` is what `release_space`
    has said. SLURM is not asked about a plain success.
    """
    advance = measure_attempt(attempt.run, attempt.request.progress_patterns)
    stop_requested = step is None or bool(step.stops)
    succeeded = step is not None and has_succeeded(attempt, step)
    timeout = SHORT_TIMEOUT if stop_requested else LONG_TIMEOUT
    if status is None:
        if step and succeeded and not (stop_requested or step.near_limit or step.missing):
            return AttemptEnd(step, None, attempt.decide(None, step, advance), advance, trouble=trouble)
        status = attempt.ask_status(timeout)
    kill = classify_kill(status, attempt.restarts)
    found = dict(lost or {})
    if lost is None:  # slurmctld may be minutes late to see a loss (SlurmdTimeout)
        down = ask_down_nodes(
            attempt.hosts if kill or step is None else step.missing, attempt.environ, timeout
        )
        found = {host: f"SLURM says that it is {state}" for host, state in down.items()}
    facts: dict[str, object] = {
        "succeeded": succeeded,
        "finished": advance.finished,
        "preempted": status and status.preempted,
        "stop_requested": stop_requested,
    }
    killed_tasks: dict[str, str] = {}
    first = step.first_failure if step else None
    asks = bool(first and first[1].status in attempt.request.config.cluster.requeue.exit_codes)
    if step:
        task_ends = find_task_ends(step.srun_lines, step.missing)
        if not (kill or stop_requested or step.cancelled):
            killed_tasks = {host: word for host, word in task_ends.items() if word != ENDED}
        # If the first node's own record is missing too, which is there, no records are to be had: the disk is
        # full, or the tasks cannot start.
        own = attempt.environ.get("SLURMD_NODENAME")
        if lost is None and not (kill or (own in step.missing and own not in task_ends)):
            silent = [host for host in step.missing if host not in task_ends]
            found |= {
                host: ", and ".join(("it left no record", *filter(None, [found.get(host)])))
                for host in silent
            }
        # SLURM may start a job again before it has sorted out what another node's loss has left.
        after_loss = attempt.earlier and attempt.earlier[-1]["outcome"].get("cause") == "node_failure"
        refused = any(record.agent_said.startswith(NOT_STARTED) for record in step.records)
        facts |= {
            "failed": killed_tasks or step.failed,
            "lost": after_loss and refused,
            "hung": any(record.hang for record in step.records),
            "sick": step.sickness,
            "near_limit": step.near_limit,
            "stopped_from_outside": not stop_requested and was_stopped_from_outside(attempt, step),
            "restart_requested": asks,
            "cancelled_by_user": step.cancelled
            or (stop_requested and any(record.signal for record in step.records)),
        }
    facts["lost"] = found or facts.get("lost")
    cause = classify_end([name for name, holds in facts.items() if holds], kill)
    asks = asks and cause in ("requested", "timeout")
    is_own = cause == "crash" or (cause == "stopped" and step and not step.signalled)
    first = first if asks or is_own else None
    early = find_early_end(attempt, step) if step and not asks and cause not in (None, "stopped") else ""
    events = [f"{host} was lost: {evidence}" for host, evidence in found.items()]
    for host, word in killed_tasks.items():
        hint = ", probably out of memory" if word == "Killed" else ""
        events.append(f"{host} is there, but its task left no record, and ended: {word}{hint}")
    if step and not events:
        events = tell_step_events(step, cause, first, asks=asks, has_trouble=bool(trouble))
    decision = attempt.decide(cause, step, advance)
    first_events = tuple(filter(None, (trouble, early)))
    return AttemptEnd(
        step, cause, decision, advance, kill, found, first, first_events, tuple(events), trouble, status
    )


def tell_step_events(
    step: StepReport,
    cause: str | None,
    first: tuple[NodeRecord, RankFailure] | None,
    *,
    asks: bool,
    has_trouble: bool,
) -> list[str]:
    """Say what happened in a step whose nodes are all there; nothing of a crash's first rank, see `first`."""
    if cause == "sick_node":
        return [*step.sickness]
    if cause == "hang":
        return [record.hang for record in step.records if record.hang][:1]
    if cause == "stopped" and step.signalled:
        hosts = name_some(list(dict(step.signalled)), MAX_NAMED)
        what = f"{name_signal(step.signalled[0][1])} from outside"
        return [f"{hosts} got {what}: neither launch nor SLURM's queue sent it"]
    if first and cause != "crash":
        record, failure = first
        what = f"was stopped first: it {failure.reason}"
        what = f"ended with {failure.status}, and asks for another start" if asks else what
        return [f"rank {failure.rank} on {record.host} {what}"]
    if first or cause != "crash":
        return []
    hosts_by_text: dict[str, list[str]] = {}
    for record in step.records:
        hosts_by_text.setdefault(record.agent_said, []).append(record.host)
    said = [f"{name_some(names, MAX_NAMED)}: {text}" for text, names in hosts_by_text.items() if text]
    if step.missing:
        doubt = "" if has_trouble else ": is the disk full?"
        said.append(f"no record came from {', '.join(step.missing)}{doubt}")
    return said or [f"no rank failed, but srun ended with {step.srun_exitcode}"]


def was_stopped_from_outside(attempt: "Attempt", step: StepReport) -> bool:
    """Tell whether the first event was a signal to a task or a rank that neither we nor SLURM's queue sent.

    A signal to every node's task by way of SLURM is a user's wish that the step end. An elastic job goes on
    without the node, and may fail for another reason later.
    """
    first = step.first_failure
    if not step.signalled:
        return bool(first and was_terminated(first[1]) and not step.cancelled)
    if step.cancelled and len(dict(step.signalled)) == len(attempt.hosts):
        return False
    return not (attempt.is_elastic and first and failed_by_itself(first[1]))


def find_early_end(attempt: "Attempt", step: StepReport) -> str:
    """Say which ranks ended with 0 before the first failure, or long before all were stopped."""
    first = step.first_failure
    before = first[1].time if first else max((when - LONG_BEFORE for _, when in step.signals), default=None)
    if before is None:
        return ""
    ends = [
        CleanEnd(rank, record.host, moment, attempt.run.first_attempt + record.restarts)
        for record in step.records
        for rank, moment in record.clean
    ]
    world = 0 if step.missing else sum(record.ranks for record in step.records)
    return explain_early_exits(attempt.run, ends, before, world)


def has_succeeded(attempt: "Attempt", step: StepReport) -> bool:
    """Tell whether all nodes ended well; of an elastic job's, those that are left, if they are enough.

    An elastic job goes on without a node whose task was stopped from outside, as without one that was lost.
    """
    left = dict(step.signalled) if attempt.is_elastic else {}
    records = [record for record in step.records if record.host not in left]
    if step.sickness or any(record.state != "succeeded" or record.exit_code for record in records):
        return False
    if attempt.is_elastic and len(records) >= attempt.request.min_nodes:
        return True
    # If the kernel has killed a helper of theirs for memory, srun's code is 1, whatever the tasks' are.
    if step.records and not step.missing:
        return True
    # A task ends with 0 if its ranks did, or was stopped: a record may be late, or the disk full.
    return step.srun_exitcode == 0 and not (step.missing and step.signals)


SIGNAL_EARLY = 60.0
"""Seconds that SLURM may send a job's signal too early (sbatch(1), --signal)."""
CLOCK_SLACK = 30.0
"""Seconds that slurmctld may be late to tell, and clocks may differ."""
CLOSING_TIME = 15.0
"""Seconds before the time limit for the batch script's process: records, manifest, requeue."""


def choose_stop_time(now: float, end_time: float | None, seconds: float, grace: float) -> float | None:
    """Return when ranks that got the checkpoint signal now are to be stopped by SIGTERM; epoch seconds.

    None: the signal was a user's own, far from the limit, and the program goes on. Else as late as leaves
    the ranks `grace` seconds from SIGTERM to SIGKILL, and CLOSING_TIME seconds before the limit; but at least
    half of the time that is left is for the checkpoint. `end_time` is the job's limit (infinite for none),
    `seconds` how long before it the signal was ordered, which is used if SLURM does not tell the limit.
    """
    if end_time is not None and now < end_time - seconds - SIGNAL_EARLY - CLOCK_SLACK:
        return None
    left = max((now + seconds if end_time is None else end_time) - now, 0.0)
    return now + max(left / 2, left - grace - CLOSING_TIME)
