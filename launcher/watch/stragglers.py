"""Names the ranks that the others wait for in each step, from the reports of all nodes. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence

from launcher.text import name_some
from launcher.watch.collective_marks import DURATION, unpack_marks
from launcher.watch.excess_history import MIN_EXCESS, ExcessHistory, SlowRank
from launcher.watch.own_time import StepExcess, measure_steps, measure_waits
from launcher.watch.straggler_causes import OWN_CODE, RankFacts, find_cause
from launcher.watch.watch_model import CollectiveTimes, NodeReport, Straggler

MOST_REPORTS = 24
"""Reports of a rank that are kept, to find a cause in."""
LATER = 0.5
"""Share of the slow steps that is left out for the cause: it may have begun within them."""
LEAST_REPORTS = 1
"""Reports from the slow steps that show a cause; with fewer, the last ones are taken."""
CLEAR_REPORTS = 2
"""Reports from the slow steps that rule other causes out, if the cause is the rank's own code."""
MOST_TOLD = 200
"""Stragglers of a job that are kept."""
CAUSES: Mapping[str, str] = {
    "data": "data",
    "run_delay": "run delay",
    "cpu_quota": "CPU quota",
    "memory_pressure": "memory pressure",
    "page_faults": "page faults",
    "gpu_clock": "GPU clock",
    "pcie": "PCIe link",
    "nic": "network link",
    OWN_CODE: "its own code",
}
"""Causes as people read them."""


class StragglerFinder:
    """Finds the stragglers of one attempt; each is told once in an episode, which ends when it recovers."""

    def __init__(self, min_excess: float = MIN_EXCESS) -> None:
        self.history = ExcessHistory(min_excess)
        self.told: tuple[Straggler, ...] = ()
        """All stragglers so far, oldest first."""
        self.waits: dict[int, float] = {}
        """Share of the time that each rank waits for others, over the steps that were measured last."""
        self.facts: dict[int, deque[RankFacts]] = {}
        self.numbers: dict[str, int] = {}
        """The last report of each node that was used."""
        self.seen: tuple[CollectiveTimes, ...] = ()
        self.pids: dict[int, tuple[str, int]] = {}
        """Node and PID of all ranks that have been heard of."""
        self.pending: list[SlowRank] = []
        """Slow ranks whose cause another report may show."""

    def update(self, reports: Sequence[NodeReport]) -> tuple[Straggler, ...]:
        """Take the last reports of all nodes, some of which may be known already; return new stragglers."""
        self.note_start(reports)
        self.note_facts(reports)
        hosts = {state.rank: report.host for report in reports for state in report.ranks}
        slow = (*self.pending, *self.measure(reports, hosts))
        now = max((report.time for report in reports), default=0.0)
        named = [(one, self.name(one, hosts, now)) for one in slow]
        self.pending = [one for one, straggler in named if not self.is_clear(one, straggler)]
        found = tuple(straggler for one, straggler in named if one not in self.pending)
        self.told = (*self.told, *found)[-MOST_TOLD:]
        return found

    def measure(self, reports: Sequence[NodeReport], hosts: Mapping[int, str]) -> Sequence[SlowRank]:
        """Measure the steps of new reports, and return the ranks that are found to be slow."""
        times = tuple(one for report in reports for one in report.collectives if one.rank in self.pids)
        if 2 * len(times) < max(4, len(self.pids)) or times == self.seen:
            return ()
        self.seen = times
        steps = measure_times(times, hosts)
        if steps:
            self.waits = measure_waits(steps)
        return self.history.add(steps)

    def note_start(self, reports: Sequence[NodeReport]) -> None:
        """Begin anew once ranks have started anew."""
        pids = {state.rank: (report.host, state.pid) for report in reports for state in report.ranks}
        if any(self.pids.get(rank, process) != process for rank, process in pids.items()):
            self.history = ExcessHistory(self.history.min_excess)
            self.pids, self.waits, self.facts, self.seen, self.pending = {}, {}, {}, (), []
        self.pids |= pids

    def note_facts(self, reports: Sequence[NodeReport]) -> None:
        """Keep what new reports say of their ranks."""
        for report in reports:
            if self.numbers.get(report.host) == report.number:
                continue
            self.numbers[report.host] = report.number
            for state in report.ranks:
                kept = self.facts.setdefault(state.rank, deque(maxlen=MOST_REPORTS))
                kept.append(RankFacts(state, report.memory_pressure))

    def name(self, slow: SlowRank, hosts: Mapping[int, str], now: float) -> Straggler:
        """Return a slow rank as a straggler, with its cause."""
        others = [
            self.choose_facts(slow, rank)
            for rank in self.facts
            if rank != slow.rank and rank not in self.history.slow
        ]
        share = slow.excess / (1 + slow.excess)
        cause = find_cause(self.choose_facts(slow, slow.rank), others, share)
        host = hosts.get(slow.rank, "")
        where = (slow.first_step, slow.last_step)
        return Straggler(slow.rank, host, slow.excess, cause.name, cause.detail, *where, now)

    def choose_facts(self, slow: SlowRank, rank: int) -> Sequence[RankFacts]:
        """Return what a rank's reports say of the slow steps, or its last reports if none is from these."""
        return self.list_facts(slow, rank) or list(self.facts.get(rank, ()))[-LEAST_REPORTS:]

    def list_facts(self, slow: SlowRank, rank: int) -> Sequence[RankFacts]:
        """Return what a rank's reports say of the slow steps, without the first of these, and since then."""
        begin = slow.first_step + (slow.last_step - slow.first_step) * LATER
        return [one for one in self.facts.get(rank, ()) if one.state.step > begin]

    def is_clear(self, slow: SlowRank, straggler: Straggler) -> bool:
        """Tell whether another report would show no other cause: a report may begin before the slow steps."""
        return straggler.cause != OWN_CODE or len(self.list_facts(slow, slow.rank)) >= CLEAR_REPORTS


def measure_times(times: Sequence[CollectiveTimes], hosts: Mapping[int, str]) -> tuple[StepExcess, ...]:
    """Measure the steps that are in the times of all ranks; none if one's are damaged or missing."""
    try:
        marks = {one.rank: unpack_marks(one) for one in times}
    except ValueError:
        return ()
    if len(marks) < 2 or not marks.keys() <= hosts.keys() or len({one.measure for one in times}) > 1:
        return ()
    return measure_steps(marks, {rank: hosts[rank] for rank in marks}, durations=times[0].measure == DURATION)


def explain_straggler(straggler: Straggler) -> str:
    """Say who is slow, by how much and why, in one sentence."""
    where = f" on {straggler.host}" if straggler.host else ""
    when = f"steps {straggler.first_step} to {straggler.last_step}"
    much = f"its own part of a step is {straggler.excess:.0%} longer than the others'"
    return f"rank {straggler.rank}{where} is a straggler: {much} ({when}): {straggler.detail}"


def list_slow_ranks(stragglers: Sequence[Straggler]) -> str:
    """Name all stragglers of a job in a line, the slowest first; empty if there were none."""
    worst: dict[int, Straggler] = {}
    for one in stragglers:
        if one.rank not in worst or one.excess > worst[one.rank].excess:
            worst[one.rank] = one
    names = [
        f"rank {one.rank} on {one.host} ({one.excess:.0%}, {CAUSES.get(one.cause, one.cause)})"
        for one in sorted(worst.values(), key=lambda one: -one.excess)
    ]
    return name_some(names, 8)
