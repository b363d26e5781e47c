"""One attempt of a SLURM job: its manifest from start to end, and what comes after it."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.errors import LaunchError, SchedulerError
from launcher.runs.disk_reserve import free_room, hold_room
from launcher.runs.manifest import stamp_time
from launcher.runs.run_directory import RunDir
from launcher.slurm.attempt import Attempt, Sight, StepEnd, judge_advance, keep_manifest, renew_manifest
from launcher.slurm.attempt_end import choose_status, judge_end, judge_trail, look_again, look_ahead, look_at
from launcher.slurm.end_messages import describe_outcome, tell_attempt, tell_end, tell_failure
from launcher.slurm.job_request import JobRequest
from launcher.slurm.own_job import QUICK, exclude_nodes, requeue_job
from launcher.slurm.requeue_policy import Verdict
from launcher.text import break_line

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds in which slurmctld may come back for a requeue, while nothing ends this job."""


class StoppedError(LaunchError):
    """No further attempt begins, by the policy or since the last one has finished; it has that one's code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def begin_attempt(
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
    manifest = renew_manifest(request, run, environ, hosts, owned=requeues)
    attempt = Attempt(request, run, environ, tuple(hosts), manifest, requeues)
    verdict = judge_trail(attempt.trail, request.config.cluster.requeue) if requeues else None
    if verdict:
        raise refuse_attempt(attempt, verdict)
    keep_manifest(run, manifest)
    hold_room(run)
    return attempt


def refuse_attempt(attempt: Attempt, verdict: Verdict) -> StoppedError:
    """Close the manifest with the last attempt's end, and return the error that says why."""
    *earlier, last = attempt.trail
    state = "failed" if verdict.cause else "succeeded"
    outcome = {**last["outcome"], "state": state, "cause": verdict.cause, "reason": verdict.why}
    before = attempt.manifest["earlier"]
    keep_manifest(attempt.run, {**attempt.manifest, **last, "outcome": outcome, "earlier": before[:-1]})
    text = f"attempt {len(earlier) + 2} does not begin: attempt {len(earlier) + 1} ended: {verdict.why}"
    return StoppedError(text, outcome.get("exit_code") or int(state == "failed"))


def foresee_end(attempt: Attempt) -> None:
    """Settle at once what becomes of a job that SLURM has begun to end: for when the head gets SIGTERM.

    KillWait later all is killed, and the ranks may need all of that time. Then the manifest tells why, and
    the job is in the queue again. Does nothing where a user sent the signal.
    """
    sight = look_ahead(attempt)
    if sight is None or attempt.foreseen:
        return
    for line in tell_failure(sight):
        logger.info(line)
    attempt.foreseen = (sight, settle_end(attempt, sight, QUICK))


def end_attempt(attempt: Attempt, end: StepEnd) -> int:
    """Judge an attempt, requeue the job or conclude it, say so on stderr, and return the head's exit code."""
    trouble = free_room(attempt.run)
    if trouble:
        break_line()
    if attempt.foreseen:
        before, verdict = attempt.foreseen
        sight = look_again(attempt, before, end, trouble)
        verdict = verdict if sight.cause else replace(verdict, cause=None)
        record_end(attempt, sight, verdict)
    else:
        sight = look_at(attempt, end, trouble)
        for line in tell_failure(sight):
            logger.info(line)
        verdict = settle_end(attempt, sight, QUICK if sight.kill else PATIENCE)
    for line in tell_end(sight, verdict, attempt.run, time.time() - attempt.started):
        logger.info(line)
    return choose_status(sight)


def settle_end(attempt: Attempt, sight: Sight, patience: float) -> Verdict:
    """Decide, write the manifest, and requeue: the manifest first, since a requeue ends the head too."""
    verdict = judge_end(attempt, sight)
    record_end(attempt, sight, verdict)
    if sight.cause:
        logger.info(
            f"attempt {len(attempt.trail) + attempt.unrecorded + 1} ended: {tell_attempt(sight, verdict)}"
        )
    if not verdict.requeue:
        return verdict
    try:
        if sight.kill != "requeued":
            requeue_job(attempt.job_id, attempt.environ, patience)
    except SchedulerError as error:
        verdict = replace(verdict, requeue=False, why=f"{verdict.why}, but SLURM refuses ({error})")
        logger.warning(f"the job could not be requeued ({error})")
        record_end(attempt, sight, verdict)
        return verdict
    exclude_lost(attempt, sight)
    return verdict


def exclude_lost(attempt: Attempt, sight: Sight) -> None:
    """Keep the next attempt off the nodes that this one and those before it have lost."""
    outcomes = [entry["outcome"] for entry in reversed(attempt.trail)]
    lost = [*sight.lost, *(host for outcome in outcomes for host in outcome.get("lost") or ())]
    if lost:
        least = attempt.request.min_nodes
        doubt = exclude_nodes(attempt.job_id, list(dict.fromkeys(lost)), least, attempt.environ)
        if doubt:
            logger.warning(f"{doubt}")


def record_end(attempt: Attempt, sight: Sight, verdict: Verdict) -> None:
    """Complete the manifest."""
    attempt.manifest["ended"] = stamp_time()
    outcome = describe_outcome(sight, verdict, attempt.run, choose_status(sight))
    attempt.manifest["outcome"] = {**outcome, "advanced": judge_advance(sight.advance, attempt.trail)}
    keep_manifest(attempt.run, attempt.manifest)
