"""An attempt of a job, from the manifest that it begins with to its end.

The end: what happened is found out, a requeue is decided and carried out, and people are told.
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.errors import EXIT_MACHINE, LaunchError, SchedulerError
from launcher.launch.ending import post_end
from launcher.protocol import name_host
from launcher.runs.manifest import (
    OF_ATTEMPT,
    OF_START,
    describe_start,
    read_manifest,
    read_time,
    stamp_time,
    take_dict,
    take_earlier,
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
from launcher.runs.run_directory import RunDir, release_space, reserve_space
from launcher.slurm.attempt_end import (
    CAUSES,
    AttemptEnd,
    Decision,
    PastAttempt,
    StepReport,
    classify_end,
    classify_kill,
    decide_requeue,
    failed_by_itself,
    find_failed,
    find_first_failure,
    was_terminated,
)
from launcher.slurm.commands import (
    LONG_TIMEOUT,
    RUNNING,
    SHORT_TIMEOUT,
    JobState,
    ask_job,
    ask_last_end,
    ask_node_states,
    count_restarts,
    exclude_nodes,
    is_down,
    name_job,
    requeue_job,
)
from launcher.slurm.job_request import JobRequest, hold_manifest
from launcher.slurm.node_order import NodeOrder
from launcher.slurm.step import ENDED, NOT_STARTED, find_task_ends
from launcher.text import break_line, describe_time

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
"""A manifest, or one of its earlier attempts."""
CLAIM = "ended-by-"
"""`logs/ATTEMPT/ended-by-0` links to the name of the node that ends an attempt, `-1` if that is lost too."""
ENDS = {
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "TIMEOUT": "timeout",
    "REQUEUED": "requeued",
}
"""States of an attempt in accounting that was requeued for something else than a preemption."""


@dataclass(slots=True)
class Attempt:
    """An attempt that is running."""

    request: JobRequest
    run: RunDir
    environ: Mapping[str, str]
    manifest: Manifest
    requeues: bool
    """The job is ours to requeue; false if `launch` runs in somebody's allocation."""
    prepared: AttemptEnd | None = None
    """What was found and decided when SLURM began to end the job during the step."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes of the ranks, in their order."""
        return tuple(self.manifest["hosts"])

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that wait, without ranks, to replace one that is lost."""
        return tuple(self.manifest.get("spares", ()))

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
    def is_guarded(self) -> bool:
        """Whether SLURM would have the job run on without its first node, so that others watch that one."""
        return self.requeues and (self.is_elastic or self.request.config.cluster.spares > 0)

    @property
    def step_hosts(self) -> tuple[str, ...]:
        """All nodes with a task of ours: those of the ranks, and the spare ones."""
        return (*self.hosts, *self.spares)

    @property
    def earlier(self) -> tuple[Manifest, ...]:
        """The attempts before this one, each requeued into the next; a start by hand begins anew."""
        return list_requeued_attempts(self.manifest, self.job_id)

    @property
    def unrecorded(self) -> int:
        """Attempts that SLURM counts and the manifest lacks, since it could not be written."""
        slurm = [take_dict(entry, "slurm") for entry in take_earlier(self.manifest)]
        known = [int(one.get("restarts", -1)) for one in slurm if one.get("job_id") == self.job_id]
        return max(self.restarts - 1 - max(known, default=-1), 0)

    def measure_progress(self) -> AttemptProgress:
        """Return how far it has come."""
        return measure_attempt(self.run, self.request.progress_patterns)

    def write(self) -> None:
        """Write the manifest, unless another node has ended this attempt; if that fails, say so and go on."""
        if is_taken_over(self.run):
            return
        try:
            write_manifest(self.run, self.manifest)
        except OSError as error:
            logger.warning(f"the manifest could not be written ({error})")


class AttemptRefusedError(LaunchError):
    """No further attempt begins, by the policy or since the last one has finished; it has that one's code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def start_attempt(
    request: JobRequest,
    run: RunDir,
    environ: Mapping[str, str],
    order: NodeOrder,
    *,
    requeues: bool = True,
) -> Attempt:
    """Write the manifest of a new attempt, with those before it, and return it.

    A submission that never ran is no attempt, nor is what `launch` has written of this start in an allocation
    (if the job is not ours to requeue). Raises AttemptRefusedError if the job is to end at once:
    SLURM requeues a preempted job, and one that lost a node, by itself, and what `cluster.requeue` says of it
    is carried out here.
    """
    found: Manifest = read_manifest(run.path) or describe_start(run, request.command, request.choices)
    state, slurm = take_dict(found, "outcome").get("state"), take_dict(found, "slurm")
    earlier, job_id = take_earlier(found), name_job(environ)
    if requeues and state == "running" and slurm.get("job_id") == job_id:
        found["outcome"] = reconstruct_outcome(request, found, run, environ)
    if requeues and state != "submitted" and slurm:
        earlier.append({key: found[key] for key in OF_ATTEMPT if key in found})
    spares = order.hosts[request.max_nodes :]
    manifest = {
        **{key: value for key, value in found.items() if key not in OF_START},
        "directory": request.directory,
        "submitted": found.get("submitted") or found.get("started"),
        "started": stamp_time(),
        "ended": None,
        "hosts": list(order.hosts[: request.max_nodes]),
        "attempt": run.first_attempt,
        "slurm": {**slurm, "job_id": job_id, "restarts": count_restarts(environ)},
        "outcome": {"state": "running"},
        "earlier": earlier,
        "node_order": {"source": order.source, "why": order.why, "hosts": list(order.hosts)},
        **({"spares": list(spares)} if spares else {}),
    }
    attempt = Attempt(request, run, environ, manifest, requeues)
    past = list_past_attempts(attempt.earlier) if requeues else []
    if past:
        *before, last = past
        decision = decide_requeue(last.cause, request.config.cluster.requeue, before, last.advanced)
        if not decision.requeue:  # the manifest is closed with the last attempt's end
            closed = attempt.earlier[-1]
            state = "failed" if decision.cause else "succeeded"
            closed["outcome"] |= {"state": state, "cause": decision.cause, "reason": decision.reason}
            attempt.manifest = {**manifest, **closed, "earlier": earlier[:-1]}
            attempt.write()
            number = len(past)
            text = f"attempt {number + 1} does not begin: attempt {number} ended: {decision.reason}"
            code = closed["outcome"].get("exit_code") or int(state == "failed")
            raise AttemptRefusedError(text, code)
    with hold_manifest(run.path):
        attempt.write()
    reserve_space(run)
    return attempt


