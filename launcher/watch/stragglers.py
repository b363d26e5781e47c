"""Names the ranks that others wait for in each step, and why they are slow, from the reports of all nodes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from launcher.watch.model import CollectiveTimes, GpuSample, NodeReport, Rank, Straggler

if TYPE_CHECKING:
    from launcher.watch.excess import ExcessHistory, SlowRank

# From reports to stragglers

_MOST_REPORTS = 24
"""Reports of a rank that are kept, to find a cause in."""
_LATER = 0.5
"""Share of the slow steps that is left out for the cause: it may have begun within them."""
_LEAST_REPORTS = 1
"""Reports from the slow steps that show a cause; with fewer, the last ones are taken."""
_CLEAR_REPORTS = 2
"""Reports from the slow steps that rule other causes out, if the cause is the rank's own code."""
_AFTER_DEFECT = 600.0
"""Seconds until the next comparison after one that failed."""
_COMPARISONS = 50
"""The ranks are compared no sooner than so many times what that took the last time: 2% of a core at most."""
_MOST_TOLD = 200
"""Stragglers of a job that are kept."""
_OWN_CODE = "program"
"""The cause, if no other is found."""


class Facts(NamedTuple):
    """A rank in one report, and its node's memory pressure."""

    rank: Rank
    memory_pressure: float | None = None


class StragglerFinder:
    """Finds the stragglers of one attempt; each is told once in an episode, which ends when it recovers."""

    def __init__(self) -> None:
        self.told: tuple[Straggler, ...] = ()
        """All stragglers so far, oldest first."""
        self.next_time = 0.0
        """Monotonic time of the next comparison."""
        self.thread: threading.Thread | None = None
        self.numbers: dict[str, int] = {}
        """The last report of each node that was used."""
        self._forget()

    def _forget(self) -> None:
        """Begin with new ranks."""
        self.history: ExcessHistory | None = None
        self.waits: dict[int, float] = {}
        """Share of the time that each rank waits for others, over the steps that were measured last."""
        self.facts: dict[int, deque[Facts]] = {}
        self.seen: tuple[CollectiveTimes, ...] = ()
        self.pids: dict[int, tuple[str, int]] = {}
        """Node and PID of all ranks that have been heard of."""
        self.pending: list[SlowRank] = []
        """Slow ranks whose cause another report may show."""

    def start(self, reports: Sequence[NodeReport], now: float, tell: Callable[[Straggler], None]) -> None:
        """Compare the ranks of these reports, if it is time, in a thread: 1,000 of them take a second.

        `tell` is called there for each new straggler; `now` is monotonic.
        """
        if now < self.next_time or (self.thread and self.thread.is_alive()):
            return

        def compare() -> None:
            self.next_time = time.monotonic() + _AFTER_DEFECT
            if any(report.collectives for report in reports):
                import_module("launcher.watch.excess")  # once, with numpy: that does not count
            begin = time.thread_time()
            for found in self.update(reports):
                tell(found)
            self.next_time = time.monotonic() + _COMPARISONS * (time.thread_time() - begin)

        self.thread = threading.Thread(target=compare, name="stragglers", daemon=True)
        self.thread.start()

    def update(self, reports: Sequence[NodeReport]) -> tuple[Straggler, ...]:
        """Take the last reports of all nodes, some of which may be known already; return new stragglers."""
        pids = {rank.rank: (report.host, rank.pid) for report in reports for rank in report.ranks}
        if any(self.pids.get(rank, process) != process for rank, process in pids.items()):
            self._forget()
        self.pids |= pids
        for report in reports:
            if self.numbers.get(report.host) != report.number:
                self.numbers[report.host] = report.number
                for rank in report.ranks:
                    kept = self.facts.setdefault(rank.rank, deque(maxlen=_MOST_REPORTS))
                    kept.append(Facts(rank, report.memory_pressure))
        now = max((report.time for report in reports), default=0.0)
        found, waiting = [], []
        suspects = (*self.pending, *self._measure(reports))
        known = self.history.slow if self.history else {}
        for slow in suspects:
            # From the slow steps without the first of these, and since then; else the last reports.
            begin = slow.first_step + (slow.last_step - slow.first_step) * _LATER
            late = {rank: [one for one in kept if one.rank.step > begin] for rank, kept in self.facts.items()}
            chosen = {rank: late[rank] or list(kept)[-_LEAST_REPORTS:] for rank, kept in self.facts.items()}
            others = [facts for rank, facts in chosen.items() if rank != slow.rank and rank not in known]
            cause = find_cause(chosen.get(slow.rank, ()), others, slow.excess / (1 + slow.excess))
            if cause.name == _OWN_CODE and len(late.get(slow.rank, ())) < _CLEAR_REPORTS:
                waiting.append(slow)  # the report may have begun before the slow steps
                continue
            host, steps = self.pids[slow.rank][0], (slow.first_step, slow.last_step)
            found.append(Straggler(slow.rank, host, slow.excess, cause.name, cause.detail, *steps, now))
        self.pending = waiting
        self.told = (*self.told, *found)[-_MOST_TOLD:]
        return tuple(found)

    def _measure(self, reports: Sequence[NodeReport]) -> "Sequence[SlowRank]":
        """Measure the steps of new reports, and return the ranks that are found to be slow.

        None are measured if a rank's times are damaged, or those of many ranks are missing.
        """
        times = tuple(one for report in reports for one in report.collectives if one.rank in self.pids)
        if 2 * len(times) < max(4, len(self.pids)) or times == self.seen:
            return ()
        self.seen = times
        if len({one.measure for one in times}) > 1:
            return ()
        # numpy takes time and memory, which a program without collectives is spared.
        from launcher.watch.excess import ExcessHistory, measure_steps, measure_waits

        try:
            steps = measure_steps(times, {one.rank: self.pids[one.rank][0] for one in times})
        except ValueError:
            return ()
        if not len(steps):
            return ()
        self.waits = measure_waits(steps)
        self.history = self.history or ExcessHistory()
        return self.history.add(steps)


