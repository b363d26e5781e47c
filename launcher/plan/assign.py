"""Which NUMA node each rank runs on."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from launcher.plan.model import Gpu
from launcher.plan.overlap import settle
from launcher.plan.topology import Topology


def assign_nodes(topology: Topology, gpus: Sequence[Gpu | None]) -> tuple[int, ...]:
    """NUMA node of each rank, given each rank's GPU: among the nearest to it, in proportion to cores.

    Ranks with the same nearest nodes (a locality) are shared out together; ranks of one GPU stay together.
    """
    localities: dict[frozenset[int], list[int]] = {}
    for rank in order_ranks(gpus):
        localities.setdefault(topology.find_home(gpus[rank]), []).append(rank)
    homes = sorted(localities, key=lambda home: (len(home), sorted(home)))
    taken: Counter[int] = Counter()
    shares: list[Mapping[int, int]] = []
    for home in homes:
        count = len(localities[home])
        shares.append(share_out(topology, weigh(topology, home, taken, count), count))
        taken.update(shares[-1])
    if len(frozenset().union(*homes)) < sum(len(home) for home in homes):
        shares = list(settle(topology, tuple(shares)))
    nodes: dict[int, int] = {}
    for home, share in zip(homes, shares, strict=True):
        places = (node for node in sorted(share) for _ in range(share[node]))
        nodes.update(zip(localities[home], places, strict=True))
    return tuple(nodes[rank] for rank in range(len(gpus)))


def order_ranks(gpus: Sequence[Gpu | None]) -> list[int]:
    """Ranks in the order of their GPUs, so that those of one GPU (MPS, MIG) come to be neighbours."""
    places = [(-1, -1) if gpu is None else (-1 if gpu.node is None else gpu.node, gpu.index) for gpu in gpus]
    return sorted(range(len(gpus)), key=lambda rank: (places[rank], rank))


def weigh(topology: Topology, home: Iterable[int], taken: Mapping[int, int], count: int) -> dict[int, float]:
    """Cores of a locality's nodes, less a fair share for each rank that an overlapping locality put there."""
    sizes = {node: len(topology.cores[node]) for node in sorted(home)}
    fair = sum(sizes.values()) / (count + sum(taken[node] for node in sizes))
    return {node: max(0.0, size - fair * taken[node]) for node, size in sizes.items()}


def share_out(topology: Topology, weights: Mapping[int, float], count: int) -> dict[int, int]:
    """Ranks for each node in proportion to `weights`, by largest remainder."""
    total = sum(weights.values())
    exact = {node: count * weight / total for node, weight in weights.items()}
    shares = {node: int(part) for node, part in exact.items()}
    load: Counter[int] = Counter()
    for node, share in shares.items():
        load[find_package(topology, node)] += share
    for _ in range(count - sum(shares.values())):
        node = pick_node(topology, exact, shares, load)
        shares[node] += 1
        load[find_package(topology, node)] += 1
        del exact[node]
    return shares


def pick_node(
    topology: Topology, exact: Mapping[int, float], shares: Mapping[int, int], load: Mapping[int, int]
) -> int:
    """The node with the largest remainder; of nodes just like it, one in the package with fewest ranks."""
    first = min(exact, key=lambda node: (shares[node] - exact[node], node))
    alike = [
        node
        for node in exact
        if measure(topology, node) == measure(topology, first) and exact[node] == exact[first]
    ]
    return min(alike, key=lambda node: (load[find_package(topology, node)], node))


def find_package(topology: Topology, node: int) -> int:
    """The package of a node's first core."""
    return topology.cores[node][0].package


def measure(topology: Topology, node: int) -> list[int]:
    """Sizes of a node's last-level caches, in cores: nodes of equal sizes split alike."""
    return list(Counter(core.l3 for core in topology.cores[node]).values())
