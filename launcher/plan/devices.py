"""Which GPUs a job sees, by the user's variables and `devices=spread`, and which RDMA device each rank uses.

Sources for NVIDIA: CUDA Programming Guide, "CUDA_VISIBLE_DEVICES", and `torch.cuda._parse_visible_devices`.
Sources for AMD: ROCm's documentation, "GPU isolation techniques": the runtime (ROCR) filters first, and HIP
numbers what is left.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.plan.model import Gpu, Machine, Nic, PlanWarning, Request, warn
from launcher.plan.topology import UNREACHABLE, Placement, Topology, group_by
from launcher.plan.variables import VISIBLE_DEVICES
from launcher.protocol import LAUNCH_NIC

CUDA, HIP, ROCR = VISIBLE_DEVICES
NO_DEVICES = ("", "-1", "NoDevFiles")
"""Values that mean no device: empty, the customary -1, and SLURM's for a job without GPUs."""
SLOW = 0.5
"""Share of the fastest NIC's rate below which one is for management rather than for training."""


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

    A build of torch serves one vendor: AMD's count if there are none of NVIDIA's. HIP takes
    HIP_VISIBLE_DEVICES before CUDA_VISIBLE_DEVICES, an empty value being as good as none, and shows a device
    by its number among those that ROCR shows.
    """
    gpus = tuple(sorted(gpus, key=lambda gpu: gpu.index))
    nvidia = [gpu for gpu in gpus if gpu.vendor != "amd"]
    warnings: list[PlanWarning] = []
    if nvidia or not gpus:
        instances = [
            [replace(gpu, uuid=uuid, mig=(), memory_mib=0) for uuid in gpu.mig] or [gpu] for gpu in nvidia
        ]
        devices = [one for found in instances for one in found]
        if CUDA in environ:
            named = [(gpu.uuid, found[0]) for gpu, found in zip(nvidia, instances, strict=True)]
            parts = [(one.uuid, one) for one in devices if one.uuid.startswith("MIG-")]
            devices = _choose(CUDA, environ[CUDA], named, parts, warnings)
        has_names = all(gpu.uuid for gpu in devices)  # a list has numbers or UUIDs
        variables = [(CUDA, gpu.uuid if has_names else str(gpu.index)) for gpu in devices]
        return Visible(tuple(devices), tuple(variables), tuple(warnings))
    shown = list(gpus)
    if ROCR in environ:
        shown = _choose(ROCR, environ[ROCR], [(gpu.uuid, gpu) for gpu in gpus], [], warnings)
    devices, name = shown, HIP if environ.get(HIP) else CUDA
    if environ.get(name):
        devices = _choose(name, environ[name], [(gpu.uuid, gpu) for gpu in shown], [], warnings)
    variables = [(HIP, str(shown.index(gpu))) for gpu in devices]
    return Visible(tuple(devices), tuple(variables), tuple(warnings))


def _choose(
    name: str,
    value: str,
    numbered: Sequence[tuple[str, Gpu]],
    instances: Sequence[tuple[str, Gpu]],
    warnings: list[PlanWarning],
) -> list[Gpu]:
    """The devices that a variable's list shows: up to the first entry that names none, or several.

    Entries are numbers, or beginnings of the UUIDs of `numbered` devices or MIG `instances`. With a
    repeated one CUDA and torch on ROCm show none, and ROCR what comes before.
    """
    chosen: list[Gpu] = []
    entries = [part.strip() for part in value.split(",")]
    for entry in entries if value.strip() not in NO_DEVICES else ():
        if entry.isdecimal() and entry.isascii():
            number = entry.lstrip("0") or "0"
            found = [gpu for at, (_, gpu) in enumerate(numbered) if number == str(at)]
        else:
            named = [*numbered, *instances] if len(entry) > len("GPU-") else ()
            found = [gpu for uuid, gpu in named if uuid.lower().startswith(entry.lower())]
        # CUDA takes numbers or UUIDs, and HIP both.
        is_mixed = entry.isdecimal() != entries[0].isdecimal() and found[:1] and found[0].vendor != "amd"
        if len(found) == 1 and found[0] in chosen and name != ROCR:
            warnings.append(warn("repeated", name=name, value=value, entry=entry))
            return []
        if len(found) != 1 or found[0] in chosen or is_mixed:
            values = {"name": name, "value": value, "entry": entry}
            warnings.append(warn("invalid", **values, gpus=len(numbered), seen=len(chosen)))
            break
        chosen += found
    return chosen


def spread_devices(
    machine: Machine, topology: Topology, visible: Visible, request: Request, each: int
) -> Visible:
    """Choose a visible device for each rank, and show all ranks these, so that `cuda:LOCAL_RANK` is right.

    They come one by one: each time the one with cores enough (`each`) for every rank near it, then the one
    with fewest chosen in its package, on its node, at its NIC, and with fewest PCI bridges in common.
    """
    devices = visible.devices
    count = min(request.nproc_per_node or len(devices), len(devices))
    nics = NicChoice(machine, topology, request.environ).preferred
    local = [topology.find_local_nodes(gpu) for gpu in devices]
    packages = [{topology.cores[node][0].package for node in nodes} for nodes in local]
    chosen: list[int] = []

    def score_device(at: int) -> tuple[int, ...]:
        gpu, others = devices[at], [devices[other] for other in chosen]
        peers = sum(local[at] == local[other] for other in chosen)
        return (
            sum(gpu.index == other.index for other in others),
            -min(each, sum(len(topology.cores[node]) for node in local[at]) // (peers + 1)),
            sum(packages[at] == packages[other] for other in chosen),
            peers,
            sum(nics.get(gpu.index) == nics.get(other.index) for other in others),
            max((_count_shared_bridges(gpu.path, other.path) for other in others), default=0),
            at,
        )

    while len(chosen) < count:
        chosen.append(min({*range(len(devices))}.difference(chosen), key=score_device))
    chosen.sort()
    shown = ",".join(visible.gpu_variables[at][1] for at in chosen)
    variables = tuple((visible.gpu_variables[at][0], shown) for at in chosen)
    return replace(visible, devices=tuple(devices[at] for at in chosen), gpu_variables=variables)


class NicChoice:
    """The NICs nearest to each GPU of a machine, and the one that it would have if all were in use."""

    def __init__(self, machine: Machine, topology: Topology, environ: Mapping[str, str]) -> None:
        self.nics = _list_usable(machine.nics, environ.get("NCCL_IB_HCA", ""))
        self.user = environ.get(LAUNCH_NIC)
        gpus = machine.gpus if self.nics else ()
        self.nearest = {gpu.index: _find_nearest(topology, gpu, self.nics) for gpu in gpus}
        self.preferred = self._deal(Counter(self.nearest.keys()), {})
        """By the GPU's index, which its MIG instances have too, a number of `nics`."""

    def choose(self, machine: Machine, ranks: Sequence[Placement]) -> None:
        """Give each rank a NIC, unless it has no GPU, or no NIC is active.

        Ranks of one GPU share its NIC. If several would do, a GPU gets the one that it would have if all of
        the machine's GPUs were in use, so that jobs side by side on a node keep apart.
        """
        dealt = self._deal(
            Counter(rank.gpu.index for rank in ranks if rank.gpu and self.nics), self.preferred
        )
        for rank in ranks:
            if self.user:
                known = (nic for nic in machine.nics if nic.name == self.user)
                rank.nic, rank.nic_why = next(known, Nic(self.user, "", None)), "set by the user"
            elif rank.gpu and self.nics:
                gpu = rank.gpu.index
                rank.nic, rank.nic_why = self.nics[dealt[gpu]], self.nearest[gpu][0]

    def _deal(self, ranks: Counter[int], preferred: Mapping[int, int]) -> dict[int, int]:
        """Give each GPU one of its nearest NICs: that with fewest ranks, first to those with least choice.

        Those that may have the same NICs get them in blocks (0, 0, 1, 1), as NVIDIA's and the clouds'
        topology files have it: neighbours on a bus share a NIC.
        """
        load: Counter[int] = Counter()
        dealt: dict[int, int] = {}
        for gpu in sorted(ranks, key=lambda gpu: (len(self.nearest[gpu][1]), gpu)):
            nics, preference = self.nearest[gpu][1], preferred.get(gpu)
            dealt[gpu] = min(nics, key=lambda at: (load[at], at != preference, at))
            load[dealt[gpu]] += ranks[gpu]
        for alike in group_by(dealt, lambda gpu: (self.nearest[gpu][1], ranks[gpu])).values():
            dealt.update(zip(alike, sorted(dealt[gpu] for gpu in alike), strict=True))
        return dealt


