"""Judges the end of an attempt: what SLURM and the nodes' records say, its class, and what comes of it."""

import signal
from collections.abc import Sequence
from dataclasses import replace

from launcher.config.schema import RequeueConfig
from launcher.errors import EXIT_MACHINE, SchedulerError
from launcher.launch.signals import STOPPING
from launcher.runs.early_exits import LONG_BEFORE, CleanEnd, EarlyEnd, find_early
from launcher.runs.node_records import NodeFailure, NodeRecord
from launcher.slurm.attempt import (
    Attempt,
    Manifest,
    Sight,
    StepReport,
    failed_by_itself,
    find_first_failure,
    has_advanced,
    was_terminated,
)
from launcher.slurm.job_control import CALM, QUICK, ask_job, ask_nodes, is_down
from launcher.slurm.notation import parse_signal
from launcher.slurm.requeue_policy import (
    DESCRIPTIONS,
    LIMITED,
    RUNNING,
    Decision,
    EndFacts,
    JobStatus,
    PastAttempt,
    Policy,
    classify_end,
    classify_kill,
    decide_requeue,
    is_near_limit,
)
from launcher.slurm.srun_messages import ENDED, parse_task_ends


def diagnose_kill(attempt: Attempt) -> Sight | None:
    """Return what SLURM's word is while the step still ends; None where SLURM is not ending the job."""
    word = ask_job_status(attempt, QUICK) if attempt.requeues else None
    kill = classify_kill(word, attempt.restarts)
    if word is None or not kill or word.state in RUNNING:
        return None
    advance, _ = attempt.measure_progress()
    states = ask_node_states(attempt, attempt.hosts, QUICK)
    lost = tuple(host for host, state in states if is_down(state))
    facts = EndFacts(False, advance.finished, False, bool(lost), True, False, preempted=word.preempted)
    return Sight(None, kill, classify_end(facts, kill), lost, states, (), advance)


def complete_diagnosis(attempt: Attempt, before: Sight, end: StepReport, trouble: str) -> Sight:
    """Return what is known of an attempt now that its step has ended; `diagnose_kill` gave `before`."""
    advance, _ = attempt.measure_progress()
    facts = EndFacts(
        *(has_succeeded(attempt, end), advance.finished, False, bool(before.lost), True, False),
        preempted=before.cause == "preempted",
    )
    cause = before.cause if classify_end(facts, before.kill) else None
    return replace(before, end=end, cause=cause, advance=advance, trouble=trouble)


def diagnose_end(attempt: Attempt, end: StepReport, trouble: str = "") -> Sight:
    """Return what is known of an attempt whose step has ended; SLURM is not asked about a plain success.

    `trouble` is what `free_room` has said.
    """
    advance, _ = attempt.measure_progress()
    asked, succeeded = got_stop_signal(end), has_succeeded(attempt, end)
    if succeeded and not end.checkpointed and not asked and not end.missing:
        return Sight(end, "", None, (), (), (), advance, trouble=trouble)
    patience = QUICK if asked else CALM
    word = ask_job_status(attempt, patience)
    kill = classify_kill(word, attempt.restarts)
    states = ask_node_states(attempt, attempt.hosts if kill else end.missing, patience)
    told = find_task_ends(end)
    stopped = bool(kill) or asked or end.cancelled
    killed = tuple((host, word) for host, word in told.items() if word != ENDED and not stopped)
    down = {host for host, state in states if is_down(state)}
    lost = down if kill else down | find_silent_nodes(attempt, end) - {*told}
    facts = collect_facts(attempt, end, word, lost=bool(lost), killed=bool(killed))
    facts = replace(facts, succeeded=succeeded, finished=advance.finished)
    cause = classify_end(facts, kill)
    requested = facts.requested and cause in ("requested", "timeout")
    ordered = tuple(host for host in attempt.hosts if host in lost)
    early = None if requested or cause in (None, "stopped") else find_early_end(attempt, end)
    return Sight(end, kill, cause, ordered, states, killed, advance, requested, early, trouble)


