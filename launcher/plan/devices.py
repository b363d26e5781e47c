"""Which GPUs a job sees: by the user's variables, and by `devices=spread`.

Sources for NVIDIA: CUDA Programming Guide, "CUDA_VISIBLE_DEVICES", and `torch.cuda._parse_visible_devices`.
If the two differ, the guide counts: for `0,9,0` on a machine with two GPUs CUDA shows the devices before the
invalid entry, and torch counts none because of the repeated one.

Sources for AMD: ROCm's documentation, "GPU isolation techniques": the runtime (ROCR) filters first, and HIP
numbers what is left. Details follow the code, `RvdFilter` in ROCR-Runtime's amd_filter_device.cpp and
`Device::init` in clr's rocdevice.cpp.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from launcher.plan.model import Gpu, Machine, PlanWarning, Request, warn
from launcher.plan.nics import count_shared_bridges, name_gpu, prefer_nics
from launcher.plan.resources import count_rank_cores, count_requested_workers
from launcher.plan.topology import Topology

NO_DEVICES = ("", "-1", "NoDevFiles")
"""Values that mean no device: empty, the customary -1, and SLURM's for a job without GPUs."""
NUMBER = re.compile(r"(?:\+?(\d{1,4})|-(0{1,4}))(?!\d)(.*)", re.ASCII | re.DOTALL)
"""How CUDA reads a number (strtoul): what follows its digits counts for nothing."""
UUID_LENGTH = len("GPU-0123456789abcdef")


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


def spread_devices(machine: Machine, topology: Topology, visible: Visible, request: Request) -> Visible:
    """Choose a visible device for each rank, and show all ranks these, so that `cuda:LOCAL_RANK` is right.

    They come one by one: each time the one with cores enough for every rank near it, then the one with
    fewest chosen in its package, on its node, at its NIC, and with fewest PCI bridges in common with them.
    """
    count = min(request.nproc_per_node or len(visible.devices), len(visible.devices))
    each = count_rank_cores(count_requested_workers(request))
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
