"""Why each rank runs where it does, what the machine could not give, and settings that are seldom meant."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.cpulist import format_cpulist
from launcher.plan.allocator import MALLOC_PACKAGES, read_host
from launcher.plan.model import Gpu, Machine, PlanWarning, Request
from launcher.plan.resources import MIN_CORES_PER_RANK, ROUNDING, Cores, Placement
from launcher.plan.topology import Topology, find_usable, gather_pus, split_classes
from launcher.plan.variables import BINDS, COUNTS, find_binders, find_gc_fault, read_variable_count
from launcher.protocol import LAUNCH_GC, LAUNCH_NIC


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """The placement of all ranks of a node."""

    machine: Machine
    topology: Topology
    binding: str
    ranks: Sequence[Placement]
    """In the order of local ranks."""

    def group_by_node(self) -> dict[int, set[int]]:
        """Local ranks by NUMA node."""
        groups: dict[int, set[int]] = {}
        for rank, placement in enumerate(self.ranks):
            if placement.sets.node is not None:
                groups.setdefault(placement.sets.node, set()).add(rank)
        return groups


def explain_ranks(placed: NodePlacement) -> Iterator[str]:
    """A sentence for each rank: GPU and node, cores, caches, workers' cores, memory, NIC."""
    peers = Counter(placement.sets.cpus for placement in placed.ranks)
    exclusive = dict(_explain_exclusive(placed)) if placed.binding == "exclusive" else {}
    for rank, placement in enumerate(placed.ranks):
        parts = [_explain_node(placed, placement)]
        if exclusive:
            parts += exclusive[rank]
        else:
            count = peers[placement.sets.cpus]
            shared = f", shared by {count} ranks" if count > 1 else ""
            parts.append(f"it has {placement.sets.why}{shared}")
        parts.append(_explain_memory(placed.machine, placement))
        if placement.link:
            parts.append(f"NIC {placement.link.nic.name}, {placement.link.why}")
        yield "; ".join(parts)


def _explain_node(placed: NodePlacement, placement: Placement) -> str:
    """The rank's GPU, the NUMA node that the GPU is on, and the NUMA node of the rank."""
    topology, gpu, node, local_nodes = (
        placed.topology,
        placement.gpu,
        placement.sets.node,
        placement.local_nodes,
    )
    spread = f", so ranks are spread over the NUMA nodes by their cores, this one on node {node}"
    if len(topology.cores) == 1:
        spread = f", and all CPUs for this job are on node {node}"
    if gpu is None:
        return "no GPU" if node is None else f"no GPU{spread}"
    name = f"GPU {gpu.index} ({gpu.pci})"
    if node is None or gpu.node == node:
        return name if gpu.node is None else f"{name} is on NUMA node {gpu.node}"
    is_many = len(local_nodes) > 1
    nodes = f"{'nodes' if is_many else 'node'} {format_cpulist(local_nodes)}"
    chosen = f", this rank on node {node}" if is_many else ""
    if node not in local_nodes:
        usable = _count_noun(sum(len(topology.cores[local]) for local in local_nodes), "usable core")
        far = min(topology.distance(local, node) for local in local_nodes)
        taken = f"{name} is nearest to {nodes}, whose {usable} other ranks have"
        return f"{taken}: this one is on node {node} (distance {far})"
    if gpu.node is not None and (gpu.node in topology.cores or gpu.node in topology.distances):
        has_cpus = any(cpu.node == gpu.node for cpu in placed.machine.cpus)
        lack = "whose CPUs are not for this job" if has_cpus else "which has no CPUs"
        nearest = f"nearest {'are' if is_many else 'is'} {nodes}"
        far = topology.distance(gpu.node, node)
        return f"{name} is on NUMA node {gpu.node}, {lack}: {nearest} (distance {far}){chosen}"
    silent = f"the firmware names no NUMA node for {name}"
    if len(local_nodes) < len(topology.cores):
        return f"{silent}, but its local CPUs are on {nodes}{chosen}"
    return silent + spread


