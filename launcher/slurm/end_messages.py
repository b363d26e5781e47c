"""The end of an attempt in words: for the manifest, and for people."""

import signal

from launcher.launch.signals import STOPPING, name_signal
from launcher.runs.node_records import NodeRecord, RankFailure
from launcher.runs.progress import describe_progress
from launcher.runs.run_directory import RunDir
from launcher.slurm.attempt import Manifest, describe_advance
from launcher.slurm.attempt_end import AttemptEnd
from launcher.slurm.requeue_policy import Decision
from launcher.text import describe_first_failed_rank, describe_time, name_some

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