def reconstruct_outcome(
    request: JobRequest, found: Manifest, run: RunDir, environ: Mapping[str, str]
) -> Manifest:
    """Return the outcome of an attempt whose batch script wrote none: it died with its node, or was killed.

    Accounting tells, if there is any. Else a node that is down tells of its loss; the rest are preemptions.
    """
    outcome, hosts = take_dict(found, "outcome"), [str(host) for host in found.get("hosts") or ()]
    lost: list[str] = []
    with contextlib.suppress(SchedulerError):
        lost = [host for host, state in ask_node_states(hosts, environ).items() if is_down(state)]
    word = ask_last_end(name_job(environ), environ)
    cause = outcome.get("cause") or ENDS.get(word) or ("preempted" if word or not lost else "node_failure")
    advance = measure_attempt(RunDir(run.path, found.get("attempt") or 0), request.progress_patterns)
    reason = f"{', '.join(lost)} was lost" if lost else "it was killed before it could say why"
    return {
        **outcome,
        **{"state": "requeued", "cause": cause, "reason": reason, "lost": lost},
        **{"step": advance.step, "checkpoint": advance.newest},
        "advanced": has_advanced(advance, list_requeued_attempts(found, name_job(environ))),
    }


def list_requeued_attempts(manifest: Manifest, job_id: str) -> tuple[Manifest, ...]:
    """Return the attempts that led to a manifest's last one by requeues of the same job, oldest first."""
    earlier: list[Manifest] = []
    for entry in reversed(take_earlier(manifest)):
        requeued = take_dict(entry, "outcome").get("state") == "requeued"
        if not requeued or take_dict(entry, "slurm").get("job_id") != job_id:
            break
        earlier.append(entry)
    return tuple(reversed(earlier))


def list_past_attempts(earlier: Sequence[Manifest]) -> list[PastAttempt]:
    """Return what the policy looks at in earlier attempts."""
    outcomes = [entry["outcome"] for entry in earlier]
    return [PastAttempt(outcome.get("cause"), outcome.get("advanced")) for outcome in outcomes]


