"""From ranks that stand still to a hang that is told: asks for evidence, judges it, and sees it pass."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from launcher.watch.job_view import JobView, list_job_progress
from launcher.watch.progress_limit import (
    FLOORS,
    RankProgress,
    find_stall_begin,
    has_time,
    list_stalled,
)
from launcher.watch.watch_model import Hang, JobState, NodeEvidence, NodeReport, Verdict

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
    hang_attempt: int = 0
    """torchrun's start in which that was."""
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
            self.stalled_steps = {}
        self.hangs = [known[number] for number in sorted(known)]
        self.restarts = max(self.restarts, job.restarts)
        self.last_asks = max(self.last_asks, job.asks)

    def should_ask(self, view: JobView, limit: float, now: float) -> bool:
        """Tell whether all nodes are to gather evidence now; `now` is monotonic."""
        if self.asks or self.hang or now < self.next_look:
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
        if not verdict.is_hang or self.is_excused(verdict, progress, limit):
            self.next_look = now + self.patience
            self.patience = min(self.patience * 1.5, MOST_AGAIN)
            return None
        return self.record(view, verdict, stalled, number)

    def is_excused(self, verdict: Verdict, progress: Sequence[RankProgress], limit: float) -> bool:
        """Tell whether one of those that hold the others up has more time in its phase."""
        return any(rank.rank in verdict.ranks and has_time(rank, limit) for rank in progress)

    def record(self, view: JobView, verdict: Verdict, stalled: Sequence[RankProgress], number: int) -> Hang:
        """Remember a hang."""
        now = time.time()
        number = max(number, self.hangs[-1].number + 1 if self.hangs else 1)
        hang = Hang(
            number=number,
            time=now,
            stalled_since=find_stall_begin(stalled, now) or now,
            step=max(rank.step for rank in stalled),
            verdict=verdict,
            action=self.on_hang,
        )
        self.hangs.append(hang)
        self.patience = AGAIN
        self.stalled_steps = {rank.rank: rank.step for rank in stalled}
        self.hang_attempt = max((rank.attempt for rank in view.ranks), default=0)
        self.restarts += self.on_hang == "restart"
        return hang

    def find_recovery(self, view: JobView, limit: float) -> Hang | None:
        """Return the last hang once steps go on, in the same ranks or in those that were started anew."""
        hang = self.hang
        if hang is None or list_stalled(list_job_progress(view), limit):
            return None
        if not any(self.has_gone_on(rank.rank, rank.attempt, rank.step) for rank in view.ranks):
            return None
        now = time.time()
        self.hangs[-1] = hang = replace(hang, recovered=now)
        if hang.action == "report":
            self.learned = max(self.learned, now - hang.stalled_since)
        return hang

    def has_gone_on(self, rank: int, attempt: int, step: int) -> bool:
        """Tell whether a rank of the last hang has made a step since."""
        if attempt > self.hang_attempt:
            return step > 0
        if not self.stalled_steps:  # another node has told of it
            return self.hang is not None and step > self.hang.step
        return rank in self.stalled_steps and step > self.stalled_steps[rank]


def find_active(verdict: Verdict, progress: Sequence[RankProgress], limit: float) -> float | None:
    """Return the least idle time of those that hold the others up if one of them makes progress; else None.

    Others wait for it, as for a rank that evaluates alone and gets one batch after the other. Ranks that come
    to a standstill together differ by less than half the limit.
    """
    idle = [rank.idle for rank in progress if rank.rank in verdict.ranks and rank.idle is not None]
    least = min(idle, default=limit)
    return least if verdict.is_hang and least < limit / 2 else None