def explain_straggler(straggler: Straggler) -> str:
    """Say who is slow, by how much and why, in one sentence."""
    where = f" on {straggler.host}" if straggler.host else ""
    when = f"steps {straggler.first_step} to {straggler.last_step}"
    much = f"its own part of a step is {straggler.excess:.0%} longer than the others'"
    return f"rank {straggler.rank}{where} is a straggler: {much} ({when}): {straggler.detail}"


# Causes: what a slow rank has more of than the other ranks

_EXPLAINED = 0.5
"""Share of the excess that a cause accounts for if it is named before others."""
_PARTLY = 0.25
"""The largest cause is named if it accounts for this share of the excess."""
_FAULT_SECONDS = 5e-4
"""What a major page fault is taken to cost: 0.1 ms from flash, several from disks and networks."""
_PRESSURE = 0.05
"""Share of the time that tasks of the node wait for memory (PSI), from which on it is named."""
_CLOCK = 0.97
"""A GPU's clock in that of the others, below which it is low."""
_COMPUTES = 0.85
"""Cores that a rank uses at least, if it computes all the time."""


class Cause(NamedTuple):
    """A cause of Straggler, how much of the time it accounts for, and the figures."""

    name: str
    share: float
    detail: str


def find_cause(own: Sequence[Facts], others: Sequence[Sequence[Facts]], excess: float) -> Cause:
    """Compare a slow rank's reports with those of the other ranks over the same time.

    `excess` is the share of the time by which it holds the others up.
    """
    found = list(_list_causes(own, others)) if own else []
    clear = [cause for cause in found if cause.share >= _EXPLAINED * excess]
    main = clear[0] if clear else max(found, key=lambda cause: cause.share, default=None)
    if main and main.share >= _PARTLY * excess:
        return main
    gpu = next((one.rank.gpu for one in reversed(own) if one.rank.gpu), None)
    theirs = [facts[-1].rank.gpu for facts in others if facts]
    if gpu and _is_narrow(gpu) and sum(map(_is_narrow, theirs)) * 2 <= len(theirs):
        text = f"its GPU's PCIe link has {gpu.pcie_width} lanes of {gpu.max_pcie_width}"
        return Cause("pcie", 0.0, text)
    cpu = _take_mean(own, lambda one: one.rank.cpu)
    if cpu is None:
        return Cause(_OWN_CODE, 0.0, "its own code, for none of the reasons that are looked for")
    does = "computes" if cpu >= _COMPUTES else "sleeps, or waits for something but data and other ranks"
    return Cause(_OWN_CODE, 0.0, f"its own code: it {does}, with {cpu:.2f} cores in use")