def has_advanced(advance: AttemptProgress, earlier: Sequence[Manifest]) -> bool | None:
    """Tell whether an attempt came to a later step, or wrote a newer checkpoint, than those before it.

    None if neither a step nor a checkpoint was ever seen: then there is nothing to judge by.
    """
    steps = [step for entry in earlier if (step := entry["outcome"].get("step")) is not None]
    times = [time for entry in earlier if (time := entry["outcome"].get("checkpoint")) is not None]
    if advance.step is None and advance.newest is None and not steps and not times:
        return None
    later = advance.step is not None and advance.step > max(steps, default=-1)
    return later or (advance.newest is not None and advance.newest > max(times, default=float("-inf")))


def claim_end(run: RunDir, host: str, lost: Collection[str] = ()) -> str:
    """Take it upon a node to end an attempt; returns the node that does, empty on a full disk.

    The claim of a node among `lost` counts no more.
    """
    claims = list_claims(run)
    if not claims or claims[-1] in lost:
        with contextlib.suppress(OSError):  # a link is made whole or not at all, by one of many
            (run.path / "logs" / str(run.first_attempt) / f"{CLAIM}{len(claims)}").symlink_to(host)
    return next(reversed(list_claims(run)), "")


def list_claims(run: RunDir) -> list[str]:
    """Return the nodes that have taken it upon themselves to end an attempt; the last one counts."""
    found = (run.path / "logs" / str(run.first_attempt)).glob(f"{CLAIM}*")
    try:
        return [str(path.readlink()) for path in sorted(found)]
    except OSError:
        return []


def is_taken_over(run: RunDir) -> bool:
    """Tell whether another node has ended the attempt of this process, whose own was taken for lost."""
    return any(host != name_host(os.environ) for host in list_claims(run)[-1:])


