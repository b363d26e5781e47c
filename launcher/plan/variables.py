"""The variables of a rank: the user's that the plan keeps, who set each one, the allocators' settings.

Sources for the allocator: `getKeys` and the parsers of c10/core/AllocatorConfig and
c10/cuda/CUDAAllocatorConfig in PyTorch's releases 2.6 to 2.13.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from launcher.plan.model import GC_POLICIES, GcConfig, Gpu, Request, Variable
from launcher.protocol import LAUNCH_GC, LAUNCH_LOADER_DEFAULT, LAUNCH_NIC, LAUNCH_NUM_WORKERS

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
SHARING = ("verl", "openrlhf", "skyrl_train", "skyrl", "nemo_rl", "slime", "miles")
"""Packages that hand weights from process to process by CUDA IPC, on one GPU."""

Version = tuple[int, int]
"""Major and minor number of a torch."""
OLDEST, NEWEST = (2, 6), (2, 13)
"""The releases that the table is of."""
KEYS: dict[str, tuple[str, Version]] = {
    EXPANDABLE: ("bool", OLDEST),
    "max_split_size_mb": ("size", OLDEST),
    "max_non_split_rounding_mb": ("size", OLDEST),
    "garbage_collection_threshold": ("fraction", OLDEST),
    "roundup_power2_divisions": ("divisions", OLDEST),
    "backend": ("backend", OLDEST),
    "release_lock_on_cudamalloc": ("bool", OLDEST),
    "release_lock_on_hipmalloc": ("bool", OLDEST),
    "pinned_use_cuda_host_register": ("bool", OLDEST),
    "pinned_use_hip_host_register": ("bool", OLDEST),
    "pinned_num_register_threads": ("threads", OLDEST),
    "pinned_use_background_threads": ("bool", OLDEST),
    "graph_capture_record_stream_reuse": ("bool", (2, 9)),
    "pinned_reserve_segment_size_mb": ("number", (2, 10)),
    "per_process_memory_fraction": ("share", (2, 10)),
    "large_segment_size_mb": ("number", (2, 11)),
    "pinned_free_catch_all": ("bool", (2, 12)),
    "throw_on_cudamalloc_oom": ("bool", (2, 12)),
    "pinned_max_round_threshold_mb": ("number", (2, 13)),
    "pinned_max_cached_size_mb": ("number", (2, 13)),
}
"""For each setting the kind of its value, a key of `KINDS`, and the first release that knows it; those before
`OLDEST` are not told apart."""


POWER = "|".join(str(1 << bits) for bits in range(30))
DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?"
WHOLE = "[0-9]{1,9}"
"""Plain digits; torch takes `64abc` and `-1`, too."""
SETTING = r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)"
"""A name and its value, a list perhaps."""
KINDS: dict[str, tuple[str, str]] = {
    "bool": ("True|False", "True or False"),
    "number": (WHOLE, "a whole number"),
    "size": (WHOLE, "a whole number of at least 20"),
    "threads": ("|".join(str(1 << bits) for bits in range(8)), "a power of two from 1 to 128"),
    "fraction": (DECIMAL, "a number above 0 and below 1"),
    "share": (DECIMAL, "a number from 0 to 1"),
    "backend": ("|".join(BACKENDS), "native or cudaMallocAsync"),
    "divisions": (
        rf"{POWER}|\[(?:(?:>|{POWER}):(?:0|{POWER})(?:,(?!\])|(?=\])))+\]",
        "a power of two such as 4, or one for each size, [256:1,512:2,>:8]",
    ),
}
"""For each kind what a value of it looks like, and what it is for people."""
BOUNDS = {"size": (20, math.inf), "fraction": (math.nextafter(0, 1), math.nextafter(1, 0)), "share": (0, 1)}
"""Of kinds that are numbers: the least and the most."""


def find_fault(name: str, value: str) -> str:
    """Say what values are valid if a known setting has an invalid one; else empty."""
    kind = KEYS[name][0]
    pattern, words = KINDS[kind]
    is_valid = re.fullmatch(pattern, value) is not None
    if is_valid and kind in BOUNDS:
        least, most = BOUNDS[kind]
        is_valid = least <= float(value) <= most
    return "" if is_valid else words


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
    text = "".join(text.split())
    found = re.findall(SETTING, text) if re.fullmatch(f"(?:{SETTING})*", text) else None
    return None if found is None else dict(found)


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
    if own is None or any(key not in KEYS or find_fault(key, value) for key, value in own.items()):
        return {}, [f"{name}={environ[name]} kept as the user has it: torch may not take it"]
    merged, notes = read_settings(request.allocator), []
    if merged.get(EXPANDABLE) == "True" and EXPANDABLE not in own:
        why = ""
        if gpu.vendor == "amd":
            why = f"AMD GPUs have it from ROCm 7 and torch 2.12 on: {SET_VARIABLES[0]} asks for it"
        elif "microsoft" in kernel.lower():
            why = "on WSL2 the first allocation may fail (github.com/pytorch/pytorch/issues/192330)"
        if why:
            del merged[EXPANDABLE]
            notes.append(f"{EXPANDABLE} left out: {why}")
    merged |= own
    if own:
        notes.append(f"{name}: {format_settings(own)} kept, set by the user")
    # Under the new name alone, a CUDA build that knows neither the name nor the settings ignores them.
    is_newer = name == SET_VARIABLES[1] and any(KEYS[key][1] > OLDEST for key in own)
    names = SET_VARIABLES[1:] if is_newer else SET_VARIABLES
    return dict.fromkeys(names, format_settings(merged)) if merged else {}, notes


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


def find_conflicts(
    settings: Mapping[str, str], argv: Sequence[str], environ: Mapping[str, str], *, contained: bool
) -> Iterator[tuple[str, str]]:
    """Find what does not go with expandable segments, if `settings` have them.

    Gives what happens, with its source, and how to have both, which is empty if there is no way. `argv` are
    the program's, `environ` what the ranks will have. `contained`: they run in a container that may not trace
    processes.
    """
    if settings.get(EXPANDABLE) != "True" or settings.get("backend") in BACKENDS[1:]:
        return
    words = [part for word in argv for part in word.split("=", 1)]
    # NCCL registers buffers, and then segments grow.
    if "--use-nccl-ub" in words:
        yield "--use-nccl-ub: Megatron-LM refuses NCCL user buffers with expandable_segments", ""
    graphs = [option for option in GRAPHS if option in words]
    if "--cuda-graph-impl" in words[:-1] and words[words.index("--cuda-graph-impl") + 1] != "none":
        graphs.append("--cuda-graph-impl")
    if environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        graphs.append("TORCHINDUCTOR_CUDAGRAPHS=1")
    if graphs and environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield (
            f"{graphs[0]}: NCCL registers buffers of CUDA graphs, which with expandable_segments ends in"
            " illegal memory accesses (Megatron-LM's arguments.py, which refuses it)",
            "set env.NCCL_GRAPH_REGISTER=0",
        )
    # Other processes open memory.
    nixl = next((name for name in environ if name.startswith("NIXL_")), "")
    if ucx := f"UCX_TLS={environ['UCX_TLS']}" if "cuda" in environ.get("UCX_TLS", "") else nixl:
        yield (
            f"{ucx}: UCX moves memory of expandable_segments over TCP rather than cuda_ipc, hundreds of times"
            " slower (github.com/ai-dynamo/nixl/issues/1754)",
            "",
        )
    package = next((word for word in argv if word.partition(".")[0] in SHARING), "")
    if package and contained:
        yield (
            f"{package} shares GPU memory among processes, which with expandable_segments takes pidfd_getfd,"
            " and containers forbid that (github.com/pytorch/pytorch/issues/165685)",
            "start the container with --cap-add=SYS_PTRACE",
        )


BINDERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that have OpenMP bind threads by itself: never set, and warned of."""
KMP_TYPES = ("balanced", "compact", "explicit", "logical", "physical", "scatter")
"""Words of KMP_AFFINITY that bind; `none` is what it does without one (LLVM's OpenMP runtime reference)."""
OFF_VALUES = ("", "0", "false", "no", "off", "none", "disabled")
"""Values by which a variable does nothing."""
COUNTS = {
    "OMP_NUM_THREADS": 1,
    "NUMEXPR_NUM_THREADS": 1,
    "TORCHINDUCTOR_COMPILE_THREADS": 0,
    LAUNCH_NUM_WORKERS: 0,
}
"""Variables that hold a number, and the least that each may be."""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose and number the GPUs of a machine; the first two can show a rank its own."""
MERGED = (*ALLOCATOR_VARIABLES, "LD_PRELOAD")
"""Variables whose settings the plan joins with its own."""
HONOURED = (
    *VISIBLE_DEVICES,
    *COUNTS,
    *("CUDA_DEVICE_ORDER", "NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *BINDERS,
    *(LAUNCH_LOADER_DEFAULT, LAUNCH_GC, LAUNCH_NIC, "NCCL_IB_HCA"),
    *MERGED,
)
"""Variables of the user's that the plan depends on; one that the user has set wins."""
REASONS = {
    "CUDA_DEVICE_ORDER": "GPUs are numbered as in this plan",
    LAUNCH_GC: "the group gc",
    LAUNCH_LOADER_DEFAULT: "dataloader.default=true",
    LAUNCH_NIC: "the RDMA device next to its GPU",
    LAUNCH_NUM_WORKERS: "DataLoader workers",
    "LD_PRELOAD": "allocator.host",
    "NCCL_IB_HCA": "binding.nic=true",
    "NUMEXPR_NUM_THREADS": "as many as NumExpr takes",
    "OMP_NUM_THREADS": "its cores less its workers",
    "PYTORCH_ALLOC_CONF": "the group allocator",
    "PYTORCH_CUDA_ALLOC_CONF": "the group allocator",
    "PYTORCH_HIP_ALLOC_CONF": "the group allocator",
    **dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), "on the node, for this job alone"),
    "TORCHINDUCTOR_COMPILE_THREADS": "its hardware threads, at most 32",
}
"""What the plan's variables come from."""


