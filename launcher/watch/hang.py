"""From ranks that stand still to a notice or a hang, and what follows on each node. Pure but for the clock.

Progress is a step, a batch from a DataLoader, or a change of phase. Activity is more: CPU, bytes that are
read, written or sent, a busy GPU, another stack, anywhere in a rank's process tree.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.watch.activity import find_phase, is_working
from launcher.watch.model import (
    Decision,
    Frame,
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    Rank,
    Verdict,
)
from launcher.watch.verdict import judge_evidence

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
UNWATCHED = ("ended", "exited", "unwatched")
"""Phases of ranks from which no progress is due."""


def find_quantile(values: Sequence[float], share: float) -> float | None:
    """Return the least of some values that is not less than a share of them; None if there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def find_slow_step(durations: Sequence[float]) -> float:
    """Return the seconds of a slow step (p99); 0 if there was none yet."""
    if len(durations) <= _FEW:
        return max(durations, default=0.0)
    return sorted(durations)[min(len(durations) - 1, math.ceil(_SLOW_SHARE * len(durations))) - 1]


def choose_limit(setting: object, slow_step: float, longest_pause: float = 0.0) -> float:
    """Return the seconds without progress after which ranks are looked at, and a notice is given.

    `setting` is `watch.hang_seconds`; a notice does not come after the hang that it sets.
    """
    limit = max(_LEAST_NOTICE, _FACTOR * slow_step, _PAUSES_TO_NOTICE * longest_pause)
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


def find_stall_begin(stalled: Iterable[Rank], now: float) -> float | None:
    """Return since when the last of some stalled ranks has made no progress, by a clock that reads `now`."""
    idle = [rank.idle for rank in stalled if rank.idle is not None]
    return now - min(idle) if idle else None


# The judge

_PATIENCE = 9.0
"""Seconds that other nodes have: 2 to see the question, 4 to gather evidence, and to write it."""
_AGAIN = 20.0
"""Seconds after a look that found no hang until the next one; each one in a row waits half as long again."""
_LEAST_AGAIN, _MOST_AGAIN = 5.0, 60.0
_MOST_AT_START = 120.0
"""Seconds of a pause before the first step that are learned."""


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
    ranks = {rank.rank: rank for node in nodes for rank in node.ranks}
    states = {state.rank: state for report in reports for state in report.ranks}
    culprits = [ranks[number] for number in verdict.ranks if number in ranks]
    phases = [find_phase(rank) for rank in culprits]
    phases += [states[number].phase for number in verdict.ranks if number in states.keys() - ranks.keys()]
    is_silent, setting = verdict.kind == "silent", pause.setting
    unit, learned = _HANG_SECONDS, _PAUSES_TO_HANG * pause.longest
    if isinstance(setting, int | float):
        unit, learned = float(setting), 0.0
    patient = max((_PATIENT_PHASES.get(phase, 0.0) for phase in phases), default=0.0)
    working = max(patient, _WORKING)
    if not any(one.step for one in ranks.values()) and not any(one.step for one in states.values()):
        patient = working
    has_waiting = verdict.waiting > 0 and not is_silent
    quiet = min((pause.quiet.get(number, 0.0) for number in verdict.ranks), default=0.0)
    if is_silent:
        quiet = pause.idle
    elif any(map(is_working, culprits)):
        quiet = 0.0
    seconds = min(
        max(unit * (patient or (1.0 if has_waiting else _NOBODY_WAITS)), learned) - quiet,
        max(unit * working, learned) - pause.idle,
    )
    if seconds <= 0:
        return Decision("hang", verdict)
    goes_on = min((rank.idle for rank in culprits), default=pause.limit) < pause.limit / 2
    return Decision("none" if goes_on else "notice", verdict, seconds)


