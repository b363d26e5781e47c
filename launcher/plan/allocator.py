"""The allocators of a rank: PyTorch's settings by release, what conflicts with them, and malloc's library.

Sources for the settings: `getKeys` and the parsers of c10/core/AllocatorConfig and
c10/cuda/CUDAAllocatorConfig in PyTorch's releases 2.6 to 2.15.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.plan.model import Gpu, Request

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that hold settings; torch reads the first that is set, and no other.

Tried with 2.13. Up to 2.9, CUDA builds do not know the last (github.com/pytorch/pytorch/issues/183387).
"""
SET_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Both get the same: CUDA builds of torch up to 2.9 know the first alone, which is deprecated."""
EXPANDABLE = "expandable_segments"
BACKENDS = ("native", "cudaMallocAsync", "hipMallocAsync")
"""The last is ROCm's alone, which takes the second as well."""
MALLOC_LIBRARIES = ("tcmalloc", "jemalloc", "mimalloc")
"""Parts of the names of libraries that replace malloc."""
GRAPHS = ("--enable-cuda-graph", "--external-cuda-graph")
"""Options of Megatron-LM's for CUDA graphs; `--cuda-graph-impl` has a value, which may be `none`."""
HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
SHARING = ("verl", "openrlhf", "skyrl_train", "skyrl", "nemo_rl", "slime", "miles")
"""Packages that hand weights from process to process by CUDA IPC, on one GPU."""

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
    """A setting of PyTorch's allocator."""

    name: str
    kind: str
    """What its value is, a name in `KINDS`."""
    since: Version = OLDEST
    """The first release that knows it; those before `OLDEST` are not told apart."""
    minimum: int = 0
    maximum: int = MAX_INT


