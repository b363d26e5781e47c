"""Whether this process can be forked: one thread, no GPU, no children."""

import contextlib
import os
import sys
from collections.abc import Iterable

from launcher.agent.python_program import ExecNeededError

DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd")
DELETED = " (deleted)"
BAD_FORK = ("_cuda_isInBadFork", "_xpu_isInBadFork", "_mtia_isInBadFork")
"""Functions of torch that tell whether this process was forked from one that had started a GPU's runtime.
Some calls set that flag and open no device (`poison_fork` of torch/csrc/cuda/Module.cpp)."""


def require_forkable() -> None:
    """Raise ExecNeededError if a fork of this process would not be as a process of its own."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise ExecNeededError(f"the imports have started {threads - 1} more thread{'s' * (threads > 2)}")
    if device := find_open_device():
        raise ExecNeededError(f"the imports have opened {device}")
    if children := read_children():
        raise ExecNeededError(f"the imports have started a process ({children[0]})")
    if library := find_replaced_library():
        raise ExecNeededError(f"{library} was replaced since it was loaded")


def require_usable_gpus() -> None:
    """Raise ExecNeededError if torch would refuse the GPUs in this forked process."""
    native = getattr(sys.modules.get("torch"), "_C", None)
    if any(getattr(native, name, bool)() for name in BAD_FORK):
        raise ExecNeededError("the imports have started a GPU's runtime, which no fork can use")


def find_open_device() -> str:
    """Return a GPU's device file that this process has open or mapped; empty if there is none."""
    targets = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor
            targets.append(os.readlink(f"/proc/self/fd/{entry}"))
    return find_device([*targets, *list_mapped_files()])


def find_device(paths: Iterable[str]) -> str:
    """Return the first of these files that is a GPU's; empty if none is."""
    return next((path for path in paths if path.startswith(DEVICES)), "")


def list_mapped_files() -> list[str]:
    """Return the paths of files that are mapped into this process, libraries among them."""
    return list(
        dict.fromkeys(
            f"/{line.partition('/')[2]}" for line in read_proc_lines("/proc/self/maps") if "/" in line
        )
    )


def find_replaced_library() -> str:
    """Return the path of a loaded library whose file was replaced; empty if there is none."""
    replaced = [path.removesuffix(DELETED) for path in list_mapped_files() if path.endswith(DELETED)]
    return next((path for path in replaced if ".so" in os.path.basename(path)), "")


def read_children() -> list[str]:
    """Return the PIDs of this process's children, as far as the kernel keeps a list of them."""
    return " ".join(read_proc_lines(f"/proc/self/task/{os.getpid()}/children")).split()


def read_proc_lines(path: str) -> list[str]:
    """Return the lines of a file in /proc; none if it is not there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