def got_stop_signal(end: StepReport) -> bool:
    """Tell whether the head was sent a signal to stop."""
    return any(number in STOPPING for number, _ in end.signals)


def collect_facts(
    attempt: Attempt, end: StepReport, word: JobStatus | None, *, lost: bool, killed: bool
) -> EndFacts:
    """Return what the nodes tell of an attempt's end, short of its success and progress."""
    first, asked = find_first_failure(end.records), got_stop_signal(end)
    return EndFacts(
        succeeded=False,
        finished=None,
        failed=killed or bool(find_failed(end.records)),
        lost=lost,
        asked=asked,
        near_limit=was_checkpointed_for_limit(attempt, end, word),
        preempted=bool(word and word.preempted),
        outside=not asked and was_stopped_from_outside(attempt, end, first),
        requested=bool(first and first[1].status in attempt.request.config.cluster.requeue.exit_codes),
        ended=end.cancelled or (asked and any(record.signal for record in end.records)),
    )


def was_stopped_from_outside(
    attempt: Attempt, end: StepReport, first: tuple[NodeRecord, NodeFailure] | None
) -> bool:
    """Tell whether the first event was a signal to some node's task, or to a rank, by nobody that counts.

    A signal to every node's task by way of SLURM is a user's wish that the step end. An elastic job goes on
    without the node, and may fail for another reason later.
    """
    if not end.signalled:
        return bool(first and was_terminated(first[1]) and not end.cancelled)
    if end.cancelled and len(dict(end.signalled)) == len(attempt.hosts):
        return False
    return not (attempt.is_elastic and first and failed_by_itself(first[1]))


def find_early_end(attempt: Attempt, end: StepReport) -> EarlyEnd | None:
    """Return the ranks that ended with 0 before the first failure, or long before all were stopped."""
    last = max((moment - LONG_BEFORE for _, moment in end.signals), default=None)
    first = find_first_failure(end.records)
    before = first[1].time if first else last
    if before is None:
        return None
    ends = [
        CleanEnd(rank, record.host, moment, attempt.run.first_attempt + record.restarts)
        for record in end.records
        for rank, moment in record.clean
    ]
    world = 0 if end.missing else sum(record.ranks for record in end.records)
    return find_early(attempt.run, ends, before, world)


def has_succeeded(attempt: Attempt, end: StepReport) -> bool:
    """Tell whether all nodes ended well; of an elastic job's, those that are left, where they are enough.

    An elastic job goes on without a node whose task was stopped from outside, as without one that was lost.
    """
    left = {host for host, _ in end.signalled} if attempt.is_elastic else set()
    records = [record for record in end.records if record.host not in left]
    if any(record.state != "succeeded" or record.exit_code for record in records):
        return False
    if attempt.is_elastic and len(records) >= attempt.request.min_nodes:
        return True
    # Where the kernel has killed a helper of theirs for memory, srun's code is 1, whatever the tasks' are.
    if end.records and not end.missing:
        return True
    # A task ends with 0 where its ranks did, or was stopped: a record may be late, or the disk full.
    return end.srun_exitcode == 0 and not (end.missing and end.signals)


