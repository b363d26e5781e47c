"""The allocators of a rank: settings of PyTorch's, what conflicts with them, and the library for malloc."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.environment import ALLOCATOR_VARIABLES, VariablesAndNotes
from launcher.plan.model import Gpu, Request

SET_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The same under both: CUDA builds of torch know the first alone up to 2.9, and it is to go one day."""
EXPANDABLE = "expandable_segments"
ASYNC = ("cudaMallocAsync", "hipMallocAsync")
MALLOC_LIBRARIES = ("tcmalloc", "jemalloc", "mimalloc")
"""Parts of the names of libraries that replace malloc."""
GRAPHS = ("--enable-cuda-graph", "--external-cuda-graph")
"""Options of Megatron-LM's for CUDA graphs; `--cuda-graph-impl` has a value, which may be `none`."""
HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
SHARING = ("verl", "openrlhf", "skyrl_train", "skyrl", "nemo_rl", "slime", "miles")
"""Packages that hand weights from process to process by CUDA IPC, on one GPU."""


def parse_settings(text: str) -> dict[str, str] | None:
    """Read settings by name, the last of a name counting; None if the notation is broken.

    Blanks mean nothing anywhere, and a comma at the end is fine, as torch has it.
    """
    settings: dict[str, str] = {}
    items = split_items("".join(text.split()))
    if items and not items[-1]:
        items.pop()
    for item in items:
        name, _, value = item.partition(":")
        listed = value.startswith("[") and value.endswith("]") and value.count("[") == value.count("]") == 1
        if not name or not value or set(name) & set("[]") or (not listed and set(value) & set("[]:")):
            return None
        settings[name] = value
    return settings


def split_items(text: str) -> list[str]:
    """Split at the commas that are not within brackets."""
    items, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return items


def format_settings(settings: Mapping[str, str]) -> str:
    """Write settings; `parse_settings` reads them back."""
    return ",".join(f"{name}:{value}" for name, value in settings.items())


def find_variable(environ: Mapping[str, str]) -> str:
    """Name of the variable that torch hears; empty if none is set. An empty value is as good as none."""
    return next((name for name in ALLOCATOR_VARIABLES if environ.get(name, "").strip()), "")


def set_allocator(request: Request, gpu: Gpu | None, kernel: str) -> VariablesAndNotes:
    """PyTorch's allocator settings for a rank with a GPU: the configuration's, overridden by the user's.

    A variable that torch would refuse is left alone, so that the job ends as it would have without us.
    `kernel` is the release of the node's kernel.
    """
    if gpu is None:
        return {}, ()
    environ = dict(request.environ)
    name = find_variable(environ)
    user_settings = read_user_settings(environ[name]) if name else {}
    if user_settings is None:
        return {}, [f"{name}={environ[name]} kept as the user has it: torch may not take it"]
    configured = parse_settings(request.allocator) or {}
    reasons = {
        key: why
        for key in configured
        if (why := find_reason(key, {**configured, **user_settings}, gpu, kernel))
    }
    merged = {key: value for key, value in configured.items() if key not in reasons} | user_settings
    notes = [
        f"{key}:{configured[key]} left out: {why}" for key, why in reasons.items() if key not in user_settings
    ]
    text = format_settings(merged)
    names = SET_VARIABLES[1:] if name == SET_VARIABLES[1] and has_newer_keys(user_settings) else SET_VARIABLES
    return dict.fromkeys(names, text) if merged else {}, [
        *notes,
        *describe_user_settings(environ, name, user_settings),
    ]


def read_user_settings(text: str) -> dict[str, str] | None:
    """Read the user's settings; None if torch would refuse them."""
    from launcher.plan.allocator_keys import KNOWN, find_fault  # noqa: PLC0415 - most ranks need no table

    settings = parse_settings(text)
    if settings is None or any(key not in KNOWN or find_fault(key, settings, None) for key in settings):
        return None
    return settings


def has_newer_keys(user_settings: Mapping[str, str]) -> bool:
    """Whether some of the user's settings are younger than the oldest torch.

    Under the new name alone, a CUDA build that knows neither the name nor the settings passes them over.
    """
    from launcher.plan.allocator_keys import KNOWN, OLDEST  # noqa: PLC0415 - as above

    return any(KNOWN[key].since > OLDEST for key in user_settings)


def find_reason(key: str, settings: Mapping[str, str], gpu: Gpu, kernel: str) -> str:
    """Say why a setting of the configuration's is not for this rank; empty if it is."""
    if settings.get("backend") in ASYNC and is_native(key):
        return f"backend:{settings['backend']} ignores it"
    if key != EXPANDABLE or settings[key] != "True":
        return ""
    if gpu.vendor == "amd":
        return f"AMD GPUs have it from ROCm 7 and torch 2.12 on: {SET_VARIABLES[0]}={key}:True asks for it"
    if "microsoft" in kernel.lower():
        return "on WSL2 the first allocation may fail with it (github.com/pytorch/pytorch/issues/192330)"
    return ""


def is_native(key: str) -> bool:
    """Whether a setting is for torch's own pools of GPU memory, which `backend` can replace."""
    return key != "backend" and not key.startswith("pinned_")


