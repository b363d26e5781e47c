"""From a machine and a request to the placement of every rank on the node."""

from launcher.errors import MachineError, UsageError
from launcher.plan.cpu_sets import place_ranks
from launcher.plan.devices import resolve_visible, spread_devices
from launcher.plan.explain import NodePlacement, explain_ranks, find_advice, find_shortfalls
from launcher.plan.model import BINDINGS, Machine, Plan, Request, warn
from launcher.plan.nics import assign_nics
from launcher.plan.resources import (
    Placement,
    budget_workers,
    build_rank_plan,
    choose_memory,
    count_cores,
    count_rank_cores,
    count_requested_workers,
)
from launcher.plan.topology import assign_ranks, build_topology


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
    if request.devices == "spread":
        visible = spread_devices(machine, topology, visible, request)
    devices = visible.devices
    ranks = range(request.nproc_per_node or len(devices) or len(topology.cores))
    # Programs choose device `local_rank` modulo their number.
    gpus = [devices[rank % len(devices)] if devices else None for rank in ranks]
    each = count_rank_cores(count_requested_workers(request)) if binding == "exclusive" else 0
    assignment = assign_ranks(topology, gpus, each)
    sets = place_ranks(binding, topology, assignment)
    links = assign_nics(machine, topology, gpus, assignment.nodes, request.environ)
    local = assignment.local_nodes_by_rank
    memories = [choose_memory(machine, topology, sets[rank].node, local[rank]) for rank in ranks]
    placements = [
        Placement(gpus[rank], local[rank], sets[rank], memories[rank], links[rank]) for rank in ranks
    ]
    placed = NodePlacement(machine, topology, binding, placements)
    shortfalls = find_shortfalls(request, placed)
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
        for rank, why in enumerate(explain_ranks(placed))
    )
    warnings = (
        *(warn("machine", text=text) for text in machine.warnings),
        *visible.warnings,
        *find_advice(request, machine, devices, cores),
        *budget.find_shortages(within, measured=request.dataloader.measured),
        *shortfalls,
    )
    return Plan(machine, made, warnings)