def diagnose(
    attempt: Attempt,
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
    advance, known = attempt.measure_progress(), lost is not None
    stop_requested = step is None or bool(step.stops)
    succeeded = step is not None and has_succeeded(attempt, step)
    timeout = SHORT_TIMEOUT if stop_requested else LONG_TIMEOUT
    if status is None:
        if step and succeeded and not (stop_requested or step.near_limit or step.missing):
            return AttemptEnd(step, None, decide_next(attempt, None, step, advance), advance, trouble=trouble)
        status = ask_job_status(attempt, timeout)
    kill = classify_kill(status, attempt.restarts)
    if lost is None:
        suspects = attempt.hosts if kill or step is None else step.missing
        lost = find_down_nodes(attempt, suspects, timeout)
    killed_tasks: dict[str, str] = {}
    first = find_first_failure(step.records) if step else None
    asks = bool(first and first[1].status in attempt.request.config.cluster.requeue.exit_codes)
    facts: dict[str, object] = {
        "succeeded": succeeded,
        "finished": advance.finished,
        "preempted": status and status.preempted,
        "stop_requested": stop_requested,
    }
    if step:
        task_ends = find_task_ends(step.srun_lines, step.missing)
        if not (kill or stop_requested or step.cancelled):
            killed_tasks = {host: word for host, word in task_ends.items() if word != ENDED}
        # If the first node's own record is missing too, which is there, no records are to be had: the disk is
        # full, or the tasks cannot start.
        own = attempt.environ.get("SLURMD_NODENAME")
        if not (kill or known or (own in step.missing and own not in task_ends)):
            silent = [host for host in step.missing if host not in task_ends]
            words = {host: ("it left no record", lost.get(host, "")) for host in silent}
            lost = {**lost, **{host: ", and ".join(filter(None, said)) for host, said in words.items()}}
        # SLURM may start a job again before it has sorted out what another node's loss has left.
        after_loss = attempt.earlier and attempt.earlier[-1]["outcome"].get("cause") == "node_failure"
        refused = any(record.agent_said.startswith(NOT_STARTED) for record in step.records)
        facts |= {
            "failed": killed_tasks or find_failed(step.records),
            "lost": after_loss and refused,
            "hung": any(record.hang for record in step.records),
            "sick": step.sickness,
            "near_limit": step.near_limit,
            "stopped_from_outside": not stop_requested and was_stopped_from_outside(attempt, step),
            "restart_requested": asks,
            "cancelled_by_user": step.cancelled
            or (stop_requested and any(record.signal for record in step.records)),
        }
    facts["lost"] = lost or facts.get("lost")
    cause = classify_end([name for name, holds in facts.items() if holds], kill)
    asks = asks and cause in ("requested", "timeout")
    early = find_early_end(attempt, step) if step and not asks and cause not in (None, "stopped") else ""
    decision = decide_next(attempt, cause, step, advance)
    return AttemptEnd(step, cause, decision, advance, kill, lost, killed_tasks, asks, early, trouble, status)


def was_stopped_from_outside(attempt: Attempt, step: StepReport) -> bool:
    """Tell whether the first event was a signal to a task or a rank that neither we nor SLURM's queue sent.

    A signal to every node's task by way of SLURM is a user's wish that the step end. An elastic job goes on
    without the node, and may fail for another reason later.
    """
    first = find_first_failure(step.records)
    if not step.signalled:
        return bool(first and was_terminated(first[1]) and not step.cancelled)
    if step.cancelled and len(dict(step.signalled)) == len(attempt.hosts):
        return False
    return not (attempt.is_elastic and first and failed_by_itself(first[1]))


def find_early_end(attempt: Attempt, step: StepReport) -> str:
    """Say which ranks ended with 0 before the first failure, or long before all were stopped."""
    first = find_first_failure(step.records)
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


def has_succeeded(attempt: Attempt, step: StepReport) -> bool:
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


def ask_job_status(attempt: Attempt, timeout: float) -> JobState | None:
    """Ask SLURM how the job stands; None if it does not answer."""
    try:
        return ask_job(attempt.job_id, attempt.environ, timeout)
    except SchedulerError:
        return None


def find_down_nodes(attempt: Attempt, hosts: Sequence[str], timeout: float) -> dict[str, str]:
    """Return the nodes that are down as SLURM has it, which may be minutes late to see it (SlurmdTimeout)."""
    try:
        states = ask_node_states(hosts, attempt.environ, timeout)
    except SchedulerError:
        return {}
    return {host: f"SLURM says that it is {states[host]}" for host in hosts if is_down(states.get(host, ""))}


def prepare_for_kill(attempt: Attempt) -> None:
    """Decide and requeue at once if SLURM has begun to end the job: called on SIGTERM, while the step runs.

    SLURM kills everything KillWait later, and the ranks may need all of that time. The manifest tells why,
    and the job is in the queue again, before that. Does nothing if a user sent the signal.
    """
    status = ask_job_status(attempt, SHORT_TIMEOUT) if attempt.requeues and not attempt.prepared else None
    if status is None or status.state in RUNNING or not classify_kill(status, attempt.restarts):
        return
    if may_end(attempt):
        attempt.prepared = carry_out(attempt, diagnose(attempt, None, status))


def may_end(attempt: Attempt) -> bool:
    """Tell whether it is still this node that ends the attempt: another one may have taken it for lost."""
    own = name_host(attempt.environ)
    if not attempt.is_guarded or claim_end(attempt.run, own) in ("", own):
        return True
    logger.info("another node has ended this attempt, to which this one was lost")
    return False


def end_attempt(attempt: Attempt, step: StepReport) -> int:
    """Diagnose an attempt's end, requeue the job or not, log it, and return the batch script's exit code."""
    if not may_end(attempt):
        return EXIT_MACHINE
    troubles = [release_space(attempt.run), *(record.trouble for record in step.records)]
    trouble = next(filter(None, troubles), "")
    if trouble:
        break_line()
    before = attempt.prepared
    if before is None:
        return finish_attempt(attempt, diagnose(attempt, step, trouble=trouble)).exit_code
    end = diagnose(attempt, step, before.status, before.lost, trouble)
    cause = before.decision.cause if end.cause else None
    end = replace(end, decision=replace(before.decision, cause=cause))
    write_outcome(attempt, end)
    report_end(attempt, end)
    return end.exit_code


def finish_attempt(attempt: Attempt, end: AttemptEnd) -> AttemptEnd:
    """Log an attempt's end, requeue the job or not, and return the end with what became of that."""
    end = carry_out(attempt, end)
    report_end(attempt, end)
    return end


def report_end(attempt: Attempt, end: AttemptEnd) -> None:
    """Say how an attempt went and where everything is, here and to `notify.url`."""
    if end.trouble and end.cause is None:
        logger.info(f"warning: {end.trouble}")
    now, result = time.time(), describe_progress(end.advance.steps)
    seconds = now - (read_time(attempt.manifest["started"]) or now)
    logger.info(f"{end.state} after {describe_time(seconds)}" + (f": {result}" if result else ""))
    logger.info(f"run directory {attempt.run.path}")
    notify, outcome = attempt.request.config.notify, attempt.manifest["outcome"]
    post_end(notify, attempt.run, attempt.hosts[0], outcome, job_id=attempt.job_id)


def carry_out(attempt: Attempt, end: AttemptEnd) -> AttemptEnd:
    """Log an end, write the manifest, and requeue: the manifest first, since a requeue ends this process too.

    Returns the end with another decision if SLURM refuses the requeue.
    """
    for line in end.list_failure_lines():
        logger.info(line)
    write_outcome(attempt, end)
    decision = end.decision
    if end.cause:
        number, reason = len(attempt.earlier) + attempt.unrecorded + 1, decision.reason
        if end.kill == "requeued" and not decision.requeue:  # SLURM's own requeue is not undone here
            reason = f"{reason}; SLURM requeues it, and the next attempt ends at once"
        logger.info(f"attempt {number} ended: {reason}")
    if not decision.requeue:
        return end
    try:
        if end.kill != "requeued":
            requeue_job(attempt.job_id, attempt.environ, SHORT_TIMEOUT if end.kill else math.inf)
    except SchedulerError as error:
        reason = f"{decision.reason}, but SLURM refuses ({error})"
        end = replace(end, decision=replace(decision, requeue=False, reason=reason))
        logger.warning(f"the job could not be requeued ({error})")
        write_outcome(attempt, end)
        return end
    # The next attempt is kept off the nodes that this one and those before it have lost, also those that a
    # spare one has replaced, or found sick.
    bad = [*end.lost, *(end.step.sick if end.step else ())]
    for entry in (attempt.manifest, *reversed(attempt.earlier)):
        outcome, replaced = entry["outcome"], entry.get("replacements") or ()
        bad += [host for key in ("lost", "sick") for host in outcome.get(key) or ()]
        bad += [*(one["lost"] for one in replaced), *(entry.get("sick_spares") or ())]
    if bad:
        min_nodes = attempt.request.min_nodes + attempt.request.config.cluster.spares
        warning = exclude_nodes(attempt.job_id, list(dict.fromkeys(bad)), min_nodes, attempt.environ)
        if warning:
            logger.warning(f"{warning}")
    return end


def write_outcome(attempt: Attempt, end: AttemptEnd) -> None:
    """Complete the manifest, with the hangs and stragglers that the node has written that judged them."""
    from launcher.watch.run_files import read_job_state  # not at the start of the job

    manifest, state = attempt.manifest, read_job_state(attempt.run.path, own=True)
    if state and state.attempt == attempt.run.first_attempt:
        account = {"hangs": [*map(asdict, state.hangs)], "stragglers": [*map(asdict, state.stragglers)]}
        manifest |= {key: found for key, found in account.items() if found}
    advanced = has_advanced(end.advance, attempt.earlier)
    manifest["ended"] = stamp_time()
    manifest["outcome"] = {**end.describe(attempt.run.first_attempt), "advanced": advanced}
    attempt.write()


def decide_next(
    attempt: Attempt, cause: str | None, step: StepReport | None, advance: AttemptProgress
) -> Decision:
    """Decide what is to be done; a job in somebody's allocation never goes back into the queue."""
    stays = cause == "sick_node" and not (step and step.sick)
    if cause and (stays or not attempt.requeues):
        return Decision(False, cause, CAUSES[cause].text)
    advanced, past = has_advanced(advance, attempt.earlier), list_past_attempts(attempt.earlier)
    if attempt.unrecorded and cause:
        # An attempt that could not write its manifest has written no checkpoint.
        past += [PastAttempt(cause, False)] * attempt.unrecorded
        advanced = bool(advanced)
    return decide_requeue(cause, attempt.request.config.cluster.requeue, past, advanced)
