"""Which devices the user's variables show, in the order in which programs number them.

Source of NVIDIA's rules: CUDA Programming Guide, "CUDA_VISIBLE_DEVICES", and what torch makes of them
(`torch.cuda._parse_visible_devices`). Where the two differ the guide counts: of `0,9,0` on a machine with
two GPUs it shows what precedes the invalid entry, while torch counts none for the repeated one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.model import Gpu

NO_DEVICES = ("", "-1", "NoDevFiles")
"""Values that mean no device: empty, the customary -1, and SLURM's for a job without GPUs."""


@dataclass(frozen=True, slots=True)
class Visible:
    """The devices that a job sees."""

    devices: tuple[Gpu, ...] = ()
    """A MIG instance is given as its parent with the instance's UUID."""
    own: tuple[tuple[str, str], ...] = ()
    """For each device the variable and value that show it: alone, or with all that are to be seen."""
    warnings: tuple[str, ...] = ()
    """About illegal entries."""


def resolve_visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> Visible:
    """Find the devices that a job sees on a machine with `gpus`.

    A build of torch serves one vendor: AMD's count where there are none of NVIDIA's.
    """
    gpus = tuple(sorted(gpus, key=lambda gpu: gpu.index))
    nvidia = tuple(gpu for gpu in gpus if gpu.vendor != "amd")
    if gpus and not nvidia:
        from launcher.plan.rocm import resolve_rocm  # noqa: PLC0415  # a rank's start pays for imports

        devices, own, warnings = resolve_rocm(gpus, environ)
        return Visible(devices, own, warnings)
    devices, warnings = resolve_cuda(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    named = all(gpu.uuid for gpu in devices)  # a list has numbers or UUIDs
    own = tuple(("CUDA_VISIBLE_DEVICES", gpu.uuid if named else str(gpu.index)) for gpu in devices)
    return Visible(devices, own, warnings)


def resolve_cuda(gpus: tuple[Gpu, ...], value: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Devices and warnings by `CUDA_VISIBLE_DEVICES`, None where it is unset."""
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
    """What CUDA can open on a GPU: its MIG instances, or itself where MIG is off."""
    return tuple(as_instance(gpu, uuid) for uuid in gpu.mig) or (gpu,)


def as_instance(gpu: Gpu, uuid: str) -> Gpu:
    """The parent's place under the instance's name."""
    return Gpu(gpu.index, uuid, gpu.pci, gpu.node, gpu.local_cpus, gpu.name, path=gpu.path)


def match_cuda_index(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """Read an entry as strtoul does (`1gpu` is 1), None where no GPU has that number."""
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


def describe_invalid(gpus: tuple[Gpu, ...], value: str, entry: str, seen: int) -> str:
    """Warn of an entry that ends the list."""
    mixed = entry.isdecimal() and value.startswith(("GPU-", "MIG-"))
    why = "is a number among UUIDs" if mixed else f"names no single device of this machine's {len(gpus)} GPUs"
    return (
        f"CUDA_VISIBLE_DEVICES={value}: {entry!r} {why}; "
        f"CUDA drops it and what follows, so the job sees {seen}: correct or unset the variable"
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
