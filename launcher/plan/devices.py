"""Which GPUs a job sees, by the user's variables and `devices=spread`, and which RDMA device each rank uses.

Sources for NVIDIA: CUDA Programming Guide, "CUDA_VISIBLE_DEVICES", and `torch.cuda._parse_visible_devices`.
If the two differ, the guide counts: for `0,9,0` on a machine with two GPUs CUDA shows the devices before the
invalid entry, and torch counts none because of the repeated one.

Sources for AMD: ROCm's documentation, "GPU isolation techniques": the runtime (ROCR) filters first, and HIP
numbers what is left. Details follow the code, `RvdFilter` in ROCR-Runtime's amd_filter_device.cpp and
`Device::init` in clr's rocdevice.cpp.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.plan.model import Gpu, Machine, Nic, PlanWarning, Request, warn
from launcher.plan.topology import UNREACHABLE, Topology
from launcher.protocol import LAUNCH_NIC

NO_DEVICES = ("", "-1", "NoDevFiles")
"""Values that mean no device: empty, the customary -1, and SLURM's for a job without GPUs."""
NUMBER = re.compile(r"(?:\+?(\d{1,4})|-(0{1,4}))(?!\d)(.*)", re.ASCII | re.DOTALL)
"""How CUDA reads a number (strtoul): what follows its digits counts for nothing."""
UUID_LENGTH = len("GPU-0123456789abcdef")
SLOW = 0.5
"""Share of the fastest NIC's rate below which one is for management rather than for training."""
NicUser = tuple[str, int]
"""What needs a NIC: a GPU by PCI address and index, or a rank without one."""
NearestNics = tuple[str, tuple[int, ...]]
"""Why these NICs are the nearest, and their positions among the usable ones."""


@dataclass(frozen=True, slots=True)
class Visible:
    """The devices that a job sees."""

    devices: tuple[Gpu, ...] = ()
    """A MIG instance is given as its parent with the instance's UUID."""
    gpu_variables: tuple[tuple[str, str], ...] = ()
    """For each device the variable and value that show it: alone, or with all that are to be seen."""
    warnings: tuple[PlanWarning, ...] = ()
    """About illegal entries."""


