"""From ranks that stand still to a notice or a hang, and what follows on each node. Pure but for the clock.

Progress is a step, a batch from a DataLoader, or a change of phase. Activity is more: CPU, bytes that are
read, written or sent, a busy GPU, another stack, anywhere in a rank's process tree.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.watch.model import (
    UNWATCHED,
    Decision,
    Frame,
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    ProcessState,
    Rank,
    RankEvidence,
)
from launcher.watch.run_files import Found, Stored, is_silent
from launcher.watch.verdict import judge_evidence

# The job as its judging node sees it


@dataclass(frozen=True, slots=True)
class JobView:
    """The job as the judging node sees it."""

    fresh: tuple[NodeReport, ...]
    """Of this attempt, by node rank; this node's own is the one of now."""
    silent: tuple[NodeReport, ...] = ()
    """The last reports of nodes that have reported in this attempt, and do so no more."""
    ended: tuple[NodeEvidence, ...] = ()
    """Ranks that ended with 0, of nodes whose ranks have all ended, and with them the task that reported."""
    hangs: int = 0
    """The highest number of a hang so far."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks of nodes that are heard of."""
        return [rank for report in self.fresh for rank in report.ranks]


def make_job_view(own: NodeReport, found: Found, now: float) -> JobView:
    """Join this node's report of now with what the others have written; `now` is monotonic."""
    fresh, silent, ended = [own], list[NodeReport](), []
    records = [record for record in found.ended if record.host != own.host]
    for record in records:
        gone: dict[str, Any] = {"host": record.host, "process": ProcessState(0, "X"), "exit_code": 0}
        ranks = [RankEvidence(rank, 0, 0, 0, "ended", 0, None, **gone) for rank, _ in record.clean]
        ended.append(NodeEvidence(record.host, record.node_rank, 0, record.ended, 0.0, tuple(ranks)))
    known = {own.host, *(record.host for record in records)}
    for stored in found.reports:
        report = stored.value
        if report.host not in known and report.attempt == own.attempt:
            is_late = is_silent(now - stored.seen, max(own.interval, report.interval))
            (silent if is_late else fresh).append(report)
    fresh.sort(key=lambda report: report.node_rank)
    return JobView(tuple(fresh), tuple(silent), tuple(ended), found.hangs)


def find_word(own: NodeReport, found: Found, begin: float) -> Stored[JobState] | None:
    """Return what another node that judges has told.

    The run directory, and even the number of the attempt, can be those of a job of yesterday: what was
    written before this watcher's start does not count. Ages are by the filesystem's clock.
    """
    word = found.job
    if word is None or word.seen < begin or word.value.host == own.host:
        return None
    return word if word.value.attempt == own.attempt and word.value.state != "ended" else None


def is_judge(own: NodeReport, found: Found, begin: float, now: float) -> bool:
    """Tell whether this node judges: the first one does, and the first that is heard of if it is silent.

    `begin` is as for `find_word`. Only a node whose own ranks stand still takes over.
    """
    word = find_word(own, found, begin)
    is_told = word is not None and not is_silent(now - word.seen, own.interval)
    if own.node_rank == 0 or is_told or not found.reports or own.stalled_since is None:
        return own.node_rank == 0
    return make_job_view(own, found, now).fresh[0].host == own.host


# How long ranks may make no progress before a notice, and before it is a hang

_LEAST_NOTICE = 20.0
"""Seconds: below it, the garbage collector, a short checkpoint or a busy filesystem would cause notices."""
_FACTOR = 10.0
"""Times the slow steps. What a healthy step can take beyond its p99 is far less (a straggler is 1.1)."""
_SLOW_SHARE = 0.99
_FEW = 3
"""Steps up to which the slowest counts: a program of steps of minutes must not be taken for hung in its
second. From then on the slowest 1%, at least one, is left out: the first step compiles and allocates."""
_PAUSES_TO_NOTICE, _PAUSES_TO_HANG = 2.0, 3.0
"""Times the longest pause that has ended by itself."""
_HANG_SECONDS = 60.0
"""Seconds that ranks may hold up others without activity, or without progress if they work."""
_NOBODY_WAITS, _WORKING, _COMPILING = 3.0, 10.0, 30.0
"""Times that: where nobody waits in a collective; for ranks that work, or whose phase looks like a standstill
from outside (torch's own timeout is 10 minutes); and for `torch.compile` of large models."""
_PATIENT_PHASES = {"compiling": _COMPILING, "saving": _WORKING, "evaluating": _WORKING}


