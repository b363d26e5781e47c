"""Which GPUs a job sees: by the user's variables, and by `devices=spread`.

Sources for NVIDIA: CUDA Programming Guide, "CUDA_VISIBLE_DEVICES", and `torch.cuda._parse_visible_devices`.
If the two differ, the guide counts: for `0,9,0` on a machine with two GPUs CUDA shows the devices before the
invalid entry, and torch counts none because of the repeated one.

Sources for AMD: ROCm's documentation, "GPU isolation techniques": the runtime (ROCR) filters first, and HIP
numbers what is left. The documentation leaves details open; these follow the code, `RvdFilter` in
ROCR-Runtime's amd_filter_device.cpp and `Device::init` in clr's rocdevice.cpp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.plan.model import Gpu, Machine, Request
from launcher.plan.nic_choice import count_shared_bridges, name_gpu, prefer_nics
from launcher.plan.rules import count_rank_cores
from launcher.plan.usable_cores import Topology
from launcher.plan.workers_and_threads import count_requested_workers

NO_DEVICES = ("", "-1", "NoDevFiles")
"""Values that mean no device: empty, the customary -1, and SLURM's for a job without GPUs."""
UUID_LENGTH = len("GPU-0123456789abcdef")
Entry = tuple[int, Gpu]
"""A device with its position among those that ROCR shows."""


@dataclass(frozen=True, slots=True)
class Visible:
    """The devices that a job sees."""

    devices: tuple[Gpu, ...] = ()
    """A MIG instance is given as its parent with the instance's UUID."""
    gpu_variables: tuple[tuple[str, str], ...] = ()
    """For each device the variable and value that show it: alone, or with all that are to be seen."""
    warnings: tuple[str, ...] = ()
    """About illegal entries."""


