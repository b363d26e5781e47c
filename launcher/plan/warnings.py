"""Warnings: a placement that falls short of the request, and settings that are seldom meant."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from launcher.cpulist import format_cpulist
from launcher.plan.allocator import find_missing
from launcher.plan.cpu_sets import RankPlacement
from launcher.plan.environment import COUNTS, read_variable_count
from launcher.plan.gc_policy import parse_gc_policy
from launcher.plan.model import Gpu, Machine, Request
from launcher.plan.rank_settings import NodePlacement
from launcher.plan.rules import BINDS, MIN_CORES_PER_RANK, find_binders
from launcher.plan.usable_cores import Topology, find_usable, gather_pus
from launcher.plan.workers_and_threads import Cores
from launcher.protocol import LAUNCH_GC, LAUNCH_NIC


def find_shortfalls(request: Request, placed: NodePlacement) -> tuple[str, ...]:
    """What the machine could not give, as `what happened: fix`; nothing if no binding was asked for."""
    if request.binding == "none":
        return ()
    return (
        *find_remote(placed),
        *find_foreign_memory(placed),
        *find_isolated(placed.machine),
        *find_unreserved(placed.machine, placed.topology, request.reserve_cores),
        *((*find_crowded(placed), *find_uneven(placed)) if request.binding == "exclusive" else ()),
    )


def find_remote(placed: NodePlacement) -> Iterator[str]:
    """Ranks that run away from their GPU because the job may use none of the CPUs beside it."""
    usable = frozenset(placed.topology.core_of)
    by_node: dict[int | None, set[int]] = {}
    for cpu in placed.machine.cpus:
        by_node.setdefault(cpu.node, set()).add(cpu.id)
    wanted: dict[frozenset[int], set[int]] = {}
    for rank, gpu in enumerate(placed.gpus):
        if gpu is not None and (local_cpus := by_node.get(gpu.node, gpu.local_cpus)).isdisjoint(usable):
            wanted.setdefault(frozenset(local_cpus), set()).add(rank)
    for local_cpus, ranks in wanted.items():
        if local_cpus:
            yield (
                f"local rank {format_cpulist(ranks)} needs CPUs {format_cpulist(local_cpus)}, next to its "
                f"GPU, but this job may use {format_cpulist(usable)}, and runs elsewhere: "
                "ask for those CPUs (cpus_per_task, or the whole node), or set binding=none"
            )


def find_foreign_memory(placed: NodePlacement) -> Iterator[str]:
    """Ranks on a node next to their GPU that has memory, which the job's cpuset leaves out."""
    machine = placed.machine
    barred = {entry.id for entry in machine.nodes if entry.normal and entry.memory_kib} - machine.allowed_mems
    for node, found in group_by_node(placed.placements).items():
        ranks = {rank for rank in found if node in placed.local_nodes_by_rank[rank]}
        if node in barred and ranks:
            source = placed.memories[min(ranks)].nodes
            yield (
                f"local rank {format_cpulist(ranks)} runs on NUMA node {node}, but this job may use "
                f"the memory of {format_cpulist(machine.allowed_mems) or 'no node'}, so its memory comes "
                f"from {format_cpulist(source) or 'wherever the kernel finds it'}: "
                f"ask for node {node}'s memory (cpuset.mems)"
            )


def find_crowded(placed: NodePlacement) -> Iterator[str]:
    """NUMA nodes with more ranks than cores."""
    for node, ranks in group_by_node(placed.placements).items():
        cores = placed.topology.cores[node]
        if len(ranks) > len(cores):
            yield (
                f"local rank {format_cpulist(ranks)} must share {len(cores)} cores (CPUs "
                f"{format_cpulist(gather_pus(cores))}) of NUMA node {node} and will wait for one another: "
                "ask for more CPUs (cpus_per_task), or start fewer ranks (nproc_per_node)"
            )


def find_uneven(placed: NodePlacement) -> Iterator[str]:
    """Ranks that have few cores next to their GPUs, and at most half as many as others.

    Nothing if there are more ranks than cores, which `find_crowded` tells.
    """
    topology = placed.topology
    sizes = {node: len(cores) for node, cores in topology.cores.items()}
    if sum(sizes.values()) < len(placed.placements):
        return
    groups: dict[frozenset[int], set[int]] = {}
    for rank, local_nodes in enumerate(placed.local_nodes_by_rank):
        groups.setdefault(local_nodes, set()).add(rank)
    cores = {local_nodes: sum(sizes[node] for node in local_nodes) for local_nodes in groups}
    each = {local_nodes: cores[local_nodes] / len(ranks) for local_nodes, ranks in groups.items()}
    largest = max(each.values())
    for local_nodes, ranks in groups.items():
        if each[local_nodes] < MIN_CORES_PER_RANK and 2 * each[local_nodes] <= largest:
            yield (
                f"local rank {format_cpulist(ranks)} has {cores[local_nodes]} usable cores next to its GPUs, "
                f"on {format_nodes(local_nodes)}, {each[local_nodes]:.2g} for each where other ranks "
                f"have {largest:.3g} next to theirs, so "
                f"{describe_help(topology, local_nodes, ranks, placed.placements)}: "
                f"{suggest_cores(placed.machine, local_nodes)}"
            )


def format_nodes(nodes: Iterable[int]) -> str:
    """NUMA nodes by their numbers."""
    return f"NUMA node {format_cpulist(frozenset(nodes))}"


