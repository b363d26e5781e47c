"""Whether this process can be forked: one thread, no GPU, no children."""

import os

NVIDIA, DRI, KFD = "/dev/nvidia", "/dev/dri/", "/dev/kfd"
DELETED = " (deleted)"


def find_fork_obstacle() -> str:
    """Say why a fork of this process would not be as a process of its own; empty if it would."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the imports have started {threads - 1} more thread{'s' * (threads > 2)}"
    if device := find_open_device():
        return f"the imports have opened {device}"
    if children := read_children():
        return f"the imports have started a process ({children[0]})"
    return find_replaced_library()


def find_open_device() -> str:
    """Return a GPU's device file that this process has open or mapped; empty if there is none."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the folder's own descriptor
            continue
        if target.startswith((NVIDIA, DRI, KFD)):
            return target
    paths = (line.partition("/")[2] for line in read_lines("/proc/self/maps"))
    return next((f"/{path}" for path in paths if f"/{path}".startswith((NVIDIA, DRI, KFD))), "")


def find_replaced_library() -> str:
    """Name a loaded library whose file was replaced; empty if there is none."""
    for line in read_lines("/proc/self/maps"):
        if line.endswith(f".so{DELETED}") or (".so." in line and line.endswith(DELETED)):
            return f"/{line.partition('/')[2].removesuffix(DELETED)} was replaced"
    return ""


def read_children() -> list[str]:
    """Return the PIDs of this process's children, as far as the kernel keeps a list of them."""
    return " ".join(read_lines(f"/proc/self/task/{os.getpid()}/children")).split()


def read_lines(path: str) -> list[str]:
    """Return the lines of a file in /proc; none if it is not there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
