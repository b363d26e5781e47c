"""By how much a rank's own part of a step is longer than the others', and who is slow step after step. Pure.

A collective ends on all of its ranks at the same time, so the step times of ranks are equal, and the rank
that comes to collectives last is the one that the others wait for. Its lateness at a collective counts in
full if all ranks set out together after the one before (they had waited for it); if they had not waited, as
between the buckets of DDP's backward pass, only the growth of its lateness counts. Which of the two holds is
not recorded, but noise tells: lateness of the moment that carries on to the next collective makes intervals
less spread than lateness itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from launcher.watch.flight_recorder import DURATION, STEP_ENDS, unpack_marks
from launcher.watch.model import CollectiveTimes

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]
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


@dataclass(frozen=True, slots=True)
class StepExcess:
    """One step: by how much longer each rank's own part took than the others'."""

    step: int
    seconds: float
    """Of the whole step."""
    excess: Mapping[int, float]
    """Seconds by rank; negative for ranks that were quicker than the others."""


def measure_steps(times: Sequence[CollectiveTimes], hosts: Mapping[int, str]) -> tuple[StepExcess, ...]:
    """Measure the steps that all ranks have whole; raises ValueError for times that are damaged.

    `hosts` has the node of each rank; the clocks of nodes need not agree. If times are minus the durations of
    collectives, it holds that the shorter one was on a rank, the later the rank came.
    """
    durations = times[0].measure == DURATION
    numbers = {STEP_ENDS: 0}
    lengths: dict[int, list[float]] = {}
    rows: list[_Integers] = []
    for index, one in enumerate(times):
        table = unpack_marks(one)
        table[:, 1] = np.array([numbers.setdefault(name, len(numbers)) for name in one.groups])[table[:, 1]]
        ends = table[table[:, 1] == 0]
        for before, after in pairwise(ends):
            if after[0] == before[0] + 1:
                lengths.setdefault(int(after[0]), []).append((after[3] - before[3]) / 1e6)
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
    known = np.array(sorted(step for step, own in lengths.items() if len(own) == len(times)), np.int64)
    excess = np.zeros((len(known), len(times)))
    if durations or not nodes.max() or arrivals.align_clocks(nodes):
        counted = arrivals.measure_excess(durations=durations)
        is_known = np.isin(arrivals.step, known)
        steps = np.searchsorted(known, arrivals.step[is_known])
        np.add.at(excess, (steps, arrivals.rank[is_known]), counted[is_known])
    ranks = [one.rank for one in times]
    return tuple(
        StepExcess(int(step), float(np.median(lengths[int(step)])), dict(zip(ranks, own, strict=True)))
        for step, own in zip(known, excess.tolist(), strict=True)
    )


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
        return sum(_measure_deviation(chosen[ranks == rank]) for rank in np.unique(ranks))

    def align_clocks(self, nodes: _Integers) -> bool:
        """Take the offsets of the nodes' clocks off all times; tell whether they are known.

        Nodes are together at the place in a step at which lateness varies least from step to step: just after
        they have waited for each other. What a whole node is late there counts as its clock's offset.
        """
        node = nodes[self.rank]
        call = np.repeat(np.arange(len(self.starts)), self.sizes)
        has_node: NDArray[np.bool_] = np.zeros((len(self.starts), nodes.max() + 1), bool)
        has_node[call, node] = True
        is_whole: NDArray[np.bool_] = np.all(has_node, axis=1)[call]
        late = self.compare(self.moment, lambda own: own - np.median(own, axis=1, keepdims=True))
        # Ranks may count a collective to different steps, so that a place does not have those of all nodes.
        places = [is_whole & (self.place == place) for place in np.unique(self.place[is_whole])]
        places = [at for at in places if len(np.unique(node[at])) == nodes.max() + 1]
        if not places:
            return False
        together = min(places, key=lambda at: self.spread(at, late))
        offsets = [np.median(late[together & (node == one)]) for one in range(nodes.max() + 1)]
        self.moment = self.moment - np.array(offsets)[node]
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


def _measure_deviation(values: _Floats) -> float:
    """Return the median absolute deviation of values."""
    return float(np.median(np.abs(values - np.median(values))))


def measure_waits(steps: Sequence[StepExcess]) -> dict[int, float]:
    """Return the share of time that each rank waits for the one that takes longest in a step."""
    total = sum(step.seconds for step in steps)
    waits: dict[int, float] = {}
    for step in steps:
        last = max(step.excess.values(), default=0.0)
        for rank, excess in step.excess.items():
            waits[rank] = waits.get(rank, 0.0) + (last - excess) / _COUNTED.get(len(step.excess), 1.0)
    return {rank: min(1.0, wait / total) for rank, wait in waits.items()} if total > 0 else {}


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


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive steps taken together."""

    first_step: int
    last_step: int
    seconds: float
    """Of a step, in the mean."""
    excess: Mapping[int, float]
    """Seconds for each step in the mean, by rank."""
    error: float
    """Standard error of these within the block, in the median over ranks."""


