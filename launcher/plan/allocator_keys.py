"""The settings that PyTorch's CUDA allocator knows, by version, and which values each takes.

Sources: `getKeys` and the parsers of c10/core/AllocatorConfig and c10/cuda/CUDAAllocatorConfig in PyTorch's
releases 2.6 to 2.15.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Version = tuple[int, int]
"""Major and minor number of a torch."""
OLDEST, NEWEST = (2, 6), (2, 15)
"""The releases that the table is of."""
MAX_INT = 2**31 - 1
"""Largest whole number: up to 2.9 the parser reads an int."""
LARGE_MIB = 20
"""Size of a large segment if `large_segment_size_mb` sets no other."""


@dataclass(frozen=True, slots=True)
class Key:
    """A setting."""

    name: str
    kind: str
    """What its value is, a name in `CHECKS`."""
    since: Version = OLDEST
    """The first release that knows it; those before `OLDEST` are not told apart."""
    minimum: int = 0
    maximum: int = MAX_INT


KEYS = (
    Key("expandable_segments", "bool"),
    Key("max_split_size_mb", "whole"),
    Key("max_non_split_rounding_mb", "whole"),
    Key("garbage_collection_threshold", "fraction"),
    Key("roundup_power2_divisions", "divisions"),
    Key("backend", "backend"),
    Key("release_lock_on_cudamalloc", "bool"),
    Key("release_lock_on_hipmalloc", "bool"),
    Key("pinned_use_cuda_host_register", "bool"),
    Key("pinned_use_hip_host_register", "bool"),
    Key("pinned_num_register_threads", "power", minimum=1, maximum=128),
    Key("pinned_use_background_threads", "bool"),
    Key("graph_capture_record_stream_reuse", "bool", (2, 9)),
    Key("pinned_reserve_segment_size_mb", "whole", (2, 10), minimum=1),
    Key("per_process_memory_fraction", "share", (2, 10)),
    Key("large_segment_size_mb", "whole", (2, 11), minimum=11),
    Key("pinned_free_catch_all", "bool", (2, 12)),
    Key("throw_on_cudamalloc_oom", "bool", (2, 12)),
    Key("pinned_max_round_threshold_mb", "whole", (2, 13)),
    Key("pinned_max_cached_size_mb", "whole", (2, 13)),
    Key("expandable_segments_reserve", "reserve", (2, 15)),
    Key("expandable_segments_reserve_by_class", "reserves", (2, 15)),
)
SPLIT = ("max_split_size_mb", "max_non_split_rounding_mb")
"""Settings whose least value is the size of a large segment: `find_min_split`."""
BACKENDS = ("native", "cudaMallocAsync", "hipMallocAsync")
"""The last is ROCm's alone, which takes the second as well."""
KNOWN = {key.name: key for key in KEYS}


def list_known_keys(version: Version | None) -> tuple[str, ...]:
    """Names of the settings of a release; None stands for all."""
    return tuple(key.name for key in KEYS if version is None or key.since <= max(version, OLDEST))


def find_fault(name: str, settings: Mapping[str, str], version: Version | None) -> str:
    """Say what values are valid if a known setting has an invalid one; else empty.

    `settings` are all that go together, in the allocator's notation; None is a release that is not known.
    """
    key = KNOWN[name]
    minimum = find_min_split(settings, version) if name in SPLIT else key.minimum
    return CHECKS[key.kind](settings[name], minimum, key.maximum)


def find_min_split(settings: Mapping[str, str], version: Version | None) -> int:
    """Smallest `max_split_size_mb`: a large segment's size, which up to 2.9 it had to be above."""
    large = settings.get("large_segment_size_mb", "")
    if is_whole(large):
        return int(large)
    return LARGE_MIB + (version is not None and version < (2, 10))


def is_whole(text: str) -> bool:
    """Whether a text is a whole number from 0 in plain digits; torch takes `64abc` and `-1`, too."""
    return text.isascii() and text.isdigit() and len(text) < 12


def is_power(text: str) -> bool:
    """Whether a text is a power of two."""
    return is_whole(text) and int(text).bit_count() == 1


def read_decimal(text: str) -> float:
    """A decimal number; NaN, which is within no bounds, if the text is none."""
    plain = text.isascii() and "_" not in text and text.strip() == text
    try:
        return float(text) if plain else float("nan")
    except ValueError:
        return float("nan")


def check_bool(text: str, minimum: int, maximum: int) -> str:
    """True and False, so written."""
    return "" if text in ("True", "False") else "True or False"


def check_whole(text: str, minimum: int, maximum: int) -> str:
    """A whole number within bounds."""
    right = is_whole(text) and minimum <= int(text) <= maximum
    return (
        ""
        if right
        else f"a whole number of at least {minimum}" + (f", at most {maximum}" * (maximum < MAX_INT))
    )


def check_power(text: str, minimum: int, maximum: int) -> str:
    """A power of two within bounds."""
    right = is_power(text) and minimum <= int(text) <= maximum
    return "" if right else f"a power of two from {minimum} to {maximum}"


def check_fraction(text: str, minimum: int, maximum: int) -> str:
    """A number between 0 and 1."""
    return "" if 0 < read_decimal(text) < 1 else "a number above 0 and below 1"


def check_share(text: str, minimum: int, maximum: int) -> str:
    """A number from 0 to 1."""
    return "" if 0 <= read_decimal(text) <= 1 else "a number from 0 to 1"


def check_backend(text: str, minimum: int, maximum: int) -> str:
    """An allocator's name."""
    return "" if text in BACKENDS else "native or cudaMallocAsync"


def check_divisions(text: str, minimum: int, maximum: int) -> str:
    """A number of divisions, or one for each size from a power of two of MiB on, `>` being all above."""
    pairs = [item.partition(":")[::2] for item in split_list(text)]
    listed = pairs and all(
        (size == ">" or is_power(size)) and (parts == "0" or is_power(parts)) for size, parts in pairs
    )
    right = listed if text.startswith("[") else is_power(text)
    return (
        ""
        if right
        else "a power of two such as 4, or one for each size, [256:1,512:2,>:8] (YAML: {256: 1, '>': 8})"
    )


def check_reserve(text: str, minimum: int, maximum: int) -> str:
    """A share of the GPU's memory, or GiB."""
    number = read_decimal(text[:-1] if text[-1:] in ("G", "g") else text)
    return (
        "" if 0 < number < float("inf") else "a share of the GPU's memory such as 0.5, or a size such as 40G"
    )


def check_reserves(text: str, minimum: int, maximum: int) -> str:
    """Such a reserve for each class of streams."""
    pairs = [item.partition(":")[::2] for item in split_list(text)]
    right = pairs and all(name and not check_reserve(size, minimum, maximum) for name, size in pairs)
    return "" if right else "reserves by class, [serving:0.25,capture:8G]"


def split_list(text: str) -> list[str]:
    """The items between brackets; none if there are no brackets."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else ""
    return inner.split(",") if inner else []


CHECKS: Mapping[str, Callable[[str, int, int], str]] = {
    "bool": check_bool,
    "whole": check_whole,
    "power": check_power,
    "fraction": check_fraction,
    "share": check_share,
    "backend": check_backend,
    "divisions": check_divisions,
    "reserve": check_reserve,
    "reserves": check_reserves,
}
"""By kind: the function that says what is valid if a text is not; the bounds are a number's."""