def resolve_visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> Visible:
    """Find the devices that a job sees on a machine with `gpus`.

    A build of torch serves one vendor: AMD's count if there are none of NVIDIA's.
    """
    gpus = tuple(sorted(gpus, key=lambda gpu: gpu.index))
    nvidia = tuple(gpu for gpu in gpus if gpu.vendor != "amd")
    if gpus and not nvidia:
        return _resolve_rocm(gpus, environ)
    devices, warnings = _resolve_cuda(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    named = all(gpu.uuid for gpu in devices)  # a list has numbers or UUIDs
    gpu_variables = tuple(("CUDA_VISIBLE_DEVICES", gpu.uuid if named else str(gpu.index)) for gpu in devices)
    return Visible(devices, gpu_variables, warnings)


def _resolve_cuda(
    gpus: tuple[Gpu, ...], value: str | None
) -> tuple[tuple[Gpu, ...], tuple[PlanWarning, ...]]:
    """Devices and warnings by `CUDA_VISIBLE_DEVICES`, None if it is unset."""
    if value is None:
        return tuple(device for gpu in gpus for device in _list_instances(gpu)), ()
    if value.strip() in NO_DEVICES:
        return (), ()
    by_uuid = value.startswith(("GPU-", "MIG-"))
    found: list[Gpu] = []
    is_loose = False
    for entry in (part.strip() for part in value.split(",")):
        device = _match_uuid(gpus, entry) if by_uuid else None
        if not by_uuid and (number := NUMBER.match(entry)):
            index = int(number[1] or 0)
            device = _list_instances(gpus[index])[0] if index < len(gpus) else None
            is_loose = is_loose or bool(number[2] or number[3])
        if device is None:
            rule = "cuda_mixed" if by_uuid and entry.isdecimal() else "cuda_invalid"
            return tuple(found), (warn(rule, value=value, entry=entry, gpus=len(gpus), seen=len(found)),)
        if device.uuid in (other.uuid for other in found if other.index == device.index):
            return (), (warn("cuda_repeated", value=value, entry=entry),)
        found.append(device)
    seen = ",".join(str(gpu.index) for gpu in found)
    return tuple(found), (warn("cuda_loose", value=value, seen=seen),) if is_loose else ()


def _list_instances(gpu: Gpu) -> tuple[Gpu, ...]:
    """What CUDA can open on a GPU: its MIG instances, or the GPU itself if MIG is off."""
    return tuple(_as_instance(gpu, uuid) for uuid in gpu.mig) or (gpu,)


def _as_instance(gpu: Gpu, uuid: str) -> Gpu:
    """The parent's place under the instance's name."""
    return replace(gpu, uuid=uuid, mig=(), memory_mib=0)


def _match_uuid(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """The one device whose UUID begins with `entry`; None for no device or several.

    `MIG-GPU-…/gi/ci` is the form of drivers before R470, which names the parent.
    """
    if entry.startswith("MIG-GPU-"):
        parent = _match_uuid(gpus, entry.removeprefix("MIG-").partition("/")[0])
        return _as_instance(parent, entry) if parent else None
    found = []
    if entry.startswith("MIG-"):
        found = [_as_instance(gpu, uuid) for gpu in gpus for uuid in gpu.mig if uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        found = [_list_instances(gpu)[0] for gpu in gpus if gpu.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _resolve_rocm(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> Visible:
    """Devices that ROCR shows, of these what HIP shows.

    HIP_VISIBLE_DEVICES shows one alone whatever the others are: HIP takes it before CUDA_VISIBLE_DEVICES,
    and ROCR_VISIBLE_DEVICES stays as the user has set it.

    ROCR reads numbers and unique beginnings of UUIDs, up to the first entry that is invalid or repeated. HIP
    reads numbers and parts of UUIDs, up to the first invalid one; an empty value is as good as none.
    """
    shown, warnings = list(gpus), list[PlanWarning]()

    value = environ.get("ROCR_VISIBLE_DEVICES")
    if value is not None:
        shown = []
        # As many entries are read as there are GPUs.
        for entry in (part.strip() for part in value.removesuffix(",").split(",")[: len(gpus)] if value):
            matches = [gpu for at, gpu in enumerate(gpus) if entry.removeprefix("+") == str(at)]
            if len("GPU-") < len(entry) <= UUID_LENGTH and not matches:
                matches = [gpu for gpu in gpus if gpu.uuid.upper().startswith(entry.upper())]
            if len(matches) != 1 or matches[0] in shown:
                more = {"name": "ROCR_VISIBLE_DEVICES", "value": value, "entry": entry}
                warnings.append(warn("rocm_invalid", **more, seen=len(shown)))
                break
            shown += matches
    name = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    value = environ.get(name, "")
    chosen: list[int] = [] if value else [*range(len(shown))]
    for entry in value.removesuffix(",").split(",") if value else ():
        by_uuid = [at for at, gpu in enumerate(shown) if "GPU-" in entry and entry in gpu.uuid]
        positions = by_uuid or [at for at in range(len(shown)) if entry == str(at)]
        if not positions:
            if value != "-1":  # the customary -1 for no device needs no warning
                warnings.append(warn("rocm_invalid", name=name, value=value, entry=entry, seen=len(chosen)))
            break
        if positions[0] in chosen:
            warnings.append(warn("hip_repeated", name=name, value=value, entry=entry))
        else:
            chosen.append(positions[0])
    gpu_variables = tuple(("HIP_VISIBLE_DEVICES", str(position)) for position in chosen)
    return Visible(tuple(shown[at] for at in chosen), gpu_variables, tuple(warnings))


def spread_devices(
    machine: Machine, topology: Topology, visible: Visible, request: Request, each: int
) -> Visible:
    """Choose a visible device for each rank, and show all ranks these, so that `cuda:LOCAL_RANK` is right.

    They come one by one: each time the one with cores enough (`each`) for every rank near it, then the one
    with fewest chosen in its package, on its node, at its NIC, and with fewest PCI bridges in common.
    """
    count = min(request.nproc_per_node or len(visible.devices), len(visible.devices))
    nics = prefer_nics(machine, topology, request.environ)
    local_nodes_by_rank = [topology.find_local_nodes(gpu) for gpu in visible.devices]
    packages = [
        {topology.cores[node][0].package for node in local_nodes} for local_nodes in local_nodes_by_rank
    ]

    def score_device(at: int) -> tuple[int, ...]:
        gpu, others = visible.devices[at], [visible.devices[other] for other in chosen]
        peers = sum(local_nodes_by_rank[at] == local_nodes_by_rank[other] for other in chosen)
        return (
            sum(gpu.index == other.index for other in others),
            -min(each, sum(len(topology.cores[node]) for node in local_nodes_by_rank[at]) // (peers + 1)),
            sum(packages[at] == packages[other] for other in chosen),
            peers,
            sum(nics.get(name_gpu(gpu)) == nics.get(name_gpu(other)) for other in others),
            max((count_shared_bridges(gpu.path, other.path) for other in others), default=0),
            at,
        )

    chosen: list[int] = []
    while len(chosen) < count:
        chosen.append(min((at for at in range(len(visible.devices)) if at not in chosen), key=score_device))
    chosen.sort()
    names = [visible.gpu_variables[at] for at in chosen]
    shown = [(name, ",".join(value for _, value in names)) for name, _ in names]
    return replace(visible, devices=tuple(visible.devices[at] for at in chosen), gpu_variables=tuple(shown))


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
