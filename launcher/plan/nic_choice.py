"""Which RDMA device (NIC) each rank uses: the nearest to its GPU, with even load."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.model import Gpu, Machine, Nic
from launcher.plan.usable_cores import UNREACHABLE, Topology
from launcher.protocol import LAUNCH_NIC

SLOW = 0.5
"""Share of the fastest NIC's rate below which one is for management rather than for training."""
NicUser = tuple[str, int]
"""What needs a NIC: a GPU by PCI address and index, or a rank without one."""
NearestNics = tuple[str, tuple[int, ...]]
"""Why these NICs are the nearest, and their positions among the usable ones."""


@dataclass(frozen=True, slots=True)
class RankNic:
    """A rank's NIC."""

    nic: Nic
    why: str
    """Where it is, for people: `on one PCI switch with the GPU`."""


def assign_nics(
    machine: Machine,
    topology: Topology,
    gpus: Sequence[Gpu | None],
    nodes: Sequence[int],
    environ: Mapping[str, str],
) -> tuple[RankNic | None, ...]:
    """NIC of each rank, given its GPU and its NUMA node; None if the machine has none that is active.

    Ranks of one GPU share its NIC. If several would do, a GPU gets the one that it would have if all of
    the machine's GPUs were in use, so that jobs side by side on a node keep apart.
    """
    if chosen := environ.get(LAUNCH_NIC):
        user_nic = next((nic for nic in machine.nics if nic.name == chosen), Nic(chosen, "", None))
        return (RankNic(user_nic, "set by the user"),) * len(gpus)
    nics = choose_usable(machine.nics, environ.get("NCCL_IB_HCA", ""))
    if not nics:
        return (None,) * len(gpus)
    by_gpu = choose_for_all_gpus(machine, topology, nics)
    by_node = {node: choose_nearest(topology, None, node, nics) for node in set(nodes) if None in gpus}
    seekers = [name_gpu(gpu) if gpu else ("", rank) for rank, gpu in enumerate(gpus)]
    wanted = {
        seeker: by_gpu[seeker] if gpu else by_node[node]
        for seeker, gpu, node in zip(seekers, gpus, nodes, strict=True)
    }
    dealt = distribute_nics(wanted, Counter(seekers), distribute_nics(by_gpu, Counter(by_gpu.keys()), {}))
    return tuple(RankNic(nics[dealt[seeker]], wanted[seeker][0]) for seeker in seekers)


def choose_for_all_gpus(
    machine: Machine, topology: Topology, nics: Sequence[Nic]
) -> dict[NicUser, NearestNics]:
    """The nearest NICs of each of the machine's GPUs."""
    return {name_gpu(gpu): choose_nearest(topology, gpu, None, nics) for gpu in machine.gpus}


def prefer_nics(machine: Machine, topology: Topology, environ: Mapping[str, str]) -> dict[NicUser, int]:
    """A number for the NIC that each GPU would have if all were in use; empty without NICs."""
    nics = choose_usable(machine.nics, environ.get("NCCL_IB_HCA", ""))
    by_gpu = choose_for_all_gpus(machine, topology, nics) if nics else {}
    return distribute_nics(by_gpu, Counter(by_gpu.keys()), {})


def name_gpu(gpu: Gpu) -> NicUser:
    """A GPU, with its MIG instances."""
    return gpu.pci, gpu.index


def choose_usable(nics: Sequence[Nic], hca: str) -> list[Nic]:
    """Active NICs that `NCCL_IB_HCA` lets through, without those for management."""
    active = [nic for nic in nics if nic.active]
    listed = [nic for nic in active if is_listed(nic, hca)] or active
    fastest = max((nic.rate_gbps for nic in listed), default=0)
    return [nic for nic in listed if not nic.rate_gbps or nic.rate_gbps >= SLOW * fastest]


def is_listed(nic: Nic, hca: str) -> bool:
    """Whether a value of `NCCL_IB_HCA` allows a NIC.

    Source: NCCL's documentation, "Environment Variables": names with an optional `:port`, of which each is a
    prefix (`mlx5_1` selects mlx5_10 too) unless the list begins with `=`; `^` excludes.
    """
    exclude, rest = hca.startswith("^"), hca.removeprefix("^")
    names = tuple(part.partition(":")[0] for part in rest.removeprefix("=").split(",") if part)
    found = nic.name in names if rest.startswith("=") else nic.name.startswith(names)
    return not names or found != exclude


