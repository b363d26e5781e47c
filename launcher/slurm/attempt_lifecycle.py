"""The end of an attempt in words: for the manifest, and for people."""

import logging
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from launcher.config.settings import RequeueConfig
from launcher.errors import EXIT_MACHINE, LaunchError, SchedulerError
from launcher.launch.ending import post_end
from launcher.launch.signals import STOPPING, name_signal
from launcher.protocol import name_host
from launcher.runs.manifest import stamp_time
from launcher.runs.progress import describe_progress
from launcher.runs.run_directory import RunDir, release_space, reserve_space
from launcher.slurm.attempt import (
    Attempt,
    Manifest,
    claim_end,
    describe_advance,
    has_advanced,
    make_attempt_manifest,
    try_write_manifest,
)
from launcher.slurm.attempt_end import (
    DESCRIPTIONS,
    AttemptEnd,
    Decision,
    PastAttempt,
    StepReport,
    decide_requeue,
)
from launcher.slurm.commands import SHORT_TIMEOUT, exclude_nodes, requeue_job
from launcher.slurm.diagnosis import complete_diagnosis, diagnose_end, diagnose_kill
from launcher.slurm.job_request import JobRequest, hold_manifest
from launcher.slurm.node_order import NodeOrder
from launcher.text import break_line, describe_first_failed_rank, describe_time, name_some

logger = logging.getLogger(__name__)

MAX_NAMED = 3
"""Sentences of the manifest's reason, and nodes that are named in one."""


def name_state(end: AttemptEnd, decision: Decision) -> str:
    """Return the manifest's word: what SLURM has requeued is in the queue, whatever the policy says."""
    if decision.requeue or end.kill == "requeued":
        return "requeued"
    if end.cause is None:
        return "succeeded"
    ended = end.cause in ("cancelled", "preempted", "timeout") and decision.cause == end.cause
    return "stopped" if ended else "failed"


def describe_outcome(end: AttemptEnd, decision: Decision, run: RunDir) -> Manifest:
    """Return the manifest's outcome; of many things that happened, its reason has the first ones."""
    step, first, state = end.step, end.first, name_state(end, decision)
    stops = [number for number, _ in step.signals if number in STOPPING] if step else [signal.SIGTERM]
    events = describe_events(end)
    if len(events) > MAX_NAMED:
        more = f" (and {len(events) - MAX_NAMED} more)"
        events = [*events[: MAX_NAMED - 1], events[MAX_NAMED - 1] + more]
    failure = None
    if first:
        record, failed = first
        failure = {
            "rank": failed.rank,
            "local_rank": failed.local_rank,
            "host": record.host,
            "attempt": run.first_attempt + record.restarts,
            "exit_code": failed.status,
            "reason": failed.reason,
            "last_lines": list(failed.lines),
        }
    return {
        "state": state,
        "cause": end.cause if state == "requeued" else decision.cause,
        "exit_code": end.exit_code,
        "signal": name_signal(stops[0]) if stops else None,
        "reason": None if end.cause is None else "; ".join([*events, decision.reason]),
        "events": list_first_events(end),
        "lost": list(end.lost),
        **({"sick": list(step.sick)} if step and step.sick else {}),
        "first_failure": failure,
        "attempts": 1 + run.first_attempt + max((r.restarts for r in step.records), default=0)
        if step
        else None,
        **describe_advance(end.advance),
    }


def list_failure_lines(end: AttemptEnd) -> list[str]:
    """Say why the attempt ended, and which rank failed first, with the end of its log."""
    if end.first and end.cause == "crash" and not (end.lost or end.killed_tasks):
        record, failure = end.first
        where = f"rank {failure.rank} on {record.host} (local rank {failure.local_rank})"
        what = "failed after that" if end.early else "failed first"
        return [
            *list_first_events(end),
            *describe_first_failed_rank(where, failure.reason, failure.log, failure.lines, what),
        ]
    return [] if end.cause == "sick_node" else describe_events(end)  # preflight has told of it


def list_first_events(end: AttemptEnd) -> list[str]:
    """Say what came before any failure: nothing could be written, or ranks ended with 0 before the others."""
    return [*filter(None, (end.trouble, end.early.describe() if end.early else ""))]


