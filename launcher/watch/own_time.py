"""By how much a rank's own part of a step is longer than the others', and who is slow step after step. Pure.

A collective ends on all of its ranks at the same time, so the step times of ranks are equal, and the rank
that comes to collectives last is the one that the others wait for. Its lateness at a collective counts in
full if all ranks set out together after the one before (they had waited for it); if they had not waited, as
between the buckets of DDP's backward pass, only the growth of its lateness counts. Which of the two holds is
not recorded, but noise tells: lateness of the moment that carries on to the next collective makes intervals
less spread than lateness itself.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median, pstdev

from launcher.watch.flight_recorder import STEP_ENDS, Mark

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
_Name = tuple[str, int]
"""A collective on all ranks: its group and its sequence number."""
_Place = tuple[str, int]
"""Where in a step a collective is: its group, and how many of the group came before it in the step."""


@dataclass(frozen=True, slots=True)
class StepExcess:
    """One step: by how much longer each rank's own part took than the others'."""

    step: int
    seconds: float
    """Of the whole step."""
    excess: Mapping[int, float]
    """Seconds by rank; negative for ranks that were quicker than the others."""


@dataclass(slots=True)
class _Arrival:
    """A rank comes to a collective."""

    time: float
    interval: float
    """Since the collective or end of a step before."""
    step: int
    place: _Place
    late: float = 0.0
    """How late it comes beside the others."""
    growth: float = 0.0
    """By how much its interval is longer than theirs."""


_Arrivals = dict[_Name, dict[int, _Arrival]]
"""Of each collective, by rank."""


def measure_steps(
    marks: Mapping[int, Sequence[Mark]], hosts: Mapping[int, str], *, durations: bool = False
) -> tuple[StepExcess, ...]:
    """Measure the steps that all ranks have whole.

    `marks` has those of each rank in their order, `hosts` the node of each rank. The clocks of nodes need not
    agree. With `durations` a collective's time is minus its duration: the shorter it was on a rank, the later
    the rank came.
    """
    arrivals: _Arrivals = defaultdict(dict)
    lengths: dict[int, list[float]] = defaultdict(list)
    for rank, own in marks.items():
        counts: dict[tuple[int, str], int] = defaultdict(int)
        before, end = None, None
        for mark in own:
            if mark.group == STEP_ENDS:
                if end is not None and end.step == mark.step - 1:
                    lengths[mark.step].append(mark.time - end.time)
                end = mark
                if durations:
                    continue
            place = mark.group, counts[mark.step, mark.group]
            counts[mark.step, mark.group] += 1
            if before is not None:  # a rank's first one only begins an interval
                interval = mark.time - before
                arrivals[mark.group, mark.sequence][rank] = _Arrival(mark.time, interval, mark.step, place)
            before = mark.time
    if len(set(hosts.values())) > 1 and not durations:
        _align_clocks(arrivals, hosts)
    shared = {name: found for name, found in arrivals.items() if len(found) > 1}
    for found in shared.values():
        late = subtract_others([arrival.time for arrival in found.values()])
        growth = subtract_others([arrival.interval for arrival in found.values()])
        for arrival, own_late, own_growth in zip(found.values(), late, growth, strict=True):
            arrival.late, arrival.growth = own_late, own_growth
    synchronous = _find_synchronous(shared, durations=durations)
    seconds = {step: median(found) for step, found in lengths.items() if len(found) == len(marks)}
    excess = {step: dict.fromkeys(marks, 0.0) for step in seconds}
    for found in shared.values():
        for rank, arrival in found.items():
            if arrival.step in excess:
                counted = arrival.late if arrival.place in synchronous else arrival.growth
                excess[arrival.step][rank] += counted
    return tuple(StepExcess(step, seconds[step], excess[step]) for step in sorted(seconds))


def subtract_others(values: Sequence[float]) -> list[float]:
    """Return each value less the median of the others."""
    if len(values) > _FEW:
        middle = median(values)
        return [value - middle for value in values]
    return [value - median([*values[:index], *values[index + 1 :]]) for index, value in enumerate(values)]


def _find_synchronous(arrivals: _Arrivals, *, durations: bool) -> set[_Place]:
    """Return the places in a step to which all ranks have set out together.

    There a rank's interval is longer if it came early to the collective before, and waited there: intervals
    are spread more than arrivals are, with each rank's usual lateness taken off. And no rank comes before the
    last one has come to the collective before, as far as times say so: durations do not.
    """
    late: dict[_Place, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    grown: dict[_Place, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    waited: dict[_Place, list[bool]] = defaultdict(list)
    for found in arrivals.values():
        last_before = max(arrival.time - arrival.interval for arrival in found.values())
        has_waited = min(arrival.time for arrival in found.values()) >= last_before
        for place in {arrival.place for arrival in found.values()}:  # ranks may differ at the end of a step
            waited[place].append(has_waited)
        for rank, arrival in found.items():
            late[arrival.place][rank].append(arrival.late)
            grown[arrival.place][rank].append(arrival.growth)
    return {
        place
        for place in late
        if (durations or fmean(waited[place]) >= _WAITED)
        and _measure_spread(late[place]) < _LESS_SPREAD * _measure_spread(grown[place])
    }


def _measure_spread(values: Mapping[int, Sequence[float]]) -> float:
    """Return the sum over ranks of the median distance from a rank's own median."""
    return sum(map(_measure_deviation, values.values()))


