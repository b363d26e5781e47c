"""From a machine and a request to the placement of every rank on the node."""

from collections.abc import Callable, Mapping, Sequence

from launcher.errors import MachineError, UsageError
from launcher.plan.assign import assign_nodes, order_ranks
from launcher.plan.exclusive import place_exclusive
from launcher.plan.findings import find_advice, find_shortfalls
from launcher.plan.model import Gpu, Machine, Plan, Request
from launcher.plan.policies import Place, place_l3, place_none, place_numa, place_socket
from launcher.plan.settings import choose_memory, count_cores, finish_rank
from launcher.plan.topology import Topology, survey
from launcher.plan.visible import resolve_visible

POLICIES: Mapping[str, Callable[[Topology, Sequence[int], Sequence[int]], Mapping[int, Place]]] = {
    "exclusive": place_exclusive,
    "numa": place_numa,
    "socket": place_socket,
    "l3": place_l3,
    "none": place_none,
}
"""The bindings by name; each takes the NUMA node of every rank, and the order in which ranks take CPUs."""


def plan(machine: Machine, request: Request) -> Plan:
    """Place every rank of a node. Depends on its arguments alone.

    Raises UsageError for a request that no machine could meet, MachineError where nothing can run, or
    where the placement falls short and `request.strict` is set.
    """
    check_request(request)
    environ = dict(request.environ)
    visible, warnings = resolve_visible(machine.gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    topology = survey(machine, 0 if request.binding == "none" else request.reserve_cores)
    gpus = give_gpus(request.nproc_per_node or len(visible) or len(topology.cores), visible)
    nodes = assign_nodes(topology, gpus)
    placed = POLICIES[request.binding](topology, nodes, order_ranks(gpus))
    places = [placed[rank] for rank in range(len(gpus))]
    memories = [
        choose_memory(machine, topology, place.node, topology.find_home(gpu))
        for place, gpu in zip(places, gpus, strict=True)
    ]
    shortfalls = find_shortfalls(request, machine, topology, gpus=gpus, places=places, memories=memories)
    if request.strict and shortfalls:
        raise MachineError(shortfalls[0])
    cores = count_cores(topology, places)
    ranks = tuple(
        finish_rank(request, rank, gpu, place=places[rank], memory=memories[rank], cores=cores[rank])
        for rank, gpu in enumerate(gpus)
    )
    advice = find_advice(request, visible, len(gpus))
    return Plan(machine, ranks, (*machine.warnings, *warnings, *advice, *shortfalls))


def check_request(request: Request) -> None:
    """Raise UsageError for values that mean nothing."""
    if request.binding not in POLICIES:
        raise UsageError(f"binding={request.binding} is unknown: use one of {', '.join(POLICIES)}")
    if request.devices not in ("all", "own"):
        raise UsageError(f"devices={request.devices} is unknown: use all or own")
    least = {"nproc_per_node": 1, "reserve_cores": 0, "num_workers": 0}
    given = {
        "nproc_per_node": request.nproc_per_node,
        "reserve_cores": request.reserve_cores,
        "num_workers": request.num_workers,
    }
    for name, value in given.items():
        if value is not None and value < least[name]:
            raise UsageError(f"{name}={value} is too small: give {least[name]} or more")


def give_gpus(count: int, visible: Sequence[Gpu]) -> tuple[Gpu | None, ...]:
    """The GPU of each rank: device `local_rank` modulo their number, as programs choose it."""
    return tuple(visible[rank % len(visible)] if visible else None for rank in range(count))
