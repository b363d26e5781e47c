"""Finds out how an attempt ended: from the nodes' records, srun, SLURM and the run directory."""

from collections.abc import Sequence
from dataclasses import replace

from launcher.errors import SchedulerError
from launcher.launch.signals import STOPPING
from launcher.runs.node_records import NodeRecord, RankFailure
from launcher.runs.progress import LONG_BEFORE, CleanEnd, EarlyEnd, find_early_exits
from launcher.slurm.attempt import Attempt
from launcher.slurm.attempt_end import (
    AttemptEnd,
    EndFacts,
    StepReport,
    classify_end,
    classify_kill,
    failed_by_itself,
    find_failed,
    find_first_failure,
    is_near_limit,
    was_terminated,
)
from launcher.slurm.commands import (
    LONG_TIMEOUT,
    RUNNING,
    SHORT_TIMEOUT,
    JobState,
    ask_job,
    ask_node_states,
    is_down,
)
from launcher.slurm.notation import parse_signal
from launcher.slurm.srun import ENDED, SRUN, parse_task_ends

GRES_REFUSAL = "Invalid generic resource"
"""In srun's words if the job has no such GPUs on its nodes."""


def diagnose_kill(attempt: Attempt) -> AttemptEnd | None:
    """Return what SLURM says of the end while the step still runs; None if SLURM does not end the job."""
    status = ask_job_status(attempt, SHORT_TIMEOUT) if attempt.requeues else None
    kill = classify_kill(status, attempt.restarts)
    if status is None or not kill or status.state in RUNNING:
        return None
    advance = attempt.measure_progress()
    node_states = find_node_states(attempt, attempt.hosts, SHORT_TIMEOUT)
    lost = tuple(host for host, state in node_states if is_down(state))
    facts = EndFacts(
        finished=advance.finished, lost=bool(lost), stop_requested=True, preempted=status.preempted
    )
    return AttemptEnd(None, kill, classify_end(facts, kill), advance, lost, node_states)


def complete_diagnosis(attempt: Attempt, before: AttemptEnd, step: StepReport, trouble: str) -> AttemptEnd:
    """Return what is known of an attempt now that its step has ended; `diagnose_kill` gave `before`."""
    advance = attempt.measure_progress()
    facts = EndFacts(
        succeeded=has_succeeded(attempt, step),
        finished=advance.finished,
        lost=bool(before.lost),
        stop_requested=True,
        preempted=before.cause == "preempted",
    )
    cause = before.cause if classify_end(facts, before.kill) else None
    return replace(before, step=step, cause=cause, advance=advance, trouble=trouble)


def diagnose_end(attempt: Attempt, step: StepReport, trouble: str = "") -> AttemptEnd:
    """Return what is known of an attempt whose step has ended; SLURM is not asked about a plain success.

    `trouble` is what `release_space` has said.
    """
    advance, succeeded = attempt.measure_progress(), has_succeeded(attempt, step)
    stop_requested = any(number in STOPPING for number, _ in step.signals)
    if succeeded and not step.checkpointed and not stop_requested and not step.missing:
        return AttemptEnd(step, "", None, advance, trouble=trouble)
    timeout = SHORT_TIMEOUT if stop_requested else LONG_TIMEOUT
    status = ask_job_status(attempt, timeout)
    kill = classify_kill(status, attempt.restarts)
    node_states = find_node_states(attempt, attempt.hosts if kill else step.missing, timeout)
    task_ends = find_task_ends(step)
    stopped = bool(kill) or stop_requested or step.cancelled or SRUN in dict(step.signalled)
    killed_tasks = tuple((host, word) for host, word in task_ends.items() if word != ENDED and not stopped)
    lost = {host for host, state in node_states if is_down(state)}
    # If the first node's own record is missing too, which is there, it is the records that are not to be had:
    # the disk is full, or the tasks cannot start.
    own = attempt.environ.get("SLURMD_NODENAME")
    if not kill and not (own in step.missing and own not in task_ends):
        lost |= {*step.missing} - {*task_ends}
    config = attempt.request.config.cluster
    checkpoint, seconds = parse_signal(config.signal)
    limit = status.end_time if status else None
    sent = [moment for number, moment in step.signals if number == checkpoint]
    first = find_first_failure(step.records)
    facts = EndFacts(
        succeeded=succeeded,
        finished=advance.finished,
        failed=bool(killed_tasks or find_failed(step.records)),
        lost=bool(lost) or lacks_resources(attempt, step),
        hung=any(record.hang for record in step.records),
        sick=bool(step.sickness),
        stop_requested=stop_requested,
        near_limit=step.checkpointed and any(is_near_limit(moment, limit, seconds) for moment in sent),
        preempted=bool(status and status.preempted),
        stopped_from_outside=not stop_requested and was_stopped_from_outside(attempt, step, first),
        restart_requested=bool(first and first[1].status in config.requeue.exit_codes),
        cancelled_by_user=step.cancelled
        or (stop_requested and any(record.signal for record in step.records)),
    )
    cause = classify_end(facts, kill)
    restart_requested = facts.restart_requested and cause in ("requested", "timeout")
    ordered = tuple(host for host in attempt.hosts if host in lost)
    early = None if restart_requested or cause in (None, "stopped") else find_early_end(attempt, step)
    return AttemptEnd(
        step, kill, cause, advance, ordered, node_states, killed_tasks, restart_requested, early, trouble
    )


