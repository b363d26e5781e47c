"""The usable cores of a machine, the NUMA node of each rank, and its CPUs for each value of `binding`."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from launcher.errors import MachineError
from launcher.plan.model import Gpu, Machine, Memory, Nic

K = TypeVar("K")
T = TypeVar("T")
UNREACHABLE = 255
"""SLIT distance if the table has no entry."""
SAME_CLASS = 0.85
"""Cores of at least this share of a class's best capacity belong to it: favoured cores differ by less
(Turbo Boost Max), efficiency cores by more."""


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """A physical core, as far as the job may use it; each is equal to itself alone."""

    id: int
    """Its lowest-numbered usable PU."""
    node: int
    package: int
    l3: int
    """The last-level cache above it."""
    capacity: int
    pus: tuple[int, ...]
    """Its usable PUs in ascending order."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The usable part of a machine."""

    cores: Mapping[int, tuple[Core, ...]]
    """By NUMA node, in ascending order; nodes with usable cores only. Within a node the cores under one
    last-level cache are consecutive."""
    distances: Mapping[int, Mapping[int, int]]

    def distance(self, node: int, other: int) -> int:
        """SLIT distance between two NUMA nodes."""
        return 10 if node == other else self.distances.get(node, {}).get(other, UNREACHABLE)

    def find_nearest(self, node: int, among: Iterable[int]) -> frozenset[int]:
        """The nodes of `among` at the smallest distance from `node`, which may be one of them."""
        far = {other: self.distance(node, other) for other in among}
        return frozenset(other for other, distance in far.items() if distance == min(far.values()))

    def find_local_nodes(self, gpu: Gpu | None) -> frozenset[int]:
        """NUMA nodes with usable cores that are nearest to a GPU; all of them if its place is not known.

        `local_cpulist` knows no better: for node -1 the kernel has all CPUs in it (drivers/pci/pci-sysfs.c).
        """
        node = None if gpu is None else gpu.node
        if node is not None and (node in self.cores or node in self.distances):
            return self.find_nearest(node, self.cores)
        return frozenset(self.cores)


def build_topology(machine: Machine, reserve: int = 0) -> Topology:
    """Sort out what the job may use, less `reserve` cores. Raises MachineError if it may use nothing.

    Reserved cores are spread over the nodes, each time the first core of the node with most: the kernel's
    own work gathers on low-numbered CPUs. Every node keeps a core.
    """
    usable = find_usable(machine)
    if not usable:
        raise MachineError("this job may use none of the online CPUs: check the cpuset of its cgroup")
    cpus = [cpu for cpu in sorted(machine.cpus, key=lambda cpu: cpu.id) if cpu.id in usable]
    found_cores = [
        Core(
            first.id,
            first.node,
            first.package,
            first.l3,
            first.capacity,
            (first.id, *(cpu.id for cpu in rest)),
        )
        for first, *rest in group_by(cpus, lambda cpu: cpu.core).values()
    ]
    by_node = group_by(sorted(found_cores, key=lambda core: (core.node, core.id)), lambda core: core.node)
    for _ in range(reserve):
        largest = max(by_node, key=lambda node: (len(by_node[node]), -node))
        if len(by_node[largest]) == 1:
            break
        del by_node[largest][0]
    cores = {}
    for node, found in by_node.items():
        caches = group_by(found, lambda core: core.l3)
        cores[node] = tuple(core for cache in caches.values() for core in cache)
    return Topology(cores, {node.id: dict(node.distances) for node in machine.nodes})


def find_usable(machine: Machine) -> frozenset[int]:
    """Allowed and online CPUs, without the isolated ones unless nothing else is left."""
    allowed = machine.allowed_cpus.intersection(cpu.id for cpu in machine.cpus)
    return allowed - machine.isolated or allowed


def group_by(items: Iterable[T], key_of: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a property of theirs, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key_of(item), []).append(item)
    return groups


def split_classes(cores: Iterable[Core]) -> list[list[Core]]:
    """Cores of like capacity together, the most capable first; one class unless the machine is hybrid."""
    cores = tuple(cores)
    tops: list[int] = []
    for capacity in sorted({core.capacity for core in cores}, reverse=True):
        if not tops or capacity < SAME_CLASS * tops[-1]:
            tops.append(capacity)
    bounds = zip(tops, [*tops[1:], -1], strict=True)
    return [[core for core in cores if low < core.capacity <= top] for top, low in bounds]


def gather_pus(cores: Iterable[Core]) -> frozenset[int]:
    """All usable PUs of some cores."""
    return frozenset(pu for core in cores for pu in core.pus)


