"""Who holds the others up, and whether that is a hang, from the evidence of all nodes: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.text import escape_text
from launcher.watch.call_mismatch import find_mismatch
from launcher.watch.progress_limit import PATIENT_PHASES, choose_hang_time
from launcher.watch.rank_activity import (
    describe_activity,
    find_phase,
    is_deadlocked,
    is_debugged,
    is_working,
)
from launcher.watch.verdict_text import (
    LONGEST,
    count_all_waiting,
    describe_others,
    format_ranks,
    say_absent,
    say_circle,
    say_mismatch,
    say_network,
    say_silent,
)
from launcher.watch.waits_for import Wait, find_roots, find_waits
from launcher.watch.watch_model import Decision, Frame, NodeEvidence, NodeReport, RankEvidence, Verdict

MOST_PLACES = 3
"""Different places that a sentence names."""


@dataclass(frozen=True, slots=True)
class Job:
    """The evidence of all nodes with what follows from it."""

    ranks: Mapping[int, RankEvidence]
    hosts: Mapping[int, str]
    """Of every rank that has been heard of, now or before."""
    waits: Mapping[int, tuple[Wait, ...]]
    silent: tuple[str, ...]
    """Hosts without evidence."""
    unreported: int
    """Nodes that have never reported."""


@dataclass(frozen=True, slots=True)
class Pause:
    """What is known of a pause beside the evidence."""

    limit: float
    """Seconds without progress after which a notice is due."""
    idle: float
    """Seconds without progress of the rank that has made none for longest."""
    quiet: Mapping[int, float]
    """Seconds without activity, by rank; of one that is not in it, nothing is known."""
    longest: float
    """Seconds of the longest pause that has ended by itself."""
    setting: object
    """`watch.hang_seconds`."""


def decide(nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport], pause: Pause) -> Decision:
    """Return whether a pause is a hang, is worth a notice, or nothing to tell of.

    A hang is what cannot go on by itself, or ranks that have shown no activity, or made no progress, for long
    enough (`choose_hang_time`). A rank that makes progress while others wait, as in an evaluation on rank 0
    alone, and one that a debugger holds, are nothing to tell of. What is not known counts as activity.
    """
    verdict = judge(nodes, reports)
    if verdict.kind == "debugged" or verdict.is_final:
        return Decision("hang" if verdict.is_final else "none", verdict)
    found = {rank.rank: rank for node in nodes for rank in node.ranks}
    states = {state.rank: state for report in reports for state in report.ranks}
    culprits = [found[number] for number in verdict.ranks if number in found]
    phases = [find_phase(rank) for rank in culprits]
    phases += [states[number].phase for number in verdict.ranks if number in states.keys() - found.keys()]
    begun = any(rank.step for rank in found.values()) or any(state.step for state in states.values())
    quiet_time, working_time = (
        choose_hang_time(
            pause.setting,
            pause.longest,
            phase=max(phases, key=lambda phase: PATIENT_PHASES.get(phase, 0.0), default=""),
            has_begun=begun,
            is_working=is_working_,
            has_waiting=verdict.waiting > 0 and verdict.kind != "silent",
        )
        for is_working_ in (False, True)
    )
    quiet = min((pause.quiet.get(number, 0.0) for number in verdict.ranks), default=0.0)
    if verdict.kind == "silent":
        quiet = pause.idle
    elif any(map(is_working, culprits)):
        quiet = 0.0
    seconds = min(quiet_time - quiet, working_time - pause.idle)
    if seconds <= 0:
        return Decision("hang", verdict)
    goes_on = min((rank.idle for rank in culprits), default=pause.limit) < pause.limit / 2
    return Decision("none" if goes_on else "notice", verdict, seconds)


def judge(nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport]) -> Verdict:
    """Return who holds the others up, as far as the evidence says.

    `reports` are the last reports of all nodes: a node or rank in them without evidence is not heard of.
    """
    job = make_job(nodes, reports)
    if mismatch := judge_mismatch(job):
        return mismatch
    if roots := find_roots(job.waits, job.ranks):
        return judge_roots(job, sorted(roots))
    if job.silent or job.unreported:
        return judge_silent(job)
    if not job.waits:
        return judge_roots(job, sorted(job.ranks))
    return judge_circle(job)


def make_job(nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport]) -> Job:
    """Put the evidence of all nodes together."""
    ranks = {rank.rank: rank for node in nodes for rank in node.ranks}
    hosts = {state.rank: report.host for report in reports for state in report.ranks}
    hosts |= {number: rank.host for number, rank in ranks.items()}
    heard = {node.host for node in nodes} | {rank.host for rank in ranks.values()}
    silent = tuple(sorted({report.host for report in reports} - heard))
    expected = max((report.nodes for report in reports), default=0)
    unreported = max(expected - len({report.host for report in reports} | heard), 0)
    return Job(ranks, hosts, find_waits(ranks, frozenset(hosts)), silent, unreported)


def judge_mismatch(job: Job) -> Verdict | None:
    """Return the verdict that ranks have called different collectives as one; None if they have not."""
    found = find_mismatch(job.ranks, job.waits)
    if found is None:
        return None
    call, few = found.calls[0]
    doing, frame = describe_activities(job, few)
    waiting = sum(len(ranks) for _, ranks in found.calls[1:])
    wait = Wait(call.operation, found.key, found.group, found.sequence)
    return make_verdict(
        "mismatch",
        say_mismatch(found, job.hosts, doing),
        job,
        few,
        wait,
        waiting=waiting,
        frame=frame,
        is_final=True,
    )


def judge_roots(job: Job, roots: Sequence[int]) -> Verdict:
    """Return the verdict on the ranks at the end of all waiting, by the first kind that some of them are of.

    A rank that is stopped goes first: it explains all others.
    """
    heard = {number: job.ranks[number] for number in roots if number in job.ranks}
    stopped = [number for number, rank in heard.items() if rank.process.state == "T"]
    exited = [number for number, rank in heard.items() if has_exited(rank)]
    debugged = [number for number, rank in heard.items() if number not in exited and is_debugged(rank)]
    absent = [number for number in heard if number not in {*stopped, *exited}]
    if stopped:
        return blame_stopped(job, stopped)
    if debugged:
        wait, waiting = find_main_wait(job, debugged)
        doing, frame = describe_activity(job.ranks[debugged[0]])
        text = f"{format_ranks(debugged[:1], job.hosts)} {doing}{describe_others(wait, waiting)}"
        return make_verdict("debugged", text, job, debugged, wait, waiting=waiting, frame=frame)
    if exited and (job.waits or not absent):
        return blame_exited(job, exited)
    if absent:
        return blame_absent(job, absent)
    return judge_silent(job, roots)


def has_exited(rank: RankEvidence) -> bool:
    """Tell whether a rank has ended."""
    return rank.exit_code is not None or rank.process.state in ("Z", "X")


def blame_stopped(job: Job, ranks: Sequence[int]) -> Verdict:
    """Return the verdict on ranks that SIGSTOP holds."""
    wait, waiting = find_main_wait(job, ranks)
    is_or_are = "are" if len(ranks) > 1 else "is"
    text = f"{format_ranks(ranks, job.hosts)} {is_or_are} stopped (SIGSTOP){describe_others(wait, waiting)}"
    return make_verdict("stopped", text, job, ranks, wait, waiting=waiting, is_final=waiting > 0)


def blame_exited(job: Job, ranks: Sequence[int]) -> Verdict:
    """Return the verdict on ranks that have ended while others wait for them."""
    wait, waiting = find_main_wait(job, ranks)
    codes = sorted({code for number in ranks if (code := job.ranks[number].exit_code) is not None})
    how = f" with exit code {', '.join(map(str, codes))}" if codes else ""
    has = "have" if len(ranks) > 1 else "has"
    text = f"{format_ranks(ranks, job.hosts)} {has} ended{how}{describe_others(wait, waiting)}"
    return make_verdict("exited", text, job, ranks, wait, waiting=waiting, is_final=waiting > 0)


def blame_absent(job: Job, ranks: Sequence[int]) -> Verdict:
    """Return the verdict on ranks that have not joined what others wait in, or that all stand still."""
    wait, waiting = find_main_wait(job, ranks)
    doing, frame = describe_activities(job, ranks)
    named = format_ranks(ranks, job.hosts)
    many = len(ranks) > 1
    final = any(is_deadlocked(job.ranks[number]) for number in ranks)
    if wait is None:
        text = f"{named} {'make' if many else 'makes'} no step: {doing}"
        return make_verdict("standstill", text, job, ranks, None, frame=frame, is_final=final)
    total = len(job.waits.keys() - set(ranks))
    text = say_absent(named, many, wait, count_all_waiting(waiting, total), doing)
    waiting = max(waiting, total)
    return make_verdict("absent", text, job, ranks, wait, waiting=waiting, frame=frame, is_final=final)


def judge_silent(job: Job, ranks: Sequence[int] = ()) -> Verdict:
    """Return the verdict on nodes and ranks that have not been heard of."""
    silent = sorted(ranks or (number for number in job.hosts if number not in job.ranks))
    wait, waiting = find_main_wait(job, silent)
    heard = [number for number in silent if job.hosts.get(number) not in job.silent]
    named = format_ranks(heard, job.hosts) if heard else format_ranks(silent, {}) if silent else ""
    text = say_silent(job.silent, named, job.unreported) + describe_others(wait, waiting)
    return make_verdict("silent", text, job, silent, wait, waiting=waiting)


def judge_circle(job: Job) -> Verdict:
    """Return the verdict where all ranks wait: for each other, or for what does not end by itself."""
    by_wait: dict[tuple[str, str, int | None], tuple[Wait, list[int]]] = {}
    for number in sorted(job.waits):
        for wait in job.waits[number]:
            entry = (wait.operation, wait.key, wait.sequence)
            by_wait.setdefault(entry, (wait, []))[1].append(number)
    entries = sorted(by_wait.values(), key=lambda entry: -len(entry[1]))
    wait, ranks = entries[0]
    if not any(found.missing for found, _ in entries) and (len(entries) == 1 or wait.key):
        text = say_network(wait, len(ranks), list_gpu_errors(job))
        _, frame = describe_activity(job.ranks[ranks[0]])
        return make_verdict("network", text, job, ranks, wait, waiting=len(ranks), frame=frame)
    said = [
        (
            format_ranks(found, job.hosts),
            each,
            format_ranks(sorted(each.missing), {}) if each.missing else "",
        )
        for each, found in reversed(entries)
    ]
    odd, wait = entries[-1][1], entries[-1][0]
    _, frame = describe_activity(job.ranks[odd[0]])
    # A send or receive that is not recorded may be under way.
    final = all(each.key and each.is_collective for each, _ in entries)
    text, waiting = say_circle(said[:4]), len(job.waits)
    return make_verdict("mismatch", text, job, odd, wait, waiting=waiting, frame=frame, is_final=final)


def list_gpu_errors(job: Job) -> list[str]:
    """Return which GPUs have reported errors (XID)."""
    return [
        f"the GPU of {format_ranks([number], job.hosts)} reported XID {', '.join(map(str, rank.gpu.xids))}"
        for number, rank in sorted(job.ranks.items())
        if rank.gpu and rank.gpu.xids
    ]


def find_main_wait(job: Job, culprits: Sequence[int]) -> tuple[Wait | None, int]:
    """Return what most ranks wait in for these, and how many; without one, what most ranks wait in at all."""
    found: dict[tuple[str, str, int | None], tuple[Wait, int]] = {}
    for is_direct in (True, False):
        for number, waits in job.waits.items():
            for wait in waits:
                if number in culprits or (is_direct and not wait.missing.intersection(culprits)):
                    continue
                key = (wait.operation, wait.key, wait.sequence)
                found[key] = (wait, found.get(key, (wait, 0))[1] + 1)
        if found:
            break
    return max(found.values(), key=lambda entry: entry[1], default=(None, 0))


def describe_activities(job: Job, ranks: Sequence[int]) -> tuple[str, Frame | None]:
    """Return what ranks do, the same said once, and where the first one is."""
    doings: dict[str, list[int]] = {}
    frame = None
    for number in ranks:
        doing, place = describe_activity(job.ranks[number], is_waiting=number in job.waits)
        frame = frame or place
        doings.setdefault(doing, []).append(number)
    if len(doings) == 1:
        (doing,) = doings
        return f"{'it' if len(ranks) == 1 else f'rank {ranks[0]}'} {doing}", frame
    shown = [f"rank {numbers[0]} {doing}" for doing, numbers in list(doings.items())[:MOST_PLACES]]
    return "; ".join(shown), frame


def make_verdict(
    kind: str,
    text: str,
    job: Job,
    ranks: Sequence[int],
    wait: Wait | None,
    *,
    waiting: int = 0,
    frame: Frame | None = None,
    is_final: bool = False,
) -> Verdict:
    """Make a verdict whose sentence is harmless on a terminal."""
    hosts = dict.fromkeys(job.hosts[number] for number in ranks if number in job.hosts)
    return Verdict(
        kind=kind,
        sentence=escape_text(text, LONGEST),
        ranks=tuple(ranks),
        hosts=tuple(hosts),
        group=wait.group if wait else "",
        operation=wait.operation if wait else "",
        sequence=wait.sequence if wait else None,
        waiting=waiting,
        frame=frame,
        is_final=is_final,
    )