def _explain_exclusive(placed: NodePlacement) -> Iterator[tuple[int, list[str]]]:
    """For each rank what it has of its node's cores and caches, and where its workers have cores besides."""
    core_of = placed.topology.core_of
    on_node = placed.group_by_node()
    caches = [{core_of[pu].l3 for pu in placement.sets.cpus} for placement in placed.ranks]
    users = defaultdict[int, set[int]](set)
    lent = []
    for rank, placement in enumerate(placed.ranks):
        for cache in caches[rank]:
            users[cache].add(rank)
        extra = {core_of[pu] for pu in placement.sets.worker_cpus - placement.sets.cpus}
        lent.append(Counter(core.node for core in extra))
    for rank, node in ((rank, node) for node, ranks in on_node.items() for rank in ranks):
        placement = placed.ranks[rank]
        shared = _explain_caches(rank, caches[rank], users)
        parts = [_explain_cores(placed.topology, placement, node, len(on_node[node])) + shared]
        if others := {
            other for other, cores in enumerate(lent) if cores[node] and other not in on_node[node]
        }:
            cores = _count_noun(sum(lent[other][node] for other in others), "core")
            parts.append(f"workers of {_name_ranks(others)} have {cores} of the node")
        if lent[rank][node]:
            parts.append(
                f"its workers also have {_count_noun(lent[rank][node], 'less capable core')} of the node"
            )
        for has_ranks, why in ((False, "where no rank runs"), (True, "which ranks there can spare")):
            sources = [
                f"{_count_noun(cores, 'core')} of node {other} "
                f"(distance {placed.topology.distance(other, node)})"
                for other, cores in sorted(lent[rank].items())
                if other != node and (other in on_node) == has_ranks
            ]
            if sources:
                parts.append(f"its workers also have {', '.join(sources)}, {why}")
        yield rank, parts


def _explain_cores(topology: Topology, placement: Placement, node: int, peers: int) -> str:
    """What a rank has of its node's cores, as one of `peers` ranks there."""
    cpus = placement.sets.cpus
    total, own_cores = len(topology.cores[node]), len({topology.core_of[pu] for pu in cpus})
    usable = _count_noun(total, "usable core")
    if total < peers:
        return f"the node has {usable} for {peers} ranks, of which it has CPUs {format_cpulist(cpus)}"
    if peers > 1:
        return f"it has {own_cores} of the node's {usable}, as one of {peers} ranks there"
    if own_cores < total:
        best = f"the {own_cores} most capable" if split_classes(topology.cores[node])[1:] else own_cores
        return f"it has {best} of the node's {usable}"
    return f"it has {'all ' if total > 1 else ''}the node's {usable}"


def _explain_caches(rank: int, own_caches: set[int], users: Mapping[int, set[int]]) -> str:
    """Whether a rank shares its last-level caches with other ranks."""
    split = [cache for cache in own_caches if len(users[cache]) > 1]
    if not split:
        return f", with {_count_noun(len(own_caches), 'last-level cache')} of its own"
    part = "its last-level cache"
    if len(own_caches) > 1:
        part = f"{len(split)} of its {len(own_caches)} last-level caches"
    return f", {part} shared with {_name_ranks(set().union(*(users[cache] for cache in split)) - {rank})}"


def _explain_memory(machine: Machine, placement: Placement) -> str:
    """Where a rank's memory comes from, and why if that is not its node."""
    node, found, local_nodes = placement.sets.node, placement.memory.nodes, placement.local_nodes
    if node is None:
        return "no memory policy"
    if found == {node}:
        return f"memory from node {node}"
    if node not in local_nodes and found & local_nodes:
        return f"memory from node {format_cpulist(found)}, next to its GPU"
    has_memory = any(entry.id == node and entry.normal and entry.memory_kib for entry in machine.nodes)
    barred = has_memory and node not in machine.allowed_mems
    reason = f"since that of node {node} is not for this job" if barred else f"since node {node} has none"
    source = f"from node {format_cpulist(found)}" if found else "wherever the kernel finds it"
    return f"memory {source}, {reason}"


def find_shortfalls(request: Request, placed: NodePlacement) -> tuple[PlanWarning, ...]:
    """What the machine could not give; nothing if no binding was asked for."""
    if request.binding.policy == "none":
        return ()
    crowded = (*_find_crowded(placed), *_find_uneven(placed)) if placed.binding == "exclusive" else ()
    return (
        *_find_remote(placed),
        *_find_foreign_memory(placed),
        *_find_left_over(placed, request.binding.reserve_cores),
        *crowded,
    )