def describe_events(end: AttemptEnd) -> list[str]:
    """Say what happened to the run directory, and then to nodes, to a rank or else to the agents.

    The first rank that failed by itself has more to it, and is told elsewhere.
    """
    lines, step, states = list_first_events(end), end.step, dict(end.node_states)
    if step and end.cause == "sick_node":
        return [*lines, *step.sickness]
    for host in end.lost:  # which SLURM may be minutes late to see (SlurmdTimeout)
        seen = f", and is {states[host]}, says SLURM" if states.get(host) else ""
        lines.append(f"{host} was lost: it left no record{seen}")
    for host, word in end.killed_tasks:
        if host not in end.lost:
            hint = ", probably out of memory" if word == "Killed" else ""
            lines.append(f"{host} is there, but its task left no record, and ended: {word}{hint}")
    if end.lost or end.killed_tasks:
        return lines
    if end.hang:
        return [*lines, end.hang]
    if end.signalled:
        hosts = name_some(list(dict(end.signalled)), MAX_NAMED)
        what = f"{name_signal(end.signalled[0][1])} from outside"
        return [*lines, f"{hosts} got {what}: neither launch nor SLURM's queue sent it"]
    if end.first and end.cause != "crash":
        record, failure = end.first
        who = f"rank {failure.rank} on {record.host}"
        if end.restart_requested:
            return [*lines, f"{who} ended with {failure.status}, and asks for another start"]
        return [*lines, f"{who} was stopped first: it {failure.reason}"]
    if end.first or end.cause != "crash" or step is None:
        return lines
    hosts_by_text: dict[str, list[str]] = {}
    for record in step.records:
        hosts_by_text.setdefault(record.agent_said, []).append(record.host)
    said = [f"{name_some(names, MAX_NAMED)}: {text}" for text, names in hosts_by_text.items() if text]
    if step.missing:
        doubt = "" if end.trouble else ": is the disk full?"
        said.append(f"no record came from {', '.join(step.missing)}{doubt}")
    return [*lines, *(said or [f"no rank failed, but srun ended with {step.srun_exitcode}"])]


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
    if decision:  # the manifest is closed with the last attempt's end
        *earlier, last = attempt.earlier
        state = "failed" if decision.cause else "succeeded"
        outcome = {**last["outcome"], "state": state, "cause": decision.cause, "reason": decision.reason}
        closed = {**manifest, **last, "outcome": outcome, "earlier": manifest["earlier"][:-1]}
        try_write_manifest(run, closed)
        number = len(earlier) + 1
        text = f"attempt {number + 1} does not begin: attempt {number} ended: {decision.reason}"
        raise AttemptRefusedError(text, outcome.get("exit_code") or int(state == "failed"))
    with hold_manifest(run.path):
        try_write_manifest(run, manifest)
    reserve_space(run)
    return attempt


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
    troubles = [release_space(attempt.run), *(record.trouble for record in step.records)]
    trouble = next(filter(None, troubles), "")
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
    """Say how an attempt went and where everything is, here and to `notify.url`."""
    doubts = [end.trouble] if end.trouble else []
    if end.step and (end.step.signals or end.kill) and end.advance.finished is False:
        last = end.advance.steps[-1]
        doubts.append(
            f"all ranks ended with 0, which is a success, but after a signal and at step {last.step} of"
            f" {last.total}: a program that is to be started again ends with 75 (cluster.requeue.exit_codes)"
        )
    for doubt in doubts if end.cause is None else ():
        logger.info(f"warning: {doubt}")
    result = describe_progress(end.advance.steps)
    word = f"{name_state(end, decision)} after {describe_time(time.time() - attempt.started)}"
    logger.info(word + (f": {result}" if result else ""))
    logger.info(f"run directory {attempt.run.path}")
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
        number, reason = len(attempt.earlier) + attempt.unrecorded + 1, decision.reason
        if end.kill == "requeued" and not decision.requeue:  # SLURM's own requeue is not undone here
            reason = f"{reason}; SLURM requeues it, and the next attempt ends at once"
        logger.info(f"attempt {number} ended: {reason}")
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
    """Complete the manifest."""
    attempt.manifest["ended"] = stamp_time()
    outcome = describe_outcome(end, decision, attempt.run)
    attempt.manifest |= read_watch_account(attempt.run)
    attempt.manifest["outcome"] = {**outcome, "advanced": has_advanced(end.advance, attempt.earlier)}
    try_write_manifest(attempt.run, attempt.manifest)


def read_watch_account(run: RunDir) -> dict[str, list[dict[str, object]]]:
    """Return the hangs and stragglers of an attempt, as the node that judged them has written them."""
    from launcher.watch.run_files import read_job_state  # not at the start of the job

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
