"""The usable cores of a machine, the NUMA node of each rank, and its CPUs for each value of `binding`."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from launcher.errors import MachineError
from launcher.plan.model import Cpu, Gpu, Machine

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
    core_of: Mapping[int, Core]
    """By usable PU."""
    distances: Mapping[int, Mapping[int, int]]

    def distance(self, node: int, other: int) -> int:
        """SLIT distance between two NUMA nodes."""
        return 10 if node == other else self.distances.get(node, {}).get(other, UNREACHABLE)

    def find_nearest(self, node: int, among: Iterable[int]) -> frozenset[int]:
        """The nodes of `among` at the smallest distance from `node`, which may be one of them."""
        far = {other: self.distance(node, other) for other in among}
        return frozenset(other for other, distance in far.items() if distance == min(far.values()))

    def find_local_nodes(self, gpu: Gpu | None) -> frozenset[int]:
        """NUMA nodes with usable cores that are nearest to a GPU; all of them if nothing is known.

        The kernel shows node -1 on VMs and one-node machines; `local_cpulist` may still know better.
        """
        node = None if gpu is None else gpu.node
        if node is not None and (node in self.cores or node in self.distances):
            return self.find_nearest(node, self.cores)
        local = gpu.local_cpus if gpu else frozenset()
        touched = (
            node for node, cores in self.cores.items() if any(local.intersection(c.pus) for c in cores)
        )
        return frozenset(touched) or frozenset(self.cores)


def build_topology(machine: Machine, reserve: int = 0) -> Topology:
    """Sort out what the job may use, less `reserve` cores. Raises MachineError if it may use nothing.

    Reserved cores are spread over the nodes, each time the first core of the node with most: the kernel's
    own work gathers on low-numbered CPUs. Every node keeps a core.
    """
    usable = find_usable(machine)
    if not usable:
        raise MachineError("this job may use none of the online CPUs: check the cpuset of its cgroup")
    pus: dict[int, list[Cpu]] = {}
    for cpu in sorted(machine.cpus, key=lambda cpu: cpu.id):
        if cpu.id in usable:
            pus.setdefault(cpu.core, []).append(cpu)
    found_cores = [
        Core(
            first.id,
            first.node,
            first.package,
            first.l3,
            first.capacity,
            (first.id, *(cpu.id for cpu in rest)),
        )
        for first, *rest in pus.values()
    ]
    by_node = group_cores(sorted(found_cores, key=lambda core: (core.node, core.id)), lambda core: core.node)
    for _ in range(reserve):
        largest = max(by_node, key=lambda node: (len(by_node[node]), -node))
        if len(by_node[largest]) == 1:
            break
        del by_node[largest][0]
    cores = {}
    for node, found in by_node.items():
        caches = group_cores(found, lambda core: core.l3)
        cores[node] = tuple(core for cache in caches.values() for core in cache)
    core_of = {pu: core for found in cores.values() for core in found for pu in core.pus}
    return Topology(cores, core_of, {node.id: dict(node.distances) for node in machine.nodes})


def find_usable(machine: Machine) -> frozenset[int]:
    """Allowed and online CPUs, without the isolated ones unless nothing else is left."""
    allowed = machine.allowed_cpus.intersection(cpu.id for cpu in machine.cpus)
    return allowed - machine.isolated or allowed


def group_cores(cores: Iterable[Core], key_of: Callable[[Core], int]) -> dict[int, list[Core]]:
    """Cores by a property of theirs, in their order."""
    groups: dict[int, list[Core]] = {}
    for core in cores:
        groups.setdefault(key_of(core), []).append(core)
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
    ranks: tuple[int, ...]
    """In the order of their GPUs."""
    counts: Counter[int] = field(default_factory=Counter)
    """Ranks on each node."""


_Nodes = Mapping[int, _Node]
_Ways = Mapping[int, tuple[_Locality, int | None]]
"""Nodes that can take one more rank: the locality whose rank comes, and the node that the rank leaves."""


def assign_ranks(topology: Topology, gpus: Sequence[Gpu | None], each: int) -> Assignment:
    """Assign each rank to one of the nodes nearest to its GPU, in proportion to their cores.

    `each` is the number of cores that every rank should have to itself; 0 if ranks share them. If there are
    cores for all, no node gets more ranks than cores, and a rank whose nearest nodes are full goes elsewhere.

    Ranks take CPUs in the order of their GPUs, so that those of one GPU (MPS, MIG) come to be neighbours.
    """
    nodes = {
        node: _Node(node, len(cores), cores[0].package, list(Counter(core.l3 for core in cores).values()))
        for node, cores in topology.cores.items()
    }
    goal = min(each, sum(node.cores for node in nodes.values()) // len(gpus))
    places = [(-1, -1) if gpu is None else (-1 if gpu.node is None else gpu.node, gpu.index) for gpu in gpus]
    order = sorted(range(len(gpus)), key=lambda rank: (places[rank], rank))
    local_nodes_by_rank = tuple(map(topology.find_local_nodes, gpus))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in order:
        groups.setdefault(tuple(sorted(local_nodes_by_rank[rank])), []).append(rank)
    narrow_first = sorted(groups, key=lambda local_nodes: (len(local_nodes), local_nodes))
    localities = [_Locality(local_nodes, tuple(groups[local_nodes])) for local_nodes in narrow_first]
    _fill_nodes(topology, nodes, localities, goal)
    assigned: dict[int, int] = {}
    for locality in localities:
        elements = sorted(
            locality.counts.elements(), key=lambda node: (node not in locality.local_nodes, node)
        )
        assigned.update(zip(locality.ranks, elements, strict=True))
    by_rank = tuple(assigned[rank] for rank in range(len(gpus)))
    return Assignment(local_nodes_by_rank, by_rank, tuple(order), goal)


def _fill_nodes(topology: Topology, nodes: _Nodes, localities: Sequence[_Locality], goal: int) -> None:
    """Count the ranks of each locality on each node.

    Ranks come one by one. Each takes the node that has most left for it, if need be by moving a rank of an
    overlapping locality on to another node of its own. These are shortest augmenting paths of a flow with a
    convex cost for each node, so that the total is least (Ahuja, Magnanti, Orlin: Network Flows, chapter 14).
    """
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
