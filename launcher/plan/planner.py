"""From a machine and a request to the placement of every rank on the node, and why it is so."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.cpulist import format_cpulist
from launcher.errors import MachineError, UsageError
from launcher.plan.devices import assign_nics, resolve_visible, spread_devices
from launcher.plan.model import BINDINGS, Gpu, Machine, Plan, PlanWarning, Request, warn
from launcher.plan.resources import (
    MIN_CORES_PER_RANK,
    ROUNDING,
    Cores,
    Placement,
    budget_workers,
    build_rank_plan,
    choose_memory,
    count_cores,
    count_rank_cores,
    count_requested_workers,
)
from launcher.plan.topology import (
    Topology,
    assign_ranks,
    build_topology,
    find_usable,
    gather_pus,
    place_ranks,
    split_classes,
)
from launcher.plan.variables import COUNTS, find_binders, find_gc_fault, read_host, read_variable_count
from launcher.protocol import LAUNCH_GC, LAUNCH_NIC


@dataclass(frozen=True, slots=True)
class _NodePlacement:
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


def plan(machine: Machine, request: Request) -> Plan:
    """Place every rank of a node. Depends on its arguments alone.

    Raises UsageError for a binding that does not exist, MachineError if nothing can run, or if the placement
    falls short and `binding.strict` is set.
    """
    binding = request.binding.policy
    if binding not in BINDINGS:
        raise UsageError(f"binding={binding} is unknown: use one of {', '.join(BINDINGS)}")
    visible = resolve_visible(machine.gpus, request.environ)
    topology = build_topology(machine, 0 if binding == "none" else request.binding.reserve_cores)
    enough = count_rank_cores(count_requested_workers(request))
    if request.devices == "spread":
        visible = spread_devices(machine, topology, visible, request, enough)
    devices = visible.devices
    ranks = range(request.nproc_per_node or len(devices) or len(topology.cores))
    # Programs choose device `local_rank` modulo their number.
    gpus = [devices[rank % len(devices)] if devices else None for rank in ranks]
    assignment = assign_ranks(topology, gpus, enough if binding == "exclusive" else 0)
    sets = place_ranks(binding, topology, assignment)
    links = assign_nics(machine, topology, gpus, assignment.nodes, request.environ)
    local = assignment.local_nodes_by_rank
    memories = [choose_memory(machine, topology, sets[rank].node, local[rank]) for rank in ranks]
    placements = [
        Placement(gpus[rank], local[rank], sets[rank], memories[rank], links[rank]) for rank in ranks
    ]
    placed = _NodePlacement(machine, topology, binding, placements)
    shortfalls: list[PlanWarning] = []  # what the machine could not give
    if binding != "none":
        shortfalls += [*_find_remote(placed), *_find_foreign_memory(placed)]
        shortfalls += _find_left_over(placed, request.binding.reserve_cores)
    if binding == "exclusive":
        shortfalls += [*_find_crowded(placed), *_find_uneven(placed)]
    if request.binding.strict and shortfalls:
        raise MachineError(str(shortfalls[0]))
    cores = count_cores(topology, sets)
    quota = machine.limits.cpus
    within = [have.within(None if quota is None else quota / len(ranks)) for have in cores]
    budget = budget_workers(request, machine, within)
    made = tuple(
        build_rank_plan(
            request,
            machine.kernel,
            rank,
            placements[rank],
            visible.gpu_variables[rank % len(devices)] if devices else None,
            cores=within[rank],
            budget=budget,
            why=why,
        )
        for rank, why in enumerate(_explain_ranks(placed))
    )
    warnings = (
        *(warn("machine", text=text) for text in machine.warnings),
        *visible.warnings,
        *_find_advice(request, machine, devices, cores),
        *budget.find_shortages(within, measured=request.dataloader.measured),
        *shortfalls,
    )
    return Plan(machine, made, warnings)


def _explain_ranks(placed: _NodePlacement) -> Iterator[str]:
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


def _explain_node(placed: _NodePlacement, placement: Placement) -> str:
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


def _explain_exclusive(placed: _NodePlacement) -> Iterator[tuple[int, list[str]]]:
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


def _find_remote(placed: _NodePlacement) -> Iterator[PlanWarning]:
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
            yield warn("remote", ranks=ranks, wanted=local_cpus, usable=usable)


def _find_foreign_memory(placed: _NodePlacement) -> Iterator[PlanWarning]:
    """Ranks on a node next to their GPU that has memory, which the job's cpuset leaves out."""
    machine = placed.machine
    barred = {entry.id for entry in machine.nodes if entry.normal and entry.memory_kib} - machine.allowed_mems
    for node, found in placed.group_by_node().items():
        ranks = {rank for rank in found if node in placed.ranks[rank].local_nodes}
        if node in barred and ranks:
            allowed = machine.allowed_mems or "no node"
            source = placed.ranks[min(ranks)].memory.nodes or "wherever the kernel finds it"
            yield warn("foreign_memory", ranks=ranks, node=node, allowed=allowed, source=source)


