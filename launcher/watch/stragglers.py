"""Names the ranks that others wait for in each step, and why they are slow, from the reports of all nodes.

A collective ends on all of its ranks at the same time, so the step times of ranks are equal, and the rank
that comes to collectives last is the one that the others wait for. Its lateness at a collective counts in
full if all ranks set out together after the one before (they had waited for it); if they had not waited, as
between the buckets of DDP's backward pass, only the growth of its lateness counts. Which of the two holds is
not recorded, but noise tells: lateness of the moment that carries on to the next collective makes intervals
less spread than lateness itself.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from launcher.watch.flight_recorder import DURATION, STEP_ENDS, unpack_marks
from launcher.watch.model import CollectiveTimes, GpuSample, NodeReport, Rank, Straggler

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]

# By how much a rank's own part of a step is longer than the others'

_FIGURES, _BLOCK_FIGURES = 2, 4
"""Columns before those of ranks, in a table of steps and of blocks."""
_FEW = 16
"""Up to so many ranks, a rank is compared with the others alone; in larger groups with all."""
_WAITED = 0.8
"""Share of steps in which all ranks have waited at a place that counts as one where they wait."""
_LESS_SPREAD = 0.85
"""Spread of arrivals in that of intervals at such a place, at most; two equal parts of a step give 0.71."""
_COUNTED = {2: 2.0, 3: 1.5}
"""How often a difference between two ranks is in that of their excess, by the number of ranks.

