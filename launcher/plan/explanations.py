"""Why each rank runs where it does, in a sentence."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from launcher.cpulist import format_cpulist
from launcher.plan.cpu_sets import RankPlacement
from launcher.plan.model import Gpu, Machine, Memory
from launcher.plan.rank_settings import NodePlacement
from launcher.plan.usable_cores import Core, Topology, split_classes


def explain_ranks(placed: NodePlacement) -> Iterator[str]:
    """A sentence for each rank: GPU and node, cores, caches, workers' cores, memory, NIC."""
    exclusive = placed.binding == "exclusive"
    topology = placed.topology
    peers = Counter(placement.node if exclusive else placement.cpus for placement in placed.placements)
    cores = {core.id: core for found in topology.cores.values() for core in found}
    users = find_cache_users(topology, cores, placed.placements) if exclusive else {}
    extra = [
        count_worker_cores(topology, cores, placement) if exclusive else {} for placement in placed.placements
    ]
    for rank, (gpu, placement, link) in enumerate(
        zip(placed.gpus, placed.placements, placed.links, strict=True)
    ):
        local_nodes, memory = placed.local_nodes_by_rank[rank], placed.memories[rank]
        parts = [explain_node(topology, placed.machine, gpu, local_nodes, placement.node)]
        if exclusive and placement.node is not None:
            caches = {cores[topology.core_of[pu]].l3 for pu in placement.cpus}
            shared = explain_caches(rank, caches, users)
            parts.append(explain_cores(topology, placement, placement.node, peers[placement.node]) + shared)
            parts += explain_lent_cores(placed.placements, extra, placement.node)
            parts += explain_worker_cores(topology, extra[rank], placement.node, peers)
        else:
            others = peers[placement.cpus] - 1
            parts.append(f"it has {placement.why}{f', shared by {others + 1} ranks' if others else ''}")
        parts.append(explain_memory(placed.machine, local_nodes, placement.node, memory))
        parts += [f"NIC {link.nic.name}, {link.why}"] if link else []
        yield "; ".join(parts)


def find_cache_users(
    topology: Topology, cores: Mapping[int, Core], placements: Sequence[RankPlacement]
) -> Mapping[int, set[int]]:
    """Ranks whose own process runs under each last-level cache."""
    users: dict[int, set[int]] = {}
    for rank, placement in enumerate(placements):
        for cache in {cores[topology.core_of[pu]].l3 for pu in placement.cpus}:
            users.setdefault(cache, set()).add(rank)
    return users


def count_worker_cores(
    topology: Topology, cores: Mapping[int, Core], placement: RankPlacement
) -> Mapping[int, int]:
    """Cores that are for a rank's workers alone, by NUMA node."""
    found = {topology.core_of[pu] for pu in placement.worker_cpus - placement.cpus}
    return Counter(cores[core].node for core in found)


def explain_node(
    topology: Topology, machine: Machine, gpu: Gpu | None, local_nodes: frozenset[int], node: int | None
) -> str:
    """The rank's GPU, the NUMA node that the GPU is on, and the NUMA node of the rank."""
    name = "" if gpu is None else f"GPU {gpu.index} ({gpu.pci})"
    if gpu is None or node is None:
        known = f" is on NUMA node {gpu.node}" if gpu and gpu.node is not None else ""
        return name + known if gpu else "no GPU" + ("" if node is None else explain_spread(topology, node))
    if gpu.node == node:
        return f"{name} is on NUMA node {node}"
    nodes = f"{'nodes' if len(local_nodes) > 1 else 'node'} {format_cpulist(local_nodes)}"
    chosen = f", this rank on node {node}" if len(local_nodes) > 1 else ""
    if node not in local_nodes:
        usable = count_noun(sum(len(topology.cores[local]) for local in local_nodes), "usable core")
        far = min(topology.distance(local, node) for local in local_nodes)
        taken = f"{name} is nearest to {nodes}, whose {usable} other ranks have"
        return f"{taken}: this one is on node {node} (distance {far})"
    if gpu.node is not None and (gpu.node in topology.cores or gpu.node in topology.distances):
        has_cpus = any(cpu.node == gpu.node for cpu in machine.cpus)
        lack = "whose CPUs are not for this job" if has_cpus else "which has no CPUs"
        far, are = topology.distance(gpu.node, node), "are" if len(local_nodes) > 1 else "is"
        return f"{name} is on NUMA node {gpu.node}, {lack}: nearest {are} {nodes} (distance {far}){chosen}"
    silent = f"the firmware names no NUMA node for {name}"
    if len(local_nodes) < len(topology.cores):
        return f"{silent}, but its local CPUs are on {nodes}{chosen}"
    return silent + explain_spread(topology, node)


