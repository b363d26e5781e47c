"""Which RDMA device (NIC) each rank uses: the nearest to its GPU, with even load."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.model import Gpu, Machine, Nic
from launcher.plan.topology import UNREACHABLE, Topology
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

    @property
    def is_verbs(self) -> bool:
        """Whether NCCL reaches it by InfiniBand verbs, and so by `NCCL_IB_HCA`; EFA goes by libfabric.

        EFA's devices have a link layer of their own, and are named `efa_0` by the kernel, `rdmap16s27` by
        udev.
        """
        return bool(self.nic.link_layer) or not self.nic.name.startswith(("efa", "rdma"))


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
    nics = _choose_usable(machine.nics, environ.get("NCCL_IB_HCA", ""))
    if not nics:
        return (None,) * len(gpus)
    by_gpu = {name_gpu(gpu): _choose_nearest(topology, gpu, None, nics) for gpu in machine.gpus}
    by_node = {node: _choose_nearest(topology, None, node, nics) for node in set(nodes) if None in gpus}
    seekers = [name_gpu(gpu) if gpu else ("", rank) for rank, gpu in enumerate(gpus)]
    wanted = {
        seeker: by_gpu[seeker] if gpu else by_node[node]
        for seeker, gpu, node in zip(seekers, gpus, nodes, strict=True)
    }
    dealt = _distribute(wanted, Counter(seekers), _distribute(by_gpu, Counter(by_gpu.keys()), {}))
    return tuple(RankNic(nics[dealt[seeker]], wanted[seeker][0]) for seeker in seekers)


def prefer_nics(machine: Machine, topology: Topology, environ: Mapping[str, str]) -> dict[NicUser, int]:
    """A number for the NIC that each GPU would have if all were in use; empty without NICs."""
    nics = _choose_usable(machine.nics, environ.get("NCCL_IB_HCA", ""))
    gpus = machine.gpus if nics else ()
    by_gpu = {name_gpu(gpu): _choose_nearest(topology, gpu, None, nics) for gpu in gpus}
    return _distribute(by_gpu, Counter(by_gpu.keys()), {})


def name_gpu(gpu: Gpu) -> NicUser:
    """A GPU, with its MIG instances."""
    return gpu.pci, gpu.index


def count_shared_bridges(path: Sequence[str], other: Sequence[str]) -> int:
    """Bridges, the host's included, that the ways to two devices have in common."""
    shortest = min(len(path), len(other))
    return next((at for at in range(shortest) if path[at] != other[at]), shortest)


def _choose_usable(nics: Sequence[Nic], hca: str) -> list[Nic]:
    """Active NICs that `NCCL_IB_HCA` (`hca`) lets through, without those for management.

    Source: NCCL's documentation, "Environment Variables": names with an optional `:port`, of which each is a
    prefix (`mlx5_1` selects mlx5_10 too) unless the list begins with `=`; `^` excludes.
    """
    exclude, rest = hca.startswith("^"), hca.removeprefix("^")
    names = tuple(part.partition(":")[0] for part in rest.removeprefix("=").split(",") if part)
    active = [nic for nic in nics if nic.active]
    listed = []
    for nic in active:
        is_named = nic.name in names if rest.startswith("=") else nic.name.startswith(names)
        if not names or is_named != exclude:
            listed.append(nic)
    listed = listed or active
    fastest = max((nic.rate_gbps for nic in listed), default=0)
    return [nic for nic in listed if not nic.rate_gbps or nic.rate_gbps >= SLOW * fastest]


def _choose_nearest(
    topology: Topology, gpu: Gpu | None, node: int | None, nics: Sequence[Nic]
) -> NearestNics:
    """The fastest of the NICs nearest to a GPU, or to a rank's NUMA node if it has none.

    Near is what shares most bridges of the PCI path, then what is near by NUMA distance.
    """
    starts = frozenset() if node is None else frozenset((node,))
    if gpu and gpu.node is not None:
        starts = frozenset((gpu.node,))
    elif gpu:
        local_nodes = topology.find_local_nodes(gpu)
        starts = local_nodes if len(local_nodes) < len(topology.cores) else frozenset()
    path = gpu.path if gpu else ()
    nearness = []
    for nic in nics:
        known = starts if nic.node is not None else ()
        distance = min((topology.distance(start, nic.node or 0) for start in known), default=UNREACHABLE)
        nearness.append((-count_shared_bridges(path, nic.path), distance))
    nearest = min(nearness)
    candidates = [at for at, found in enumerate(nearness) if found == nearest]
    fastest = max(nics[at].rate_gbps for at in candidates)
    best = tuple(at for at in candidates if nics[at].rate_gbps == fastest)
    shared, distance = -nearest[0], nearest[1]
    what = "GPU" if gpu else "rank"
    if shared:
        return f"on one {'PCI switch' if shared > 1 else 'host bridge'} with the {what}", best
    if distance == UNREACHABLE:
        return "its place unknown, so that NICs go round in order", best
    if distance == 10:
        return f"on the {what}'s NUMA node", best
    return f"the nearest to the {what} (distance {distance})", best


def _distribute(
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