def resolve_visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> Visible:
    """Find the devices that a job sees on a machine with `gpus`.

    A build of torch serves one vendor: AMD's count if there are none of NVIDIA's.
    """
    gpus = tuple(sorted(gpus, key=lambda gpu: gpu.index))
    nvidia = tuple(gpu for gpu in gpus if gpu.vendor != "amd")
    if gpus and not nvidia:
        devices, gpu_variables, warnings = resolve_rocm(gpus, environ)
        return Visible(devices, gpu_variables, warnings)
    devices, warnings = resolve_cuda(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    named = all(gpu.uuid for gpu in devices)  # a list has numbers or UUIDs
    gpu_variables = tuple(("CUDA_VISIBLE_DEVICES", gpu.uuid if named else str(gpu.index)) for gpu in devices)
    return Visible(devices, gpu_variables, warnings)


def resolve_cuda(gpus: tuple[Gpu, ...], value: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Devices and warnings by `CUDA_VISIBLE_DEVICES`, None if it is unset."""
    if value is None:
        return tuple(device for gpu in gpus for device in list_instances(gpu)), ()
    if value.strip() in NO_DEVICES:
        return (), ()
    by_uuid = value.startswith(("GPU-", "MIG-"))
    found: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        device = match_cuda_uuid(gpus, entry) if by_uuid else match_cuda_index(gpus, entry)
        if device is None:
            return tuple(found), (describe_invalid(gpus, value, entry, len(found)),)
        if device.uuid in (other.uuid for other in found if other.index == device.index):
            return (), (describe_duplicate(value, entry),)
        found.append(device)
    loose = not by_uuid and any(not part.strip().removeprefix("+").isdecimal() for part in value.split(","))
    return tuple(found), (describe_trailing_text(value, found),) if loose else ()


def list_instances(gpu: Gpu) -> tuple[Gpu, ...]:
    """What CUDA can open on a GPU: its MIG instances, or the GPU itself if MIG is off."""
    return tuple(as_instance(gpu, uuid) for uuid in gpu.mig) or (gpu,)


def as_instance(gpu: Gpu, uuid: str) -> Gpu:
    """The parent's place under the instance's name."""
    return Gpu(gpu.index, uuid, gpu.pci, gpu.node, gpu.local_cpus, gpu.name, path=gpu.path)


def match_cuda_index(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """Read an entry as strtoul does (`1gpu` is 1), None if no GPU has that number."""
    sign, digits = (entry[0], entry[1:]) if entry[:1] in ("+", "-") else ("", entry)
    end = next((at for at, char in enumerate(digits) if char not in "0123456789"), len(digits))
    # Four digits name more GPUs than a node has; int() refuses some thousands of them.
    if not 0 < end < 5:
        return None
    index = int(digits[:end])
    if index >= len(gpus) or (sign == "-" and index):
        return None
    return list_instances(gpus[index])[0]


def match_cuda_uuid(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """The one device whose UUID begins with `entry`; None for no device or several.

    `MIG-GPU-…/gi/ci` is the form of drivers before R470, which names the parent.
    """
    if entry.startswith("MIG-GPU-"):
        parent = match_cuda_uuid(gpus, entry.removeprefix("MIG-").partition("/")[0])
        return as_instance(parent, entry) if parent else None
    if entry.startswith("MIG-"):
        found = [as_instance(gpu, uuid) for gpu in gpus for uuid in gpu.mig if uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        found = [list_instances(gpu)[0] for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        return None
    return found[0] if len(found) == 1 else None


def describe_invalid(gpus: tuple[Gpu, ...], value: str, entry: str, count: int) -> str:
    """Warn of an entry that ends the list."""
    mixed = entry.isdecimal() and value.startswith(("GPU-", "MIG-"))
    why = "is a number among UUIDs" if mixed else f"names no single device of this machine's {len(gpus)} GPUs"
    return (
        f"CUDA_VISIBLE_DEVICES={value}: {entry!r} {why}; "
        f"CUDA drops it and what follows, so the job sees {count}: correct or unset the variable"
    )


def describe_trailing_text(value: str, found: Sequence[Gpu]) -> str:
    """Warn of numbers with something behind them, such as a range, which CUDA does not know."""
    return (
        f"CUDA_VISIBLE_DEVICES={value}: CUDA reads the number that an entry begins with and drops the rest, "
        f"so the job sees GPU {','.join(str(gpu.index) for gpu in found)}: give plain numbers and commas"
    )


def describe_duplicate(value: str, entry: str) -> str:
    """Warn of an entry that names a device again."""
    return (
        f"CUDA_VISIBLE_DEVICES={value}: {entry!r} names a device for the second time; "
        "CUDA then shows none, so the job sees 0 GPUs: remove the duplicate"
    )


def resolve_rocm(
    gpus: tuple[Gpu, ...], environ: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Devices that a job sees, the variable and value that show each alone, and warnings.

    HIP_VISIBLE_DEVICES shows one alone whatever the others are: HIP takes it before CUDA_VISIBLE_DEVICES,
    and ROCR_VISIBLE_DEVICES stays as the user has set it.
    """
    shown, warnings = filter_by_rocr(gpus, environ.get("ROCR_VISIBLE_DEVICES"))
    name = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    found, more = filter_by_hip(shown, name, environ.get(name, ""))
    gpu_variables = tuple(("HIP_VISIBLE_DEVICES", str(position)) for position, _ in found)
    return tuple(gpu for _, gpu in found), gpu_variables, (*warnings, *more)


def filter_by_rocr(gpus: tuple[Gpu, ...], value: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """What ROCR shows: indices and unique beginnings of UUIDs, up to the first invalid or repeated entry."""
    if value is None:
        return gpus, ()
    found: list[Gpu] = []
    entries = value.removesuffix(",").split(",") if value else []
    # As many entries are read as there are GPUs.
    for entry in (part.strip() for part in entries[: len(gpus)]):
        gpu = match_rocr_uuid(gpus, entry) if entry[:1] in ("G", "g") else match_rocr_index(gpus, entry)
        if gpu is None or gpu in found:
            return tuple(found), (describe_ignored_rest("ROCR_VISIBLE_DEVICES", value, entry, len(found)),)
        found.append(gpu)
    return tuple(found), ()


def match_rocr_index(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """Read an index as strtol with base 0 does: `010` is 8, `0x1` is 1."""
    body = entry.removeprefix("+")
    octal = len(body) > 1 and body.isdigit() and body[0] == "0"
    try:
        index = int(body, 8 if octal else 0) if body.isascii() and body.isalnum() and len(body) < 9 else -1
    except ValueError:
        return None
    # Python reads 0b and 0o as well, which no GPU is written as.
    return gpus[index] if 0 <= index < len(gpus) and body[1:2].lower() not in ("b", "o") else None


def match_rocr_uuid(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """The one GPU whose UUID begins so, in letters of either case."""
    if not len("GPU-") < len(entry) <= UUID_LENGTH:
        return None
    found = [gpu for gpu in gpus if gpu.uuid.upper().startswith(entry.upper())]
    return found[0] if len(found) == 1 else None


def filter_by_hip(shown: tuple[Gpu, ...], name: str, value: str) -> tuple[list[Entry], tuple[str, ...]]:
    """What HIP shows of it: indices in their plain form and parts of UUIDs, up to the first invalid entry.

    An empty value is as good as none. Of UUIDs the first match counts, and entries that repeat count once.
    """
    if not value:
        return list(enumerate(shown)), ()
    numbers = {str(at): (at, gpu) for at, gpu in enumerate(shown)}
    found: list[Entry] = []
    warnings: list[str] = []
    for entry in value.removesuffix(",").split(","):
        by_uuid = (item for item in numbers.values() if "GPU-" in entry and entry in item[1].uuid)
        match = next(by_uuid, None) or numbers.get(entry)
        if match is None:
            # The customary -1 for no device needs no warning.
            end = () if value == "-1" else (describe_ignored_rest(name, value, entry, len(found)),)
            return found, (*warnings, *end)
        if match in found:
            warnings.append(describe_repeated(name, value, entry))
        else:
            found.append(match)
    return found, tuple(warnings)


def describe_ignored_rest(name: str, value: str, entry: str, count: int) -> str:
    """Warn of an entry that ends the list."""
    return (
        f"{name}={value}: {entry!r} names no single device that is still to be had; the runtime drops it and "
        f"what follows, so the job sees {count}: correct or unset the variable"
    )


def describe_repeated(name: str, value: str, entry: str) -> str:
    """Warn of an entry that HIP takes once and torch not at all."""
    return (
        f"{name}={value}: {entry!r} names a device for the second time; HIP shows it once, "
        "but torch counts no device at all: remove the duplicate"
    )


def spread_devices(machine: Machine, topology: Topology, visible: Visible, request: Request) -> Visible:
    """Choose a visible device for each rank, and show all ranks these, so that `cuda:LOCAL_RANK` is right.

    They come one by one: each time the one with cores enough for every rank near it, then the one with
    fewest chosen in its package, on its node, at its NIC, and with fewest PCI bridges in common with them.
    """
    count = min(request.nproc_per_node or len(visible.devices), len(visible.devices))
    each, environ = count_rank_cores(count_requested_workers(request)), dict(request.environ)
    nics = prefer_nics(machine, topology, environ)
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
