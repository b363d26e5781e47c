"""The peak of a rank's memory, written into the run directory at the rank's end.

`LAUNCH_MEMORY` is that directory. A GPU that the program has not used is not touched.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from types import ModuleType

    Device = dict[str, object]


def start_memory_record(environ: MutableMapping[str, str]) -> None:
    """Have the peak written at this process's end if it imports torch; what it starts is not the rank."""
    from .import_hook import when_framework_is_used

    folder, rank, process = environ.pop("LAUNCH_MEMORY", ""), environ.get("RANK", ""), os.getpid()
    if not rank.isdigit():
        return

    def register(_module: ModuleType) -> None:
        import atexit

        atexit.register(write_at_end, folder, rank, process)

    when_framework_is_used(register)


def write_at_end(folder: str, rank: str, process: int) -> None:
    """Write the record; whatever fails here, the program ends as it would have."""
    if os.getpid() != process:
        return
    try:
        write_memory(folder, rank)
    except Exception:
        return


def write_memory(folder: str, rank: str) -> None:
    """Write `rank-RANK.memory.json`, whole or not at all."""
    import json

    from .step_counter import COUNTER

    record = {
        "schema": 1,
        "rank": int(rank),
        "steps": COUNTER.step,
        "resident": read_resident_peak(),
        "devices": list_device_peaks(),
    }
    path = os.path.join(folder, f"rank-{rank}.memory.json")
    draft = os.path.join(folder, f".rank-{rank}.memory.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(record, file)
        os.replace(draft, path)
    except OSError:  # no room
        os.unlink(draft)


def list_device_peaks() -> list[Device]:
    """Return the peaks of the GPUs on which torch has allocated something."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    found: list[Device] = []
    for index in range(cuda.device_count()):
        reserved = cuda.max_memory_reserved(index)
        if reserved:
            allocated = cuda.max_memory_allocated(index)
            name = cuda.get_device_name(index)
            found.append({"index": index, "name": name, "reserved": reserved, "allocated": allocated})
    return found


def read_resident_peak() -> int:
    """Return the peak of this process's resident memory in bytes (VmHWM of proc(5)); 0 if it is not told."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)
