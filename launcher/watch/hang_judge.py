"""From ranks that stand still to a notice or a hang: asks for evidence, and sees pauses end."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from launcher.watch.hang_actions import choose_action
from launcher.watch.job_view import JobView, list_job_progress
from launcher.watch.progress_limit import RankProgress, find_stall_begin, list_stalled
from launcher.watch.rank_activity import find_main_stack, is_working
from launcher.watch.verdict import Pause
from launcher.watch.watch_model import (
    Decision,
    Frame,
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    Notice,
    RankState,
    Verdict,
)

PATIENCE = 9.0
"""Seconds that other nodes have: 2 to see the question, 4 to gather evidence, and to write it."""
AGAIN = 20.0
"""Seconds after a look that found no hang until the next one; each one in a row waits half as long again."""
LEAST_AGAIN, MOST_AGAIN = 5.0, 60.0
MOST_AT_START = 120.0
"""Seconds of a pause before the first step that are learned."""


@dataclass(slots=True)
class HangJudge:
    """The judging node's memory of the job's hangs, in this attempt."""

    decide: Callable[[Sequence[NodeEvidence], Sequence[NodeReport], Pause], Decision]
    """`verdict.decide`."""
    on_hang: str
    hang_seconds: object = "auto"
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
    longest_pause: float = 0.0
    """Seconds without progress after which a rank went on by itself, the most so far."""
    has_begun: bool = False
    """A step was made."""
    idle: dict[int, tuple[int, float]] = field(default_factory=dict)
    """PID and seconds without progress of each rank, as of the last look."""
    has_noticed: bool = False
    """A notice of the pause that goes on was given."""
    active_at: dict[int, float] = field(default_factory=dict)
    """Monotonic time at which evidence showed a rank to be active."""
    stacks: dict[int, tuple[int, Sequence[Frame]]] = field(default_factory=dict)
    """PID and main thread of each rank, as the last evidence has it."""

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
    ) -> Hang | Notice | None:
        """Judge what was gathered; return what is to be told, if anything is.

        A hang gets this number, or the one after the last.
        """
        self.asks = 0
        self.note_activity(evidence, now)
        stalled = list_stalled(list_job_progress(view), limit)
        if not stalled:  # it went on meanwhile
            return None
        never = float("-inf")
        quiet = {one.rank: min(one.quiet, now - self.active_at.get(one.rank, never)) for one in view.ranks}
        idle = [rank.idle for rank in stalled if rank.idle is not None]
        longest = self.longest_pause if self.has_begun else 0.0
        pause = Pause(limit, max(idle), quiet, longest, self.hang_seconds)
        decision = self.decide(evidence, view.reports, pause)
        if decision.word == "hang":
            return self.record(view, decision.verdict, stalled, number)
        self.next_look = now + max(LEAST_AGAIN, min(self.patience, decision.seconds or self.patience))
        self.patience = min(self.patience * 1.5, MOST_AGAIN)
        if decision.word == "none" or self.has_noticed:
            return None
        self.has_noticed = True
        return Notice(min(idle), decision.verdict)

    def note_activity(self, evidence: Sequence[NodeEvidence], now: float) -> None:
        """Note which ranks the evidence shows to be active, among them those that are at another place."""
        for rank in (rank for node in evidence for rank in node.ranks):
            main = find_main_stack(rank.process)
            before, frames = self.stacks.get(rank.rank), main.frames if main else ()
            is_elsewhere = before is not None and before[0] == rank.pid and before[1] != frames
            if is_working(rank) or is_elsewhere:
                self.active_at[rank.rank] = now
            if frames or not is_elsewhere:  # without an answer, the next one is compared with the last one
                self.stacks[rank.rank] = rank.pid, frames

    def note_pauses(self, view: JobView, limit: float) -> None:
        """Note how long the pauses were that have ended by themselves; `limit` is that of a notice.

        Before the first step, activity ends a pause, too: such pauses only put off the next notice, and not
        for long. With the first step they are forgotten.
        """
        has_begun = any(rank.step for rank in view.ranks)
        if has_begun and not self.has_begun:
            self.longest_pause, self.idle = 0.0, {}
        self.has_begun = has_begun
        most = float("inf") if has_begun else MOST_AT_START
        for rank in view.ranks:
            pid, before = self.idle.get(rank.rank, (0, 0.0))
            if rank.idle is not None:
                if pid == rank.pid and rank.idle < before:
                    self.longest_pause = max(self.longest_pause, min(before, most))
                self.idle[rank.rank] = rank.pid, rank.idle
        if not list_stalled(list_job_progress(view), limit):
            self.has_noticed, self.patience, self.next_look = False, AGAIN, 0.0

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
            action=choose_action(self.on_hang, verdict),
            pids=tuple((rank.rank, rank.pid) for rank in view.ranks if rank.rank in verdict.ranks),
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