class HangJudge:
    """The judging node's memory of the job's hangs, in this attempt.

    `ranks` are those of now of the nodes that are heard of, `limit` the seconds without progress after which
    they are looked at, and `now` is monotonic.
    """

    def __init__(
        self, on_hang: str, hang_seconds: object = "auto", decide: Callable[..., Decision] = decide
    ) -> None:
        self._decide = decide
        self.on_hang = on_hang
        self._hang_seconds = hang_seconds
        self.asks = 0
        """Number of the question that is open; 0 for none."""
        self.last_asks = 0
        self.asked_at = 0.0
        self._next_look = 0.0
        self._patience = _AGAIN
        self.hangs: list[Hang] = []
        self._stalled_steps: dict[int, int] = {}
        """Steps of the ranks of the last hang, by rank."""
        self._hang_pids: dict[int, int] = {}
        """PIDs of all ranks that were heard of then, by rank."""
        self.restarts = 0
        self._adopted = 0.0
        """Time of the last word of another node that judged."""
        self.longest_pause = 0.0
        """Seconds without progress after which a rank went on by itself, the most so far."""
        self._has_begun = False
        """A step was made."""
        self._idle: dict[int, tuple[int, float]] = {}
        """PID and seconds without progress of each rank, as of the last look."""
        self._has_noticed = False
        """A notice of the pause that goes on was given."""
        self._active_at: dict[int, float] = {}
        """When evidence showed a rank to be active."""
        self._stacks: dict[int, tuple[int, Sequence[Frame]]] = {}
        """PID and main thread of each rank, as the last evidence has it."""

    @property
    def hang(self) -> Hang | None:
        """The hang that goes on."""
        return self.hangs[-1] if self.hangs and self.hangs[-1].recovered is None else None

    def is_hanging(self, ranks: Sequence[Rank]) -> bool:
        """Tell whether a hang goes on, in the ranks in which it began."""
        return self.hang is not None and not self._has_restarted(self.hang, ranks)

    def adopt(self, job: JobState) -> None:
        """Go on where another node stopped that judged; once for each of its words."""
        if job.time <= self._adopted:
            return
        self._adopted = job.time
        known = {hang.number: hang for hang in (*self.hangs, *job.hangs)}
        if self.hang is None or known[self.hang.number] != self.hang:
            self._stalled_steps, self._hang_pids = {}, {}
        self.hangs = [known[number] for number in sorted(known)]
        self.restarts = max(self.restarts, job.restarts)
        self.last_asks = max(self.last_asks, job.asks)

    def should_ask(self, ranks: Sequence[Rank], limit: float, now: float) -> bool:
        """Tell whether all nodes are to gather evidence now."""
        is_early = self.asks or now < self._next_look or self.is_hanging(ranks)
        return not is_early and bool(list_stalled(ranks, limit))

    def ask(self, now: float, least: int) -> int:
        """Raise a question, with a number of at least `least`; return it."""
        self.asks = self.last_asks = max(self.last_asks + 1, least)
        self.asked_at = now
        return self.asks

    def is_answered(self, fresh: Sequence[NodeReport], hosts: Iterable[str], now: float) -> bool:
        """Tell whether all nodes that are heard of have answered, as these have, or have had their time."""
        return {report.host for report in fresh} <= {*hosts} or now > self.asked_at + _PATIENCE

    def conclude(
        self,
        ranks: Sequence[Rank],
        reports: Sequence[NodeReport],
        evidence: Sequence[NodeEvidence],
        limit: float,
        *,
        now: float,
        number: int,
    ) -> Hang | str | None:
        """Judge what was gathered; return a hang, a notice, or None.

        `reports` are all nodes', also the last ones of those that are heard of no more. A hang gets this
        number, or the one after the last. A notice is of a pause that may end by itself; nothing follows from
        it.
        """
        self.asks = 0
        self._note_activity(evidence, now)
        stalled = list_stalled(ranks, limit)
        if not stalled:  # it went on meanwhile
            return None
        quiet = {one.rank: min(one.quiet, now - self._active_at.get(one.rank, -math.inf)) for one in ranks}
        idle = [rank.idle or 0.0 for rank in stalled]
        longest = self.longest_pause if self._has_begun else 0.0
        pause = Pause(limit, max(idle), quiet, longest, self._hang_seconds)
        decision = self._decide(evidence, reports, pause)
        if decision.word == "hang":
            return self._record(ranks, decision.verdict, stalled, number)
        self._next_look = now + max(_LEAST_AGAIN, min(self._patience, decision.seconds or self._patience))
        self._patience = min(self._patience * 1.5, _MOST_AGAIN)
        if decision.word == "none" or self._has_noticed:
            return None
        self._has_noticed = True
        return f"no step for {min(idle):.0f} s: {decision.verdict.sentence}"

    def _note_activity(self, evidence: Sequence[NodeEvidence], now: float) -> None:
        """Note which ranks the evidence shows to be active, among them those that are at another place."""
        for rank in (rank for node in evidence for rank in node.ranks):
            main = rank.process.main_stack
            before, frames = self._stacks.get(rank.rank), main.frames if main else ()
            is_elsewhere = before is not None and before[0] == rank.pid and before[1] != frames
            if is_working(rank) or is_elsewhere:
                self._active_at[rank.rank] = now
            if frames or not is_elsewhere:  # without an answer, the next one is compared with the last one
                self._stacks[rank.rank] = rank.pid, frames

    def note_pauses(self, ranks: Sequence[Rank], limit: float) -> None:
        """Note how long the pauses were that have ended by themselves; `limit` is that of a notice.

        Before the first step, activity ends a pause, too: such pauses only put off the next notice, and not
        for long. With the first step they are forgotten.
        """
        has_begun = any(rank.step for rank in ranks)
        if has_begun and not self._has_begun:
            self.longest_pause, self._idle = 0.0, {}
        self._has_begun = has_begun
        most = math.inf if has_begun else _MOST_AT_START
        for rank in ranks:
            pid, before = self._idle.get(rank.rank, (0, 0.0))
            if rank.idle is not None:
                if pid == rank.pid and rank.idle < before:
                    self.longest_pause = max(self.longest_pause, min(before, most))
                self._idle[rank.rank] = rank.pid, rank.idle
        if not list_stalled(ranks, limit):
            self._has_noticed, self._patience, self._next_look = False, _AGAIN, 0.0

    def _record(self, ranks: Sequence[Rank], verdict: Verdict, stalled: Sequence[Rank], number: int) -> Hang:
        """Remember a hang; of ranks that are not heard of, nobody knows whether they work."""
        now = time.time()
        hang = Hang(
            number=max(number, self.hangs[-1].number + 1 if self.hangs else 1),
            time=now,
            stalled_since=find_stall_begin(stalled, now) or now,
            step=max(rank.step for rank in stalled),
            verdict=verdict,
            action="report" if verdict.kind == "silent" else self.on_hang,
            pids=tuple((rank.rank, rank.pid) for rank in ranks if rank.rank in verdict.ranks),
        )
        self.hangs.append(hang)
        self._patience = _AGAIN
        self._stalled_steps = {rank.rank: rank.step for rank in stalled}
        self._hang_pids = {rank.rank: rank.pid for rank in ranks}
        self.restarts += hang.action == "restart"
        return hang

    def find_recovery(self, ranks: Sequence[Rank], limit: float) -> Hang | None:
        """Return the last hang once steps go on, in the same ranks or in those that have replaced them."""
        hang = self.hang
        if hang is None or list_stalled(ranks, limit):
            return None
        if not any(self._has_gone_on(rank, hang) for rank in ranks):
            return None
        self.hangs[-1] = over = replace(hang, recovered=time.time())
        if not self._has_restarted(hang, ranks):
            self.restarts -= hang.action == "restart"
        return over

    def _has_gone_on(self, rank: Rank, hang: Hang) -> bool:
        """Tell whether a rank of the last hang has made a step since."""
        if self._hang_pids.get(rank.rank, rank.pid) != rank.pid:
            return rank.step > 0
        if not self._stalled_steps:  # another node has told of it
            return rank.step > hang.step
        return rank.rank in self._stalled_steps and rank.step > self._stalled_steps[rank.rank]

    def _has_restarted(self, hang: Hang, ranks: Sequence[Rank]) -> bool:
        """Tell whether all ranks that were heard of in the last hang have been started again, or are gone.

        A node's report is a few seconds old: until then, some of it is of the ranks before.
        """
        known = dict(hang.pids) | self._hang_pids
        pids = {rank.rank: rank.pid for rank in ranks}
        return bool(known.keys() & pids) and all(pids.get(rank) != pid for rank, pid in known.items())


def list_orders(hangs: Iterable[Hang], after: int, pids: Mapping[int, int]) -> Iterator[dict[str, object]]:
    """Give what the supervisor is to do now about the hangs after this number, as messages to it.

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
                "event": "act",
                "action": hang.action,
                "ranks": culprits,
                "pids": list(pids.values()),
                "sentence": hang.verdict.sentence,
            }