Each is compared with the others: of two ranks one is early by what the other is late.
"""


def measure_steps(times: Sequence[CollectiveTimes], hosts: Mapping[int, str]) -> _Floats:
    """Measure the steps that all ranks have whole; raises ValueError for times that are damaged.

    A row is a step: its number, its seconds, and by how many seconds the own part of rank 0, 1, … was longer
    than the others'; NaN for ranks without times. `hosts` has the node of each rank; the clocks of nodes need
    not agree. If times are minus the durations of collectives, it holds that the shorter one was on a rank,
    the later the rank came.
    """
    durations = times[0].measure == DURATION
    numbers = {STEP_ENDS: 0}
    rows: list[_Integers] = []
    lengths: list[_Integers] = []
    for index, one in enumerate(times):
        table = unpack_marks(one)
        table[:, 1] = np.array([numbers.setdefault(name, len(numbers)) for name in one.groups])[table[:, 1]]
        ends = table[table[:, 1] == 0]
        whole = np.diff(ends[:, 0]) == 1
        lengths.append(np.column_stack([ends[1:, 0], np.diff(ends[:, 3])])[whole])
        if durations:
            table = table[table[:, 1] != 0]
        # A collective's place in a step: its group, and how many of the group came before it in the step.
        count = np.zeros(len(table), np.int64)
        for group in np.unique(table[:, 1]):
            (at,) = np.nonzero(table[:, 1] == group)
            count[at] = np.arange(len(at)) - np.searchsorted(table[at, 0], table[at, 0])
        interval = np.diff(table[:, 3], prepend=0)
        # A rank's first one only begins an interval.
        rows.append(np.column_stack([table, count, interval, np.full(len(table), index)])[1:])
    arrivals = _Arrivals(np.concatenate(rows))
    nodes = np.unique([hosts[one.rank] for one in times], return_inverse=True)[1]
    ended, seconds = np.concatenate(lengths).T
    steps, counts = np.unique(ended, return_counts=True)
    steps = steps[counts == len(times)]
    found = np.full((len(steps), _FIGURES + max(hosts) + 1), nan)
    found[:, 0], found[:, 1] = steps, [np.median(seconds[ended == step]) / 1e6 for step in steps]
    excess = np.zeros((len(steps), len(times)))
    if durations or not nodes.max() or arrivals.align_clocks(nodes):
        is_known = np.isin(arrivals.step, steps)
        places = np.searchsorted(steps, arrivals.step[is_known])
        counted = arrivals.measure_excess(durations=durations)
        np.add.at(excess, (places, arrivals.rank[is_known]), counted[is_known])
    found[:, [_FIGURES + one.rank for one in times]] = excess
    return found


class _Arrivals:
    """Ranks come to collectives that others come to, too: columns, ordered by collective and rank."""

    def __init__(self, table: _Integers) -> None:
        """A row has the step, the group, the sequence number, the time, the count, the interval, the rank."""
        _, call, sizes = np.unique(table[:, 1:3], axis=0, return_inverse=True, return_counts=True)
        place = np.unique(table[:, [1, 4]], axis=0, return_inverse=True)[1]
        order = np.lexsort((table[:, 6], call.ravel()))
        order = order[sizes[call.ravel()[order]] > 1]
        self.step, self.rank, self.place = table[order, 0], table[order, 6], place.ravel()[order]
        self.moment: _Floats = table[order, 3] / 1e6
        self.interval: _Floats = table[order, 5] / 1e6
        self.starts = np.flatnonzero(np.diff(call.ravel()[order], prepend=-1))
        """Where a collective begins."""
        self.sizes = np.diff(self.starts, append=len(order))
        """Its ranks."""

    def compare(self, values: _Floats, subtract: Callable[[_Floats], _Floats]) -> _Floats:
        """Return the values of each collective, in a row for each one of as many ranks, less something."""
        found = np.zeros(len(values))
        for size in np.unique(self.sizes):
            at = self.starts[self.sizes == size][:, None] + np.arange(size)
            found[at] = subtract(values[at])
        return found

    def spread(self, at: NDArray[np.bool_], values: _Floats) -> float:
        """Return the sum over ranks of the median distance of some values from a rank's own median."""
        chosen, ranks = values[at], self.rank[at]
        return sum(float(_measure_deviation(chosen[ranks == rank])) for rank in np.unique(ranks))

    def align_clocks(self, nodes: _Integers) -> bool:
        """Take the offsets of the nodes' clocks off all times; tell whether they are known.

        Nodes are together at the place in a step at which lateness varies least from step to step: just after
        they have waited for each other. What a whole node is late there counts as its clock's offset.
        """
        node, count = nodes[self.rank], nodes.max() + 1
        call = np.repeat(np.arange(len(self.starts)), self.sizes)
        has_node: NDArray[np.bool_] = np.zeros((len(self.starts), count), bool)
        has_node[call, node] = True
        is_whole: NDArray[np.bool_] = np.all(has_node, axis=1)[call]
        late = self.compare(self.moment, lambda own: own - np.median(own, axis=1, keepdims=True))
        # Ranks may count a collective to different steps, so that a place does not have those of all nodes.
        places = [is_whole & (self.place == place) for place in np.unique(self.place[is_whole])]
        places = [at for at in places if len(np.unique(node[at])) == count]
        if not places:
            return False
        together = min(places, key=lambda at: self.spread(at, late))
        offsets = np.array([np.median(late[together & (node == one)]) for one in range(count)])
        self.moment = self.moment - offsets[node]
        return True

    def measure_excess(self, *, durations: bool) -> _Floats:
        """Return what counts of each arrival: its lateness at a place to which ranks set out together.

        There a rank's interval is longer if it came early to the collective before, and waited there:
        intervals are spread more than arrivals are, with each rank's usual lateness taken off. And no rank
        comes before the last one has come to the collective before, as far as times say so: durations do not.
        """
        if not len(self.starts):
            return np.zeros(0)
        late, growth = (self.compare(own, subtract_others) for own in (self.moment, self.interval))
        last_before = np.maximum.reduceat(self.moment - self.interval, self.starts)
        waited = np.repeat(np.minimum.reduceat(self.moment, self.starts) >= last_before, self.sizes)
        counted = growth.copy()
        for place in np.unique(self.place):
            at = self.place == place
            has_waited = durations or waited[at].mean() >= _WAITED
            if has_waited and self.spread(at, late) < _LESS_SPREAD * self.spread(at, growth):
                counted[at] = late[at]
        return counted


def subtract_others(values: _Floats) -> _Floats:
    """Return each value less the median of the others, along the last axis."""
    count = values.shape[-1]
    if count > _FEW:
        return values - np.median(values, axis=-1, keepdims=True)
    others = [np.median(np.delete(values, index, axis=-1), axis=-1) for index in range(count)]
    return values - np.stack(others, axis=-1)


def _measure_deviation(values: _Floats) -> _Floats:
    """Return the median absolute deviation of values, or of each column."""
    deviation: _Floats = np.median(np.abs(values - np.median(values, axis=0)), axis=0)
    return deviation


