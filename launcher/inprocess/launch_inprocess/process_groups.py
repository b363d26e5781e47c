"""Gloo's threads at the end of process groups.

A thread of gloo's that has carried out a collective drops its references to the program's tensors, for which
it needs the GIL. Who frees a DistributedDataParallel after `destroy_process_group`, or ends the interpreter,
joins that thread and holds the GIL (`Reducer::~Reducer` of torch 2.13): for ever; or the interpreter's end
stops the thread inside a destructor, which aborts the process. Where a rank has one core, the main thread
is often that far before gloo's thread has run again after the last collective.
"""

from __future__ import annotations

import atexit
import os
from time import monotonic, sleep

from .import_hook import Suppressed, surround, when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from types import ModuleType

THREAD = b"pt_gloo_runloop"
PAUSE = 0.01
"""Seconds between two looks: what waits for the GIL wakes up every 5 ms (`sys.getswitchinterval`)."""
PATIENCE = 5.0
"""Seconds that threads are given at most: they may be in a collective that goes on."""
STATE = (b"State", b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")


def start_settling() -> None:
    """Have gloo's threads come to rest before the program destroys its process groups, and before it ends."""

    def settle_before_destruction(module: ModuleType) -> None:
        surround(module, "destroy_process_group", settle)

    when_imported("torch.distributed.distributed_c10d", settle_before_destruction)
    atexit.register(settle)  # before the program's own, thus after them


def settle() -> None:
    """Leave the GIL to gloo's threads until all of them wait for something else."""
    deadline, before = monotonic() + PATIENCE, None
    while (now := _read_threads()) and monotonic() < deadline:
        if now == before and all(state[0].startswith(b"S") for state in now.values()):
            return
        before = now
        sleep(PAUSE)


def _read_threads() -> dict[str, list[bytes]]:
    """Return the state of each of gloo's threads, with how often it has begun to wait (proc(5))."""
    found: dict[str, list[bytes]] = {}
    with Suppressed(OSError):
        for thread in os.listdir("/proc/self/task"):
            with Suppressed(OSError, ValueError), open(f"/proc/self/task/{thread}/status", "rb") as file:
                fields = dict(line.split(b":\t", 1) for line in file.read().splitlines())
                if fields.get(b"Name") == THREAD:
                    found[thread] = [fields.get(name, b"") for name in STATE]
    return found