def _find_remote(placed: NodePlacement) -> Iterator[PlanWarning]:
    """Ranks that run away from their GPU because the job may use none of the CPUs beside it."""
    usable = frozenset(placed.topology.core_of)
    by_node = defaultdict[int | None, set[int]](set)
    for cpu in placed.machine.cpus:
        by_node[cpu.node].add(cpu.id)
    wanted = defaultdict[frozenset[int], set[int]](set)
    for rank, placement in enumerate(placed.ranks):
        if gpu := placement.gpu:
            wanted[frozenset(by_node.get(gpu.node, gpu.local_cpus))].add(rank)
    for local_cpus, ranks in wanted.items():
        if local_cpus and local_cpus.isdisjoint(usable):
            yield PlanWarning(
                "placement",
                f"local rank {format_cpulist(ranks)} needs CPUs {format_cpulist(local_cpus)}, next to its "
                f"GPU, but this job may use {format_cpulist(usable)}, and runs elsewhere",
                "ask for those CPUs (cpus_per_task, or the whole node), or set binding=none",
            )


def _find_foreign_memory(placed: NodePlacement) -> Iterator[PlanWarning]:
    """Ranks on a node next to their GPU that has memory, which the job's cpuset leaves out."""
    machine = placed.machine
    barred = {entry.id for entry in machine.nodes if entry.normal and entry.memory_kib} - machine.allowed_mems
    for node, found in placed.group_by_node().items():
        ranks = {rank for rank in found if node in placed.ranks[rank].local_nodes}
        if node in barred and ranks:
            source = placed.ranks[min(ranks)].memory.nodes
            yield PlanWarning(
                "memory",
                f"local rank {format_cpulist(ranks)} runs on NUMA node {node}, but this job may use "
                f"the memory of {format_cpulist(machine.allowed_mems) or 'no node'}, so its memory comes "
                f"from {format_cpulist(source) or 'wherever the kernel finds it'}",
                f"ask for node {node}'s memory (cpuset.mems)",
            )


def _find_left_over(placed: NodePlacement, reserve: int) -> Iterator[PlanWarning]:
    """A job that may use isolated CPUs only, and reserved cores that could not be kept back."""
    machine, usable = placed.machine, find_usable(placed.machine)
    if usable <= machine.isolated:
        yield PlanWarning(
            "placement",
            f"this job may use isolated CPUs only ({format_cpulist(usable)}), "
            "which the kernel does not balance",
            "ask for others, or start without isolcpus",
        )
    total = len({cpu.core for cpu in machine.cpus if cpu.id in usable})
    kept = total - sum(map(len, placed.topology.cores.values()))
    if kept < reserve:
        what = f"reserve_cores={reserve}, but only {kept} of {total} cores can be kept back"
        yield PlanWarning("placement", what, "reserve fewer")


def _find_crowded(placed: NodePlacement) -> Iterator[PlanWarning]:
    """NUMA nodes with more ranks than cores."""
    for node, ranks in placed.group_by_node().items():
        cores = placed.topology.cores[node]
        if len(ranks) > len(cores):
            yield PlanWarning(
                "placement",
                f"local rank {format_cpulist(ranks)} must share {len(cores)} cores (CPUs "
                f"{format_cpulist(gather_pus(cores))}) of NUMA node {node} and will wait for one another",
                "ask for more CPUs (cpus_per_task), or start fewer ranks (nproc_per_node)",
            )


def _find_uneven(placed: NodePlacement) -> Iterator[PlanWarning]:
    """Ranks that have few cores next to their GPUs, and at most half as many as others.

    Nothing if there are more ranks than cores, which `_find_crowded` tells.
    """
    machine, sizes = placed.machine, {node: len(cores) for node, cores in placed.topology.cores.items()}
    if sum(sizes.values()) < len(placed.ranks):
        return
    groups = defaultdict[frozenset[int], set[int]](set)
    for rank, placement in enumerate(placed.ranks):
        groups[placement.local_nodes].add(rank)
    cores = {local_nodes: sum(sizes[node] for node in local_nodes) for local_nodes in groups}
    each = {local_nodes: cores[local_nodes] / len(ranks) for local_nodes, ranks in groups.items()}
    largest = max(each.values())
    for local_nodes, ranks in groups.items():
        if each[local_nodes] >= MIN_CORES_PER_RANK or 2 * each[local_nodes] > largest:
            continue
        nodes = _name_nodes(local_nodes)
        fix = "start fewer ranks (nproc_per_node, with devices=spread)"
        fix += ", or spread the GPUs' slots over the nodes"
        if any(cpu.node in local_nodes and cpu.id not in machine.allowed_cpus for cpu in machine.cpus):
            fix = f"ask for more CPUs of {nodes} (cpus_per_task, or the whole node)"
        yield PlanWarning(
            "placement",
            f"local rank {format_cpulist(ranks)} has {cores[local_nodes]} usable cores next to its GPUs, "
            f"on {nodes}, {each[local_nodes]:.2g} for each where other ranks have {largest:.3g} next to "
            f"theirs, so {_describe_help(placed, local_nodes, ranks)}",
            fix,
        )