def measure_waits(steps: _Floats) -> dict[int, float]:
    """Return the share of time that each rank waits for the one that takes longest in a step."""
    excess = steps[:, _FIGURES:]
    (ranks,) = np.nonzero(~np.isnan(excess).all(axis=0))
    own = excess[:, ranks]
    waits = (own.max(axis=1, keepdims=True) - own).sum(axis=0) / _COUNTED.get(len(ranks), 1.0)
    shares = np.minimum(1.0, waits / max(steps[:, 1].sum(), 1e-9))
    return dict(zip(ranks.tolist(), shares.tolist(), strict=True))


# Who is slow step after step

_BLOCK = 10
"""Steps that are taken together: their mean is less noisy, and more like other means, than single steps."""
_SCALES = (4, 6, 8, 10)
"""Blocks, newest last, over which a rank must be slow: large excess is plain after few of them."""
_MIN_BLOCKS = 6
"""Blocks that are known before anything is said: fewer do not show how a rank drifts."""
_MOST_BLOCKS = 40
_MIN_EXCESS = 0.05
"""Excess, as a share of the others' step, that is worth to be told."""
_CERTAINTY = 4.5
"""Excess in standard errors."""
_RELATED = 2
"""Blocks of which one counts for the error: ranks drift, so that neighbouring blocks are alike."""
_ROBUST_Z = 5.0
"""Excess in standard deviations of the other ranks' excess, once there are MIN_OTHERS."""
_MIN_OTHERS = 4
_SPREAD = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median in that of a mean, for normal noise: sqrt(pi / 2)."""
_TRIMMED = 1.4
"""Standard deviation of ten normal values in that of the eight that are left without both ends."""
_NOISE_FLOOR = 0.002
"""Spread of blocks, as a share of the step, below which none is believed."""
_RECOVERED = 0.5
"""An episode ends once the excess over the fewest blocks is below this share of MIN_EXCESS."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slow step after step."""

    rank: int
    excess: float
    """Of its own part of a step, as a share of the others' step."""
    first_step: int
    last_step: int


class ExcessHistory:
    """The last steps of all ranks; says which of them begin and cease to be slow."""

    def __init__(self) -> None:
        self.waiting: _Floats = np.empty((0, _FIGURES))
        self.blocks: _Floats = np.empty((0, _BLOCK_FIGURES))
        """A row is consecutive steps taken together: the first and the last one, the seconds of a step, the
        standard error of the excess within the block (in the median over ranks), and the excess of ranks."""
        self.last_step = 0
        self.slow: dict[int, SlowRank] = {}

    def add(self, steps: _Floats) -> list[SlowRank]:
        """Add steps, as `measure_steps` gives them, if they are not known already.

        Return the ranks that begin to be slow. Steps may be missing in between.
        """
        self.waiting = _append(self.waiting, steps[steps[:, 0] > self.last_step])
        self.last_step = int(max(self.last_step, *steps[:, 0]))
        found: list[SlowRank] = []
        while len(self.waiting) >= _BLOCK:
            block, self.waiting = np.split(self.waiting, [_BLOCK])
            excess = block[:, _FIGURES:]
            # Ranks count that are in all of the steps. The largest and the smallest excess of each is left
            # out: one long pause is no habit.
            kept = np.sort(excess, axis=0)[1:-1]
            kept[:, np.isnan(excess).any(axis=0)] = nan
            error = float(np.nanmedian(kept.std(axis=0))) / sqrt(_BLOCK) * _TRIMMED
            figures = [block[0, 0], block[-1, 0], np.median(block[:, 1]), error]
            row = np.array([[*figures, *kept.mean(axis=0)]])
            self.blocks = _append(self.blocks, row)[-_MOST_BLOCKS:]
            found += self._judge()
        return found

    def _judge(self) -> list[SlowRank]:
        """Return the ranks that are slow now and were not before; forget those that are quick again."""
        recent = self.blocks[-_SCALES[0] :]
        for rank in tuple(self.slow):
            share = np.median(np.nan_to_num(recent[:, _BLOCK_FIGURES + rank]) / recent[:, 2])
            if share < _RECOVERED * _MIN_EXCESS:
                del self.slow[rank]
        found: dict[int, SlowRank] = {}
        for scale in _SCALES:
            if len(self.blocks) >= max(scale, _MIN_BLOCKS):
                for slow in _find_slow(self.blocks, scale):
                    found.setdefault(slow.rank, slow)
        new = [slow for rank, slow in found.items() if rank not in self.slow]
        self.slow |= found
        return new


