"""How much longer a rank's own part of a step takes than that of the others. Pure.

A collective ends on all of its ranks at the same time, so the step times of ranks are equal, and the rank
that comes to collectives last is the one that the others wait for. Its lateness at a collective counts in
full if all ranks set out together after the one before (they had waited for it); if they had not waited, as
between the buckets of DDP's backward pass, only the growth of its lateness counts. Which of the two holds is
not recorded, but noise tells: lateness of the moment that carries on to the next collective makes intervals
less spread than lateness itself.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from launcher.watch.collective_marks import STEP_ENDS, Mark

FEW = 16
"""Up to so many ranks, a rank is compared with the others alone; in larger groups with all."""
WAITED = 0.8
"""Share of steps in which all ranks have waited at a place that counts as one where they wait."""
LESS_SPREAD = 0.85
"""Spread of arrivals in that of intervals at such a place, at most; two equal parts of a step give 0.71."""
COUNTED = {2: 2.0, 3: 1.5}
"""How often a difference between two ranks is in that of their excess, by the number of ranks.

Each is compared with the others: of two ranks one is early by what the other is late.
"""
Name = tuple[str, int]
"""A collective on all ranks: its group and its sequence number."""
Place = tuple[str, int]
"""Where in a step a collective is: its group, and how many of the group came before it in the step."""


@dataclass(frozen=True, slots=True)
class StepExcess:
    """One step: by how much longer each rank's own part took than the others'."""

    step: int
    seconds: float
    """Of the whole step."""
    excess: Mapping[int, float]
    """Seconds by rank; negative for ranks that were quicker than the others."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank comes to a collective."""

    time: float
    interval: float
    """Since the collective or end of a step before."""
    step: int
    place: Place


def measure_steps(
    marks: Mapping[int, Sequence[Mark]], hosts: Mapping[int, str], *, durations: bool = False
) -> tuple[StepExcess, ...]:
    """Measure the steps that all ranks have whole.

    `marks` has those of each rank in their order, `hosts` the node of each rank. The clocks of nodes need not
    agree. With `durations` a collective's time is minus its duration: the shorter it was on a rank, the later
    the rank came.
    """
    arrivals = list_arrivals(marks, durations=durations)
    if len(set(hosts.values())) > 1 and not durations:
        arrivals = align_clocks(arrivals, hosts)
    seconds = measure_lengths(marks)
    lateness = {name: compare_arrivals(found) for name, found in arrivals.items() if len(found) > 1}
    synchronous = find_synchronous(lateness, durations=durations)
    excess: dict[int, dict[int, float]] = {step: dict.fromkeys(marks, 0.0) for step in seconds}
    for found in lateness.values():
        for rank, (arrival, late, growth) in found.items():
            if arrival.step in excess:
                excess[arrival.step][rank] += late if arrival.place in synchronous else growth
    return tuple(StepExcess(step, seconds[step], excess[step]) for step in sorted(seconds))


def list_arrivals(marks: Mapping[int, Sequence[Mark]], *, durations: bool) -> dict[Name, dict[int, Arrival]]:
    """Order the marks of all ranks by collective; each rank's first one only begins an interval."""
    arrivals: dict[Name, dict[int, Arrival]] = defaultdict(dict)
    for rank, own in marks.items():
        counts: dict[tuple[int, str], int] = defaultdict(int)
        before = None
        for mark in own:
            if durations and mark.group == STEP_ENDS:
                continue
            place = mark.group, counts[mark.step, mark.group]
            counts[mark.step, mark.group] += 1
            if before is not None:
                interval = mark.time - before
                arrivals[mark.group, mark.sequence][rank] = Arrival(mark.time, interval, mark.step, place)
            before = mark.time
    return arrivals


def measure_lengths(marks: Mapping[int, Sequence[Mark]]) -> dict[int, float]:
    """Return the seconds of each step that all ranks have from its beginning to its end."""
    lengths: dict[int, list[float]] = defaultdict(list)
    for own in marks.values():
        ends = {mark.step: mark.time for mark in own if mark.group == STEP_ENDS}
        for step, end in ends.items():
            if step - 1 in ends:
                lengths[step].append(end - ends[step - 1])
    return {step: median(found) for step, found in lengths.items() if len(found) == len(marks)}


