"""An attempt of a job, from the manifest that it begins with to its end.

The end: what happened is found out, a requeue is decided and carried out, and people are told.
"""

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from launcher.codec import convert
from launcher.config.settings import RequeueConfig
from launcher.errors import EXIT_MACHINE, LaunchError, SchedulerError
from launcher.launch.ending import post_end
from launcher.launch.signals import name_signal
from launcher.protocol import name_host
from launcher.runs.manifest import (
    AttemptRecord,
    Outcome,
    Run,
    SlurmJob,
    begin_run,
    read_manifest,
    read_time,
    stamp_time,
    write_manifest,
)
from launcher.runs.progress import (
    LONG_BEFORE,
    AttemptProgress,
    CleanEnd,
    describe_progress,
    explain_early_exits,
    measure_attempt,
)
from launcher.runs.records import NodeRecord, RankFailure
from launcher.runs.run_directory import RunDir, release_space, reserve_space
from launcher.slurm import commands
from launcher.slurm.job_request import JobRequest, hold_manifest
from launcher.slurm.step import (
    ENDED,
    NOT_STARTED,
    StepReport,
    failed_by_itself,
    find_task_ends,
    was_terminated,
)
from launcher.text import break_line, describe_first_failed_rank, describe_time, name_some

logger = logging.getLogger(__name__)

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


CAUSES = convert(dict[str, Cause], commands.STATES["causes"])
LIMITED = tuple(name for name, cause in CAUSES.items() if cause.is_limited)


def classify_kill(status: commands.JobState | None, restarts: int) -> str:
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
    return "" if status.state in commands.RUNNING else "cancelled"


def classify_end(facts: Collection[str], kill: str) -> str | None:
    """Return the cause of an attempt's end; None for a success.

    `facts` are names of what can have happened (`events` in states.toml), and of `succeeded` (exit code 0 on
    all nodes, or on enough of an elastic job's), `finished` (the last step that was printed is the last of
    all) and `preempted`. All ranks ended with 0: that is a success, whatever signals came before. But what an
    administrator, or the program itself, has put back into the queue begins again, and what a user has ended
    is cancelled, unless the last step was the last of all.
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
    cause = next((cause for fact, cause in commands.STATES["events"].items() if fact in facts), "crash")
    return "timeout" if cause == "requested" and "near_limit" in facts else cause


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

    step: StepReport
    cause: str | None
    """None for a success."""
    decision: Decision
    advance: AttemptProgress
    kill: str
    """How SLURM ends the job, see `classify_kill`; empty if it does not."""
    lost: Mapping[str, str]
    """Lost nodes, and what tells of it."""
    first: tuple[NodeRecord, RankFailure] | None
    """The first rank that failed by itself, and its node, if that is the cause."""
    first_events: Sequence[str]
    """What came before any failure: nothing could be written, or ranks ended with 0 before the others."""
    events: Sequence[str]
    """What happened to nodes, to a rank or else to the agents; the first rank of a crash has more to it."""
    trouble: str
    """What is wrong with the run directory, see `release_space`."""
    status: commands.JobState | None
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
        if self.cause == "stopped" and step.signalled:
            return 128 + step.signalled[0][1]
        if self.first:
            return self.first[1].status
        if self.cause == "crash":
            codes = [record.exit_code for record in step.failed if record.exit_code]
            return (codes or [0 if self.trouble else abs(step.srun_exitcode or 0)])[0] or EXIT_MACHINE
        return 128 + next(iter(step.stops), signal.SIGTERM)

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

    def describe(self, first_attempt: int, *, advanced: bool | None) -> Outcome:
        """Return the manifest's outcome; of many things that happened, its reason has the first ones."""
        step, state, failure = self.step, self.state, None
        events = [*self.first_events, *self.events]
        if len(events) > MAX_NAMED:
            more = f" (and {len(events) - MAX_NAMED} more)"
            events = [*events[: MAX_NAMED - 1], events[MAX_NAMED - 1] + more]
        if self.first:
            record, failed = self.first
            failure = failed.describe(record.host, first_attempt + record.restarts)
        restarts = max((record.restarts for record in step.records), default=0)
        return Outcome(
            state,
            cause=self.cause if state == "requeued" else self.decision.cause,
            exit_code=self.exit_code,
            signal=name_signal(step.stops[0]) if step.stops else None,
            reason=None if self.cause is None else "; ".join([*events, self.decision.reason]),
            events=list(self.first_events),
            lost=list(self.lost),
            sick=list(step.sick),
            first_failure=failure,
            attempts=None if step.srun_exitcode is None else 1 + first_attempt + restarts,
            step=self.advance.step,
            checkpoint=self.advance.newest,
            advanced=advanced,
        )