def _count_shared_bridges(path: Sequence[str], other: Sequence[str]) -> int:
    """Bridges, the host's included, that the ways to two devices have in common."""
    shortest = min(len(path), len(other))
    return next((at for at in range(shortest) if path[at] != other[at]), shortest)


def _list_usable(nics: Sequence[Nic], hca: str) -> list[Nic]:
    """Active NICs that `NCCL_IB_HCA` (`hca`) lets through, without those for management.

    Source: NCCL's documentation, "Environment Variables": names with an optional `:port`, of which each is a
    prefix (`mlx5_1` selects mlx5_10 too) unless the list begins with `=`; `^` excludes.
    """
    rest = hca.removeprefix("^")
    names = tuple(part.partition(":")[0] for part in rest.removeprefix("=").split(",") if part)
    active = [nic for nic in nics if nic.active]
    listed = []
    for nic in active:
        is_named = nic.name in names if rest.startswith("=") else nic.name.startswith(names)
        if not names or is_named != hca.startswith("^"):
            listed.append(nic)
    listed = listed or active
    fastest = max((nic.rate_gbps for nic in listed), default=0)
    return [nic for nic in listed if not nic.rate_gbps or nic.rate_gbps >= SLOW * fastest]


def _find_nearest(topology: Topology, gpu: Gpu, nics: Sequence[Nic]) -> tuple[str, tuple[int, ...]]:
    """Why these NICs are the nearest to a GPU, and their numbers: the fastest of those that are as near.

    Near is what shares most bridges of the PCI path, then what is near by NUMA distance.
    """
    nearness = []
    for nic in nics:
        is_known = gpu.node is not None and nic.node is not None
        distance = topology.distance(gpu.node or 0, nic.node or 0) if is_known else UNREACHABLE
        nearness.append((-_count_shared_bridges(gpu.path, nic.path), distance, -nic.rate_gbps))
    shared, distance, _ = nearest = min(nearness)
    if shared:
        why = f"on one {'PCI switch' if shared < -1 else 'host bridge'} with the GPU"
    elif distance == UNREACHABLE:
        why = "its place unknown, so that NICs go round in order"
    else:
        why = "on the GPU's NUMA node" if distance == 10 else f"the nearest to the GPU (distance {distance})"
    return why, tuple(at for at, found in enumerate(nearness) if found == nearest)