KEYS = (
    Key(EXPANDABLE, "bool"),
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
KNOWN = {key.name: key for key in KEYS}
SPLIT = ("max_split_size_mb", "max_non_split_rounding_mb")
"""Settings whose minimum is the size of a large segment, which up to 2.9 they had to be above."""
KINDS = {
    "bool": "True or False",
    "whole": "a whole number of at least {minimum}",
    "power": "a power of two from {minimum} to {maximum}",
    "fraction": "a number above 0 and below 1",
    "share": "a number from 0 to 1",
    "backend": "native or cudaMallocAsync",
    "divisions": "a power of two such as 4, or one for each size, [256:1,512:2,>:8]",
    "reserve": "a share of the GPU's memory such as 0.5, or a size such as 40G",
    "reserves": "reserves by class, [serving:0.25,capture:8G]",
}
"""What a value of each kind is, for people."""


def list_known_keys(version: Version | None) -> tuple[str, ...]:
    """Names of the settings of a release; None stands for all."""
    return tuple(key.name for key in KEYS if version is None or key.since <= max(version, OLDEST))


def find_fault(name: str, settings: Mapping[str, str], version: Version | None) -> str:
    """Say what values are valid if a known setting has an invalid one; else empty.

    `settings` are all that go together, in the allocator's notation; None is a release that is not known.
    """
    key, minimum = KNOWN[name], KNOWN[name].minimum
    if name in SPLIT:
        large = settings.get("large_segment_size_mb", "")
        is_older = version is not None and version < (2, 10)
        minimum = int(large) if _is_whole(large) else LARGE_MIB + is_older
    if _is_valid(key.kind, settings[name], minimum, key.maximum):
        return ""
    most = f", at most {key.maximum}" if key.kind == "whole" and key.maximum < MAX_INT else ""
    return KINDS[key.kind].format(minimum=minimum, maximum=key.maximum) + most


def _is_valid(kind: str, text: str, minimum: int, maximum: int) -> bool:
    """Whether torch takes a text as a value of a kind."""
    match kind:
        case "bool":
            return text in ("True", "False")
        case "whole":
            return _is_whole(text) and minimum <= int(text) <= maximum
        case "power":
            return _is_power(text) and minimum <= int(text) <= maximum
        case "fraction":
            return 0 < _read_decimal(text) < 1
        case "share":
            return 0 <= _read_decimal(text) <= 1
        case "backend":
            return text in BACKENDS
        case "reserve":
            return 0 < _read_decimal(text[:-1] if text[-1:] in ("G", "g") else text) < float("inf")
    # One for each size from a power of two of MiB on, `>` being all above, or for each class of streams.
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else ""
    pairs = [item.partition(":")[::2] for item in inner.split(",")] if inner else []
    if kind == "reserves":
        return bool(pairs) and all(name and _is_valid("reserve", size, 0, 0) for name, size in pairs)
    if not text.startswith("["):
        return _is_power(text)
    sizes = all(size == ">" or _is_power(size) for size, _ in pairs)
    return bool(pairs) and sizes and all(parts == "0" or _is_power(parts) for _, parts in pairs)


def _is_whole(text: str) -> bool:
    """Whether a text is a whole number from 0 in plain digits; torch takes `64abc` and `-1`, too."""
    return text.isascii() and text.isdigit() and len(text) < 12


def _is_power(text: str) -> bool:
    return _is_whole(text) and int(text).bit_count() == 1


def _read_decimal(text: str) -> float:
    """A decimal number; NaN, which is within no bounds, if the text is none."""
    plain = text.isascii() and "_" not in text and text.strip() == text
    try:
        return float(text) if plain else float("nan")
    except ValueError:
        return float("nan")


def read_settings(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of the section `allocator` in the allocator's notation; null leaves one out."""
    return {
        str(name): _render_value(value)
        for name, value in section.items()
        if name != "host" and value is not None
    }


def read_host(section: Mapping[str, Any]) -> str:
    """Return what serves malloc: `system`, `tcmalloc` or `jemalloc`; null and nothing are the system's."""
    return str(section.get("host") or "system")


def _render_value(value: object) -> str:
    """Return a value in the allocator's notation: `True`, `512`, `[256:1,512:2]`.

    A mapping, `{256: 1, 512: 2}`, is a list of pairs.
    """
    if isinstance(value, dict):
        return f"[{','.join(f'{_render_value(key)}:{_render_value(item)}' for key, item in value.items())}]"
    if isinstance(value, list):
        return f"[{','.join(map(_render_value, value))}]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = "".join(str(value).split())
    return text.capitalize() if text.lower() in ("true", "false") else text


def parse_settings(text: str) -> dict[str, str] | None:
    """Read a variable's settings by name, the last of a name counting; None if the notation is broken.

    Blanks mean nothing anywhere, and a comma at the end is fine, as torch has it.
    """
    items, depth = [""], 0
    for char in "".join(text.split()):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    if not items[-1]:
        items.pop()
    settings: dict[str, str] = {}
    for item in items:
        name, _, value = item.partition(":")
        listed = value.startswith("[") and value.endswith("]") and value.count("[") == value.count("]") == 1
        if not name or not value or set(name) & set("[]") or (not listed and set(value) & set("[]:")):
            return None
        settings[name] = value
    return settings


def format_settings(settings: Mapping[str, str]) -> str:
    """Write settings; `parse_settings` reads them back."""
    return ",".join(f"{name}:{value}" for name, value in settings.items())


def find_variable(environ: Mapping[str, str]) -> str:
    """Name of the variable that torch reads; empty if none is set. An empty value is as good as none."""
    return next((name for name in ALLOCATOR_VARIABLES if environ.get(name, "").strip()), "")


def merge_settings(configured: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the configuration's settings with the user's over them."""
    name = find_variable(environ)
    return {**configured, **(parse_settings(environ[name]) or {} if name else {})}


def set_allocator(request: Request, gpu: Gpu | None, kernel: str) -> tuple[dict[str, str], list[str]]:
    """PyTorch's allocator variables of a rank, with notes: the configuration's settings, then the user's.

    A variable that torch would refuse is left alone, so that the job ends as it would have without us.
    `kernel` is the release of the node's kernel.
    """
    if gpu is None:
        return {}, []
    environ, name = request.environ, find_variable(request.environ)
    own = parse_settings(environ[name]) if name else {}
    if own is None or any(key not in KNOWN or find_fault(key, own, None) for key in own):
        return {}, [f"{name}={environ[name]} kept as the user has it: torch may not take it"]
    configured, notes = read_settings(request.allocator), []
    merged = dict(configured)
    for key, value in configured.items():
        if why := _find_reason(key, configured | own, gpu, kernel):
            del merged[key]
            notes += [] if key in own else [f"{key}:{value} left out: {why}"]
    merged |= own
    if own:
        notes.append(f"{name}: {format_settings(own)} kept, set by the user")
    for other in ALLOCATOR_VARIABLES[ALLOCATOR_VARIABLES.index(name) + 1 :] if name else ():
        if environ.get(other, "").strip() and environ[other] != environ[name]:
            notes.append(
                f"{other}={environ[other]} is not heard: torch takes {name} alone where both are set"
            )
    # Under the new name alone, a CUDA build that knows neither the name nor the settings ignores them.
    is_newer = name == SET_VARIABLES[1] and any(KNOWN[key].since > OLDEST for key in own)
    names = SET_VARIABLES[1:] if is_newer else SET_VARIABLES
    return dict.fromkeys(names, format_settings(merged)) if merged else {}, notes


def _find_reason(key: str, settings: Mapping[str, str], gpu: Gpu, kernel: str) -> str:
    """Say why a setting of the configuration's is not for this rank; empty if it is."""
    if settings.get("backend") in BACKENDS[1:] and _is_native(key):
        return f"backend:{settings['backend']} ignores it"
    if key != EXPANDABLE or settings[key] != "True":
        return ""
    if gpu.vendor == "amd":
        return f"AMD GPUs have it from ROCm 7 and torch 2.12 on: {SET_VARIABLES[0]}={key}:True asks for it"
    if "microsoft" in kernel.lower():
        return "on WSL2 the first allocation may fail with it (github.com/pytorch/pytorch/issues/192330)"
    return ""


def _is_native(key: str) -> bool:
    """Whether a setting is for torch's own pools of GPU memory, which `backend` can replace."""
    return key != "backend" and not key.startswith("pinned_")


def set_malloc(request: Request) -> tuple[dict[str, str], list[str]]:
    """LD_PRELOAD of the library that replaces malloc, before what the user has there, with notes."""
    path, word = request.host_library, read_host(request.allocator)
    if word == "system" or path == "":
        return {}, []
    if path is None:
        return {}, [f"allocator.host={word}: its library is looked for on the node that runs"]
    preload = request.environ.get("LD_PRELOAD", "")
    libraries = preload.replace(":", " ").split()
    replacing = [library for library in libraries if any(part in library for part in MALLOC_LIBRARIES)]
    if replacing:
        return {}, [f"LD_PRELOAD={preload} kept, set by the user: {replacing[0]} replaces malloc already"]
    return {"LD_PRELOAD": ":".join([path, *libraries])}, []


def describe_ignored(settings: Mapping[str, str]) -> str:
    """Warn of settings for torch's own pools if another backend replaces these."""
    ignored = [key for key, value in settings.items() if _is_native(key) and value != "False"]
    if settings.get("backend") not in BACKENDS[1:] or not ignored:
        return ""
    return (
        f"backend:{settings['backend']} ignores {', '.join(ignored)} (PyTorch's notes on CUDA semantics):"
        " leave one or the other out"
    )


def describe_idle(settings: Mapping[str, str]) -> str:
    """Tell of a threshold that nothing comes near to: it is a share of a limit on the process's memory."""
    has_limit = settings.get("per_process_memory_fraction", "1") != "1"
    if "garbage_collection_threshold" not in settings or has_limit:
        return ""
    return (
        "garbage_collection_threshold does nothing without a limit on memory (CUDACachingAllocator.cpp): set"
        " allocator.per_process_memory_fraction below 1 (torch 2.10), unless the program sets its own"
    )


@dataclass(frozen=True, slots=True)
class Conflict:
    """A program or variable that expandable segments do not go with."""

    what: str
    """What happens, with its source."""
    remedy: str = ""
    """How to have both; empty if there is no way."""


def find_conflicts(
    settings: Mapping[str, str], argv: Sequence[str], environ: Mapping[str, str], *, contained: bool
) -> Iterator[Conflict]:
    """Find what does not go with expandable segments, if `settings` have them.

    `argv` are the program's, `environ` what the ranks will have. `contained`: they run in a container that
    may not trace processes.
    """
    if settings.get(EXPANDABLE) != "True" or settings.get("backend") in BACKENDS[1:]:
        return
    # NCCL registers buffers, and then segments grow.
    if _has_option(argv, "--use-nccl-ub"):
        yield Conflict("--use-nccl-ub: Megatron-LM refuses NCCL user buffers with expandable_segments")
    if environ.get(HOOK, "").lower() in ("1", "true", "y", "yes"):
        yield Conflict(f"{HOOK}: torch switches it off with expandable_segments (ProcessGroupNCCL.cpp)")
    graph = _find_graph(argv, environ)
    if graph and environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield Conflict(
            f"{graph}: NCCL registers buffers of CUDA graphs, which with expandable_segments ends in illegal"
            " memory accesses (Megatron-LM's arguments.py, which refuses it)",
            "set env.NCCL_GRAPH_REGISTER=0",
        )
    # Other processes open memory.
    nixl = next((name for name in environ if name.startswith("NIXL_")), "")
    ucx = f"UCX_TLS={environ['UCX_TLS']}" if "cuda" in environ.get("UCX_TLS", "") else nixl
    if ucx:
        yield Conflict(
            f"{ucx}: UCX moves memory of expandable_segments over TCP rather than cuda_ipc, hundreds of times"
            " slower (github.com/ai-dynamo/nixl/issues/1754)"
        )
    package = next((word for word in argv if word.partition(".")[0] in SHARING), "")
    if package and contained:
        yield Conflict(
            f"{package} shares GPU memory among processes, which with expandable_segments takes pidfd_getfd,"
            " and containers forbid that (github.com/pytorch/pytorch/issues/165685)",
            "start the container with --cap-add=SYS_PTRACE",
        )


def _find_graph(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the option or variable that asks for CUDA graphs; empty if none does."""
    option = "--cuda-graph-impl"
    for word, after in zip(argv, (*argv[1:], ""), strict=False):  # without arguments there is nothing after
        name, equals, value = word.partition("=")
        if name == option:
            if (value if equals else after) not in ("", "none"):
                return option
            break
    if environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        return "TORCHINDUCTOR_CUDAGRAPHS=1"
    return next((option for option in GRAPHS if _has_option(argv, option)), "")


def _has_option(argv: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in argv)
