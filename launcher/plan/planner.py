"""From a machine and a request to the placement of every rank on the node, and why it is so."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.cpulist import format_cpulist
from launcher.errors import MachineError, UsageError
from launcher.plan.devices import NicChoice, resolve_visible, spread_devices
from launcher.plan.model import BINDINGS, Gpu, Machine, Plan, PlanWarning, Request, warn
from launcher.plan.resources import (
    MIN_CORES_PER_RANK,
    ROUNDING,
    Cores,
    budget_workers,
    build_rank_plan,
    choose_memory,
    count_cores,
    count_rank_cores,
    count_requested_workers,
)
from launcher.plan.topology import (
    Placement,
    Topology,
    build_topology,
    find_usable,
    gather_pus,
    place_ranks,
)
from launcher.plan.variables import COUNTS, find_binders, read_host, read_variable_count
from launcher.protocol import LAUNCH_NIC


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
    count = request.nproc_per_node or len(devices) or len(topology.cores)
    # Programs choose device `local_rank` modulo their number.
    gpus = [devices[rank % len(devices)] if devices else None for rank in range(count)]
    ranks = place_ranks(binding, topology, gpus, enough)
    NicChoice(machine, topology, request.environ).choose(machine, ranks)
    for rank in ranks:
        rank.memory = choose_memory(machine, topology, rank)
    shortfalls = [*_find_shortfalls(machine, topology, request, ranks)]
    if request.binding.strict and shortfalls:
        raise MachineError(str(shortfalls[0]))
    cores = count_cores(ranks)
    quota = machine.limits.cpus
    within = [have.within(None if quota is None else quota / count) for have in cores]
    chosen, shortages = budget_workers(request, machine, within)
    made = tuple(
        build_rank_plan(
            request,
            machine.kernel,
            number,
            rank,
            visible.gpu_variables[number % len(devices)] if devices else None,
            cores=within[number],
            num_workers=chosen[number][0],
            notes=[why, chosen[number][1]],
        )
        for number, (rank, why) in enumerate(zip(ranks, _explain(topology, ranks), strict=True))
    )
    warnings = (
        *(warn("machine", text=text) for text in machine.warnings),
        *visible.warnings,
        *_find_advice(request, machine, devices, cores),
        *shortages,
        *shortfalls,
    )
    return Plan(machine, made, warnings)


def _explain(topology: Topology, ranks: Sequence[Placement]) -> Iterator[str]:
    """A sentence for each rank: GPU and node, cores, caches, workers' cores, memory, NIC."""
    peers, users = Counter(rank.node for rank in ranks), defaultdict[int, set[int]](set)
    """Ranks of a node, and the ranks by last-level cache."""
    for number, rank in enumerate(ranks):
        for core in rank.own:
            users[core.l3].add(number)
    for number, rank in enumerate(ranks):
        gpu, node, memory = rank.gpu, rank.node, rank.memory.nodes
        parts = ["no GPU"]
        if gpu is not None:
            name = f"GPU {gpu.index} ({gpu.pci})"
            unknown = f"the firmware names no NUMA node for {name}"
            parts = [unknown if gpu.node is None else f"{name} is on NUMA node {gpu.node}"]
        if node is not None and (gpu is None or gpu.node != node):
            far = f" (distance {topology.distance(gpu.node, node)})" if gpu and gpu.node is not None else ""
            parts.append(f"it runs on node {node}{far}")
        if rank.why:
            parts.append(f"it has {rank.why}")
        else:
            own, total = len({core.id for core in rank.own}), len(topology.cores[node or 0])
            among = f", as one of {peers[node]} ranks there" if peers[node] > 1 else ""
            parts.append(f"it has {own} of the node's {_count_noun(total, 'usable core')}{among}")
            if sharers := set().union(*(users[core.l3] for core in rank.own)) - {number}:
                parts.append(f"it shares last-level caches with ranks {format_cpulist(sharers)}")
        lent = sorted(Counter(core.node for core in rank.lent).items())
        if lent:
            more = [f"{_count_noun(size, 'core')} of node {other}" for other, size in lent]
            parts.append(f"its workers also have {', '.join(more)}")
        if node is None:
            parts.append("no memory policy")
        else:
            source = f"from node {format_cpulist(memory)}" if memory else "wherever the kernel finds it"
            parts.append(f"memory {source}")
        if rank.nic:
            parts.append(f"NIC {rank.nic.name}, {rank.nic_why}")
        yield "; ".join(parts)


