"""By how much longer each rank's own part of a step is than the others', and who is slow step after step.

A collective ends on all of its ranks at the same time, so the step times of ranks are equal, and the rank
that comes to collectives last is the one that the others wait for. Its lateness at a collective counts in
full if all ranks set out together after the one before (they had waited for it); if they had not waited, as
between the buckets of DDP's backward pass, only the growth of its lateness counts. Which of the two holds is
not recorded, but noise tells: lateness of the moment that carries on to the next collective makes intervals
less spread than lateness itself.
"""

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt

import numpy as np
from numpy.typing import NDArray

from launcher.watch.flight_recorder import DURATION, STEP_ENDS
from launcher.watch.model import CollectiveTimes

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]

_LARGEST_PACKED = 1 << 20
"""Bytes of a rank's marks; more are not believed."""


def unpack_marks(times: CollectiveTimes) -> NDArray[np.int64]:
    """Return the marks of a rank; raises ValueError for damaged ones."""
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b85decode(times.marks), _LARGEST_PACKED)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    table = np.frombuffer(data, "<i8").reshape(4, -1).T.cumsum(axis=0)
    if not unzip.eof or not len(table) or not 0 <= table[:, 1].min() <= table[:, 1].max() < len(times.groups):
        raise ValueError("marks are cut off, too many, or of an unknown group")
    return table


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