def decide_requeue(
    cause: str | None,
    policy: RequeueConfig,
    past: Sequence[Outcome],
    advanced: bool | None,
    number: int = 0,
) -> Decision:
    """Decide what is to be done after an attempt of this cause; `past` are the outcomes of those before it.

    `advanced` tells whether it made progress, None if that cannot be judged, as the outcomes do. Attempts
    that were preempted, requeued from outside, or not begun for a sick node, do not count as lacking
    progress, nor do they end a row of such: others decided how long they ran. SLURM can know of more attempts
    than were recorded: then `number` is the attempt's own.
    """
    if cause is None:
        return Decision(False, None, "succeeded")
    text, idle = CAUSES[cause].text, 0
    if cause == "cancelled":
        return Decision(False, cause, text)
    for outcome in (Outcome(cause=cause, advanced=advanced), *reversed(past)):
        known = CAUSES.get(outcome.cause or "")
        if known and not known.is_counted and not outcome.advanced:
            continue
        if outcome.advanced is not False:
            break
        idle += 1
    if 0 < policy.no_progress <= idle:
        reason = f"no progress in {idle} attempts in a row (cluster.requeue.no_progress={policy.no_progress})"
        return Decision(False, "no_progress", reason)
    if cause in LIMITED:
        allowed, before = getattr(policy, cause), sum(outcome.cause == cause for outcome in past)
        if before >= allowed:
            often = f" after {before} of them" if allowed > 0 else ""
            return Decision(False, cause, f"{text}: not requeued{often} (cluster.requeue.{cause}={allowed})")
    number = max(number, len(past) + 1)
    if number >= policy.limit:
        return Decision(False, "limit", f"{text}: not requeued (cluster.requeue.limit={policy.limit})")
    again = text if cause == "requeued" else f"{text}: requeued"
    return Decision(True, cause, f"{again} (attempt {number + 1} of at most {policy.limit})")


CLAIM = "ended-by-"
"""`logs/ATTEMPT/ended-by-0` links to the name of the node that ends an attempt, `-1` if that is lost too."""


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """The nodes of a job in the order of their ranks, and why they have it."""

    hosts: tuple[str, ...]
    source: str
    """`slurm`, `topology` or `file`."""
    why: str
    """For people: what gave the order."""
    warnings: tuple[str, ...] = ()
    """What is wrong with what was asked for."""

    def assign(self, ranks_on: int) -> AttemptRecord:
        """Return an attempt whose ranks are on the first nodes, so many; the others are spare ones."""
        account = {"source": self.source, "why": self.why, "hosts": list(self.hosts)}
        hosts, spares = list(self.hosts[:ranks_on]), list(self.hosts[ranks_on:])
        return AttemptRecord(hosts=hosts, spares=spares, node_order=account)