def _find_shortfalls(
    machine: Machine, topology: Topology, request: Request, ranks: Sequence[Placement]
) -> Iterator[PlanWarning]:
    """What the machine could not give.

    Ranks whose cpuset has no CPU next to their GPU, or not the memory of their node; a job that may use
    isolated CPUs only; reserved cores that could not be kept back; more ranks than cores; else ranks that
    have few cores next to their GPUs, and at most half as many as others.
    """
    binding, reserve = request.binding.policy, request.binding.reserve_cores
    if binding == "none":
        return
    by_gpu, by_node, by_local = (defaultdict[Any, set[int]](set) for _ in range(3))
    """Local ranks by their GPU's node, by their node and by its local nodes."""
    for number, rank in enumerate(ranks):
        by_node[rank.node].add(number)
        by_local[rank.local_nodes].add(number)
        by_gpu[rank.gpu and rank.gpu.node].add(number)
    usable = gather_pus(core for cores in topology.cores.values() for core in cores)
    for node, found in by_gpu.items():
        beside = frozenset(cpu.id for cpu in machine.cpus if cpu.node == node)
        if beside and beside.isdisjoint(usable):
            yield warn("remote", ranks=found, wanted=beside, usable=usable)
    there = {entry.id for entry in machine.nodes if entry.normal and entry.memory_kib}
    for node, found in by_node.items():
        near = {number for number in found if node in ranks[number].local_nodes}
        if node in there - machine.allowed_mems and near:
            yield warn("foreign_memory", ranks=near, node=node, allowed=machine.allowed_mems or "none")
    possible = find_usable(machine)
    if possible <= machine.isolated:
        yield warn("isolated", usable=possible)
    total = len({cpu.core for cpu in machine.cpus if cpu.id in possible})
    sizes = {node: len(cores) for node, cores in topology.cores.items()}
    if (kept := total - sum(sizes.values())) < reserve:
        yield warn("reserve", reserve=reserve, kept=kept, total=total)
    for node, found in by_node.items() if binding == "exclusive" else ():
        if len(found) > sizes[node]:
            cpus = gather_pus(topology.cores[node])
            yield warn("crowded", ranks=found, count=sizes[node], cpus=cpus, node=node)
    cores = {local_nodes: sum(sizes[node] for node in local_nodes) for local_nodes in by_local}
    each = {local_nodes: cores[local_nodes] / len(found) for local_nodes, found in by_local.items()}
    has_enough = sum(sizes.values()) >= len(ranks)
    for nodes, found in by_local.items() if binding == "exclusive" and has_enough else ():
        if each[nodes] < MIN_CORES_PER_RANK and 2 * each[nodes] <= (largest := max(each.values())):
            values = {"cores": cores[nodes], "each": each[nodes], "largest": largest}
            yield warn("uneven", ranks=found, nodes=nodes, **values)


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
        if environ.get(name) and read_variable_count(environ, name) is None:
            yield warn("no_number", name=name, value=environ[name], minimum=minimum)
    for name in find_binders(environ):
        yield warn("binds", name=name, value=environ[name])
    nic, known = environ.get(LAUNCH_NIC), [device.name for device in machine.nics]
    if nic and nic not in known:
        yield warn("nic", nic=nic, known=", ".join(known) or "none found")
    quota, total = machine.limits.cpus, sum(each.own_cores + each.worker_cores for each in cores)
    if quota is not None and quota < total - ROUNDING:
        yield warn("quota", quota=quota, total=total, each=quota / count, ranks=count)
    host = read_host(request.allocator)
    if host != "system" and request.host_library == "":
        yield warn("no_malloc", host=host)


def _count_noun(number: int, what: str) -> str:
    """A number of things; `launcher.text` would load logging in each rank's shim."""
    return f"{number} {what}{'' if number == 1 else 's'}"