def choose_nearest(topology: Topology, gpu: Gpu | None, node: int | None, nics: Sequence[Nic]) -> NearestNics:
    """The fastest of the NICs nearest to a GPU, or to a rank's NUMA node if it has none.

    Near is what shares most bridges of the PCI path, then what is near by NUMA distance.
    """
    starts = find_origin_nodes(topology, gpu, node)
    path = gpu.path if gpu else ()
    nearness = [
        (-count_shared_bridges(path, nic.path), find_nic_distance(topology, starts, nic)) for nic in nics
    ]
    nearest = min(nearness)
    candidates = [at for at, found in enumerate(nearness) if found == nearest]
    fastest = max(nics[at].rate_gbps for at in candidates)
    best = tuple(at for at in candidates if nics[at].rate_gbps == fastest)
    return describe_nearness(gpu, -nearest[0], nearest[1]), best


def find_origin_nodes(topology: Topology, gpu: Gpu | None, node: int | None) -> frozenset[int]:
    """NUMA nodes that a NIC should be near to; none if nothing is known of the GPU's place."""
    if gpu is None or gpu.node is not None:
        place = node if gpu is None else gpu.node
        return frozenset() if place is None else frozenset((place,))
    nodes = topology.find_local_nodes(gpu)
    return nodes if len(nodes) < len(topology.cores) else frozenset()


def count_shared_bridges(path: Sequence[str], other: Sequence[str]) -> int:
    """Bridges, the host's included, that the ways to two devices have in common."""
    shortest = min(len(path), len(other))
    return next((at for at in range(shortest) if path[at] != other[at]), shortest)


def find_nic_distance(topology: Topology, starts: frozenset[int], nic: Nic) -> int:
    """NUMA distance of a NIC; unreachable if either place is unknown."""
    if nic.node is None or not starts:
        return UNREACHABLE
    return min(topology.distance(start, nic.node) for start in starts)


def describe_nearness(gpu: Gpu | None, shared: int, distance: int) -> str:
    """Where the nearest NICs are, for people."""
    what = "GPU" if gpu else "rank"
    if shared:
        return f"on one {'PCI switch' if shared > 1 else 'host bridge'} with the {what}"
    if distance == UNREACHABLE:
        return "its place unknown, so that NICs go round in order"
    return (
        f"on the {what}'s NUMA node" if distance == 10 else f"the nearest to the {what} (distance {distance})"
    )


def distribute_nics(
    wanted: Mapping[NicUser, NearestNics], ranks: Mapping[NicUser, int], preferred: Mapping[NicUser, int]
) -> dict[NicUser, int]:
    """Give each user one of its nearest NICs, the NIC with fewest ranks first; users with least choice begin.

    Those that may have the same NICs get them in blocks (0, 0, 1, 1), as NVIDIA's and the clouds' topology
    files have it: neighbours on a bus share a NIC.
    """
    load: Counter[int] = Counter()
    dealt: dict[NicUser, int] = {}
    alike: dict[tuple[tuple[int, ...], int], list[NicUser]] = {}
    for seeker in sorted(wanted, key=lambda seeker: (len(wanted[seeker][1]), seeker[1], seeker[0])):
        nics, preference = wanted[seeker][1], preferred.get(seeker)
        dealt[seeker] = min(nics, key=lambda at: (load[at], at != preference, at))
        load[dealt[seeker]] += ranks[seeker]
        alike.setdefault((nics, ranks[seeker]), []).append(seeker)
    for group in alike.values():
        dealt.update(zip(group, sorted(dealt[seeker] for seeker in group), strict=True))
    return dealt


def is_verbs(nic: Nic) -> bool:
    """Whether NCCL reaches a NIC by InfiniBand verbs, and so by `NCCL_IB_HCA`; EFA goes by libfabric.

    EFA's devices have a link layer of their own, and are named `efa_0` by the kernel, `rdmap16s27` by udev.
    """
    return bool(nic.link_layer) or not nic.name.startswith(("efa", "rdma"))
