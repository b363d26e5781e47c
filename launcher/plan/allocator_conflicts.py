"""What is known not to go with settings of PyTorch's allocator, where words or variables show it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.allocator import ASYNC, EXPANDABLE, is_native
from launcher.plan.allocator_text import find_variable, parse_settings

GRAPHS = ("--enable-cuda-graph", "--external-cuda-graph")
"""Options of Megatron-LM's for CUDA graphs; `--cuda-graph-impl` has a value, which may be `none`."""
HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
SHARING = ("verl", "openrlhf", "skyrl_train", "skyrl", "nemo_rl", "slime", "miles")
"""Packages that hand weights from process to process by CUDA IPC, on one GPU."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A program or variable that expandable segments do not go with."""

    what: str
    """What happens, with its source."""
    remedy: str = ""
    """How to have both; empty where there is no way."""


def find_conflicts(
    settings: Mapping[str, str], words: Sequence[str], environ: Mapping[str, str], *, contained: bool
) -> Iterator[Conflict]:
    """Find what does not go with expandable segments, where `settings` have them.

    `words` are the program's, `environ` what the ranks will have. `contained`: they run in a container that
    may not trace processes.
    """
    if settings.get(EXPANDABLE) == "True" and settings.get("backend") not in ASYNC:
        yield from find_registration_conflicts(words, environ)
        yield from find_ipc_conflicts(words, environ, contained=contained)


def merge_settings(given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the configuration's settings with the user's over them."""
    name = find_variable(environ)
    return {**given, **(parse_settings(environ[name]) or {} if name else {})}


def describe_ignored(settings: Mapping[str, str]) -> str:
    """Tell of settings for torch's own pools where another backend is in their place; else nothing."""
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


def find_registration_conflicts(words: Sequence[str], environ: Mapping[str, str]) -> Iterator[Conflict]:
    """NCCL's registration of buffers, which maps segments that then grow."""
    if has_option(words, "--use-nccl-ub"):
        yield Conflict("--use-nccl-ub: Megatron-LM refuses NCCL user buffers with expandable_segments")
    if environ.get(HOOK, "").lower() in ("1", "true", "y", "yes"):
        yield Conflict(f"{HOOK}: torch switches it off with expandable_segments (ProcessGroupNCCL.cpp)")
    graph = find_graph(words, environ)
    if graph and environ.get("NCCL_GRAPH_REGISTER") != "0":
        yield Conflict(
            f"{graph}: NCCL registers buffers of CUDA graphs, which with expandable_segments ends in illegal"
            " memory accesses (Megatron-LM's arguments.py, which refuses it)",
            "set env.NCCL_GRAPH_REGISTER=0",
        )


def find_graph(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the option or variable that asks for CUDA graphs; empty where none does."""
    if read_option(words, "--cuda-graph-impl") not in ("", "none"):
        return "--cuda-graph-impl"
    if environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        return "TORCHINDUCTOR_CUDAGRAPHS=1"
    return next((option for option in GRAPHS if has_option(words, option)), "")


def find_ipc_conflicts(
    words: Sequence[str], environ: Mapping[str, str], *, contained: bool
) -> Iterator[Conflict]:
    """Memory that other processes open."""
    nixl = next((name for name in environ if name.startswith("NIXL_")), "")
    ucx = f"UCX_TLS={environ['UCX_TLS']}" if "cuda" in environ.get("UCX_TLS", "") else nixl
    if ucx:
        yield Conflict(
            f"{ucx}: UCX moves memory of expandable_segments over TCP rather than cuda_ipc, hundreds of times"
            " slower (github.com/ai-dynamo/nixl/issues/1754)"
        )
    package = next((word for word in words if word.partition(".")[0] in SHARING), "")
    if package and contained:
        yield Conflict(
            f"{package} shares GPU memory among processes, which with expandable_segments takes pidfd_getfd,"
            " and containers forbid that (github.com/pytorch/pytorch/issues/165685)",
            "start the container with --cap-add=SYS_PTRACE",
        )


def has_option(words: Sequence[str], option: str) -> bool:
    """Tell whether an option is among a program's words."""
    return any(word.partition("=")[0] == option for word in words)


def read_option(words: Sequence[str], option: str) -> str:
    """Return an option's value, after `=` or as the next word; empty where it is not there."""
    for word, after in zip(words, (*words[1:], ""), strict=False):  # without words there is nothing after
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return ""