def find_quantile(values: Sequence[float], share: float) -> float | None:
    """Return the least of some values that is not less than a share of them; None if there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def choose_limit(setting: object, durations: Iterable[Sequence[float]], longest_pause: float = 0.0) -> float:
    """Return the seconds without progress after which ranks are looked at, and a notice is given.

    `durations` are those of each rank's last steps, of which the slow ones (p99) count. `setting` is
    `watch.hang_seconds`; a notice does not come after the hang that it sets.
    """
    slow = 0.0
    for steps in durations:
        skipped = 0 if len(steps) <= _FEW else max(1, math.floor((1 - _SLOW_SHARE) * len(steps)))
        slow = max([slow, *sorted(steps)[: len(steps) - skipped][-1:]])
    limit = max(_LEAST_NOTICE, _FACTOR * slow, _PAUSES_TO_NOTICE * longest_pause)
    return min(limit, float(setting)) if isinstance(setting, int | float) else limit


def list_stalled(ranks: Iterable[Rank], limit: float) -> list[Rank]:
    """Return the ranks of the job that have made no progress for too long.

    A rank that has never made a step counts only if no rank that has made one goes on: a program can have
    ranks that make none.
    """
    stalled, goes_on = [], False
    for rank in ranks:
        if rank.phase not in UNWATCHED and rank.idle is not None:
            if rank.idle > limit:
                stalled.append(rank)
            else:
                goes_on |= rank.step > 0
    return [rank for rank in stalled if rank.step] if goes_on else stalled


# The judge

_PATIENCE = 9.0
"""Seconds that other nodes have: 2 to see the question, 4 to gather evidence, and to write it."""
_AGAIN = 20.0
"""Seconds after a look that found no hang until the next one; each one in a row waits half as long again."""
_LEAST_AGAIN, _MOST_AGAIN = 5.0, 60.0


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
    enough. A rank that makes progress while others wait, as in an evaluation on rank 0 alone, and one that a
    debugger holds, are nothing to tell of. What is not known counts as activity.
    """
    verdict = judge_evidence(nodes, reports)
    if verdict.kind == "debugged" or verdict.is_final:
        return Decision("hang" if verdict.is_final else "none", verdict)
    evidence = {rank.rank: rank for node in nodes for rank in node.ranks}
    ranks: dict[int, Rank] = {state.rank: state for report in reports for state in report.ranks} | evidence
    culprits = [evidence[number] for number in verdict.ranks if number in evidence]
    phases = [ranks[number].phase for number in verdict.ranks if number in ranks]
    unit, learned = _HANG_SECONDS, _PAUSES_TO_HANG * pause.longest
    if isinstance(pause.setting, int | float):
        unit, learned = float(pause.setting), 0.0
    patient = max((_PATIENT_PHASES.get(phase, 0.0) for phase in phases), default=0.0)
    working = max(patient, _WORKING)
    if not any(rank.step for rank in ranks.values()):
        patient = working
    quiet = min((pause.quiet.get(number, 0.0) for number in verdict.ranks), default=0.0)
    factor = patient or (1.0 if verdict.waiting else _NOBODY_WAITS)
    if verdict.kind == "silent":
        quiet, factor = pause.idle, patient or _NOBODY_WAITS
    seconds = min(max(unit * factor, learned) - quiet, max(unit * working, learned) - pause.idle)
    if seconds <= 0:
        return Decision("hang", verdict)
    goes_on = min((rank.idle or 0.0 for rank in culprits), default=pause.limit) < pause.limit / 2
    return Decision("none" if goes_on else "notice", verdict, seconds)


