"""The `exclusive` binding: each rank on whole physical cores of its own next to its GPU."""

from collections.abc import Sequence
from dataclasses import replace

from launcher.plan.assign import Assignment
from launcher.plan.policies import Placement
from launcher.plan.shares import cut_evenly
from launcher.plan.usable_cores import Core, Topology, gather_pus, split_classes

Shares = dict[int, list[Core]]
"""Cores of each rank."""


def place_exclusive(topology: Topology, assignment: Assignment) -> dict[int, Placement]:
    """Whole cores for each rank; its workers also get those of nodes without ranks, and what others spare."""
    nodes, order = assignment.nodes, assignment.order
    own: Shares = {}
    lent: Shares = {}
    for node in dict.fromkeys(nodes[rank] for rank in order):
        ranks = [rank for rank in order if nodes[rank] == node]
        shares, small = divide_node(topology.cores[node], len(ranks))
        own.update(zip(ranks, shares, strict=True))
        lent.update(zip(ranks, small, strict=True))
    lend_idle(topology, nodes, own, lent)
    level_up(topology, assignment, own, lent)
    cpus = {rank: gather_pus(own[rank]) for rank in order}
    return {rank: Placement(nodes[rank], cpus[rank], cpus[rank] | gather_pus(lent[rank])) for rank in order}


def divide_node(cores: Sequence[Core], count: int) -> tuple[list[list[Core]], list[list[Core]]]:
    """Cores of each of `count` ranks on a node, and the cores that each rank's workers get besides.

    On hybrid nodes each class is dealt by itself; ranks run on the most capable where there are enough.
    """
    none: list[list[Core]] = [[] for _ in range(count)]
    if len(cores) < count:
        return divide_threads(cores, count), none
    classes = split_classes(cores)
    if len(classes[0]) >= count:
        return deal_cores(classes[:1], none), deal_cores(classes[1:], none)
    return deal_cores(classes, none), none


def deal_cores(classes: Sequence[Sequence[Core]], given: Sequence[Sequence[Core]]) -> list[list[Core]]:
    """Deal each class of cores evenly on top of what is `given`; returns the new totals."""
    shares = [list(cores) for cores in given]
    for cores in classes:
        cuts = cut_evenly([core.l3 for core in cores], [len(share) for share in shares])
        for share, cut in zip(shares, cuts, strict=True):
            share.extend(cores[cut])
    return shares


def divide_threads(cores: Sequence[Core], count: int) -> list[list[Core]]:
    """Parts of cores for more ranks than cores: siblings part first, then ranks share a PU."""
    pus = [(core, pu) for core in cores for pu in core.pus]
    if len(pus) < count:
        cuts = [slice(at * len(pus) // count, at * len(pus) // count + 1) for at in range(count)]
    else:
        cuts = cut_evenly([core.id for core, _ in pus], [0] * count)
    return [[replace(core, pus=(pu,)) for core, pu in pus[cut]] for cut in cuts]


def lend_idle(topology: Topology, nodes: Sequence[int], own: Shares, lent: Shares) -> None:
    """Deal the cores of nodes without ranks to the ranks nearest by distance, adding to `lent`."""
    idle: dict[frozenset[int], list[Core]] = {}
    for node in topology.cores.keys() - set(nodes):
        idle.setdefault(topology.find_nearest(node, set(nodes)), []).extend(topology.cores[node])
    for near in sorted(idle, key=lambda near: (len(near), sorted(near))):
        ranks = [rank for rank in lent if nodes[rank] in near]
        cores = sorted(idle[near], key=lambda core: core.node)
        totals = [len({core.id for core in own[rank]}) + len(lent[rank]) for rank in ranks]
        for rank, cut in zip(ranks, cut_evenly([core.l3 for core in cores], totals), strict=True):
            lent[rank].extend(cores[cut])


def level_up(topology: Topology, assignment: Assignment, own: Shares, lent: Shares) -> None:
    """Give ranks with less than the goal, for their workers, cores of ranks that have more.

    Cores that are for workers already come first, then near ones, then those of the rank that has most.
    """
    have = {rank: len(own[rank]) + len(lent[rank]) for rank in own}
    for poor in sorted(have, key=lambda rank: have[rank]):
        while have[poor] < assignment.goal:
            spare = {rank: (lent[rank] or own[rank])[-1] for rank in have if have[rank] > assignment.goal}
            far = {rank: topology.distance(core.node, assignment.nodes[poor]) for rank, core in spare.items()}
            giver = min(spare, key=lambda rank: (not lent[rank], far[rank], -have[rank]))
            (lent[giver] or own[giver]).pop()
            lent[poor].append(spare[giver])
            have[poor], have[giver] = have[poor] + 1, have[giver] - 1