class ExcessHistory:
    """The last steps of all ranks; says which of them begin and cease to be slow."""

    def __init__(self) -> None:
        self.waiting: list[StepExcess] = []
        self.blocks: list[_Block] = []
        self.last_step = 0
        self.slow: dict[int, SlowRank] = {}

    def add(self, steps: Iterable[StepExcess]) -> tuple[SlowRank, ...]:
        """Add steps, if they are not known already; return the ranks that begin to be slow.

        Steps may be missing in between.
        """
        found: list[SlowRank] = []
        for step in sorted(steps, key=lambda one: one.step):
            if step.step <= self.last_step:
                continue
            self.last_step = step.step
            self.waiting.append(step)
            if len(self.waiting) == _BLOCK:
                self.blocks = [*self.blocks[1 - _MOST_BLOCKS :], _join_steps(self.waiting)]
                self.waiting = []
                found += self._judge()
        return tuple(found)

    def _judge(self) -> list[SlowRank]:
        """Return the ranks that are slow now and were not before; forget those that are quick again."""
        recent = self.blocks[-_SCALES[0] :]
        for rank in tuple(self.slow):
            share = np.median([block.excess.get(rank, 0.0) / block.seconds for block in recent])
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


def _join_steps(steps: Sequence[StepExcess]) -> _Block:
    """Take the mean of steps; only ranks that are in all of them count.

    The largest and the smallest excess of each rank are left out: one long pause is no habit.
    """
    ranks = sorted(set.intersection(*(set(step.excess) for step in steps)))
    values = np.sort([[step.excess[rank] for rank in ranks] for step in steps], axis=0)[1:-1]
    excess = dict(zip(ranks, values.mean(axis=0).tolist(), strict=True))
    error = float(np.median(values.std(axis=0))) / sqrt(len(steps)) * _TRIMMED
    seconds = float(np.median([step.seconds for step in steps]))
    return _Block(steps[0].step, steps[-1].step, seconds, excess, error)


def _find_slow(blocks: Sequence[_Block], scale: int) -> list[SlowRank]:
    """Return the ranks that are slow over all of the last blocks, `scale` of them, the slowest first.

    A rank is slow if the median of its blocks is at least MIN_EXCESS, is certain by its spread within and
    between blocks, and stands out from the others by a robust z (their median and median absolute
    deviation).
    """
    recent = blocks[-scale:]
    ranks = sorted(set.intersection(*(set(block.excess) for block in recent)))
    if len(ranks) < 2:
        return []
    older = [block for block in blocks[:-scale] if block.excess.keys() >= set(ranks)]
    seconds = max(1e-9, float(np.median([block.seconds for block in recent])))
    shares, before = (
        np.array([[block.excess[rank] for rank in ranks] for block in part]) / seconds
        for part in (recent, older)
    )
    middles = np.median(shares, axis=0)
    across = _SPREAD * _measure_deviation(middles)
    within = float(np.median([block.error for block in recent])) / seconds / sqrt(scale)
    # How much ranks wander from block to block, as a share of the step, in the median over ranks.
    drifts = [
        np.median(np.abs(part - np.median(part, axis=0)), axis=0)
        for part in (shares, before)
        if len(part) > 2
    ]
    between = _SPREAD * float(np.median(np.max(drifts, axis=0))) / sqrt(max(1, scale / _RELATED))
    error = _MEDIAN_ERROR * max(within, between, _NOISE_FLOOR)
    found = []
    for rank, middle, least in zip(ranks, middles.tolist(), shares.min(axis=0), strict=True):
        excess = middle / (1 - middle) if middle < 1 else inf
        if excess < _MIN_EXCESS or least < 0 or middle < _CERTAINTY * error:
            continue
        stands_out = middle - float(np.median(middles)) >= _ROBUST_Z * max(across, _NOISE_FLOOR)
        if len(ranks) <= _MIN_OTHERS or stands_out:
            found.append(SlowRank(rank, excess, recent[0].first_step, recent[-1].last_step))
    return sorted(found, key=lambda slow: -slow.excess)
