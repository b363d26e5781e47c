"""One attempt of a SLURM job: its manifest from start to end, and what comes after it."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.errors import LaunchError, SchedulerError
from launcher.runs.disk_reserve import free_room, hold_room
from launcher.runs.manifest import stamp_time
from launcher.runs.run_directory import RunDir
from launcher.slurm.attempt import (
    Attempt,
    Sight,
    StepReport,
    has_advanced,
    make_attempt_manifest,
    try_write_manifest,
)
from launcher.slurm.attempt_end import (
    choose_exit_code,
    complete_diagnosis,
    decide_next,
    diagnose_end,
    diagnose_kill,
    find_final_decision,
)
from launcher.slurm.end_messages import (
    describe_decision,
    describe_outcome,
    list_end_lines,
    list_failure_lines,
)
from launcher.slurm.job_control import QUICK, exclude_nodes, requeue_job
from launcher.slurm.job_request import JobRequest
from launcher.slurm.requeue_policy import Decision
from launcher.text import break_line

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds in which slurmctld may come back for a requeue, while nothing ends this job."""


class AttemptRefusedError(LaunchError):
    """No further attempt begins, by the policy or since the last one has finished; it has that one's code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def start_attempt(
    request: JobRequest,
    run: RunDir,
    environ: Mapping[str, str],
    hosts: Sequence[str],
    *,
    requeues: bool = True,
) -> Attempt:
    """Write the manifest of a new attempt, and return it.

    Raises StoppedError, a LaunchError, where the job is to end at once: SLURM requeues a preempted job, and
    one that lost a node, by itself, and what `cluster.requeue` says of that is carried out here.
    """
    manifest = make_attempt_manifest(request, run, environ, hosts, owned=requeues)
    attempt = Attempt(request, run, environ, tuple(hosts), manifest, requeues)
    verdict = find_final_decision(attempt.trail, request.config.cluster.requeue) if requeues else None
    if verdict:
        raise refuse_attempt(attempt, verdict)
    try_write_manifest(run, manifest)
    hold_room(run)
    return attempt


def refuse_attempt(attempt: Attempt, verdict: Decision) -> AttemptRefusedError:
    """Close the manifest with the last attempt's end, and return the error that says why."""
    *earlier, last = attempt.trail
    state = "failed" if verdict.cause else "succeeded"
    outcome = {**last["outcome"], "state": state, "cause": verdict.cause, "reason": verdict.why}
    before = attempt.manifest["earlier"]
    try_write_manifest(attempt.run, {**attempt.manifest, **last, "outcome": outcome, "earlier": before[:-1]})
    text = f"attempt {len(earlier) + 2} does not begin: attempt {len(earlier) + 1} ended: {verdict.why}"
    return AttemptRefusedError(text, outcome.get("exit_code") or int(state == "failed"))


def prepare_for_kill(attempt: Attempt) -> None:
    """Settle at once what becomes of a job that SLURM has begun to end: for when the head gets SIGTERM.

    KillWait later all is killed, and the ranks may need all of that time. Then the manifest tells why, and
    the job is in the queue again. Does nothing where a user sent the signal.
    """
    sight = diagnose_kill(attempt)
    if sight is None or attempt.foreseen:
        return
    for line in list_failure_lines(sight):
        logger.info(line)
    attempt.foreseen = (sight, carry_out_decision(attempt, sight, QUICK))


def end_attempt(attempt: Attempt, end: StepReport) -> int:
    """Judge an attempt, requeue the job or conclude it, say so on stderr, and return the head's exit code."""
    trouble = free_room(attempt.run)
    if trouble:
        break_line()
    if attempt.foreseen:
        before, verdict = attempt.foreseen
        sight = complete_diagnosis(attempt, before, end, trouble)
        verdict = verdict if sight.cause else replace(verdict, cause=None)
        write_outcome(attempt, sight, verdict)
    else:
        sight = diagnose_end(attempt, end, trouble)
        for line in list_failure_lines(sight):
            logger.info(line)
        verdict = carry_out_decision(attempt, sight, QUICK if sight.kill else PATIENCE)
    for line in list_end_lines(sight, verdict, attempt.run, time.time() - attempt.started):
        logger.info(line)
    return choose_exit_code(sight)


def carry_out_decision(attempt: Attempt, sight: Sight, patience: float) -> Decision:
    """Decide, write the manifest, and requeue: the manifest first, since a requeue ends the head too."""
    verdict = decide_next(attempt, sight)
    write_outcome(attempt, sight, verdict)
    if sight.cause:
        logger.info(
            f"attempt {len(attempt.trail) + attempt.unrecorded + 1} ended:"
            f" {describe_decision(sight, verdict)}"
        )
    if not verdict.requeue:
        return verdict
    try:
        if sight.kill != "requeued":
            requeue_job(attempt.job_id, attempt.environ, patience)
    except SchedulerError as error:
        verdict = replace(verdict, requeue=False, why=f"{verdict.why}, but SLURM refuses ({error})")
        logger.warning(f"the job could not be requeued ({error})")
        write_outcome(attempt, sight, verdict)
        return verdict
    exclude_lost_nodes(attempt, sight)
    return verdict


def exclude_lost_nodes(attempt: Attempt, sight: Sight) -> None:
    """Keep the next attempt off the nodes that this one and those before it have lost."""
    outcomes = [entry["outcome"] for entry in reversed(attempt.trail)]
    lost = [*sight.lost, *(host for outcome in outcomes for host in outcome.get("lost") or ())]
    if lost:
        least = attempt.request.min_nodes
        doubt = exclude_nodes(attempt.job_id, list(dict.fromkeys(lost)), least, attempt.environ)
        if doubt:
            logger.warning(f"{doubt}")


def write_outcome(attempt: Attempt, sight: Sight, verdict: Decision) -> None:
    """Complete the manifest."""
    attempt.manifest["ended"] = stamp_time()
    outcome = describe_outcome(sight, verdict, attempt.run, choose_exit_code(sight))
    attempt.manifest["outcome"] = {**outcome, "advanced": has_advanced(sight.advance, attempt.trail)}
    try_write_manifest(attempt.run, attempt.manifest)