_SHARES: Sequence[tuple[str, Callable[[Rank], float | None], str]] = (
    ("data", lambda one: one.data_share, "it waits for data for {:.0%} of the time, the others for {:.0%}"),
    (
        "cpu_quota",
        lambda one: one.throttled,
        "the CPU quota of its cgroup holds it back for {:.0%} of the time",
    ),
    ("run_delay", lambda one: one.thread_delay, "it waits for a core for {:.0%} of the time"),
)
"""Causes that are shares of the time, in the order in which they are named, with their words."""


def _take_mean(facts: Sequence[Facts], get: Callable[[Facts], float | None]) -> float | None:
    """Return the mean of the values that are known."""
    values = [value for one in facts if (value := get(one)) is not None]
    return fmean(values) if values else None


def _list_causes(own: Sequence[Facts], others: Sequence[Sequence[Facts]]) -> Iterator[Cause]:
    """Give what the rank has more of than the others, in the order in which causes are named."""

    def compare(get: Callable[[Rank], float | None]) -> tuple[float, float] | None:
        """Return a value of the rank, in the mean of its reports, and the median of the others'."""
        mean, *theirs = (_take_mean(facts, lambda one: get(one.rank)) for facts in (own, *others))
        known = [value for value in theirs if value is not None]
        return None if mean is None else (mean, median(known) if known else 0.0)

    busy = {(one.name, one.pid): one for facts in own for one in facts.rank.neighbours}
    neighbours = " and ".join(
        f"{one.name} (PID {one.pid}) runs on its cores for {one.share:.0%} of the time"
        for one in sorted(busy.values(), key=lambda one: -one.share)[:2]
    )
    for name, get, words in _SHARES:
        if values := compare(get):
            detail = words.format(*values)
            has_neighbours = name == "run_delay" and neighbours
            yield Cause(name, values[0] - values[1], f"{neighbours}; {detail}" if has_neighbours else detail)
    # Memory that is read back from disk; with memory pressure on its node, that is the reason.
    values = compare(lambda one: one.major_faults)
    pressure, *theirs = (
        _take_mean(facts, lambda one: one.memory_pressure) or 0.0 for facts in (own, *others)
    )
    faults = max(0.0, values[0] - values[1]) if values else 0.0
    share = min(1.0, _FAULT_SECONDS * faults)
    more = pressure - median(theirs) if theirs else 0.0
    detail = f"{faults:.0f} major page faults a second more than the others"
    if pressure >= _PRESSURE and max(share, more) > 0:
        text = f"tasks on its node wait for memory for {pressure:.0%} of the time"
        yield Cause("memory_pressure", max(share, more), f"{text}, {detail}" if faults >= 1 else text)
    elif values:
        yield Cause("page_faults", share, detail)
    values = compare(lambda one: one.gpu.sm_clock if one.gpu else None)
    if values and values[0] < _CLOCK * values[1]:
        clock, usual = values
        reasons = dict.fromkeys(name for one in own if one.rank.gpu for name in one.rank.gpu.event_reasons)
        why = f" ({', '.join(reasons)})" if reasons else ""
        detail = f"its GPU runs at {clock:.0f} MHz, the others at {usual:.0f}{why}"
        yield Cause("gpu_clock", 1 - clock / usual, detail)


def _is_narrow(gpu: GpuSample | None) -> bool:
    """Tell whether the PCIe link of a GPU has fewer lanes than it can have."""
    return bool(gpu and gpu.pcie_width and gpu.max_pcie_width and gpu.pcie_width < gpu.max_pcie_width)