def find_failed(records: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Return the nodes on which a rank, or the agent, failed by itself rather than by SIGTERM."""
    return [
        record
        for record in records
        if record.state == "failed" and (record.failure is None or not was_terminated(record.failure))
    ]


def was_checkpointed_for_limit(attempt: Attempt, end: StepReport, word: JobStatus | None) -> bool:
    """Tell whether the ranks got the checkpoint signal for the time limit's sake."""
    checkpoint, seconds = parse_signal(attempt.request.config.cluster.signal)
    limit = word.end_time if word else None
    sent = [moment for number, moment in end.signals if number == checkpoint]
    return end.checkpointed and any(is_near_limit(moment, limit, seconds) for moment in sent)


def ask_job_status(attempt: Attempt, patience: float) -> JobStatus | None:
    """Ask SLURM how the job stands; None where it does not answer."""
    try:
        return ask_job(attempt.job_id, attempt.environ, patience)
    except SchedulerError:
        return None


def ask_node_states(attempt: Attempt, hosts: Sequence[str], patience: float) -> tuple[tuple[str, str], ...]:
    """Ask for the states of nodes; empty where SLURM does not answer."""
    try:
        return tuple(ask_nodes(hosts, attempt.environ, patience).items())
    except SchedulerError:
        return ()


def find_silent_nodes(attempt: Attempt, end: StepReport) -> set[str]:
    """Return the nodes that left no record; none where the head's own did not either, which is there.

    Then it is the records that are not to be had: the disk is full, or the tasks cannot start.
    """
    own = attempt.environ.get("SLURMD_NODENAME")
    return set() if own in end.missing and own not in find_task_ends(end) else {*end.missing}


def find_task_ends(end: StepReport) -> dict[str, str]:
    """Return the nodes without a record that srun has heard of, with its word on how their task ended."""
    return {host: word for host, word in parse_task_ends(end.said).items() if host in end.missing}


def read_policy(config: RequeueConfig) -> Policy:
    """Return the configured policy."""
    allowed = {reason: getattr(config, reason) for reason in LIMITED}
    return Policy(allowed, config.no_progress, config.limit)


def list_past_attempts(trail: Sequence[Manifest]) -> list[PastAttempt]:
    """Return what the policy looks at in earlier attempts."""
    outcomes = [entry["outcome"] for entry in trail]
    return [PastAttempt(str(outcome.get("cause")), outcome.get("advanced")) for outcome in outcomes]


def decide_next(attempt: Attempt, sight: Sight) -> Decision:
    """Decide what becomes of the job; in somebody's allocation nothing goes back into the queue."""
    if sight.cause and not attempt.requeues:
        return Decision(False, sight.cause, DESCRIPTIONS[sight.cause])
    advanced = has_advanced(sight.advance, attempt.trail)
    policy = read_policy(attempt.request.config.cluster.requeue)
    past = list_past_attempts(attempt.trail)
    if attempt.unrecorded and sight.cause:
        # What could not write its manifest has written no checkpoint.
        past += [PastAttempt(sight.cause, False)] * attempt.unrecorded
        advanced = bool(advanced)
    return decide_requeue(sight.cause, policy, past, advanced)


def find_final_decision(trail: Sequence[Manifest], config: RequeueConfig) -> Decision | None:
    """Return the verdict on a last attempt that no other was to follow; None where one may."""
    past = list_past_attempts(trail)
    if past and trail[-1]["outcome"].get("exit_code") == 0 and past[-1].cause == "None":
        return Decision(False, None, "all ranks ended with 0 when the job was back in the queue already")
    if not past or past[-1].cause not in DESCRIPTIONS:
        return None
    last = past.pop()
    verdict = decide_requeue(last.cause, read_policy(config), past, last.advanced)
    return None if verdict.requeue else verdict


def choose_exit_code(sight: Sight) -> int:
    """Return the exit code: the program's own, 3 for a lost node, 128+n for a job that was ended."""
    if sight.cause is None:
        return 0
    if sight.cause == "node_failure":
        return EXIT_MACHINE
    first, end = sight.first, sight.end
    if sight.signalled:
        return 128 + sight.signalled[0][1]
    if first:
        return first[1].status
    if sight.cause == "crash" and end:
        codes = [record.exit_code for record in find_failed(end.records) if record.exit_code]
        return next(iter(codes), EXIT_MACHINE if sight.trouble else abs(end.srun_exitcode) or EXIT_MACHINE)
    stops = [number for number, _ in end.signals if number in STOPPING] if end else []
    return 128 + next(iter(stops), signal.SIGTERM)