@dataclass(slots=True)
class Placement:
    """Where a rank is, before it has workers, threads and variables."""

    gpu: Gpu | None
    local_nodes: frozenset[int]
    """NUMA nodes nearest to its GPU."""
    node: int | None = None
    """NUMA node whose memory it should have, another than its local ones only if these have no core left;
    None for no preference."""
    own: list[Core] = field(default_factory=list)
    """Cores, or parts of them, of its own process."""
    lent: list[Core] = field(default_factory=list)
    """Cores for its DataLoader workers alone."""
    why: str = ""
    """What its cores are, for people; empty for `exclusive`, which the planner describes."""
    memory: Memory = field(default_factory=lambda: Memory("default"))
    nic: Nic | None = None
    nic_why: str = ""
    """Where its NIC is, for people: `on one PCI switch with the GPU`."""

    @property
    def cpus(self) -> frozenset[int]:
        """CPU set of its own process."""
        return gather_pus(self.own)

    @property
    def worker_cpus(self) -> frozenset[int]:
        """CPU set of its DataLoader workers."""
        return self.cpus | gather_pus(self.lent)


@dataclass(slots=True)
class _Node:
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
class _Locality:
    """Ranks whose GPUs have the same nearest nodes."""

    local_nodes: tuple[int, ...]
    """Those nodes in ascending order."""
    ranks: Sequence[Placement]
    """In the order of their GPUs."""
    counts: Counter[int] = field(default_factory=Counter)
    """Ranks on each node."""


_Nodes = Mapping[int, _Node]
_Ways = Mapping[int, tuple[_Locality, int | None]]
"""Nodes that can take one more rank: the locality whose rank comes, and the node that the rank leaves."""