@dataclass(slots=True)
class Attempt:
    """An attempt that is running."""

    request: JobRequest
    run: RunDir
    environ: Mapping[str, str]
    manifest: Run
    requeues: bool
    """The job is ours to requeue; false if `launch` runs in somebody's allocation."""
    step: StepReport = field(default_factory=StepReport)
    prepared: AttemptEnd | None = None
    """What was found and decided when SLURM began to end the job during the step."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes of the ranks, in their order."""
        return tuple(self.manifest.last.hosts)

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that wait, without ranks, to replace one that is lost."""
        return tuple(self.manifest.last.spares)

    @property
    def job_id(self) -> str:
        """SLURM's id of the job; `12_3` for an array's member."""
        return commands.name_job(self.environ)

    @property
    def restarts(self) -> int:
        """How often the job had been requeued when this attempt began."""
        return commands.count_restarts(self.environ)

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on with fewer nodes."""
        return self.request.min_nodes < self.request.max_nodes

    @property
    def is_guarded(self) -> bool:
        """Whether SLURM would have the job run on without its first node, so that others watch that one."""
        return self.requeues and (self.is_elastic or self.request.config.cluster.spares > 0)

    @property
    def step_hosts(self) -> tuple[str, ...]:
        """All nodes with a task of ours: those of the ranks, and the spare ones."""
        return (*self.hosts, *self.spares)

    @property
    def earlier(self) -> tuple[AttemptRecord, ...]:
        """The attempts that led to this one by requeues of the same job, oldest first."""
        earlier: list[AttemptRecord] = []
        for entry in reversed(self.manifest.attempts[:-1]):
            if entry.outcome.state != "requeued" or not entry.slurm or entry.slurm.job_id != self.job_id:
                break
            earlier.append(entry)
        return tuple(reversed(earlier))

    @property
    def outcomes(self) -> list[Outcome]:
        """How those attempts ended."""
        return [entry.outcome for entry in self.earlier]

    @property
    def number(self) -> int:
        """Its own among the job's attempts, from 1 on; an earlier one may have written no manifest."""
        return max(len(self.earlier), self.restarts) + 1

    def has_advanced(self, advance: AttemptProgress) -> bool | None:
        """Tell whether this attempt came to a later step, or wrote a newer checkpoint, than those before it.

        None if neither a step nor a checkpoint was ever seen: then there is nothing to judge by.
        """
        steps = [outcome.step for outcome in self.outcomes if outcome.step is not None]
        times = [outcome.checkpoint for outcome in self.outcomes if outcome.checkpoint is not None]
        if advance.step is None and advance.newest is None and not steps and not times:
            return None
        later = advance.step is not None and advance.step > max(steps, default=-1)
        return later or (advance.newest is not None and advance.newest > max(times, default=float("-inf")))

    def decide(self, cause: str | None, advance: AttemptProgress) -> Decision:
        """Decide what follows; a job in somebody's allocation never goes back into the queue."""
        if cause and (not self.requeues or (cause == "sick_node" and not self.step.sick)):
            return Decision(False, cause, CAUSES[cause].text)
        policy, advanced = self.request.config.cluster.requeue, self.has_advanced(advance)
        return decide_requeue(cause, policy, self.outcomes, advanced, self.number)

    def ask_status(self, timeout: float) -> commands.JobState | None:
        """Ask SLURM how the job stands; None if it does not answer."""
        try:
            return commands.ask_job(self.job_id, self.environ, timeout)
        except SchedulerError:
            return None

    def reconstruct_outcome(self) -> None:
        """Write the outcome of an attempt whose batch script wrote none: it died, or was killed.

        A node that is down tells of its loss; the rest are taken for preemptions.
        """
        lost = [*commands.ask_down_nodes(self.hosts, self.environ)]
        advance = measure_attempt(self.run, self.request.progress_patterns)
        self.manifest.last.outcome = replace(
            self.manifest.last.outcome,
            state="requeued",
            cause="node_failure" if lost else "preempted",
            reason=f"{', '.join(lost)} was lost" if lost else "it was killed before it could say why",
            lost=lost,
            step=advance.step,
            checkpoint=advance.newest,
            advanced=self.has_advanced(advance),
        )

    def write(self) -> None:
        """Write the manifest, unless another node has ended this attempt; if that fails, say so and go on."""
        if is_taken_over(self.run):
            return
        try:
            write_manifest(self.run, self.manifest)
        except OSError as error:
            logger.warning(f"the manifest could not be written ({error})")