class HangJudge:
    """The judging node's memory of the job's hangs, in this attempt."""

    def __init__(self, on_hang: str, hang_seconds: object = "auto") -> None:
        self._on_hang = on_hang
        self._hang_seconds = hang_seconds
        self.asks = 0
        """Number of the question that is open; 0 for none."""
        self.asked_at = 0.0
        self._last_asks = 0
        self._next_look = 0.0
        self._patience = _AGAIN
        self.hangs: list[Hang] = []
        self._hang_ranks: dict[int, Rank] = {}
        """All ranks that were heard of at the last hang, by rank."""
        self._stalled: set[int] = set()
        """Those of them that made no progress."""
        self.longest_pause = 0.0
        """Seconds without progress after which a rank went on by itself, the most since the first step."""
        self._idle: dict[int, tuple[int, float]] = {}
        """PID and seconds without progress of each rank, as of the last look."""
        self._has_noticed = False
        """A notice of the pause that goes on was given."""
        self._active_at: dict[int, float] = {}
        """When evidence showed a rank at another place."""
        self._stacks: dict[int, tuple[int, Sequence[Frame]]] = {}
        """PID and main thread of each rank, as the last evidence has it."""

    def is_hanging(self, ranks: Sequence[Rank]) -> bool:
        """Tell whether a hang goes on, in the ranks in which it began.

        They do not once all that were heard of have been started again, or are gone. A node's report is a few
        seconds old: until then, some of it is of the ranks before.
        """
        if not self.hangs or self.hangs[-1].recovered is not None:
            return False
        pids = {rank.rank: rank.pid for rank in ranks}
        known = self._hang_ranks
        return not known.keys() & pids or any(pids.get(rank) == one.pid for rank, one in known.items())

    def adopt(self, job: JobState) -> None:
        """Go on where another node stopped that judged."""
        known = {hang.number: hang for hang in (*job.hangs, *self.hangs)}
        if len(known) > len(self.hangs):
            self._hang_ranks, self._stalled = {}, set()
            self.hangs = [known[number] for number in sorted(known)]

    def look(
        self, view: JobView, evidence: Mapping[str, NodeEvidence], limit: float, now: float
    ) -> int | str | Hang | None:
        """Look at the job; return what is new.

        A number: a question, for which all nodes are to gather evidence. A text: a notice of a pause that may
        end by itself; nothing follows from it. A hang: one that has begun, or recovered. `evidence` is what
        has been gathered for the open question, by host; `limit` are the seconds without progress after which
        ranks are looked at, and `now` is monotonic.
        """
        ranks = view.ranks
        stalled = list_stalled(ranks, limit)
        self._note_pauses(ranks, is_stalled=bool(stalled))
        if self.asks:
            is_answered = {report.host for report in view.fresh} <= evidence.keys()
            if is_answered or now > self.asked_at + _PATIENCE:
                self.asks = 0
                gathered = {node.host: node for node in (*view.ended, *evidence.values())}
                nodes = sorted(gathered.values(), key=lambda node: node.node_rank)
                return self._conclude(view, nodes, stalled, limit, now)
        elif stalled and now >= self._next_look and not self.is_hanging(ranks):
            self.asks = self._last_asks = max(self._last_asks + 1, int(time.time()))
            self.asked_at = now
            return self.asks
        return None if stalled else self._find_recovery(ranks)

    def _conclude(
        self,
        view: JobView,
        nodes: Sequence[NodeEvidence],
        stalled: Sequence[Rank],
        limit: float,
        now: float,
    ) -> Hang | str | None:
        """Judge what was gathered."""
        for rank in (rank for node in nodes for rank in node.ranks):
            main = rank.process.main_stack
            before, frames = self._stacks.get(rank.rank), main.frames if main else ()
            is_elsewhere = before is not None and before[0] == rank.pid and before[1] != frames
            if is_elsewhere:
                self._active_at[rank.rank] = now
            if frames or not is_elsewhere:  # without an answer, the next one is compared with the last one
                self._stacks[rank.rank] = rank.pid, frames
        if not stalled:  # it went on meanwhile
            return None
        quiet = {
            one.rank: min(one.quiet, now - self._active_at.get(one.rank, -math.inf)) for one in view.ranks
        }
        idle = [rank.idle or 0.0 for rank in stalled]
        pause = Pause(limit, max(idle), quiet, self.longest_pause, self._hang_seconds)
        decision = decide(nodes, (*view.fresh, *view.silent), pause)
        verdict = decision.verdict
        if decision.word == "hang":
            moment = time.time()
            hang = Hang(
                number=1 + max([view.hangs, *(hang.number for hang in self.hangs)]),
                time=moment,
                stalled_since=moment - min(idle),
                step=max(rank.step for rank in stalled),
                verdict=verdict,
                # Of ranks that are not heard of, nobody knows whether they work.
                action="report" if verdict.kind == "silent" else self._on_hang,
                pids=tuple((rank.rank, rank.pid) for rank in view.ranks if rank.rank in verdict.ranks),
            )
            self.hangs.append(hang)
            self._patience = _AGAIN
            self._stalled = {rank.rank for rank in stalled}
            self._hang_ranks = {rank.rank: rank for rank in view.ranks}
            return hang
        self._next_look = now + max(_LEAST_AGAIN, min(self._patience, decision.seconds or self._patience))
        self._patience = min(self._patience * 1.5, _MOST_AGAIN)
        if decision.word == "none" or self._has_noticed:
            return None
        self._has_noticed = True
        return f"no step for {min(idle):.0f} s: {verdict.sentence}"

    def _note_pauses(self, ranks: Sequence[Rank], *, is_stalled: bool) -> None:
        """Note how long the pauses were that have ended by themselves, from the first step on."""
        has_begun = any(rank.step for rank in ranks)
        if not has_begun:
            self.longest_pause, self._idle = 0.0, {}
        for rank in ranks if has_begun else ():
            pid, before = self._idle.get(rank.rank, (0, 0.0))
            if rank.idle is not None:
                if pid == rank.pid and rank.idle < before:
                    self.longest_pause = max(self.longest_pause, before)
                self._idle[rank.rank] = rank.pid, rank.idle
        if not is_stalled:
            self._has_noticed, self._patience, self._next_look = False, _AGAIN, 0.0

    def _find_recovery(self, ranks: Sequence[Rank]) -> Hang | None:
        """Return the last hang once steps go on, in the same ranks or in those that have replaced them.

        A hang that passes before its restart has none.
        """
        if not self.hangs or self.hangs[-1].recovered is not None:
            return None
        for rank in ranks:
            before = self._hang_ranks.get(rank.rank, rank)
            is_same = before.pid == rank.pid
            has_gone_on = rank.step > (before.step if is_same else 0)
            if not self._hang_ranks:  # another node has told of it
                has_gone_on = rank.step > self.hangs[-1].step
            elif is_same and rank.rank not in self._stalled:
                has_gone_on = False
            if has_gone_on:
                action = "report" if self.is_hanging(ranks) else self.hangs[-1].action
                self.hangs[-1] = replace(self.hangs[-1], recovered=time.time(), action=action)
                return self.hangs[-1]
        return None


def list_orders(hangs: Iterable[Hang], after: int, pids: Mapping[int, int]) -> Iterator[dict[str, object]]:
    """Give what the supervisor is to do now about the hangs after this number, as the values of messages.

    `pids` are of this node's ranks. Of these, `ranks` hold the others up: none if those are elsewhere, and
    have ended. Nothing is to be done, or no more, if other processes are those ranks now; by `pids`, the
    supervisor sees that, too.
    """
    for hang in hangs:
        culprits = [rank for rank in pids if rank in hang.verdict.ranks]
        acts = culprits or hang.action == "stop" or hang.verdict.kind == "exited"
        has_restarted = any(pids.get(rank, pid) != pid for rank, pid in hang.pids)
        is_settled = hang.action == "report" or hang.recovered is not None or has_restarted
        if hang.number > after and acts and not is_settled:
            yield {
                "action": hang.action,
                "ranks": culprits,
                "pids": list(pids.values()),
                "sentence": hang.verdict.sentence,
            }
