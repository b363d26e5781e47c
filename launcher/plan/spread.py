"""Which GPUs a job has that starts fewer ranks than it has GPUs: `devices=spread` spreads them out."""

from dataclasses import replace

from launcher.plan.model import Machine, Request
from launcher.plan.nic_choice import count_shared_bridges, name_gpu, prefer_nics
from launcher.plan.rules import count_rank_cores
from launcher.plan.usable_cores import Topology
from launcher.plan.visible import Visible
from launcher.plan.workers import count_requested_workers


def spread_devices(machine: Machine, topology: Topology, seen: Visible, request: Request) -> Visible:
    """Choose a visible device for each rank, and show all ranks these, so that `cuda:LOCAL_RANK` is right.

    They come one by one: each time the one with cores enough for every rank near it, then the one with
    fewest chosen in its package, on its node, at its NIC, and with fewest PCI bridges in common with them.
    """
    count = min(request.nproc_per_node or len(seen.devices), len(seen.devices))
    each, environ = count_rank_cores(count_requested_workers(request)), dict(request.environ)
    nics = prefer_nics(machine, topology, environ)
    homes = [topology.find_local_nodes(gpu) for gpu in seen.devices]
    packages = [{topology.cores[node][0].package for node in home} for home in homes]

    def score_device(at: int) -> tuple[int, ...]:
        gpu, others = seen.devices[at], [seen.devices[other] for other in chosen]
        peers = sum(homes[at] == homes[other] for other in chosen)
        return (
            sum(gpu.index == other.index for other in others),
            -min(each, sum(len(topology.cores[node]) for node in homes[at]) // (peers + 1)),
            sum(packages[at] == packages[other] for other in chosen),
            peers,
            sum(nics.get(name_gpu(gpu)) == nics.get(name_gpu(other)) for other in others),
            max((count_shared_bridges(gpu.path, other.path) for other in others), default=0),
            at,
        )

    chosen: list[int] = []
    while len(chosen) < count:
        chosen.append(min((at for at in range(len(seen.devices)) if at not in chosen), key=score_device))
    chosen.sort()
    names = [seen.own[at] for at in chosen]
    shown = [(name, ",".join(value for _, value in names)) for name, _ in names]
    return replace(seen, devices=tuple(seen.devices[at] for at in chosen), own=tuple(shown))