def diagnose(
    attempt: Attempt,
    status: commands.JobState | None = None,
    lost: Mapping[str, str] | None = None,
    trouble: str = "",
) -> AttemptEnd:
    """Find out how an attempt ended: from the nodes' records, srun, SLURM and the run directory.

    `status` is what SLURM has said of the job, if it was asked before, and `lost` are nodes that are known to
    be lost, and what tells of it. `trouble` is what `release_space` has said. SLURM is not asked about a
    plain success.
    """
    step, advance = attempt.step, measure_attempt(attempt.run, attempt.request.progress_patterns)
    succeeded, is_stopped, first = has_succeeded(attempt), bool(step.stops), step.first_failure
    is_plain = status is None and succeeded and not (is_stopped or step.near_limit or step.missing)
    timeout = commands.SHORT_TIMEOUT if is_stopped else commands.LONG_TIMEOUT
    if status is None and not is_plain:
        status = attempt.ask_status(timeout)
    kill = classify_kill(status, attempt.restarts)
    task_ends, killed_tasks = find_task_ends(step.srun_lines, step.missing), dict[str, str]()
    if not (kill or is_stopped or step.cancelled):
        killed_tasks = {host: word for host, word in task_ends.items() if word != ENDED}
    if lost is None:  # slurmctld may be minutes late to see a loss (SlurmdTimeout)
        down = commands.ask_down_nodes(attempt.hosts if kill else step.missing, attempt.environ, timeout)
        lost = {host: f"SLURM says that it is {state}" for host, state in down.items()}
        # If the first node's own record is missing too, which is there, no records are to be had: the disk is
        # full, or the tasks cannot start.
        own = attempt.environ.get("SLURMD_NODENAME")
        if not (kill or (own in step.missing and own not in task_ends)):
            for host in step.missing:
                if host not in task_ends:
                    evidence = f", and {lost[host]}" if host in lost else ""
                    lost[host] = f"it left no record{evidence}"
    # SLURM may start a job again before it has sorted out what another node's loss has left.
    after_loss = attempt.outcomes and attempt.outcomes[-1].cause == "node_failure"
    refused = any(record.agent_said.startswith(NOT_STARTED) for record in step.records)
    asks = bool(first and first[1].status in attempt.request.config.cluster.requeue.exit_codes)
    is_users = step.cancelled or (is_stopped and any(record.signal for record in step.records))
    facts: dict[str, object] = {
        "succeeded": succeeded,
        "finished": advance.finished,
        "preempted": status and status.preempted,
        "stop_requested": is_stopped,
        "lost": lost or (after_loss and refused),
        "failed": killed_tasks or step.failed,
        "hung": any(record.hang for record in step.records),
        "sick": step.sickness,
        "near_limit": step.near_limit,
        "stopped_from_outside": not is_stopped and was_stopped_from_outside(attempt),
        "restart_requested": asks,
        "cancelled_by_user": is_users and not is_plain,
    }
    cause = classify_end([name for name, holds in facts.items() if holds], kill)
    asks = asks and cause in ("requested", "timeout")
    is_own = cause == "crash" or (cause == "stopped" and not step.signalled)
    first = first if asks or is_own else None
    early = "" if asks or cause in (None, "stopped") else find_early_end(attempt)
    events = [f"{host} was lost: {evidence}" for host, evidence in lost.items()]
    for host, word in killed_tasks.items():
        hint = ", probably out of memory" if word == "Killed" else ""
        events.append(f"{host} is there, but its task left no record, and ended: {word}{hint}")
    events = events or tell_step_events(step, cause, first, asks=asks, has_trouble=bool(trouble))
    decision = attempt.decide(cause, advance)
    first_events = [event for event in (trouble, early) if event]
    return AttemptEnd(
        step, cause, decision, advance, kill, lost, first, first_events, events, trouble, status
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


def was_stopped_from_outside(attempt: Attempt) -> bool:
    """Tell whether the first event was a signal to a task or a rank that neither we nor SLURM's queue sent.

    A signal to every node's task by way of SLURM is a user's wish that the step end. An elastic job goes on
    without the node, and may fail for another reason later.
    """
    step, first = attempt.step, attempt.step.first_failure
    if not step.signalled:
        return bool(first and was_terminated(first[1]) and not step.cancelled)
    if step.cancelled and len(dict(step.signalled)) == len(attempt.hosts):
        return False
    return not (attempt.is_elastic and first and failed_by_itself(first[1]))


def find_early_end(attempt: Attempt) -> str:
    """Say which ranks ended with 0 before the first failure, or long before all were stopped."""
    step, first = attempt.step, attempt.step.first_failure
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


def has_succeeded(attempt: Attempt) -> bool:
    """Tell whether all nodes ended well; of an elastic job's, those that are left, if they are enough.

    An elastic job goes on without a node whose task was stopped from outside, as without one that was lost.
    """
    step = attempt.step
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


def start_attempt(
    request: JobRequest, run: RunDir, environ: Mapping[str, str], order: NodeOrder, *, requeues: bool
) -> Attempt:
    """Write the manifest of a new attempt, with those before it, and return it.

    A submission that never ran is no attempt, nor is what `launch` has written of this start in an allocation
    (if the job is not ours to requeue). Raises LaunchError if the job is to end at once, by the policy or
    since the last attempt has finished, with that one's code: SLURM requeues a preempted job, and one that
    lost a node, by itself, and what `cluster.requeue` says of it is carried out here.
    """
    found = read_manifest(run.path)
    if not found.id:
        found = begin_run(run, request.command, request.choices)
    last, job_id = found.last, commands.name_job(environ)
    is_attempt = requeues and last.outcome.state != "submitted" and last.slurm is not None
    if requeues and last.outcome.state == "running" and last.slurm and last.slurm.job_id == job_id:
        Attempt(request, RunDir(run.path, last.attempt), environ, found, requeues).reconstruct_outcome()
    record = order.assign(request.max_nodes)
    record.command, record.started, record.outcome = last.command, stamp_time(), Outcome("running")
    record.attempt, record.slurm = run.first_attempt, SlurmJob(job_id, commands.count_restarts(environ))
    manifest = replace(
        found,
        directory=request.directory,
        submitted=found.submitted or last.started,
        attempts=[*(found.attempts if is_attempt else found.attempts[:-1]), record],
    )
    attempt = Attempt(request, run, environ, manifest, requeues)
    if requeues and attempt.outcomes:
        *before, ended = attempt.outcomes
        decision = decide_requeue(ended.cause, request.config.cluster.requeue, before, ended.advanced)
        if not decision.requeue:  # the manifest is closed with the last attempt's end
            number = len(before) + 1
            ended.state = "failed" if decision.cause else "succeeded"
            ended.cause, ended.reason = decision.cause, decision.reason
            manifest.attempts.pop()
            attempt.write()
            refusal = LaunchError(
                f"attempt {number + 1} does not begin: attempt {number} ended: {decision.reason}"
            )
            refusal.exit_code = ended.exit_code or int(ended.state == "failed")
            raise refusal
    with hold_manifest(run.path):
        attempt.write()
    reserve_space(run)
    return attempt


def list_claims(run: RunDir) -> list[str]:
    """Return the nodes that have taken it upon themselves to end an attempt; the last one counts."""
    found = (run.path / "logs" / str(run.first_attempt)).glob(f"{CLAIM}*")
    try:
        return [str(path.readlink()) for path in sorted(found)]
    except OSError:
        return []


def claim_end(run: RunDir, host: str, lost: Collection[str] = ()) -> str:
    """Take it upon a node to end an attempt; returns the node that does, empty on a full disk.

    The claim of a node among `lost` counts no more.
    """
    claims = list_claims(run)
    if not claims or claims[-1] in lost:
        with contextlib.suppress(OSError):  # a link is made whole or not at all, by one of many
            (run.path / "logs" / str(run.first_attempt) / f"{CLAIM}{len(claims)}").symlink_to(host)
    return next(reversed(list_claims(run)), "")


def is_taken_over(run: RunDir) -> bool:
    """Tell whether another node has ended the attempt of this process, whose own was taken for lost."""
    return any(host != name_host(os.environ) for host in list_claims(run)[-1:])


def prepare_for_kill(attempt: Attempt) -> None:
    """Decide and requeue at once if SLURM has begun to end the job: called on SIGTERM, while the step runs.

    SLURM kills everything KillWait later, and the ranks may need all of that time. The manifest tells why,
    and the job is in the queue again, before that. Does nothing if a user sent the signal.
    """
    if attempt.prepared or not attempt.requeues:
        return
    status = attempt.ask_status(commands.SHORT_TIMEOUT)
    is_running = status is None or status.state in commands.RUNNING
    if not is_running and classify_kill(status, attempt.restarts) and may_end(attempt):
        attempt.prepared = carry_out(attempt, diagnose(attempt, status))


def may_end(attempt: Attempt) -> bool:
    """Tell whether it is still this node that ends the attempt: another one may have taken it for lost."""
    own = name_host(attempt.environ)
    if not attempt.is_guarded or claim_end(attempt.run, own) in ("", own):
        return True
    logger.info("another node has ended this attempt, to which this one was lost")
    return False


def end_attempt(attempt: Attempt) -> int:
    """Diagnose an attempt's end, requeue the job or not, log it, and return the batch script's exit code."""
    if not may_end(attempt):
        return EXIT_MACHINE
    troubles = [release_space(attempt.run), *(record.trouble for record in attempt.step.records)]
    trouble = next(filter(None, troubles), "")
    if trouble:
        break_line()
    if before := attempt.prepared:
        end = diagnose(attempt, before.status, before.lost, trouble)
        cause = before.decision.cause if end.cause else None
        end = replace(end, decision=replace(before.decision, cause=cause))
        write_outcome(attempt, end)
    else:
        end = carry_out(attempt, diagnose(attempt, trouble=trouble))
    report_end(attempt, end)
    return end.exit_code


def report_end(attempt: Attempt, end: AttemptEnd) -> None:
    """Say how an attempt went and where everything is, here and to `notify.url`."""
    if end.trouble and end.cause is None:
        logger.info(f"warning: {end.trouble}")
    now, result = time.time(), describe_progress(end.advance.steps)
    last = attempt.manifest.last
    seconds = now - (read_time(last.started) or now)
    logger.info(f"{end.state} after {describe_time(seconds)}" + (f": {result}" if result else ""))
    logger.info(f"run directory {attempt.run.path}")
    notify = attempt.request.config.notify
    post_end(notify, attempt.run, attempt.hosts[0], last.outcome, job_id=attempt.job_id)


def carry_out(attempt: Attempt, end: AttemptEnd) -> AttemptEnd:
    """Log an end, write the manifest, and requeue: the manifest first, since a requeue ends this process too.

    Returns the end with another decision if SLURM refuses the requeue.
    """
    for line in end.list_failure_lines():
        logger.info(line)
    write_outcome(attempt, end)
    decision = end.decision
    if end.cause:
        reason = decision.reason
        if end.kill == "requeued" and not decision.requeue:  # SLURM's own requeue is not undone here
            reason = f"{reason}; SLURM requeues it, and the next attempt ends at once"
        logger.info(f"attempt {attempt.number} ended: {reason}")
    if not decision.requeue:
        return end
    try:
        if end.kill != "requeued":
            patience = commands.SHORT_TIMEOUT if end.kill else math.inf
            commands.requeue_job(attempt.job_id, attempt.environ, patience)
    except SchedulerError as error:
        reason = f"{decision.reason}, but SLURM refuses ({error})"
        end = replace(end, decision=replace(decision, requeue=False, reason=reason))
        logger.warning(f"the job could not be requeued ({error})")
        write_outcome(attempt, end)
        return end
    # The next attempt is kept off the nodes that this one and those before it have lost, also those that a
    # spare one has replaced, or found sick.
    bad = [*end.lost, *end.step.sick]
    for entry in (attempt.manifest.last, *reversed(attempt.earlier)):
        bad += [*entry.outcome.lost, *entry.outcome.sick, *(one["lost"] for one in entry.replacements)]
    if bad:
        min_nodes = attempt.request.min_nodes + attempt.request.config.cluster.spares
        warning = commands.exclude_nodes(attempt.job_id, list(dict.fromkeys(bad)), min_nodes, attempt.environ)
        if warning:
            logger.warning(warning)
    return end


def write_outcome(attempt: Attempt, end: AttemptEnd) -> None:
    """Complete the manifest, with the hangs and stragglers that the node has written that judged them."""
    from launcher.watch.run_files import read_job_state  # not at the start of the job

    last, state = attempt.manifest.last, read_job_state(attempt.run.path, own=True)
    if state and state.attempt == attempt.run.first_attempt:
        last.hangs, last.stragglers = [*map(asdict, state.hangs)], [*map(asdict, state.stragglers)]
    last.ended = stamp_time()
    last.outcome = end.describe(attempt.run.first_attempt, advanced=attempt.has_advanced(end.advance))
    attempt.write()