def describe_help(
    topology: Topology, local_nodes: frozenset[int], ranks: Iterable[int], placements: Sequence[RankPlacement]
) -> str:
    """Where ranks run, and their workers, that have too few cores on the nodes of `local_nodes`."""
    node_of = {pu: core.node for cores in topology.cores.values() for core in cores for pu in core.pus}
    away = {rank for rank in ranks if placements[rank].node not in local_nodes}
    used = {rank: {node_of[pu] for pu in placements[rank].worker_cpus} - local_nodes for rank in ranks}
    helped = {rank for rank in ranks if used[rank]} - away
    parts = [
        f"{who}local rank {format_cpulist(some)} {verb} {format_nodes(set().union(*(used[r] for r in some)))}"
        for some, who, verb in ((away, "", "runs on"), (helped, "workers of ", "also run on"))
        if some
    ]
    return ", and ".join(parts) or "they set the pace of all"


def suggest_cores(machine: Machine, local_nodes: frozenset[int]) -> str:
    """How there would be more cores on some nodes."""
    if any(cpu.node in local_nodes and cpu.id not in machine.allowed_cpus for cpu in machine.cpus):
        return f"ask for more CPUs of {format_nodes(local_nodes)} (cpus_per_task, or the whole node)"
    return "start fewer ranks (nproc_per_node, with devices=spread), or spread the GPUs' slots over the nodes"


def find_isolated(machine: Machine) -> Iterator[str]:
    """A job that may use isolated CPUs only."""
    usable = find_usable(machine)
    if usable <= machine.isolated:
        yield (
            f"this job may use isolated CPUs only ({format_cpulist(usable)}), "
            "which the kernel does not balance: ask for others, or start without isolcpus"
        )


def find_unreserved(machine: Machine, topology: Topology, reserve: int) -> Iterator[str]:
    """Reserved cores that could not be kept back."""
    usable = find_usable(machine)
    total = len({cpu.core for cpu in machine.cpus if cpu.id in usable})
    kept = total - sum(len(cores) for cores in topology.cores.values())
    if kept < reserve:
        yield f"reserve_cores={reserve}, but only {kept} of {total} cores can be kept back: reserve fewer"


def group_by_node(placements: Sequence[RankPlacement]) -> Mapping[int, set[int]]:
    """Local ranks by NUMA node."""
    groups: dict[int, set[int]] = {}
    for rank, placement in enumerate(placements):
        if placement.node is not None:
            groups.setdefault(placement.node, set()).add(rank)
    return groups


def find_advice(
    request: Request, machine: Machine, visible: Sequence[Gpu], cores: Sequence[Cores]
) -> Iterator[str]:
    """Warn of settings that are legal but seldom meant; `cores` are those of each rank."""
    environ = dict(request.environ)
    count = len(cores)
    if visible and count > len(visible):
        yield (
            f"{count} ranks for {len(visible)} GPUs: local rank r gets GPU r % {len(visible)}, "
            "and NCCL refuses two ranks on one GPU: "
            f"set nproc_per_node={len(visible)} unless the program means it (MPS)"
        )
    if len(visible) > 1 and request.devices != "own" and any(gpu.uuid.startswith("MIG-") for gpu in visible):
        yield "CUDA opens one MIG instance in a process, so every rank would use the first: set devices=own"
    order = environ.get("CUDA_DEVICE_ORDER") or "PCI_BUS_ID"
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in visible}) > 1:
        yield f"CUDA_DEVICE_ORDER={order} may not number GPUs as this plan does: unset it, or set PCI_BUS_ID"
    for name, minimum in COUNTS.items():
        if environ.get(name) and read_variable_count(environ, name, minimum) is None:
            yield (
                f"{name}={environ[name]} is no number from {minimum} on, and is replaced: correct or unset it"
            )
    for name in find_binders(environ):
        yield f"{name}={environ[name]} is set, and {BINDS}: unset {name}"
    if fault := find_policy_fault(environ.get(LAUNCH_GC) or "default"):
        yield (
            f"LAUNCH_GC={environ[LAUNCH_GC]}: {fault}, and garbage is left to Python: give default, "
            "synchronized,warmup=30,every=50, disabled,every=50 or frozen,warmup=30"
        )
    nic = environ.get(LAUNCH_NIC)
    if nic and nic not in (known := [device.name for device in machine.nics]):
        yield (
            f"LAUNCH_NIC={nic} is none of this machine's RDMA devices ({', '.join(known) or 'none found'}): "
            "correct or unset it"
        )
    yield from find_quota(machine, cores)
    yield from find_missing(request)


def find_policy_fault(text: str) -> str:
    """What is wrong with a user's LAUNCH_GC; empty if nothing is."""
    try:
        parse_gc_policy(text)
    except ValueError as error:
        return str(error)
    return ""


def find_quota(machine: Machine, cores: Sequence[Cores]) -> Iterator[str]:
    """A cgroup's CPU quota that keeps ranks from using their cores."""
    quota = machine.limits.cpus
    total = sum(each.own_cores + each.worker_cores for each in cores)
    if quota is not None and quota < total - 1e-6:
        yield (
            f"the cgroup's quota gives this job the time of {quota:g} CPUs, on {total:.3g} cores, and the "
            "kernel halts what goes beyond: workers and threads are counted within "
            f"{quota / len(cores):.3g} for each of {len(cores)} ranks: raise the CPU limit "
            "(resources.limits.cpu in Kubernetes) or remove it"
        )
