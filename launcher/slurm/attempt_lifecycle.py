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
from launcher.runs.node_records import NodeRecord, RankFailure
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
HINTS = {"Killed": ", probably out of memory"}


def name_state(end: AttemptEnd, decision: Decision) -> str:
    """Return the manifest's word: what SLURM has requeued is in the queue, whatever the policy says."""
    if decision.requeue or end.kill == "requeued":
        return "requeued"
    if end.cause is None:
        return "succeeded"
    ended = end.cause in ("cancelled", "preempted", "timeout") and decision.cause == end.cause
    return "stopped" if ended else "failed"


def describe_outcome(end: AttemptEnd, decision: Decision, run: RunDir) -> Manifest:
    """Return the manifest's outcome."""
    step, first = end.step, end.first
    stops = [number for number, _ in step.signals if number in STOPPING] if step else [signal.SIGTERM]
    requeued = name_state(end, decision) == "requeued"
    reason = "; ".join([*list_reasons(end), decision.reason])
    return {
        "state": name_state(end, decision),
        "cause": end.cause if requeued else decision.cause,
        "exit_code": end.exit_code,
        "signal": name_signal(stops[0]) if stops else None,
        "reason": None if end.cause is None else reason,
        "events": list_first_events(end),
        "lost": list(end.lost),
        **({"sick": list(step.sick)} if step and step.sick else {}),
        "first_failure": describe_first_failure(first, run) if first else None,
        "attempts": 1 + run.first_attempt + max((r.restarts for r in step.records), default=0)
        if step
        else None,
        **describe_advance(end.advance),
    }


def describe_first_failure(first: tuple[NodeRecord, RankFailure], run: RunDir) -> Manifest:
    """Return the first failure for the manifest."""
    record, failure = first
    return {
        "rank": failure.rank,
        "local_rank": failure.local_rank,
        "host": record.host,
        "attempt": run.first_attempt + record.restarts,
        "exit_code": failure.status,
        "reason": failure.reason,
        "last_lines": list(failure.lines),
    }


def describe_decision(end: AttemptEnd, decision: Decision) -> str:
    """Say why an attempt ended and what comes next; SLURM's own requeue is not undone here."""
    if end.kill == "requeued" and not decision.requeue:
        return f"{decision.reason}; SLURM requeues it, and the next attempt ends at once"
    return decision.reason


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


def list_reasons(end: AttemptEnd) -> list[str]:
    """Say the same for the manifest, which has the first failure elsewhere; of many nodes, the first ones."""
    lines = describe_events(end)
    more = f" (and {len(lines) - MAX_NAMED} more)" if len(lines) > MAX_NAMED else ""
    return [*lines[: MAX_NAMED - 1], lines[MAX_NAMED - 1] + more] if more else lines


def describe_events(end: AttemptEnd) -> list[str]:
    """Say what happened to the run directory, the nodes and the agents; a rank's failure has more to it."""
    return [
        *list_first_events(end),
        *(
            describe_sickness(end)
            or describe_lost_nodes(end)
            or describe_hang_end(end)
            or describe_signals(end)
            or describe_agent_failures(end)
        ),
    ]


def list_first_events(end: AttemptEnd) -> list[str]:
    """Say what came before any failure: nothing could be written, or ranks ended with 0 before the others."""
    return [*filter(None, (end.trouble, end.early.describe() if end.early else ""))]


def describe_sickness(end: AttemptEnd) -> list[str]:
    """Say which nodes are sick, if that is why no rank was started."""
    return list(end.step.sickness) if end.step and end.cause == "sick_node" else []


def describe_hang_end(end: AttemptEnd) -> list[str]:
    """Say who held the others up, if the ranks were ended for it."""
    return [end.hang] if end.hang else []


def describe_signals(end: AttemptEnd) -> list[str]:
    """Say which nodes' tasks, or which rank, got a signal from outside; or which asks for another start."""
    if end.signalled:
        hosts = name_some(list(dict(end.signalled)), MAX_NAMED)
        what = f"{name_signal(end.signalled[0][1])} from outside"
        return [f"{hosts} got {what}: neither launch nor SLURM's queue sent it"]
    if end.first is None or end.cause == "crash":
        return []
    record, failure = end.first
    who = f"rank {failure.rank} on {record.host}"
    if end.restart_requested:
        return [f"{who} ended with {failure.status}, and asks for another start"]
    return [f"{who} was stopped first: it {failure.reason}"]


def describe_agent_failures(end: AttemptEnd) -> list[str]:
    """Say what the nodes' agents reported, if the attempt failed and no rank did."""
    if end.cause != "crash" or end.step is None or end.first:
        return []
    hosts: dict[str, list[str]] = {}
    for record in end.step.records:
        hosts.setdefault(record.agent_said, []).append(record.host)
    lines = [f"{name_some(names, MAX_NAMED)}: {text}" for text, names in hosts.items() if text]
    if end.step.missing:
        doubt = "" if end.trouble else ": is the disk full?"
        lines.append(f"no record came from {', '.join(end.step.missing)}{doubt}")
    return lines or [f"no rank failed, but srun ended with {end.step.srun_exitcode}"]


def describe_lost_nodes(end: AttemptEnd) -> list[str]:
    """Say which nodes were lost, and which are there but lost their task."""
    node_states = dict(end.node_states)
    lines = [
        f"{host} was lost: it left no record{describe_node_state(node_states.get(host))}" for host in end.lost
    ]
    return lines + [
        f"{host} is there, but its task left no record, and ended: {word}{HINTS.get(word, '')}"
        for host, word in end.killed_tasks
        if host not in end.lost
    ]


def describe_node_state(state: str | None) -> str:
    """Say what SLURM knows of a lost node, which it may be minutes late to see (SlurmdTimeout)."""
    return f", and is {state}, says SLURM" if state else ""


def list_end_lines(end: AttemptEnd, decision: Decision, run: RunDir, seconds: float) -> list[str]:
    """Say how it went, in one line, and where everything is."""
    result = describe_progress(end.advance.steps)
    word = f"{name_state(end, decision)} after {describe_time(seconds)}"
    doubts = [f"warning: {doubt}" for doubt in list_success_warnings(end)] if end.cause is None else []
    return [*doubts, word + (f": {result}" if result else ""), f"run directory {run.path}"]


def list_success_warnings(end: AttemptEnd) -> list[str]:
    """Say what is odd about a success: it cannot be recorded, or the steps are not done."""
    doubts = [end.trouble] if end.trouble else []
    stopped = end.step and (end.step.signals or end.kill)
    if stopped and end.advance.finished is False:
        last = end.advance.steps[-1]
        doubts.append(
            f"all ranks ended with 0, which is a success, but after a signal and at step {last.step} of"
            f" {last.total}: a program that is to be started again ends with 75 (cluster.requeue.exit_codes)"
        )
    return doubts


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
