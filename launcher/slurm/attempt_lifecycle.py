"""One attempt of a SLURM job: its manifest from start to end, and what comes after it."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from launcher.config.settings import RequeueConfig
from launcher.errors import EXIT_MACHINE, LaunchError, SchedulerError
from launcher.launch.end_notice import post_end
from launcher.protocol import name_host
from launcher.runs.manifest import stamp_time
from launcher.runs.run_directory import RunDir, release_space, reserve_space
from launcher.slurm.attempt import (
    Attempt,
    Manifest,
    claim_end,
    has_advanced,
    make_attempt_manifest,
    try_write_manifest,
)
from launcher.slurm.attempt_end import AttemptEnd, StepReport
from launcher.slurm.diagnosis import complete_diagnosis, diagnose_end, diagnose_kill
from launcher.slurm.end_messages import (
    describe_decision,
    describe_outcome,
    list_end_lines,
    list_failure_lines,
)
from launcher.slurm.job_control import SHORT_TIMEOUT, exclude_nodes, requeue_job
from launcher.slurm.job_request import JobRequest, hold_manifest
from launcher.slurm.node_order import NodeOrder
from launcher.slurm.requeue_policy import DESCRIPTIONS, Decision, PastAttempt, decide_requeue
from launcher.text import break_line

logger = logging.getLogger(__name__)


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
    order: NodeOrder | None = None,
) -> Attempt:
    """Write the manifest of a new attempt, and return it.

    Raises AttemptRefusedError if the job is to end at once: SLURM requeues a preempted job, and
    one that lost a node, by itself, and what `cluster.requeue` says of that is carried out here.
    """
    manifest = make_attempt_manifest(request, run, environ, hosts, owned=requeues)
    if order:
        manifest["node_order"] = {"source": order.source, "why": order.why, "hosts": list(order.hosts)}
    attempt = Attempt(request, run, environ, tuple(hosts), manifest, requeues)
    decision = find_final_decision(attempt.earlier, request.config.cluster.requeue) if requeues else None
    if decision:
        raise refuse_attempt(attempt, decision)
    with hold_manifest(run.path):
        try_write_manifest(run, manifest)
    reserve_space(run)
    return attempt


def refuse_attempt(attempt: Attempt, decision: Decision) -> AttemptRefusedError:
    """Close the manifest with the last attempt's end, and return the error that says why."""
    *earlier, last = attempt.earlier
    state = "failed" if decision.cause else "succeeded"
    outcome = {**last["outcome"], "state": state, "cause": decision.cause, "reason": decision.reason}
    before = attempt.manifest["earlier"]
    try_write_manifest(attempt.run, {**attempt.manifest, **last, "outcome": outcome, "earlier": before[:-1]})
    text = f"attempt {len(earlier) + 2} does not begin: attempt {len(earlier) + 1} ended: {decision.reason}"
    return AttemptRefusedError(text, outcome.get("exit_code") or int(state == "failed"))


def prepare_for_kill(attempt: Attempt) -> None:
    """Decide and requeue at once if SLURM has begun to end the job: called on SIGTERM, while the step runs.

    SLURM kills everything KillWait later, and the ranks may need all of that time. The manifest tells why,
    and the job is in the queue again, before that. Does nothing if a user sent the signal.
    """
    end = diagnose_kill(attempt)
    if end is None or attempt.prepared or not may_end(attempt):
        return
    for line in list_failure_lines(end):
        logger.info(line)
    attempt.prepared = (end, carry_out_decision(attempt, end, SHORT_TIMEOUT))


def may_end(attempt: Attempt) -> bool:
    """Tell whether it is still this node that ends the attempt: another one may have taken it for lost."""
    if not attempt.is_guarded or claim_end(attempt.run, name_host(attempt.environ)):
        return True
    logger.info("another node has ended this attempt, to which this one was lost")
    return False


def end_attempt(attempt: Attempt, step: StepReport) -> int:
    """Diagnose an attempt's end, requeue the job or not, log it, and return the batch script's exit code."""
    if not may_end(attempt):
        return EXIT_MACHINE
    trouble = release_space(attempt.run)
    if trouble:
        break_line()
    if attempt.prepared:
        before, decision = attempt.prepared
        end = complete_diagnosis(attempt, before, step, trouble)
        decision = decision if end.cause else replace(decision, cause=None)
        write_outcome(attempt, end, decision)
        report_end(attempt, end, decision)
    else:
        end = diagnose_end(attempt, step, trouble)
        finish_attempt(attempt, end)
    return end.exit_code


def finish_attempt(attempt: Attempt, end: AttemptEnd) -> Decision:
    """Log an attempt's end, requeue the job or not, and return what was decided."""
    for line in list_failure_lines(end):
        logger.info(line)
    decision = carry_out_decision(attempt, end, SHORT_TIMEOUT if end.kill else math.inf)
    report_end(attempt, end, decision)
    return decision


