"""Which CPUs each rank and its DataLoader workers run on, for each value of `binding`."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from launcher.plan.topology import Assignment, Core, Topology, gather_pus, group_cores, split_classes

Shares = dict[int, list[Core]]
"""Cores of each rank."""


@dataclass(frozen=True, slots=True)
class CpuSets:
    """The CPU sets of a rank and of its DataLoader workers."""

    node: int | None
    """NUMA node whose memory the rank should have; None for no preference."""
    cpus: frozenset[int]
    worker_cpus: frozenset[int]
    why: str = ""
    """What the CPUs are, for people; empty for `exclusive`, which the planner describes."""


def place_ranks(binding: str, topology: Topology, assignment: Assignment) -> list[CpuSets]:
    """The CPU sets of all ranks, in the order of their local ranks, by a value of `binding`.

    `numa` and `socket`: all usable CPUs of the rank's NUMA node, or of the package that this is in. `l3`: one
    last-level cache, of which a node's ranks take the largest first; one that spans NUMA nodes counts as one
    for each of them. `none`: every usable CPU, and no memory policy.
    """
    if binding == "exclusive":
        by_rank = _place_exclusive(topology, assignment)
        return [by_rank[rank] for rank in range(len(assignment.nodes))]
    every = [core for cores in topology.cores.values() for core in cores]
    packages = group_cores(every, lambda core: core.package)
    turns = Counter[int]()
    sets: dict[int, CpuSets] = {}
    for rank in assignment.order:
        node: int | None = assignment.nodes[rank]
        cores: Sequence[Core] = topology.cores[assignment.nodes[rank]]
        package = cores[0].package
        match binding:
            case "numa":
                why = f"all of NUMA node {node}"
            case "socket":
                cores, why = packages[package], f"all of package {package}"
            case "l3":
                caches = sorted(group_cores(cores, lambda core: core.l3).values(), key=len, reverse=True)
                cores = caches[turns[assignment.nodes[rank]] % len(caches)]
                turns[assignment.nodes[rank]] += 1
                what = f"one of the {len(caches)} last-level caches" if caches[1:] else "the last-level cache"
                why = f"{what} of NUMA node {node}"
            case _:
                cores, node, why = every, None, "all CPUs for this job, since no binding was asked for"
        mask = gather_pus(cores)
        sets[rank] = CpuSets(node, mask, mask, why)
    return [sets[rank] for rank in range(len(sets))]


def cut_evenly(blocks: Sequence[Hashable], totals: Sequence[int]) -> list[slice]:
    """Cut a list into consecutive shares that are as even as can be, one for each entry of `totals`.

    `blocks` names the block (cache, core) of each item; a block's items are consecutive. `totals` is what
    each share's owner has already: if that differs, those with least get the odd items. Else the odd
    items go where the cuts split the fewest blocks.
    """
    count = len(totals)
    if len(set(totals)) == 1:
        inner = [at for at in range(1, len(blocks)) if blocks[at] != blocks[at - 1]]
        sizes = order_sizes(len(blocks), count, frozenset((*inner, len(blocks))))
    else:
        each, odd = divmod(len(blocks), count)
        poor = sorted(range(count), key=lambda at: (totals[at], at))[:odd]
        sizes = [each + (at in poor) for at in range(count)]
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def order_sizes(total: int, count: int, edges: frozenset[int]) -> list[int]:
    """Order the `count` even shares of `total` so that the fewest cuts miss an edge.

    `edges` are the positions where a block ends, the end of the list included. Dynamic programming over
    (large, small) shares still to come: exact, in at most count²/4 steps.
    """
    each, odd = divmod(total, count)
    if not odd:
        return [each] * count
    cost: dict[tuple[int, int], int] = {(0, 0): 0}
    for large in range(odd + 1):
        for small in range(count - odd + 1):
            here = [cost[large - 1, small]] if large else []
            here += [cost[large, small - 1]] if small else []
            if here:
                # What is still to come begins here, so the cut lies this far from the end.
                cut = total - large * (each + 1) - small * each
                cost[large, small] = min(here) + (cut not in edges and cut != 0)
    # The cheapest order is read off the table, the larger share first if both are as cheap.
    sizes = []
    large, small = odd, count - odd
    while large or small:
        if large and (not small or cost[large - 1, small] <= cost[large, small - 1]):
            large -= 1
            sizes.append(each + 1)
        else:
            small -= 1
            sizes.append(each)
    return sizes


def _place_exclusive(topology: Topology, assignment: Assignment) -> dict[int, CpuSets]:
    """Whole cores for each rank; workers also get cores of nodes without ranks, and spare cores of others."""
    nodes, order = assignment.nodes, assignment.order
    own_cores: Shares = {}
    lent_cores: Shares = {}
    for node in dict.fromkeys(nodes[rank] for rank in order):
        ranks = [rank for rank in order if nodes[rank] == node]
        shares, small = _divide_node(topology.cores[node], len(ranks))
        own_cores.update(zip(ranks, shares, strict=True))
        lent_cores.update(zip(ranks, small, strict=True))
    _lend_idle(topology, nodes, own_cores, lent_cores)
    _level_up(topology, assignment, own_cores, lent_cores)
    cpus = {rank: gather_pus(own_cores[rank]) for rank in order}
    return {
        rank: CpuSets(nodes[rank], cpus[rank], cpus[rank] | gather_pus(lent_cores[rank])) for rank in order
    }


def _divide_node(cores: Sequence[Core], count: int) -> tuple[list[list[Core]], list[list[Core]]]:
    """Cores of each of `count` ranks on a node, and the cores that each rank's workers get besides.

    On hybrid nodes each class is dealt by itself; ranks run on the most capable if there are enough.
    """
    none: list[list[Core]] = [[] for _ in range(count)]
    if len(cores) < count:
        return _divide_threads(cores, count), none
    classes = split_classes(cores)
    if len(classes[0]) >= count:
        return _deal_cores(classes[:1], none), _deal_cores(classes[1:], none)
    return _deal_cores(classes, none), none


def _deal_cores(classes: Sequence[Sequence[Core]], dealt: Sequence[Sequence[Core]]) -> list[list[Core]]:
    """Deal each class of cores evenly on top of what is `dealt`; returns the new totals."""
    shares = [list(cores) for cores in dealt]
    for cores in classes:
        cuts = cut_evenly([core.l3 for core in cores], [len(share) for share in shares])
        for share, cut in zip(shares, cuts, strict=True):
            share.extend(cores[cut])
    return shares


def _divide_threads(cores: Sequence[Core], count: int) -> list[list[Core]]:
    """Parts of cores for more ranks than cores: siblings part first, then ranks share a PU."""
    pus = [(core, pu) for core in cores for pu in core.pus]
    if len(pus) < count:
        cuts = [slice(at * len(pus) // count, at * len(pus) // count + 1) for at in range(count)]
    else:
        cuts = cut_evenly([core.id for core, _ in pus], [0] * count)
    return [[replace(core, pus=(pu,)) for core, pu in pus[cut]] for cut in cuts]


def _lend_idle(topology: Topology, nodes: Sequence[int], own_cores: Shares, lent_cores: Shares) -> None:
    """Deal the cores of nodes without ranks to the ranks nearest by distance, adding to `lent_cores`."""
    idle: dict[frozenset[int], list[Core]] = {}
    for node in topology.cores.keys() - set(nodes):
        idle.setdefault(topology.find_nearest(node, set(nodes)), []).extend(topology.cores[node])
    for nearest in sorted(idle, key=lambda nearest: (len(nearest), sorted(nearest))):
        ranks = [rank for rank in lent_cores if nodes[rank] in nearest]
        cores = sorted(idle[nearest], key=lambda core: core.node)
        totals = [len({core.id for core in own_cores[rank]}) + len(lent_cores[rank]) for rank in ranks]
        for rank, cut in zip(ranks, cut_evenly([core.l3 for core in cores], totals), strict=True):
            lent_cores[rank].extend(cores[cut])


def _level_up(topology: Topology, assignment: Assignment, own_cores: Shares, lent_cores: Shares) -> None:
    """Give ranks with less than the goal, for their workers, cores of ranks that have more.

    Cores that are for workers already come first, then near ones, then those of the rank that has most.
    """
    have = {rank: len(own_cores[rank]) + len(lent_cores[rank]) for rank in own_cores}
    for poor in sorted(have, key=lambda rank: have[rank]):
        while have[poor] < assignment.goal:
            spare = {
                rank: (lent_cores[rank] or own_cores[rank])[-1]
                for rank in have
                if have[rank] > assignment.goal
            }
            far = {rank: topology.distance(core.node, assignment.nodes[poor]) for rank, core in spare.items()}
            giver = min(spare, key=lambda rank: (not lent_cores[rank], far[rank], -have[rank]))
            (lent_cores[giver] or own_cores[giver]).pop()
            lent_cores[poor].append(spare[giver])
            have[poor], have[giver] = have[poor] + 1, have[giver] - 1