def _measure_deviation(values: Iterable[float]) -> float:
    """Return the median absolute deviation of values."""
    known = tuple(values)
    middle = median(known)
    return median(abs(value - middle) for value in known)


def _align_clocks(arrivals: _Arrivals, hosts: Mapping[int, str]) -> None:
    """Take the offsets of the nodes' clocks off all times; without a common collective none is left.

    Nodes are together at the place in a step at which lateness varies least from step to step: just after
    they have waited for each other. What a whole node is late there counts as its clock's offset.
    """
    late: dict[_Place, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    names = set(hosts.values())
    for found in arrivals.values():
        if {hosts[rank] for rank in found} == names:
            middle = median(arrival.time for arrival in found.values())
            for rank, arrival in found.items():
                late[arrival.place][rank].append(arrival.time - middle)
    # Ranks may count a collective to different steps, so that a place does not have those of all nodes.
    places = [place for place, own in late.items() if {hosts[rank] for rank in own} == names]
    if not places:
        arrivals.clear()
        return
    together = late[min(places, key=lambda place: _measure_spread(late[place]))]
    by_host: dict[str, list[float]] = defaultdict(list)
    for rank, values in together.items():
        by_host[hosts[rank]] += values
    offsets = {host: median(values) for host, values in by_host.items()}
    for found in arrivals.values():
        for rank, arrival in found.items():
            arrival.time -= offsets[hosts[rank]]


def measure_waits(steps: Sequence[StepExcess]) -> dict[int, float]:
    """Return the share of time that each rank waits for the one that takes longest in a step."""
    total = sum(step.seconds for step in steps)
    waits: dict[int, float] = defaultdict(float)
    for step in steps:
        last = max(step.excess.values(), default=0.0)
        for rank, excess in step.excess.items():
            waits[rank] += (last - excess) / _COUNTED.get(len(step.excess), 1.0)
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
            share = median(block.excess.get(rank, 0.0) / block.seconds for block in recent)
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
    seconds = median(step.seconds for step in steps)
    values = {rank: sorted(step.excess[rank] for step in steps)[1:-1] for rank in ranks}
    excess = {rank: fmean(own) for rank, own in values.items()}
    error = median(pstdev(own, excess[rank]) for rank, own in values.items()) / sqrt(len(steps)) * _TRIMMED
    return _Block(steps[0].step, steps[-1].step, seconds, excess, error)


def _find_slow(blocks: Sequence[_Block], scale: int) -> list[SlowRank]:
    """Return the ranks that are slow over all of the last blocks, `scale` of them, the slowest first.

    A rank is slow if the median of its blocks is at least MIN_EXCESS, is certain by its spread within and
    between blocks, and stands out from the others by a robust z (their median and median absolute
    deviation).
    """
    recent, older = blocks[-scale:], blocks[:-scale]
    seconds = max(1e-9, median(block.seconds for block in recent))
    ranks = set.intersection(*(set(block.excess) for block in recent))
    if len(ranks) < 2:
        return []
    shares = {rank: [block.excess[rank] / seconds for block in recent] for rank in ranks}
    middles = {rank: median(own) for rank, own in shares.items()}
    usual = median(middles.values())
    across = _SPREAD * _measure_deviation(middles.values())
    within = median(block.error for block in recent) / seconds / sqrt(scale)
    # How much ranks wander from block to block, as a share of the step, in the median over ranks.
    drifts = []
    for rank in set.union(*(set(block.excess) for block in recent)):
        parts = [[block.excess[rank] for block in part if rank in block.excess] for part in (recent, older)]
        drifts.append(max(_SPREAD * _measure_deviation(own) if len(own) > 2 else 0.0 for own in parts))
    between = median(drifts) / seconds / sqrt(max(1, scale / _RELATED))
    error = _MEDIAN_ERROR * max(within, between, _NOISE_FLOOR)
    found = []
    for rank, middle in middles.items():
        excess = middle / (1 - middle) if middle < 1 else inf
        if excess < _MIN_EXCESS or min(shares[rank]) < 0 or middle < _CERTAINTY * error:
            continue
        if len(ranks) <= _MIN_OTHERS or middle - usual >= _ROBUST_Z * max(across, _NOISE_FLOOR):
            found.append(SlowRank(rank, excess, recent[0].first_step, recent[-1].last_step))
    return sorted(found, key=lambda slow: -slow.excess)