def compare_arrivals(arrivals: Mapping[int, Arrival]) -> dict[int, tuple[Arrival, float, float]]:
    """Return how late each rank comes beside the others, and by how much its interval is longer."""
    late = subtract_others([arrival.time for arrival in arrivals.values()])
    growth = subtract_others([arrival.interval for arrival in arrivals.values()])
    return {
        rank: (arrival, *both)
        for (rank, arrival), both in zip(arrivals.items(), zip(late, growth, strict=True), strict=True)
    }


def subtract_others(values: Sequence[float]) -> list[float]:
    """Return each value less the median of the others."""
    if len(values) > FEW:
        middle = median(values)
        return [value - middle for value in values]
    return [value - median([*values[:index], *values[index + 1 :]]) for index, value in enumerate(values)]


def find_synchronous(
    lateness: Mapping[Name, Mapping[int, tuple[Arrival, float, float]]], *, durations: bool
) -> set[Place]:
    """Return the places in a step to which all ranks have set out together.

    There a rank's interval is longer if it came early to the collective before, and waited there: intervals
    are spread more than arrivals are, with each rank's usual lateness taken off. And no rank comes before the
    last one has come to the collective before, as far as times say so: durations do not.
    """
    late: dict[Place, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    grown: dict[Place, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    waited: dict[Place, list[bool]] = defaultdict(list)
    for found in lateness.values():
        arrivals = [arrival for arrival, _, _ in found.values()]
        last_before = max(arrival.time - arrival.interval for arrival in arrivals)
        has_waited = min(arrival.time for arrival in arrivals) >= last_before
        for place in {arrival.place for arrival in arrivals}:  # ranks may differ at the end of a step
            waited[place].append(has_waited)
        for rank, (arrival, late_by, growth) in found.items():
            late[arrival.place][rank].append(late_by)
            grown[arrival.place][rank].append(growth)
    return {
        place
        for place in late
        if (durations or fmean(waited[place]) >= WAITED)
        and measure_spread(late[place]) < LESS_SPREAD * measure_spread(grown[place])
    }


def measure_spread(values: Mapping[int, Sequence[float]]) -> float:
    """Return the mean over ranks of the median distance from a rank's own median."""
    total = 0.0
    for own in values.values():
        middle = median(own)
        total += median(abs(value - middle) for value in own)
    return total


def align_clocks(
    arrivals: Mapping[Name, Mapping[int, Arrival]], hosts: Mapping[int, str]
) -> dict[Name, dict[int, Arrival]]:
    """Take the offsets of the nodes' clocks off all times.

    Nodes are together at the place in a step at which lateness varies least from step to step: just after
    they have waited for each other. What a whole node is late there counts as its clock's offset.
    """
    late: dict[Place, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for found in arrivals.values():
        if len({hosts[rank] for rank in found}) < len(set(hosts.values())):
            continue
        middle = median(arrival.time for arrival in found.values())
        for rank, arrival in found.items():
            late[arrival.place][rank].append(arrival.time - middle)
    if not late:
        return {}
    together = late[min(late, key=lambda place: measure_spread(late[place]))]
    offsets = {
        host: median(value for rank, own in together.items() if hosts[rank] == host for value in own)
        for host in set(hosts.values())
    }
    return {
        name: {
            rank: Arrival(one.time - offsets[hosts[rank]], one.interval, one.step, one.place)
            for rank, one in found.items()
        }
        for name, found in arrivals.items()
    }


def measure_waits(steps: Sequence[StepExcess]) -> dict[int, float]:
    """Return the share of time that each rank waits for the one that takes longest in a step."""
    total = sum(step.seconds for step in steps)
    waits: dict[int, float] = defaultdict(float)
    for step in steps:
        last = max(step.excess.values(), default=0.0)
        for rank, excess in step.excess.items():
            waits[rank] += (last - excess) / COUNTED.get(len(step.excess), 1.0)
    return {rank: min(1.0, wait / total) for rank, wait in waits.items()} if total > 0 else {}
