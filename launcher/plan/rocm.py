"""Which AMD devices ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES show.

The runtime (ROCR) filters first, and HIP numbers what is left: ROCm's documentation, "GPU isolation
techniques". For the details, which it leaves open, the code counts: `RvdFilter` in ROCR-Runtime's
amd_filter_device.cpp, and `Device::init` in clr's rocdevice.cpp.
"""

from collections.abc import Mapping

from launcher.plan.model import Gpu

LONGEST = len("GPU-0123456789abcdef")
Entry = tuple[int, Gpu]
"""A device with its position among those that ROCR shows."""


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
    own = tuple(("HIP_VISIBLE_DEVICES", str(position)) for position, _ in found)
    return tuple(gpu for _, gpu in found), own, (*warnings, *more)


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
    if not len("GPU-") < len(entry) <= LONGEST:
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


def describe_ignored_rest(name: str, value: str, entry: str, seen: int) -> str:
    """Warn of an entry that ends the list."""
    return (
        f"{name}={value}: {entry!r} names no single device that is still to be had; the runtime drops it and "
        f"what follows, so the job sees {seen}: correct or unset the variable"
    )


def describe_repeated(name: str, value: str, entry: str) -> str:
    """Warn of an entry that HIP takes once and torch not at all."""
    return (
        f"{name}={value}: {entry!r} names a device for the second time; HIP shows it once, "
        "but torch counts no device at all: remove the duplicate"
    )