def place_ranks(binding: str, topology: Topology, gpus: Sequence[Gpu | None], each: int) -> list[Placement]:
    """Place ranks, given the GPU of each, by a value of `binding`.

    `exclusive`: whole cores; `each` is the number that every rank should have to itself. `numa` and `socket`:
    all usable cores of the rank's NUMA node, or of the package that this is in. `l3`: one last-level cache,
    of which a node's ranks take the largest first; one that spans NUMA nodes counts as one for each of them.
    `none`: every usable core, and no memory policy.

    Ranks take CPUs in the order of their GPUs, so that those of one GPU (MPS, MIG) come to be neighbours.
    """
    is_exclusive = binding == "exclusive"
    goal = min(each, sum(map(len, topology.cores.values())) // len(gpus)) if is_exclusive else 0
    ranks = [Placement(gpu, topology.find_local_nodes(gpu)) for gpu in gpus]
    order = sorted(ranks, key=_order_rank)
    _assign_nodes(topology, order, goal)
    by_node = group_by(order, lambda rank: rank.node)
    every = [core for cores in topology.cores.values() for core in cores]
    for node, placed in by_node.items():
        cores = list(topology.cores[node or 0])
        if is_exclusive:
            _divide_node(cores, placed)
        caches = sorted(group_by(cores, lambda core: core.l3).values(), key=len, reverse=True)
        for turn, rank in enumerate(placed if not is_exclusive else ()):
            if binding == "numa":
                rank.own, rank.why = cores, f"all of NUMA node {node}"
            elif binding == "socket":
                package = cores[0].package
                rank.own = [core for core in every if core.package == package]
                rank.why = f"all of package {package}"
            elif binding == "l3":
                rank.own = caches[turn % len(caches)]
                what = f"one of the {len(caches)} last-level caches" if caches[1:] else "the last-level cache"
                rank.why = f"{what} of NUMA node {node}"
            else:
                rank.node, rank.own = None, every
                rank.why = "all CPUs for this job, since no binding was asked for"
    if is_exclusive:
        placed = [rank for found in by_node.values() for rank in found]
        _lend_idle(topology, placed)
        _level_up(topology, placed, goal)
    return ranks


def _order_rank(rank: Placement) -> tuple[int, int]:
    gpu = rank.gpu
    return (-1, -1) if gpu is None else (-1 if gpu.node is None else gpu.node, gpu.index)


def _assign_nodes(topology: Topology, order: Sequence[Placement], goal: int) -> None:
    """Assign each rank to one of the nodes nearest to its GPU, in proportion to their cores.

    `goal` is the number of cores that every rank should have to itself; 0 if ranks share them. If there are
    cores for all, no node gets more ranks than cores, and a rank whose nearest nodes are full goes elsewhere.

    Ranks come one by one. Each takes the node that has most left for it, if need be by moving a rank of an
    overlapping locality on to another node of its own. These are shortest augmenting paths of a flow with a
    convex cost for each node, so that the total is least (Ahuja, Magnanti, Orlin: Network Flows, chapter 14).
    """
    nodes = {
        node: _Node(node, len(cores), cores[0].package, list(Counter(core.l3 for core in cores).values()))
        for node, cores in topology.cores.items()
    }
    groups = group_by(order, lambda rank: tuple(sorted(rank.local_nodes)))
    narrow_first = sorted(groups, key=lambda local_nodes: (len(local_nodes), local_nodes))
    localities = [_Locality(local_nodes, groups[local_nodes]) for local_nodes in narrow_first]
    _set_quotas(nodes, localities)
    listed = [node for locality in localities for node in locality.local_nodes]
    # Quotas make shares even within a locality, but not quite if localities overlap.
    floor = goal if len(listed) > len({*listed}) else min(goal, 1)
    displaced = []
    for locality in (each for each in localities for _ in each.ranks):
        ways = _find_ways(locality, localities)
        target = _pick_node([nodes[node] for node in ways], floor)
        if goal and target.ranks == target.cores:
            displaced.append(locality)
        else:
            _move_ranks(ways, target)
    for locality in displaced:
        target = _pick_elsewhere(topology, nodes, locality.local_nodes, goal)
        _move_ranks({target.id: (locality, None)}, target)
    for locality in localities:
        far_last = sorted(
            locality.counts.elements(), key=lambda node: (node not in locality.local_nodes, node)
        )
        for rank, node in zip(locality.ranks, far_last, strict=True):
            rank.node = node


def _set_quotas(nodes: _Nodes, localities: Sequence[_Locality]) -> None:
    """Share the ranks of each locality out so that its nodes have equally many for each core.

    _Nodes that have more than that from earlier localities get none.
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


def _find_ways(locality: _Locality, localities: Sequence[_Locality]) -> _Ways:
    """The nodes that can take one more rank of a locality, if need be by moving other ranks on."""
    ways: dict[int, tuple[_Locality, int | None]] = dict.fromkeys(locality.local_nodes, (locality, None))
    queue = list(ways)
    for node in queue:
        for other in localities:
            if other.counts[node]:
                reached = [target for target in other.local_nodes if target not in ways]
                ways.update((target, (other, node)) for target in reached)
                queue += reached
    return ways


def _move_ranks(ways: _Ways, target: _Node) -> None:
    """Add a rank along the way that ends at `target`."""
    target.ranks += 1
    node: int | None = target.id
    while node is not None:
        locality, source = ways[node]
        locality.counts[node] += 1
        if source is not None:
            locality.counts[source] -= 1
        node = source


def _pick_node(nodes: Sequence[_Node], floor: int) -> _Node:
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


def _pick_elsewhere(topology: Topology, nodes: _Nodes, local_nodes: Sequence[int], goal: int) -> _Node:
    """The node for a rank that finds no core on its local nodes: one with cores enough, then a near one."""
    free = [node for node in nodes.values() if node.ranks < node.cores]
    far = {node.id: min(topology.distance(local, node.id) for local in local_nodes) for node in free}

    def score_node(node: _Node) -> tuple[float, ...]:
        enough = min(goal, node.cores // (node.ranks + 1))
        return -enough, far[node.id], node.ranks / node.cores, node.id

    return min(free, key=score_node)


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


def _divide_node(cores: Sequence[Core], ranks: Sequence[Placement]) -> None:
    """Give ranks a node's cores, whole ones if there are enough.

    On hybrid nodes each class is dealt by itself; ranks run on the most capable if there are enough, and
    their workers get the others besides.
    """
    none: list[list[Core]] = [[] for _ in ranks]
    classes = split_classes(cores)
    has_enough = len(classes[0]) >= len(ranks)
    if len(cores) < len(ranks):
        shares = _divide_threads(cores, len(ranks))
    else:
        shares = _deal_cores(classes[:1] if has_enough else classes, none)
    lent = _deal_cores(classes[1:] if has_enough else (), none)
    for rank, own, more in zip(ranks, shares, lent, strict=True):
        rank.own, rank.lent = own, more


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


def _lend_idle(topology: Topology, ranks: Sequence[Placement]) -> None:
    """Deal the cores of nodes without ranks to the workers of the ranks nearest by distance."""
    used = {rank.node for rank in ranks if rank.node is not None}
    idle = group_by(topology.cores.keys() - used, lambda node: topology.find_nearest(node, used))
    for nearest in sorted(idle, key=lambda nearest: (len(nearest), sorted(nearest))):
        near = [rank for rank in ranks if rank.node in nearest]
        cores = [core for node in sorted(idle[nearest]) for core in topology.cores[node]]
        totals = [len({core.id for core in rank.own}) + len(rank.lent) for rank in near]
        for rank, cut in zip(near, cut_evenly([core.l3 for core in cores], totals), strict=True):
            rank.lent.extend(cores[cut])


def _level_up(topology: Topology, ranks: Sequence[Placement], goal: int) -> None:
    """Give ranks with less than the goal, for their workers, cores of ranks that have more.

    Cores that are for workers already come first, then near ones, then those of the rank that has most.
    """

    def count(rank: Placement) -> int:
        return len(rank.own) + len(rank.lent)

    def list_spare(rank: Placement) -> list[Core]:
        return rank.lent or rank.own

    for poor in sorted(ranks, key=count):
        while count(poor) < goal:
            giver = min(
                (rank for rank in ranks if count(rank) > goal),
                key=lambda rank: (
                    not rank.lent,
                    topology.distance(list_spare(rank)[-1].node, poor.node or 0),
                    -count(rank),
                ),
            )
            poor.lent.append(list_spare(giver).pop())