def report_end(attempt: Attempt, end: AttemptEnd, decision: Decision) -> None:
    """Say how an attempt went, here and to `notify.url`."""
    for line in list_end_lines(end, decision, attempt.run, time.time() - attempt.started):
        logger.info(line)
    post_end(
        attempt.request.config.notify,
        attempt.run,
        attempt.hosts[0],
        attempt.manifest["outcome"],
        job_id=attempt.job_id,
    )


def carry_out_decision(attempt: Attempt, end: AttemptEnd, timeout: float) -> Decision:
    """Decide, write the manifest, and requeue: the manifest first, since a requeue ends this process too."""
    decision = decide_next(attempt, end)
    write_outcome(attempt, end, decision)
    if end.cause:
        logger.info(
            f"attempt {len(attempt.earlier) + attempt.unrecorded + 1} ended:"
            f" {describe_decision(end, decision)}"
        )
    if not decision.requeue:
        return decision
    try:
        if end.kill != "requeued":
            requeue_job(attempt.job_id, attempt.environ, timeout)
    except SchedulerError as error:
        decision = replace(decision, requeue=False, reason=f"{decision.reason}, but SLURM refuses ({error})")
        logger.warning(f"the job could not be requeued ({error})")
        write_outcome(attempt, end, decision)
        return decision
    exclude_lost_nodes(attempt, end)
    return decision


def exclude_lost_nodes(attempt: Attempt, end: AttemptEnd) -> None:
    """Keep the next attempt off the nodes that this one and those before it have lost, or found sick."""
    earlier = (host for entry in reversed(attempt.earlier) for host in list_bad_nodes(entry))
    lost = [*end.lost, *(end.step.sick if end.step else ()), *list_bad_nodes(attempt.manifest), *earlier]
    if lost:
        min_nodes = attempt.request.min_nodes + attempt.request.config.cluster.spares
        warning = exclude_nodes(attempt.job_id, list(dict.fromkeys(lost)), min_nodes, attempt.environ)
        if warning:
            logger.warning(f"{warning}")


def list_bad_nodes(entry: Manifest) -> list[str]:
    """Return the nodes that an attempt has lost, also those that a spare one has replaced, or found sick."""
    outcome, replaced = entry["outcome"], entry.get("replacements") or ()
    hosts = [host for key in ("lost", "sick") for host in outcome.get(key) or ()]
    return [*hosts, *(one["lost"] for one in replaced), *(entry.get("sick_spares") or ())]


def write_outcome(attempt: Attempt, end: AttemptEnd, decision: Decision) -> None:
    """Complete the manifest."""
    attempt.manifest["ended"] = stamp_time()
    outcome = describe_outcome(end, decision, attempt.run)
    attempt.manifest |= read_watch_account(attempt.run)
    attempt.manifest["outcome"] = {**outcome, "advanced": has_advanced(end.advance, attempt.earlier)}
    try_write_manifest(attempt.run, attempt.manifest)


def read_watch_account(run: RunDir) -> dict[str, list[dict[str, object]]]:
    """Return the hangs and stragglers of an attempt, as the node that judged them has written them."""
    from launcher.watch.node_reports import read_job_state  # not at the start of the job

    state = read_job_state(run.path, own=True)
    if state is None or state.attempt != run.first_attempt:
        return {}
    account = {
        "hangs": [asdict(hang) for hang in state.hangs],
        "stragglers": [asdict(straggler) for straggler in state.stragglers],
    }
    return {key: found for key, found in account.items() if found}


def decide_next(attempt: Attempt, end: AttemptEnd) -> Decision:
    """Decide what is to be done; a job in somebody's allocation never goes back into the queue."""
    stays = end.cause == "sick_node" and not (end.step and end.step.sick)
    if end.cause and (stays or not attempt.requeues):
        return Decision(False, end.cause, DESCRIPTIONS[end.cause])
    advanced = has_advanced(end.advance, attempt.earlier)
    past = list_past_attempts(attempt.earlier)
    if attempt.unrecorded and end.cause:
        # An attempt that could not write its manifest has written no checkpoint.
        past += [PastAttempt(end.cause, False)] * attempt.unrecorded
        advanced = bool(advanced)
    return decide_requeue(end.cause, attempt.request.config.cluster.requeue, past, advanced)


def find_final_decision(earlier: Sequence[Manifest], config: RequeueConfig) -> Decision | None:
    """Return the decision after the last attempt if no other was to follow; None if one may."""
    past = list_past_attempts(earlier)
    if past and earlier[-1]["outcome"].get("exit_code") == 0 and past[-1].cause == "None":
        return Decision(False, None, "all ranks ended with 0 when the job was back in the queue already")
    if not past or past[-1].cause not in DESCRIPTIONS:
        return None
    last = past.pop()
    decision = decide_requeue(last.cause, config, past, last.advanced)
    return None if decision.requeue else decision


def list_past_attempts(earlier: Sequence[Manifest]) -> list[PastAttempt]:
    """Return what the policy looks at in earlier attempts."""
    outcomes = [entry["outcome"] for entry in earlier]
    return [PastAttempt(str(outcome.get("cause")), outcome.get("advanced")) for outcome in outcomes]
