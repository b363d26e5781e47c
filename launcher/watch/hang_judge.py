"""From ranks that stand still to a hang that is told: asks for evidence, judges it, and sees it pass."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from launcher.watch.hang_actions import choose_action, choose_delay
from launcher.watch.job_view import JobView, list_job_progress, list_progress_of
from launcher.watch.progress_limit import (
    FLOORS,
    RankProgress,
    find_stall_begin,
    has_time,
    list_stalled,
)
from launcher.watch.watch_model import Hang, JobState, NodeEvidence, NodeReport, RankState, Verdict

PATIENCE = 9.0
"""Seconds that other nodes have: 2 to see the question, 4 to gather evidence, and to write it."""
AGAIN = 20.0
"""Seconds after a verdict of `busy` until the next look; each one in a row waits half as long again."""
MOST_AGAIN = 60.0


@dataclass(slots=True)
class HangJudge:
    """The judging node's memory of the job's hangs, in this attempt."""

    judge: Callable[[Sequence[NodeEvidence], Sequence[NodeReport], bool], Verdict]
    """`verdict.judge`; the last argument is `patient`."""
    on_hang: str
    asks: int = 0
    """Number of the question that is open; 0 for none."""
    last_asks: int = 0
    asked_at: float = 0.0
    """Monotonic."""
    next_look: float = 0.0
    patience: float = AGAIN
    hangs: list[Hang] = field(default_factory=list)
    stalled_steps: dict[int, int] = field(default_factory=dict)
    """Steps of the ranks of the last hang, by rank."""
    hang_pids: dict[int, int] = field(default_factory=dict)
    """PIDs of all ranks that were heard of then, by rank."""
    restarts: int = 0
    adopted: float = 0.0
    """Time of the last word of another node that judged."""
    learned: float = 0.0
    """The longest pause that was told as a hang and passed by itself."""

    @property
    def hang(self) -> Hang | None:
        """The hang that goes on."""
        return self.hangs[-1] if self.hangs and self.hangs[-1].recovered is None else None

    def adopt(self, job: JobState) -> None:
        """Go on where another node stopped that judged; once for each of its words."""
        if job.time <= self.adopted:
            return
        self.adopted = job.time
        known = {hang.number: hang for hang in (*self.hangs, *job.hangs)}
        if self.hang is None or known[self.hang.number] != self.hang:
            self.stalled_steps, self.hang_pids = {}, {}
        self.hangs = [known[number] for number in sorted(known)]
        self.restarts = max(self.restarts, job.restarts)
        self.last_asks = max(self.last_asks, job.asks)

    def should_ask(self, view: JobView, limit: float, now: float) -> bool:
        """Tell whether all nodes are to gather evidence now; `now` is monotonic."""
        if self.asks or now < self.next_look or (self.hang and not self.has_restarted(self.hang, view)):
            return False
        return bool(list_stalled(list_job_progress(view), limit))

    def ask(self, now: float, least: int) -> int:
        """Raise a question, with a number of at least `least`; return it."""
        self.asks = self.last_asks = max(self.last_asks + 1, least)
        self.asked_at = now
        return self.asks

    def is_answered(self, view: JobView, evidence: Sequence[NodeEvidence], now: float) -> bool:
        """Tell whether all nodes that are heard of have answered, or have had their time."""
        answered = {node.host for node in evidence}
        missing = [report.host for report in view.fresh if report.host not in answered]
        return not missing or now > self.asked_at + PATIENCE

    def conclude(
        self, view: JobView, evidence: Sequence[NodeEvidence], limit: float, *, now: float, number: int
    ) -> Hang | None:
        """Judge what was gathered; return the hang to tell of, if there is one.

        It gets this number, or the one after the last.
        """
        self.asks = 0
        progress = list_job_progress(view)
        stalled = list_stalled(progress, limit)
        if not stalled:  # it went on meanwhile
            return None
        longest = max((rank.idle for rank in stalled if rank.idle is not None), default=0.0)
        patient = longest < max(FLOORS.values())
        verdict = self.judge(evidence, view.reports, patient)
        if patient and (idle := find_active(verdict, progress, limit)) is not None:
            self.next_look = now + limit - idle
            return None
        heard_before = (*progress, *list_progress_of(view.silent))
        if not verdict.is_hang or self.is_excused(verdict, heard_before, limit):
            self.next_look = now + self.patience
            self.patience = min(self.patience * 1.5, MOST_AGAIN)
            return None
        delay = choose_delay(verdict, evidence, limit)
        return self.record(view, verdict, stalled, number, delay)

    def is_excused(self, verdict: Verdict, progress: Sequence[RankProgress], limit: float) -> bool:
        """Tell whether one of those that hold the others up has more time in its phase."""
        return any(rank.rank in verdict.ranks and has_time(rank, limit) for rank in progress)

    def record(
        self, view: JobView, verdict: Verdict, stalled: Sequence[RankProgress], number: int, delay: float
    ) -> Hang:
        """Remember a hang."""
        now = time.time()
        number = max(number, self.hangs[-1].number + 1 if self.hangs else 1)
        hang = Hang(
            number=number,
            time=now,
            stalled_since=find_stall_begin(stalled, now) or now,
            step=max(rank.step for rank in stalled),
            verdict=verdict,
            action=choose_action(self.on_hang, verdict),
            pids=tuple((rank.rank, rank.pid) for rank in view.ranks if rank.rank in verdict.ranks),
            delay=delay,
        )
        self.hangs.append(hang)
        self.patience = AGAIN
        self.stalled_steps = {rank.rank: rank.step for rank in stalled}
        self.hang_pids = {rank.rank: rank.pid for rank in view.ranks}
        self.restarts += hang.action == "restart"
        return hang

    def find_recovery(self, view: JobView, limit: float) -> Hang | None:
        """Return the last hang once steps go on, in the same ranks or in those that were started anew."""
        hang = self.hang
        if hang is None or list_stalled(list_job_progress(view), limit):
            return None
        if not any(self.has_gone_on(rank) for rank in view.ranks):
            return None
        now = time.time()
        self.hangs[-1] = hang = replace(hang, recovered=now)
        if not self.has_restarted(hang, view):
            self.learned = max(self.learned, now - hang.stalled_since)
            self.restarts -= hang.action == "restart"
        return hang

    def has_gone_on(self, rank: RankState) -> bool:
        """Tell whether a rank of the last hang has made a step since."""
        if self.hang_pids.get(rank.rank, rank.pid) != rank.pid:
            return rank.step > 0
        if not self.stalled_steps:  # another node has told of it
            return self.hang is not None and rank.step > self.hang.step
        return rank.rank in self.stalled_steps and rank.step > self.stalled_steps[rank.rank]

    def has_restarted(self, hang: Hang, view: JobView) -> bool:
        """Tell whether all ranks that were heard of in the last hang have been started anew, or are gone.

        A node's report is a few seconds old: until then, some of it is of the ranks before.
        """
        known = dict(hang.pids) | self.hang_pids
        pids = {rank.rank: rank.pid for rank in view.ranks}
        return bool(known.keys() & pids) and all(pids.get(rank) != pid for rank, pid in known.items())


def find_active(verdict: Verdict, progress: Sequence[RankProgress], limit: float) -> float | None:
    """Return the least idle time of those that hold the others up if one of them makes progress; else None.

    Others wait for it, as for a rank that evaluates alone and gets one batch after the other. Ranks that come
    to a standstill together differ by less than half the limit.
    """
    idle = [rank.idle for rank in progress if rank.rank in verdict.ranks and rank.idle is not None]
    least = min(idle, default=limit)
    return least if verdict.is_hang and least < limit / 2 else None