def _append(table: _Floats, more: _Floats) -> _Floats:
    """Return two tables as one, whose columns are those of the wider one."""
    width = max(table.shape[1], more.shape[1])
    parts = [np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=nan) for one in (table, more)]
    return np.concatenate(parts)


def _find_slow(blocks: _Floats, scale: int) -> list[SlowRank]:
    """Return the ranks that are slow over all of the last blocks, `scale` of them, the slowest first.

    A rank is slow if the median of its blocks is at least MIN_EXCESS, is certain by its spread within and
    between blocks, and stands out from the others by a robust z (their median and median absolute
    deviation).
    """
    recent, older = blocks[-scale:], blocks[:-scale]
    (ranks,) = np.nonzero(~np.isnan(recent[:, _BLOCK_FIGURES:]).any(axis=0))
    if len(ranks) < 2:
        return []
    older = older[~np.isnan(older[:, _BLOCK_FIGURES + ranks]).any(axis=1)]
    seconds = max(1e-9, float(np.median(recent[:, 2])))
    shares, before = (part[:, _BLOCK_FIGURES + ranks] / seconds for part in (recent, older))
    middles = np.median(shares, axis=0)
    across = _SPREAD * float(_measure_deviation(middles))
    within = float(np.median(recent[:, 3])) / seconds / sqrt(scale)
    # How much ranks wander from block to block, as a share of the step, in the median over ranks.
    drifts = [_measure_deviation(part) for part in (shares, before) if len(part) > 2]
    between = _SPREAD * float(np.median(np.max(drifts, axis=0))) / sqrt(max(1, scale / _RELATED))
    error = _MEDIAN_ERROR * max(within, between, _NOISE_FLOOR)
    found = []
    for rank, middle, least in zip(ranks.tolist(), middles.tolist(), shares.min(axis=0), strict=True):
        excess = middle / (1 - middle) if middle < 1 else inf
        if excess < _MIN_EXCESS or least < 0 or middle < _CERTAINTY * error:
            continue
        stands_out = middle - float(np.median(middles)) >= _ROBUST_Z * max(across, _NOISE_FLOOR)
        if len(ranks) <= _MIN_OTHERS or stands_out:
            found.append(SlowRank(rank, excess, int(recent[0, 0]), int(recent[-1, 1])))
    return sorted(found, key=lambda slow: -slow.excess)


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
        self.history = ExcessHistory()
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
            begin = time.thread_time()
            self.next_time = time.monotonic() + _AFTER_DEFECT
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
        for slow in (*self.pending, *self._measure(reports)):
            # From the slow steps without the first of these, and since then; else the last reports.
            begin = slow.first_step + (slow.last_step - slow.first_step) * _LATER
            late = {rank: [one for one in kept if one.rank.step > begin] for rank, kept in self.facts.items()}
            chosen = {rank: late[rank] or list(kept)[-_LEAST_REPORTS:] for rank, kept in self.facts.items()}
            others = [
                facts for rank, facts in chosen.items() if rank != slow.rank and rank not in self.history.slow
            ]
            cause = find_cause(chosen.get(slow.rank, ()), others, slow.excess / (1 + slow.excess))
            if cause.name == _OWN_CODE and len(late.get(slow.rank, ())) < _CLEAR_REPORTS:
                waiting.append(slow)  # the report may have begun before the slow steps
                continue
            host, steps = self.pids[slow.rank][0], (slow.first_step, slow.last_step)
            found.append(Straggler(slow.rank, host, slow.excess, cause.name, cause.detail, *steps, now))
        self.pending = waiting
        self.told = (*self.told, *found)[-_MOST_TOLD:]
        return tuple(found)

    def _measure(self, reports: Sequence[NodeReport]) -> Sequence[SlowRank]:
        """Measure the steps of new reports, and return the ranks that are found to be slow.

        None are measured if a rank's times are damaged, or those of many ranks are missing.
        """
        times = tuple(one for report in reports for one in report.collectives if one.rank in self.pids)
        if 2 * len(times) < max(4, len(self.pids)) or times == self.seen:
            return ()
        self.seen = times
        if len({one.measure for one in times}) > 1:
            return ()
        try:
            steps = measure_steps(times, {one.rank: self.pids[one.rank][0] for one in times})
        except ValueError:
            return ()
        self.waits = measure_waits(steps) if len(steps) else self.waits
        return self.history.add(steps) if len(steps) else ()


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
