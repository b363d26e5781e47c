"""Ends an attempt: finds out how it went, decides about a requeue, carries that out, and tells people."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from launcher.errors import EXIT_MACHINE, SchedulerError
from launcher.launch.ending import post_end
from launcher.protocol import name_host
from launcher.runs.manifest import stamp_time
from launcher.runs.progress import LONG_BEFORE, CleanEnd, describe_progress, explain_early_exits
from launcher.runs.run_directory import release_space
from launcher.slurm.attempt import Attempt, claim_end, has_advanced, list_past_attempts
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
    ask_node_states,
    exclude_nodes,
    is_down,
    requeue_job,
)
from launcher.slurm.srun import ENDED, NOT_STARTED, find_task_ends
from launcher.text import break_line, describe_time

logger = logging.getLogger(__name__)


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
            return AttemptEnd(step, None, advance, trouble=trouble)
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
    return AttemptEnd(step, cause, advance, kill, lost, killed_tasks, asks, early, trouble)


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
        end = diagnose(attempt, None, status)
        for line in end.list_failure_lines():
            logger.info(line)
        attempt.prepared = (status, end, carry_out_decision(attempt, end))


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
    if attempt.prepared is None:
        end = diagnose(attempt, step, trouble=trouble)
        finish_attempt(attempt, end)
        return end.exit_code
    status, before, decision = attempt.prepared
    end = diagnose(attempt, step, status, before.lost, trouble)
    if end.cause is None:
        decision = replace(decision, cause=None)
    write_outcome(attempt, end, decision)
    report_end(attempt, end, decision)
    return end.exit_code


def finish_attempt(attempt: Attempt, end: AttemptEnd) -> Decision:
    """Log an attempt's end, requeue the job or not, and return what was decided."""
    for line in end.list_failure_lines():
        logger.info(line)
    decision = carry_out_decision(attempt, end)
    report_end(attempt, end, decision)
    return decision


def report_end(attempt: Attempt, end: AttemptEnd, decision: Decision) -> None:
    """Say how an attempt went and where everything is, here and to `notify.url`."""
    if end.trouble and end.cause is None:
        logger.info(f"warning: {end.trouble}")
    result = describe_progress(end.advance.steps)
    word = f"{end.name_state(decision)} after {describe_time(time.time() - attempt.started)}"
    logger.info(word + (f": {result}" if result else ""))
    logger.info(f"run directory {attempt.run.path}")
    notify, outcome = attempt.request.config.notify, attempt.manifest["outcome"]
    post_end(notify, attempt.run, attempt.hosts[0], outcome, job_id=attempt.job_id)


def carry_out_decision(attempt: Attempt, end: AttemptEnd) -> Decision:
    """Decide, write the manifest, and requeue: the manifest first, since a requeue ends this process too."""
    decision = decide_next(attempt, end)
    write_outcome(attempt, end, decision)
    if end.cause:
        number, reason = len(attempt.earlier) + attempt.unrecorded + 1, decision.reason
        if end.kill == "requeued" and not decision.requeue:  # SLURM's own requeue is not undone here
            reason = f"{reason}; SLURM requeues it, and the next attempt ends at once"
        logger.info(f"attempt {number} ended: {reason}")
    if not decision.requeue:
        return decision
    try:
        if end.kill != "requeued":
            requeue_job(attempt.job_id, attempt.environ, SHORT_TIMEOUT if end.kill else math.inf)
    except SchedulerError as error:
        decision = replace(decision, requeue=False, reason=f"{decision.reason}, but SLURM refuses ({error})")
        logger.warning(f"the job could not be requeued ({error})")
        write_outcome(attempt, end, decision)
        return decision
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
    return decision


def write_outcome(attempt: Attempt, end: AttemptEnd, decision: Decision) -> None:
    """Complete the manifest, with the hangs and stragglers that the node has written that judged them."""
    from launcher.watch.run_files import read_job_state  # not at the start of the job

    manifest, state = attempt.manifest, read_job_state(attempt.run.path, own=True)
    if state and state.attempt == attempt.run.first_attempt:
        hangs, stragglers = map(asdict, state.hangs), map(asdict, state.stragglers)
        account = {"hangs": [*hangs], "stragglers": [*stragglers]}
        manifest |= {key: found for key, found in account.items() if found}
    outcome = end.describe(decision, attempt.run.first_attempt)
    manifest["ended"] = stamp_time()
    manifest["outcome"] = {**outcome, "advanced": has_advanced(end.advance, attempt.earlier)}
    attempt.write()


def decide_next(attempt: Attempt, end: AttemptEnd) -> Decision:
    """Decide what is to be done; a job in somebody's allocation never goes back into the queue."""
    stays = end.cause == "sick_node" and not (end.step and end.step.sick)
    if end.cause and (stays or not attempt.requeues):
        return Decision(False, end.cause, CAUSES[end.cause].text)
    advanced, past = has_advanced(end.advance, attempt.earlier), list_past_attempts(attempt.earlier)
    if attempt.unrecorded and end.cause:
        # An attempt that could not write its manifest has written no checkpoint.
        past += [PastAttempt(end.cause, False)] * attempt.unrecorded
        advanced = bool(advanced)
    return decide_requeue(end.cause, attempt.request.config.cluster.requeue, past, advanced)