def lacks_resources(attempt: Attempt, step: StepReport) -> bool:
    """Tell whether SLURM started the job anew without the GPUs that it had given to it.

    SLURM 22.05 does so if a job went back into the queue after it was made smaller (a lost node with
    --no-kill), and while another lost node of it still counted as up. The next requeue gives them again.
    """
    outlives_nodes = attempt.is_elastic or attempt.request.config.cluster.spares > 0
    after_loss = attempt.earlier and attempt.earlier[-1]["outcome"].get("cause") == "node_failure"
    refused = any(GRES_REFUSAL in record.agent_said for record in step.records)
    return bool(outlives_nodes and after_loss and refused)


def was_stopped_from_outside(
    attempt: Attempt, step: StepReport, first: tuple[NodeRecord, RankFailure] | None
) -> bool:
    """Tell whether the first event was a signal to a task or a rank that neither we nor SLURM's queue sent.

    A signal to every node's task by way of SLURM is a user's wish that the step end. An elastic job goes on
    without the node, and may fail for another reason later.
    """
    if not step.signalled:
        return bool(first and was_terminated(first[1]) and not step.cancelled)
    if step.cancelled and len(dict(step.signalled)) == len(attempt.hosts):
        return False
    return not (attempt.is_elastic and first and failed_by_itself(first[1]))


def find_early_end(attempt: Attempt, step: StepReport) -> EarlyEnd | None:
    """Return the ranks that ended with 0 before the first failure, or long before all were stopped."""
    last = max((moment - LONG_BEFORE for _, moment in step.signals), default=None)
    first = find_first_failure(step.records)
    before = first[1].time if first else last
    if before is None:
        return None
    ends = [
        CleanEnd(rank, record.host, moment, attempt.run.first_attempt + record.restarts)
        for record in step.records
        for rank, moment in record.clean
    ]
    world = 0 if step.missing else sum(record.ranks for record in step.records)
    return find_early_exits(attempt.run, ends, before, world)


def has_succeeded(attempt: Attempt, step: StepReport) -> bool:
    """Tell whether all nodes ended well; of an elastic job's, those that are left, if they are enough.

    An elastic job goes on without a node whose task was stopped from outside, as without one that was lost.
    """
    if step.sickness:
        return False
    left = {host for host, _ in step.signalled} if attempt.is_elastic else set()
    records = [record for record in step.records if record.host not in left]
    if any(record.state != "succeeded" or record.exit_code for record in records):
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


def find_node_states(attempt: Attempt, hosts: Sequence[str], timeout: float) -> tuple[tuple[str, str], ...]:
    """Ask for the states of nodes; empty if SLURM does not answer."""
    try:
        return tuple(ask_node_states(hosts, attempt.environ, timeout).items())
    except SchedulerError:
        return ()


def find_task_ends(step: StepReport) -> dict[str, str]:
    """Return the nodes without a record that srun has heard of, and how it says that their task ended."""
    return {host: word for host, word in parse_task_ends(step.srun_lines).items() if host in step.missing}
