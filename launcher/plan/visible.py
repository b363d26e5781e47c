"""Which devices `CUDA_VISIBLE_DEVICES` shows, in the order in which CUDA numbers them for the job.

Source of the rules: CUDA C++ Programming Guide, "CUDA Environment Variables", and what torch makes of
them (`torch.cuda._parse_visible_devices`).
"""

from launcher.plan.model import Gpu

NO_DEVICES = ("", "-1", "NoDevFiles")
"""Values that mean no device: empty, the customary -1, and SLURM's for a job without GPUs."""


def resolve_visible(gpus: tuple[Gpu, ...], value: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Devices that a job sees on a machine with `gpus`, and warnings about illegal entries.

    `value` is the variable, None where it is unset. A MIG instance is given as its parent with the
    instance's UUID.
    """
    gpus = tuple(sorted(gpus, key=lambda gpu: gpu.index))
    if value is None:
        return tuple(device for gpu in gpus for device in list_devices(gpu)), ()
    if value.strip() in NO_DEVICES:
        return (), ()
    by_uuid = value.startswith(("GPU-", "MIG-"))
    found: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        device = match_uuid(gpus, entry) if by_uuid else match_index(gpus, entry)
        if device is None:
            return tuple(found), (describe_invalid(gpus, value, entry, len(found)),)
        if device.uuid in (other.uuid for other in found if other.index == device.index):
            return (), (describe_duplicate(value, entry),)
        found.append(device)
    return tuple(found), ()


def list_devices(gpu: Gpu) -> tuple[Gpu, ...]:
    """What CUDA can open on a GPU: its MIG instances, or itself where MIG is off."""
    return tuple(as_instance(gpu, uuid) for uuid in gpu.mig) or (gpu,)


def as_instance(gpu: Gpu, uuid: str) -> Gpu:
    """The parent's place under the instance's name."""
    return Gpu(gpu.index, uuid, gpu.pci, gpu.node, gpu.local_cpus, gpu.name)


def match_index(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """Read an entry as strtoul does (`1gpu` is 1), None where no GPU has that number."""
    digits = entry.removeprefix("+")
    end = next((at for at, char in enumerate(digits) if char not in "0123456789"), len(digits))
    # Four digits name more GPUs than a node has; int() refuses some thousands of them.
    if not 0 < end < 5 or int(digits[:end]) >= len(gpus):
        return None
    return list_devices(gpus[int(digits[:end])])[0]


def match_uuid(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """The one device whose UUID begins with `entry`; None for no device or several.

    `MIG-GPU-…/gi/ci` is the form of drivers before R470, which names the parent.
    """
    if entry.startswith("MIG-GPU-"):
        parent = match_uuid(gpus, entry.removeprefix("MIG-").partition("/")[0])
        return as_instance(parent, entry) if parent else None
    if entry.startswith("MIG-"):
        found = [as_instance(gpu, uuid) for gpu in gpus for uuid in gpu.mig if uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        found = [list_devices(gpu)[0] for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        return None
    return found[0] if len(found) == 1 else None


def describe_invalid(gpus: tuple[Gpu, ...], value: str, entry: str, seen: int) -> str:
    """Warn of an entry that ends the list."""
    return (
        f"CUDA_VISIBLE_DEVICES={value}: {entry!r} names no single device of this machine's {len(gpus)} GPUs; "
        f"CUDA drops it and what follows, so the job sees {seen}: correct or unset the variable"
    )


def describe_duplicate(value: str, entry: str) -> str:
    """Warn of an entry that names a device again."""
    return (
        f"CUDA_VISIBLE_DEVICES={value}: {entry!r} names a device for the second time; "
        "CUDA then shows none, so the job sees 0 GPUs: remove the duplicate"
    )
