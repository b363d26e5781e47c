"""Allocators of a rank: PyTorch's for the GPU, and the one that serves malloc."""

from collections.abc import Iterator, Mapping

from launcher.plan.allocator_text import NAMES, find_variable, format_settings, parse_settings
from launcher.plan.environment import VariablesAndNotes
from launcher.plan.model import Gpu, Request

SET = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The same under both: CUDA builds of torch know the first alone up to 2.9, and it is to go one day."""
EXPANDABLE = "expandable_segments"
ASYNC = ("cudaMallocAsync", "hipMallocAsync")
MALLOCS = ("tcmalloc", "jemalloc", "mimalloc")
"""Parts of the names of libraries that replace malloc."""


def set_allocator(request: Request, gpu: Gpu | None, kernel: str) -> VariablesAndNotes:
    """PyTorch's allocator settings for a rank with a GPU: the configuration's, over which the user's come.

    A variable that torch would refuse is left alone, so that the job ends as it would have without us.
    `kernel` is the release of the node's kernel.
    """
    if gpu is None:
        return {}, ()
    environ = dict(request.environ)
    name = find_variable(environ)
    theirs = read_theirs(environ[name]) if name else {}
    if theirs is None:
        return {}, [f"{name}={environ[name]} kept as the user has it: torch may not take it"]
    given = parse_settings(request.allocator) or {}
    reasons = {key: why for key in given if (why := find_reason(key, {**given, **theirs}, gpu, kernel))}
    merged = {key: value for key, value in given.items() if key not in reasons} | theirs
    notes = [f"{key}:{given[key]} left out: {why}" for key, why in reasons.items() if key not in theirs]
    text = format_settings(merged)
    names = SET[1:] if name == SET[1] and has_later(theirs) else SET
    return dict.fromkeys(names, text) if merged else {}, [*notes, *describe_theirs(environ, name, theirs)]


def read_theirs(text: str) -> dict[str, str] | None:
    """Read the user's settings; None where torch would refuse them."""
    from launcher.plan.allocator_keys import KNOWN, find_fault  # noqa: PLC0415 - most ranks need no table

    settings = parse_settings(text)
    if settings is None or any(key not in KNOWN or find_fault(key, settings, None) for key in settings):
        return None
    return settings


def has_later(theirs: Mapping[str, str]) -> bool:
    """Whether some of the user's settings are younger than the oldest torch.

    Under the new name alone, a CUDA build that knows neither the name nor the settings passes them over.
    """
    from launcher.plan.allocator_keys import KNOWN, OLDEST  # noqa: PLC0415 - as above

    return any(KNOWN[key].since > OLDEST for key in theirs)


def find_reason(key: str, settings: Mapping[str, str], gpu: Gpu, kernel: str) -> str:
    """Say why a setting of the configuration's is not for this rank; empty where it is."""
    if settings.get("backend") in ASYNC and is_native(key):
        return f"backend:{settings['backend']} ignores it"
    if key != EXPANDABLE or settings[key] != "True":
        return ""
    if gpu.vendor == "amd":
        return f"AMD GPUs have it from ROCm 7 and torch 2.12 on: {SET[0]}={key}:True asks for it"
    if "microsoft" in kernel.lower():
        return "on WSL2 the first allocation may fail with it (github.com/pytorch/pytorch/issues/192330)"
    return ""


def is_native(key: str) -> bool:
    """Whether a setting is for torch's own pools of GPU memory, which `backend` can replace."""
    return key != "backend" and not key.startswith("pinned_")


def describe_theirs(environ: Mapping[str, str], name: str, theirs: Mapping[str, str]) -> Iterator[str]:
    """Tell of the user's settings that stay, and of those that torch does not hear."""
    if theirs:
        yield f"{name}: {format_settings(theirs)} kept, set by the user"
    for other in NAMES[NAMES.index(name) + 1 :] if name else ():
        if environ.get(other, "").strip() and environ[other] != environ[name]:
            yield f"{other}={environ[other]} is not heard: torch takes {name} alone where both are set"


def set_malloc(request: Request) -> VariablesAndNotes:
    """LD_PRELOAD of the library that replaces malloc, before what the user has there."""
    path, word = request.host_library, request.host_allocator
    if word == "system" or path == "":
        return {}, ()
    if path is None:
        return {}, [f"allocator.host={word}: its library is looked for on the node that runs"]
    theirs = dict(request.environ).get("LD_PRELOAD", "")
    libraries = theirs.replace(":", " ").split()
    mine = [library for library in libraries if any(part in library for part in MALLOCS)]
    if mine:
        return {}, [f"LD_PRELOAD={theirs} kept, set by the user: {mine[0]} replaces malloc already"]
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
