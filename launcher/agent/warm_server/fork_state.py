"""Whether this process can be forked: one thread, no GPU, no children."""

import contextlib
import os
from collections.abc import Iterable

from launcher.agent.python_program import ExecNeededError

DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd")
DELETED = " (deleted)"


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