def find_binders(environ: Mapping[str, str]) -> Iterator[str]:
    """Names of the variables that have OpenMP bind a rank's threads a second time."""
    values = {name: environ.get(name, "").strip().lower() for name in BINDERS}
    refused = values["OMP_PROC_BIND"] in OFF_VALUES[1:]
    for name, value in values.items():
        if name == "KMP_AFFINITY":
            acts = not {word.strip() for word in value.split(",")}.isdisjoint(KMP_TYPES)
        elif name == "GOMP_CPU_AFFINITY":  # a 0 in it is a CPU
            acts = bool(value) and not refused
        else:
            acts = value not in OFF_VALUES and not refused
        if acts:
            yield name


def read_variable_count(environ: Mapping[str, str], name: str) -> int | None:
    """The number in a variable, the first of a list (`OMP_NUM_THREADS=8,4`); None if there is none."""
    text = environ.get(name, "").split(",")[0].strip()
    # Longer numbers are no count of anything here, and int() refuses some thousands of digits.
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    return number if number >= COUNTS.get(name, 1) else None


def render_gc(config: GcConfig) -> str:
    """Return the text for LAUNCH_GC: `synchronized,warmup=30,every=50,log`."""
    steps = [f"{name}={getattr(config, name)}" for name in GC_POLICIES[config.policy]]
    return ",".join([config.policy, *steps, *(["log"] if config.log else [])])


