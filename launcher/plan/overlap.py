"""Localities that share NUMA nodes: where ranks had better move to a node with more room.

Localities overlap where a cpuset or a node without CPUs sends some GPUs to the nearest of several nodes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from launcher.plan.shares import find_edges, order_sizes
from launcher.plan.topology import Topology

Shares = tuple[Mapping[int, int], ...]
"""Ranks on each node, for each locality."""


def settle(topology: Topology, shares: Shares) -> Shares:
    """Move ranks between the nodes of their locality for as long as that helps."""
    cuts: dict[tuple[int, int], int] = {}
    best = judge(topology, shares, cuts)
    found = True
    while found:
        found = False
        for moved in list_moves(shares):
            grade = judge(topology, moved, cuts)
            if grade < best:
                shares, best, found = moved, grade, True
                break
    return shares


def list_moves(shares: Shares) -> Iterator[Shares]:
    """Every way to move some ranks of a locality from one of its nodes to another, single ones first.

    A node can be even with few ranks or with many, and uneven in between.
    """
    steps = [
        (ranks, at, source, target)
        for at, counts in enumerate(shares)
        for source, target in permutations(counts, 2)
        for ranks in range(1, counts[source] + 1)
    ]
    for ranks, at, source, target in sorted(steps):
        counts = shares[at]
        moved = {**counts, source: counts[source] - ranks, target: counts[target] + ranks}
        yield (*shares[:at], moved, *shares[at + 1 :])


def judge(topology: Topology, shares: Shares, cuts: dict[tuple[int, int], int]) -> tuple[float, ...]:
    """How bad an assignment is: ranks without a core, few cores for those that have least (the job waits for
    them), the worst unevenness within a locality, caches split, and what tips the balance.

    `cuts` remembers the caches split for a node and a number of ranks.
    """
    ranks: Counter[int] = Counter()
    for counts in shares:
        ranks.update(counts)
    used = [node for node, count in ranks.items() if count]
    for node in used:
        if (node, ranks[node]) not in cuts:
            cuts[node, ranks[node]] = count_cuts(topology, node, ranks[node])
    crowded = sum(max(0, ranks[node] - len(topology.cores[node])) for node in used)
    uneven = sorted((measure_spread(topology, counts, ranks) for counts in shares), reverse=True)
    smallest = min(len(topology.cores[node]) / ranks[node] for node in used)
    least = min(len(topology.cores[node]) // ranks[node] for node in used)
    return (crowded, -least, uneven[0], sum(cuts[node, ranks[node]] for node in used), *uneven, -smallest)


def measure_spread(topology: Topology, counts: Mapping[int, int], ranks: Mapping[int, int]) -> float:
    """Largest share of cores over the smallest among a locality's ranks."""
    small, large = [], []
    for node in (node for node, count in counts.items() if count):
        each, odd = divmod(len(topology.cores[node]), ranks[node])
        small.append(max(each, 1))
        large.append(max(each + (odd > 0), 1))
    return max(large) / min(small)


def count_cuts(topology: Topology, node: int, ranks: int) -> int:
    """Caches of a node split between its ranks at best."""
    blocks: Sequence[int] = [core.l3 for core in topology.cores[node]]
    edges = find_edges(blocks)
    at = split = 0
    for size in order_sizes(len(blocks), ranks, edges):
        at += size
        split += at not in edges
    return split