def _describe_help(placed: NodePlacement, local_nodes: frozenset[int], ranks: Iterable[int]) -> str:
    """Where ranks run, and their workers, that have too few cores on the nodes of `local_nodes`."""
    core_of = placed.topology.core_of
    used = {
        rank: {core_of[pu].node for pu in placed.ranks[rank].sets.worker_cpus} - local_nodes for rank in ranks
    }
    away = {rank for rank in ranks if placed.ranks[rank].sets.node not in local_nodes}
    helped = {rank for rank in ranks if used[rank]} - away
    parts = []
    for some, who, verb in ((away, "", "runs on"), (helped, "workers of ", "also run on")):
        if some:
            nodes = _name_nodes(set().union(*(used[rank] for rank in some)))
            parts.append(f"{who}local rank {format_cpulist(some)} {verb} {nodes}")
    return ", and ".join(parts) or "they set the pace of all"


def find_advice(
    request: Request, machine: Machine, visible: Sequence[Gpu], cores: Sequence[Cores]
) -> Iterator[PlanWarning]:
    """Warn of settings that are legal but seldom meant; `cores` are those of each rank."""
    environ, count = request.environ, len(cores)
    if visible and count > len(visible):
        yield PlanWarning(
            "devices",
            f"{count} ranks for {len(visible)} GPUs: local rank r gets GPU r % {len(visible)}, "
            "and NCCL refuses two ranks on one GPU",
            f"set nproc_per_node={len(visible)} unless the program means it (MPS)",
        )
    if len(visible) > 1 and request.devices != "own" and any(gpu.uuid.startswith("MIG-") for gpu in visible):
        what = "CUDA opens one MIG instance in a process, so every rank would use the first"
        yield PlanWarning("devices", what, "set devices=own")
    order = environ.get("CUDA_DEVICE_ORDER") or "PCI_BUS_ID"
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in visible}) > 1:
        what = f"CUDA_DEVICE_ORDER={order} may not number GPUs as this plan does"
        yield PlanWarning("devices", what, "unset it, or set PCI_BUS_ID")
    for name, minimum in COUNTS.items():
        if environ.get(name) and read_variable_count(environ, name, minimum) is None:
            what = f"{name}={environ[name]} is no number from {minimum} on, and is replaced"
            yield PlanWarning("variables", what, "correct or unset it")
    for name in find_binders(environ):
        yield PlanWarning("variables", f"{name}={environ[name]} is set, and {BINDS}", f"unset {name}")
    if fault := find_gc_fault(environ.get(LAUNCH_GC) or "default"):
        yield PlanWarning(
            "variables",
            f"LAUNCH_GC={environ[LAUNCH_GC]}: {fault}, and garbage is left to Python",
            "give default, synchronized,warmup=30,every=50, disabled,every=50 or frozen,warmup=30",
        )
    nic, known = environ.get(LAUNCH_NIC), [device.name for device in machine.nics]
    if nic and nic not in known:
        devices = ", ".join(known) or "none found"
        what = f"LAUNCH_NIC={nic} is none of this machine's RDMA devices ({devices})"
        yield PlanWarning("nic", what, "correct or unset it")
    quota, total = machine.limits.cpus, sum(each.own_cores + each.worker_cores for each in cores)
    if quota is not None and quota < total - ROUNDING:
        yield PlanWarning(
            "workers",
            f"the cgroup's quota gives this job the time of {quota:g} CPUs, on {total:.3g} cores, and the "
            "kernel halts what goes beyond: workers and threads are counted within "
            f"{quota / count:.3g} for each of {count} ranks",
            "raise the CPU limit (resources.limits.cpu in Kubernetes) or remove it",
        )
    host = read_host(request.allocator)
    if host in MALLOC_PACKAGES and request.host_library == "":
        what = f"allocator.host={host}, but its library is not on this node, and malloc stays the system's"
        yield PlanWarning("allocator", what, f"install {MALLOC_PACKAGES[host]}")


def _name_nodes(nodes: Iterable[int]) -> str:
    return f"NUMA node {format_cpulist(frozenset(nodes))}"


def _name_ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_cpulist(ranks)}"


def _count_noun(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"