def describe_user_settings(
    environ: Mapping[str, str], name: str, user_settings: Mapping[str, str]
) -> Iterator[str]:
    """Describe the user's settings that are kept, and those that torch does not read."""
    if user_settings:
        yield f"{name}: {format_settings(user_settings)} kept, set by the user"
    for other in ALLOCATOR_VARIABLES[ALLOCATOR_VARIABLES.index(name) + 1 :] if name else ():
        if environ.get(other, "").strip() and environ[other] != environ[name]:
            yield f"{other}={environ[other]} is not heard: torch takes {name} alone where both are set"


def set_malloc(request: Request) -> VariablesAndNotes:
    """LD_PRELOAD of the library that replaces malloc, before what the user has there."""
    path, word = request.host_library, request.host_allocator
    if word == "system" or path == "":
        return {}, ()
    if path is None:
        return {}, [f"allocator.host={word}: its library is looked for on the node that runs"]
    preload = dict(request.environ).get("LD_PRELOAD", "")
    libraries = preload.replace(":", " ").split()
    replacing = [library for library in libraries if any(part in library for part in MALLOC_LIBRARIES)]
    if replacing:
        return {}, [f"LD_PRELOAD={preload} kept, set by the user: {replacing[0]} replaces malloc already"]
    return {"LD_PRELOAD": ":".join([path, *libraries])}, ()


def find_missing(request: Request) -> Iterator[str]:
    """Warn of a library for malloc that this node has not."""
    packages = {
        "tcmalloc": "libtcmalloc-minimal4 (Debian, Ubuntu), gperftools-libs (Fedora) or gperftools (conda)",
        "jemalloc": "libjemalloc2 (Debian, Ubuntu) or jemalloc (Fedora, conda)",
    }
    word = request.host_allocator
    if word in packages and request.host_library == "":
        yield (
            f"allocator.host={word}, but its library is not on this node, and malloc stays the system's:"
            f" install {packages[word]}"
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
    if settings.get(EXPANDABLE) == "True" and settings.get("backend") not in ASYNC:
        yield from find_registration_conflicts(argv, environ)
        yield from find_ipc_conflicts(argv, environ, contained=contained)


def merge_settings(configured: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the configuration's settings with the user's over them."""
    name = find_variable(environ)
    return {**configured, **(parse_settings(environ[name]) or {} if name else {})}


def describe_ignored(settings: Mapping[str, str]) -> str:
    """Warn of settings for torch's own pools if another backend replaces these."""
    ignored = [key for key, value in settings.items() if is_native(key) and value != "False"]
    if settings.get("backend") not in ASYNC or not ignored:
        return ""
    return (
        f"backend:{settings['backend']} ignores {', '.join(ignored)} (PyTorch's notes on CUDA semantics):"
        " leave one or the other out"
    )


def describe_idle(settings: Mapping[str, str]) -> str:
    """Tell of a threshold that nothing comes near to: it is a share of a limit on the process's memory."""
    if (
        "garbage_collection_threshold" not in settings
        or settings.get("per_process_memory_fraction", "1") != "1"
    ):
        return ""
    return (
        "garbage_collection_threshold does nothing without a limit on memory (CUDACachingAllocator.cpp): set"
        " allocator.per_process_memory_fraction below 1 (torch 2.10), unless the program sets its own"
    )


def find_registration_conflicts(argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[Conflict]:
    """NCCL's registration of buffers, which maps segments that then grow."""
    if has_option(argv, "--use-nccl-ub"):
        yield Conflict("--use-nccl-ub: Megatron-LM refuses NCCL user buffers with expandable_segments")
    if environ.get(HOOK, "").lower() in ("1", "true", "y", "yes"):
        yield Conflict(f"{HOOK}: torch switches it off with expandable_segments (ProcessGroupNCCL.cpp)")
    graph = find_graph(argv, environ)
    if graph and environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield Conflict(
            f"{graph}: NCCL registers buffers of CUDA graphs, which with expandable_segments ends in illegal"
            " memory accesses (Megatron-LM's arguments.py, which refuses it)",
            "set env.NCCL_GRAPH_REGISTER=0",
        )


def find_graph(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the option or variable that asks for CUDA graphs; empty if none does."""
    if read_option(argv, "--cuda-graph-impl") not in ("", "none"):
        return "--cuda-graph-impl"
    if environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        return "TORCHINDUCTOR_CUDAGRAPHS=1"
    return next((option for option in GRAPHS if has_option(argv, option)), "")


def find_ipc_conflicts(
    argv: Sequence[str], environ: Mapping[str, str], *, contained: bool
) -> Iterator[Conflict]:
    """Memory that other processes open."""
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


def has_option(argv: Sequence[str], option: str) -> bool:
    """Tell whether an option is in a program's argv."""
    return any(word.partition("=")[0] == option for word in argv)


def read_option(argv: Sequence[str], option: str) -> str:
    """Return an option's value, after `=` or as the next word; empty if it is not there."""
    for word, after in zip(argv, (*argv[1:], ""), strict=False):  # without arguments there is nothing after
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return ""