def _find_left_over(placed: _NodePlacement, reserve: int) -> Iterator[PlanWarning]:
    """A job that may use isolated CPUs only, and reserved cores that could not be kept back."""
    machine, usable = placed.machine, find_usable(placed.machine)
    if usable <= machine.isolated:
        yield warn("isolated", usable=usable)
    total = len({cpu.core for cpu in machine.cpus if cpu.id in usable})
    kept = total - sum(map(len, placed.topology.cores.values()))
    if kept < reserve:
        yield warn("reserve", reserve=reserve, kept=kept, total=total)


def _find_crowded(placed: _NodePlacement) -> Iterator[PlanWarning]:
    """NUMA nodes with more ranks than cores."""
    for node, ranks in placed.group_by_node().items():
        cores = placed.topology.cores[node]
        if len(ranks) > len(cores):
            yield warn("crowded", ranks=ranks, count=len(cores), cpus=gather_pus(cores), node=node)


def _find_uneven(placed: _NodePlacement) -> Iterator[PlanWarning]:
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
    for nodes, ranks in groups.items():
        if each[nodes] < MIN_CORES_PER_RANK and 2 * each[nodes] <= largest:
            barred = any(cpu.node in nodes and cpu.id not in machine.allowed_cpus for cpu in machine.cpus)
            yield warn(
                "uneven_cpuset" if barred else "uneven",
                ranks=ranks,
                nodes=nodes,
                cores=cores[nodes],
                each=each[nodes],
                largest=largest,
                help=_describe_help(placed, nodes, ranks),
            )


def _describe_help(placed: _NodePlacement, local_nodes: frozenset[int], ranks: Iterable[int]) -> str:
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
            nodes = format_cpulist(set().union(*(used[rank] for rank in some)))
            parts.append(f"{who}local rank {format_cpulist(some)} {verb} NUMA node {nodes}")
    return ", and ".join(parts) or "they set the pace of all"


def _find_advice(
    request: Request, machine: Machine, visible: Sequence[Gpu], cores: Sequence[Cores]
) -> Iterator[PlanWarning]:
    """Warn of settings that are legal but seldom meant; `cores` are those of each rank."""
    environ, count = request.environ, len(cores)
    if visible and count > len(visible):
        yield warn("shared_gpus", ranks=count, gpus=len(visible))
    if len(visible) > 1 and request.devices != "own" and any(gpu.uuid.startswith("MIG-") for gpu in visible):
        yield warn("mig")
    order = environ.get("CUDA_DEVICE_ORDER") or "PCI_BUS_ID"
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in visible}) > 1:
        yield warn("device_order", order=order)
    for name, minimum in COUNTS.items():
        if environ.get(name) and read_variable_count(environ, name, minimum) is None:
            yield warn("no_number", name=name, value=environ[name], minimum=minimum)
    for name in find_binders(environ):
        yield warn("binds", name=name, value=environ[name])
    if fault := find_gc_fault(environ.get(LAUNCH_GC) or "default"):
        yield warn("gc", value=environ[LAUNCH_GC], fault=fault)
    nic, known = environ.get(LAUNCH_NIC), [device.name for device in machine.nics]
    if nic and nic not in known:
        yield warn("nic", nic=nic, known=", ".join(known) or "none found")
    quota, total = machine.limits.cpus, sum(each.own_cores + each.worker_cores for each in cores)
    if quota is not None and quota < total - ROUNDING:
        yield warn("quota", quota=quota, total=total, each=quota / count, ranks=count)
    host = read_host(request.allocator)
    if host in ("tcmalloc", "jemalloc") and request.host_library == "":
        yield warn(host)


def _name_ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_cpulist(ranks)}"


def _count_noun(number: int, what: str) -> str:
    """A number of things; `launcher.text` would load logging in each rank's shim."""
    return f"{number} {what}{'' if number == 1 else 's'}"