def is_kept(environ: Mapping[str, str], name: str, decided: Collection[str] = ()) -> bool:
    """Whether a variable stays as the user has it: not if it holds a number that no program could read.

    `decided` are the plan's variables that show GPUs. An empty value is as good as none unless it hides GPUs.
    """
    if name in COUNTS:
        return read_variable_count(environ, name) is not None
    if name in BINDERS or name in MERGED or (name in VISIBLE_DEVICES[:2] and name in decided):
        return False
    return bool(environ[name]) or name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def list_variables(request: Request, env: Mapping[str, str]) -> tuple[Variable, ...]:
    """All that the plan (`env`) and the configuration set for a rank, and what the user has."""
    found: dict[str, Variable] = {}
    for source, given in (("user", request.environ), ("configuration", request.configured)):
        for name, value in given.items():
            why = "binds threads a second time: see the warning" if name in BINDERS else "kept"
            found[name] = Variable(name, value, source, why if name in HONOURED else "")
    for name, value in env.items():
        reason = REASONS.get(name, "")
        if name in VISIBLE_DEVICES[:2]:
            reason = f"devices={request.devices}"
        old = request.environ.get(name, "")
        if old and old != value:
            reason += f", {'the configuration' if name in request.configured else 'the user'} has {old}"
        found[name] = Variable(name, value, "plan", reason)
    return tuple(found[name] for name in sorted(found))