def explain_spread(topology: Topology, node: int) -> str:
    """Why a rank that may be anywhere is on a node."""
    if len(topology.cores) == 1:
        return f", and all CPUs for this job are on node {node}"
    return f", so ranks are spread over the NUMA nodes by their cores, this one on node {node}"


def explain_cores(topology: Topology, placement: RankPlacement, node: int, peers: int) -> str:
    """What a rank has of its node's cores."""
    total, own_cores = len(topology.cores[node]), len({topology.core_of[pu] for pu in placement.cpus})
    if total < peers:
        cpus = format_cpulist(placement.cpus)
        return (
            f"the node has {count_noun(total, 'usable core')} for {peers} ranks, of which it has CPUs {cpus}"
        )
    if peers > 1:
        usable = count_noun(total, "usable core")
        return f"it has {own_cores} of the node's {usable}, as one of {peers} ranks there"
    if own_cores < total:
        best = f"the {own_cores} most capable" if split_classes(topology.cores[node])[1:] else own_cores
        return f"it has {best} of the node's {count_noun(total, 'usable core')}"
    return f"it has {'all ' if total > 1 else ''}the node's {count_noun(total, 'usable core')}"


def explain_caches(rank: int, own_caches: set[int], users: Mapping[int, set[int]]) -> str:
    """Whether a rank shares its last-level caches with other ranks."""
    split = [cache for cache in own_caches if len(users[cache]) > 1]
    if not split:
        return f", with {count_noun(len(own_caches), 'last-level cache')} of its own"
    others = set().union(*(users[cache] for cache in split)) - {rank}
    part = (
        "its last-level cache"
        if len(own_caches) == 1
        else f"{len(split)} of its {len(own_caches)} last-level caches"
    )
    return f", {part} shared with rank{'s' if len(others) > 1 else ''} {format_cpulist(others)}"


def explain_lent_cores(
    placements: Sequence[RankPlacement], extra: Sequence[Mapping[int, int]], node: int
) -> Iterator[str]:
    """The cores of a node that workers of other nodes' ranks use."""
    others = {rank for rank, cores in enumerate(extra) if cores.get(node) and placements[rank].node != node}
    if others:
        cores = count_noun(sum(extra[rank][node] for rank in others), "core")
        ranks = f"{'ranks' if len(others) > 1 else 'rank'} {format_cpulist(others)}"
        yield f"workers of {ranks} have {cores} of the node"


def explain_worker_cores(
    topology: Topology, extra: Mapping[int, int], node: int, used: Collection[object]
) -> Iterator[str]:
    """Where the cores come from that are for a rank's workers alone."""
    if extra.get(node):
        yield f"its workers also have {count_noun(extra[node], 'less capable core')} of the node"
    for spared in (False, True):
        parts = [
            f"{count_noun(cores, 'core')} of node {other} (distance {topology.distance(other, node)})"
            for other, cores in sorted(extra.items())
            if other != node and (other in used) == spared
        ]
        if parts:
            why = "which ranks there can spare" if spared else "where no rank runs"
            yield f"its workers also have {', '.join(parts)}, {why}"


def explain_memory(machine: Machine, local_nodes: frozenset[int], node: int | None, memory: Memory) -> str:
    """Where a rank's memory comes from, and why if that is not its node."""
    if node is None:
        return "no memory policy"
    if memory.nodes == {node}:
        return f"memory from node {node}"
    target = format_cpulist(memory.nodes)
    if node not in local_nodes and memory.nodes & local_nodes:
        return f"memory from node {target}, next to its GPU"
    has_memory = any(entry.id == node and entry.normal and entry.memory_kib for entry in machine.nodes)
    barred = has_memory and node not in machine.allowed_mems
    reason = f"since that of node {node} is not for this job" if barred else f"since node {node} has none"
    if not memory.nodes:
        return f"memory wherever the kernel finds it, {reason}"
    return f"memory from node {target}, {reason}"


def count_noun(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"
