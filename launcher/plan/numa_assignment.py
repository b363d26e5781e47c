"""Which NUMA node each rank runs on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.plan.model import Gpu
from launcher.plan.usable_cores import Topology


@dataclass(frozen=True, slots=True)
class Assignment:
    """The NUMA node of each rank, and how many cores each should have."""

    local_nodes_by_rank: tuple[frozenset[int], ...]
    """The nodes nearest to each rank's GPU."""
    nodes: tuple[int, ...]
    """The node of each rank, another than its local ones only if these have no core left."""
    order: tuple[int, ...]
    """Ranks in the order in which they take CPUs."""
    goal: int
    """Cores that every rank and its DataLoader workers should have; 0 if ranks share cores."""


@dataclass(slots=True)
class Node:
    """A NUMA node that is being filled with ranks."""

    id: int
    cores: int
    package: int
    """The package of its first core."""
    caches: list[int]
    """Sizes of its last-level caches, in cores: nodes of equal sizes split alike."""
    quota: float = 0
    """Ranks that it should have, in fractions."""
    ranks: int = 0
    """Ranks that it has."""


@dataclass(frozen=True, slots=True)
class Locality:
    """Ranks whose GPUs have the same nearest nodes."""

    local_nodes: tuple[int, ...]
    """Those nodes in ascending order."""
    ranks: tuple[int, ...]
    """In the order of their GPUs."""
    counts: Counter[int] = field(default_factory=Counter)
    """Ranks on each node."""


Nodes = Mapping[int, Node]
Ways = Mapping[int, tuple[Locality, int | None]]
"""Nodes that can take one more rank: the locality whose rank comes, and the node that the rank leaves."""


def assign_ranks(topology: Topology, gpus: Sequence[Gpu | None], each: int) -> Assignment:
    """Assign each rank to one of the nodes nearest to its GPU, in proportion to their cores.

    `each` is the number of cores that every rank should have to itself; 0 if ranks share them. If there are
    cores for all, no node gets more ranks than cores, and a rank whose nearest nodes are full goes elsewhere.
    """
    nodes = {
        node: Node(node, len(cores), cores[0].package, list(Counter(core.l3 for core in cores).values()))
        for node, cores in topology.cores.items()
    }
    goal = min(each, sum(node.cores for node in nodes.values()) // len(gpus))
    order = tuple(order_ranks(gpus))
    local_nodes_by_rank = tuple(map(topology.find_local_nodes, gpus))
    localities = group_by_locality(local_nodes_by_rank, order)
    fill_nodes(topology, nodes, localities, goal)
    assigned: dict[int, int] = {}
    for locality in localities:
        places = sorted(locality.counts.elements(), key=lambda node: (node not in locality.local_nodes, node))
        assigned.update(zip(locality.ranks, places, strict=True))
    return Assignment(local_nodes_by_rank, tuple(assigned[rank] for rank in range(len(gpus))), order, goal)


def order_ranks(gpus: Sequence[Gpu | None]) -> list[int]:
    """Ranks in the order of their GPUs, so that those of one GPU (MPS, MIG) come to be neighbours."""
    places = [(-1, -1) if gpu is None else (-1 if gpu.node is None else gpu.node, gpu.index) for gpu in gpus]
    return sorted(range(len(gpus)), key=lambda rank: (places[rank], rank))


def group_by_locality(local_nodes_by_rank: Sequence[frozenset[int]], order: Sequence[int]) -> list[Locality]:
    """The localities, those with fewest nodes first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in order:
        groups.setdefault(tuple(sorted(local_nodes_by_rank[rank])), []).append(rank)
    narrow_first = sorted(groups, key=lambda local_nodes: (len(local_nodes), local_nodes))
    return [Locality(local_nodes, tuple(groups[local_nodes])) for local_nodes in narrow_first]


def fill_nodes(topology: Topology, nodes: Nodes, localities: Sequence[Locality], goal: int) -> None:
    """Count the ranks of each locality on each node.

    Ranks come one by one. Each takes the node that has most left for it, if need be by moving a rank of an
    overlapping locality on to another node of its own. These are shortest augmenting paths of a flow with a
    convex cost for each node, so that the total is least (Ahuja, Magnanti, Orlin: Network Flows, chapter 14).
    """
    set_quotas(nodes, localities)
    listed = [node for locality in localities for node in locality.local_nodes]
    # Quotas make shares even within a locality, but not quite if localities overlap.
    floor = goal if len(listed) > len({*listed}) else min(goal, 1)
    displaced = []
    for locality in (each for each in localities for _ in each.ranks):
        ways = find_ways(locality, localities)
        target = pick_node([nodes[node] for node in ways], floor)
        if goal and target.ranks == target.cores:
            displaced.append(locality)
        else:
            move_ranks(ways, target)
    for locality in displaced:
        target = pick_elsewhere(topology, nodes, locality.local_nodes, goal)
        move_ranks({target.id: (locality, None)}, target)


def set_quotas(nodes: Nodes, localities: Sequence[Locality]) -> None:
    """Share the ranks of each locality out so that its nodes have equally many for each core.

    Nodes that have more than that from earlier localities get none.
    """
    for locality in localities:
        low, found = [nodes[node] for node in locality.local_nodes], 0
        while len(low) != found:
            found = len(low)
            ranks = len(locality.ranks) + sum(node.quota for node in low)
            cores = sum(node.cores for node in low)
            low = [node for node in low if node.quota <= ranks * node.cores / cores]
        for node in low:
            node.quota = ranks * node.cores / cores


def find_ways(locality: Locality, localities: Sequence[Locality]) -> Ways:
    """The nodes that can take one more rank of a locality, if need be by moving other ranks on."""
    ways: dict[int, tuple[Locality, int | None]] = dict.fromkeys(locality.local_nodes, (locality, None))
    queue = list(ways)
    for node in queue:
        for other in localities:
            if other.counts[node]:
                reached = [target for target in other.local_nodes if target not in ways]
                ways.update((target, (other, node)) for target in reached)
                queue += reached
    return ways


def move_ranks(ways: Ways, target: Node) -> None:
    """Add a rank along the way that ends at `target`."""
    target.ranks += 1
    node: int | None = target.id
    while node is not None:
        locality, source = ways[node]
        locality.counts[node] += 1
        if source is not None:
            locality.counts[source] -= 1
        node = source


def pick_node(nodes: Sequence[Node], floor: int) -> Node:
    """The node that leaves most cores to each of its ranks up to `floor`, then what is furthest below quota.

    Of nodes just like it, one in the package with fewest ranks.
    """
    grades = {
        node.id: (-min(floor, node.cores // (node.ranks + 1)), node.ranks - node.quota) for node in nodes
    }
    best = min(nodes, key=lambda node: (grades[node.id], node.id))
    alike = [node for node in nodes if grades[node.id] == grades[best.id] and node.caches == best.caches]
    load: Counter[int] = Counter()
    for node in nodes:
        load[node.package] += node.ranks
    return min(alike, key=lambda node: (load[node.package], node.id))


def pick_elsewhere(topology: Topology, nodes: Nodes, local_nodes: Sequence[int], goal: int) -> Node:
    """The node for a rank that finds no core on its local nodes: one with cores enough, then a near one."""
    free = [node for node in nodes.values() if node.ranks < node.cores]
    far = {node.id: min(topology.distance(local, node.id) for local in local_nodes) for node in free}

    def score_node(node: Node) -> tuple[float, ...]:
        enough = min(goal, node.cores // (node.ranks + 1))
        return -enough, far[node.id], node.ranks / node.cores, node.id

    return min(free, key=score_node)
