"""The `exclusive` binding: each rank on whole physical cores of its own next to its GPU."""

from collections.abc import Mapping, Sequence

from launcher.plan.policies import Place
from launcher.plan.shares import cut_evenly
from launcher.plan.topology import Core, Topology, gather_pus, split_classes


def place_exclusive(topology: Topology, nodes: Sequence[int], order: Sequence[int]) -> dict[int, Place]:
    """Cores of its own for each rank; cores of nodes without ranks go to the nearest ranks' workers.

    `nodes` is the NUMA node of each rank, `order` the ranks in the order in which they take cores.
    """
    own: dict[int, frozenset[int]] = {}
    lent: dict[int, list[Core]] = {rank: [] for rank in order}
    for node in dict.fromkeys(nodes[rank] for rank in order):
        ranks = [rank for rank in order if nodes[rank] == node]
        masks, small = divide_node(topology.cores[node], len(ranks))
        own.update(zip(ranks, masks, strict=True))
        for rank, cores in zip(ranks, small, strict=True):
            lent[rank] += cores
    lend_idle(topology, nodes, own, lent)
    return {rank: Place(nodes[rank], own[rank], own[rank] | gather_pus(lent[rank])) for rank in order}


def divide_node(cores: Sequence[Core], count: int) -> tuple[list[frozenset[int]], list[list[Core]]]:
    """CPUs of each of `count` ranks on a node, and the cores that each rank's workers get besides.

    On hybrid nodes each class is dealt by itself; ranks run on the most capable where there are enough.
    """
    none: list[list[Core]] = [[] for _ in range(count)]
    if len(cores) < count:
        return divide_threads(cores, count), none
    classes = split_classes(cores)
    if len(classes[0]) >= count:
        own = deal_cores(classes[:1], none)
        return [gather_pus(share) for share in own], deal_cores(classes[1:], none)
    return [gather_pus(share) for share in deal_cores(classes, none)], none


def deal_cores(classes: Sequence[Sequence[Core]], given: Sequence[Sequence[Core]]) -> list[list[Core]]:
    """Deal each class of cores evenly on top of what is `given`; returns the new totals."""
    shares = [list(cores) for cores in given]
    for cores in classes:
        cuts = cut_evenly([core.l3 for core in cores], [len(share) for share in shares])
        for share, cut in zip(shares, cuts, strict=True):
            share.extend(cores[cut])
    return shares


def divide_threads(cores: Sequence[Core], count: int) -> list[frozenset[int]]:
    """CPUs for more ranks than cores: siblings part first, then ranks share a PU."""
    pus = [pu for core in cores for pu in core.pus]
    if len(pus) < count:
        return [frozenset((pus[at * len(pus) // count],)) for at in range(count)]
    cuts = cut_evenly([core.id for core in cores for _ in core.pus], [0] * count)
    return [frozenset(pus[cut]) for cut in cuts]


def lend_idle(
    topology: Topology,
    nodes: Sequence[int],
    own: Mapping[int, frozenset[int]],
    lent: Mapping[int, list[Core]],
) -> None:
    """Deal the cores of nodes without ranks to the ranks nearest by distance, adding to `lent`."""
    idle: dict[frozenset[int], list[Core]] = {}
    for node in topology.cores.keys() - set(nodes):
        idle.setdefault(topology.find_nearest(node, set(nodes)), []).extend(topology.cores[node])
    for near in sorted(idle, key=lambda near: (len(near), sorted(near))):
        ranks = [rank for rank in lent if nodes[rank] in near]
        cores = sorted(idle[near], key=lambda core: core.node)
        totals = [len({topology.core_of[pu] for pu in own[rank]}) + len(lent[rank]) for rank in ranks]
        for rank, cut in zip(ranks, cut_evenly([core.l3 for core in cores], totals), strict=True):
            lent[rank].extend(cores[cut])
