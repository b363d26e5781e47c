"""From a machine and a request to the placement of every rank on the node."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from launcher.errors import MachineError, UsageError
from launcher.plan.cpu_sets import BINDINGS, place_ranks
from launcher.plan.environment import list_variables
from launcher.plan.explanations import explain_ranks
from launcher.plan.model import Gpu, Machine, Plan, Request
from launcher.plan.nic_choice import assign_nics
from launcher.plan.numa_assignment import assign_ranks
from launcher.plan.rank_settings import NodePlacement, build_rank_plan, choose_memory
from launcher.plan.rules import DEVICES, count_rank_cores
from launcher.plan.usable_cores import Topology, build_topology
from launcher.plan.visible_devices import resolve_visible, spread_devices
from launcher.plan.warnings import find_advice, find_shortfalls
from launcher.plan.workers_and_threads import (
    budget_workers,
    count_cores,
    count_requested_workers,
    find_worker_shortages,
    limit_cores,
)


def plan(machine: Machine, request: Request) -> Plan:
    """Place every rank of a node. Depends on its arguments alone.

    Raises UsageError for a request that no machine could meet, MachineError if nothing can run, or
    if the placement falls short and `request.strict` is set.
    """
    check_request(request)
    environ = dict(request.environ)
    visible = resolve_visible(machine.gpus, environ)
    topology = build_topology(machine, 0 if request.binding == "none" else request.reserve_cores)
    if request.devices == "spread":
        visible = spread_devices(machine, topology, visible, request)
    gpus = distribute_gpus(
        request.nproc_per_node or len(visible.devices) or len(topology.cores), visible.devices
    )
    placed = place_node(machine, request, topology, gpus)
    shortfalls = find_shortfalls(request, placed)
    if request.strict and shortfalls:
        raise MachineError(shortfalls[0])
    cores = count_cores(topology, placed.placements)
    within = limit_cores(cores, machine.limits.cpus)
    budget = budget_workers(request, machine, within)
    gpu_variables = [
        visible.gpu_variables[rank % len(visible.gpu_variables)] if gpu else None
        for rank, gpu in enumerate(gpus)
    ]
    ranks = tuple(
        build_rank_plan(
            request, placed, rank, gpu_variables[rank], cores=within[rank], budget=budget, why=why
        )
        for rank, why in enumerate(explain_ranks(placed))
    )
    ranks = tuple(replace(rank, variables=list_variables(request, rank)) for rank in ranks)
    advice = (
        *find_advice(request, machine, visible.devices, cores),
        *find_worker_shortages(request, budget, within),
    )
    return Plan(machine, ranks, (*machine.warnings, *visible.warnings, *advice, *shortfalls))


def place_node(
    machine: Machine, request: Request, topology: Topology, gpus: Sequence[Gpu | None]
) -> NodePlacement:
    """Decide CPU sets, memory and NIC of each rank; `gpus` are those of the ranks."""
    each = count_rank_cores(count_requested_workers(request)) if request.binding == "exclusive" else 0
    assignment = assign_ranks(topology, gpus, each)
    placements = place_ranks(request.binding, topology, assignment)
    memories = [
        choose_memory(machine, topology, placement.node, local_nodes)
        for placement, local_nodes in zip(placements, assignment.local_nodes_by_rank, strict=True)
    ]
    links = assign_nics(machine, topology, gpus, assignment.nodes, dict(request.environ))
    return NodePlacement(
        machine, topology, request.binding, gpus, assignment.local_nodes_by_rank, placements, memories, links
    )


def check_request(request: Request) -> None:
    """Raise UsageError for values that mean nothing."""
    if request.binding not in BINDINGS:
        raise UsageError(f"binding={request.binding} is unknown: use one of {', '.join(BINDINGS)}")
    if request.devices not in DEVICES:
        raise UsageError(f"devices={request.devices} is unknown: use one of {', '.join(DEVICES)}")
    for name, value, minimum in (
        ("nproc_per_node", request.nproc_per_node, 1),
        ("reserve_cores", request.reserve_cores, 0),
        ("num_workers", request.num_workers, 0),
    ):
        if value is not None and value < minimum:
            raise UsageError(f"{name}={value} is too small: give {minimum} or more")
    for name in ("worker_gib", "worker_shm_mib"):
        if not 0 <= getattr(request, name) < inf:
            raise UsageError(f"dataloader.{name}={getattr(request, name)} is no amount: give 0 or more")


def distribute_gpus(count: int, visible: Sequence[Gpu]) -> tuple[Gpu | None, ...]:
    """The GPU of each rank: device `local_rank` modulo their number, as programs choose it."""
    return tuple(visible[rank % len(visible)] if visible else None for rank in range(count))
