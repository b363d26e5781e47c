"""The end of an attempt in words: for the manifest, and for people."""

import signal
from collections.abc import Sequence

from launcher.launch.signals import STOPPING, name_signal
from launcher.report.summary import describe_progress, describe_time
from launcher.runs.node_records import NodeFailure, NodeRecord
from launcher.runs.run_directory import RunDir
from launcher.slurm.attempt import Manifest, Sight, describe_advance
from launcher.slurm.requeue_policy import Decision
from launcher.text import tell_first

MOST = 3
"""Sentences of the manifest's reason, and nodes that are named in one."""
HINTS = {"Killed": ", probably out of memory"}


def name_state(sight: Sight, verdict: Decision) -> str:
    """Return the manifest's word: what SLURM has requeued is in the queue, whatever the policy says."""
    if verdict.requeue or sight.kill == "requeued":
        return "requeued"
    if sight.cause is None:
        return "succeeded"
    ended = sight.cause in ("cancelled", "preempted", "timeout") and verdict.cause == sight.cause
    return "stopped" if ended else "failed"


def describe_outcome(sight: Sight, verdict: Decision, run: RunDir, status: int) -> Manifest:
    """Return the manifest's outcome."""
    end, first = sight.end, sight.first
    stops = [number for number, _ in end.signals if number in STOPPING] if end else [signal.SIGTERM]
    requeued = name_state(sight, verdict) == "requeued"
    reason = "; ".join([*list_reasons(sight), verdict.why])
    return {
        "state": name_state(sight, verdict),
        "cause": sight.cause if requeued else verdict.cause,
        "exit_code": status,
        "signal": name_signal(stops[0]) if stops else None,
        "reason": None if sight.cause is None else reason,
        "events": list_first_events(sight),
        "lost": list(sight.lost),
        "first_failure": describe_first_failure(first, run) if first else None,
        "attempts": 1 + run.first_attempt + max((r.restarts for r in end.records), default=0)
        if end
        else None,
        **describe_advance(sight.advance),
    }


def describe_first_failure(first: tuple[NodeRecord, NodeFailure], run: RunDir) -> Manifest:
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


def describe_decision(sight: Sight, verdict: Decision) -> str:
    """Say why an attempt ended and what comes next; SLURM's own requeue is not undone here."""
    if sight.kill == "requeued" and not verdict.requeue:
        return f"{verdict.why}; SLURM requeues it, and the next attempt ends at once"
    return verdict.why


def list_failure_lines(sight: Sight) -> list[str]:
    """Say why the attempt ended, and which rank failed first, with the end of its log."""
    if sight.first and sight.cause == "crash" and not (sight.lost or sight.killed):
        record, failure = sight.first
        where = f"rank {failure.rank} on {record.host} (local rank {failure.local_rank})"
        what = "failed after that" if sight.early else "failed first"
        return [
            *list_first_events(sight),
            *tell_first(where, failure.reason, failure.log, failure.lines, what),
        ]
    return describe_events(sight)


def list_reasons(sight: Sight) -> list[str]:
    """Say the same for the manifest, which has the first failure elsewhere; of many nodes, the first ones."""
    said = describe_events(sight)
    more = f" (and {len(said) - MOST} more)" if len(said) > MOST else ""
    return [*said[: MOST - 1], said[MOST - 1] + more] if more else said


def describe_events(sight: Sight) -> list[str]:
    """Say what happened to the run directory, the nodes and the agents; a rank's failure has more to it."""
    return [
        *list_first_events(sight),
        *(describe_lost_nodes(sight) or describe_signals(sight) or describe_agent_failures(sight)),
    ]


def list_first_events(sight: Sight) -> list[str]:
    """Say what came before any failure: nothing could be written, or ranks ended with 0 before the others."""
    return [*filter(None, (sight.trouble, sight.early.describe() if sight.early else ""))]


def describe_signals(sight: Sight) -> list[str]:
    """Say which nodes' tasks, or which rank, got a signal from outside; or which asks for another start."""
    if sight.signalled:
        hosts = join_hosts(list(dict(sight.signalled)))
        what = f"{name_signal(sight.signalled[0][1])} from outside"
        return [f"{hosts} got {what}: neither launch nor SLURM's queue sent it"]
    if sight.first is None or sight.cause == "crash":
        return []
    record, failure = sight.first
    who = f"rank {failure.rank} on {record.host}"
    if sight.requested:
        return [f"{who} ended with {failure.status}, and asks for another start"]
    return [f"{who} was stopped first: it {failure.reason}"]


def describe_agent_failures(sight: Sight) -> list[str]:
    """Say what was in the way where the attempt failed, but no rank did: what the nodes' agents said."""
    if sight.cause != "crash" or sight.end is None or sight.first:
        return []
    hosts: dict[str, list[str]] = {}
    for record in sight.end.records:
        hosts.setdefault(record.agent_said, []).append(record.host)
    said = [f"{join_hosts(names)}: {text}" for text, names in hosts.items() if text]
    if sight.end.missing:
        doubt = "" if sight.trouble else ": is the disk full?"
        said.append(f"no record came from {', '.join(sight.end.missing)}{doubt}")
    return said or [f"no rank failed, but srun ended with {sight.end.srun_exitcode}"]


def join_hosts(names: Sequence[str]) -> str:
    """Return the first few of some nodes, and how many more there are."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def describe_lost_nodes(sight: Sight) -> list[str]:
    """Say which nodes were lost, and which are there but lost their task."""
    states = dict(sight.states)
    lines = [
        f"{host} was lost: it left no record{describe_node_state(states.get(host))}" for host in sight.lost
    ]
    return lines + [
        f"{host} is there, but its task left no record, and ended: {word}{HINTS.get(word, '')}"
        for host, word in sight.killed
        if host not in sight.lost
    ]


def describe_node_state(state: str | None) -> str:
    """Say what SLURM knows of a lost node, which it may be minutes late to see (SlurmdTimeout)."""
    return f", and is {state}, says SLURM" if state else ""


def list_end_lines(sight: Sight, verdict: Decision, run: RunDir, seconds: float) -> list[str]:
    """Say how it went, in one line, and where everything is."""
    result = describe_progress(sight.advance.steps)
    word = f"{name_state(sight, verdict)} after {describe_time(seconds)}"
    doubts = [f"warning: {doubt}" for doubt in list_success_warnings(sight)] if sight.cause is None else []
    return [*doubts, word + (f": {result}" if result else ""), f"run directory {run.path}"]


def list_success_warnings(sight: Sight) -> list[str]:
    """Say what is odd about a success: it cannot be recorded, or the steps are not done."""
    doubts = [sight.trouble] if sight.trouble else []
    stopped = sight.end and (sight.end.signals or sight.kill)
    if stopped and sight.advance.finished is False:
        last = sight.advance.steps[-1]
        doubts.append(
            f"all ranks ended with 0, which is a success, but after a signal and at step {last.step} of"
            f" {last.total}: a program that is to be started again ends with 75 (cluster.requeue.exit_codes)"
        )
    return doubts
