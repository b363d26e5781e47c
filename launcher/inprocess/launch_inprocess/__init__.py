"""Acts inside a rank's interpreter, which may be another than the launcher's, before and beside the program.

Standard library alone, for Python 3.9 and later; torch is there once the program has imported it.
"""

from __future__ import annotations

import atexit
import os
from time import monotonic, sleep

from .import_hook import Suppressed, call_safely, surround, when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

STARTERS = (
    ("", "garbage_collection", "start_collector"),
    ("", "loaders", "start_loader_policies"),
    ("LAUNCH_METER", "measurements", "start_meter"),
    ("LAUNCH_WATCH", "heartbeat", "start_heartbeat"),
    ("LAUNCH_MEMORY", "measurements", "start_memory_record"),
    ("LAUNCH_FIT", "fake_step", "start_fit"),
)
"""What starts what: the variable that asks for it, if one does, the module, and its function."""
THREAD = b"pt_gloo_runloop"
PAUSE = 0.01
"""Seconds between two looks: what waits for the GIL wakes up every 5 ms (`sys.getswitchinterval`)."""
PATIENCE = 5.0
"""Seconds that threads are given at most: they may be in a collective that goes on."""
STATE = (b"State", b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")


def start(environ: MutableMapping[str, str]) -> None:
    """Start what the environment of a rank asks for, before the program's first line.

    What fails leaves the rest as it is. A module that nothing asks for is not loaded. Gloo's threads come to
    rest before the program destroys its process groups, and before it ends.
    """
    from .step_counter import COUNTER

    os.register_at_fork(after_in_child=COUNTER.stop)
    for variable, name, starter in STARTERS:
        if not variable or environ.get(variable):
            module = __import__(name, globals(), fromlist=[starter], level=1)
            call_safely(getattr(module, starter), environ)
    when_imported(
        "torch.distributed.distributed_c10d", lambda module: surround(module, "destroy_process_group", settle)
    )
    atexit.register(settle)  # before the program's own, thus after them


def settle() -> None:
    """Leave the GIL to gloo's threads until all of them wait for something else.

    A thread of gloo's that has carried out a collective drops its references to the program's tensors, for
    which it needs the GIL. Who frees a DistributedDataParallel after `destroy_process_group`, or ends the
    interpreter, joins that thread and holds the GIL (`Reducer::~Reducer` of torch 2.13): for ever; or the
    interpreter's end stops the thread inside a destructor, which aborts the process. Where a rank has one
    core, the main thread is often that far before gloo's thread has run again after the last collective.
    """
    deadline, before = monotonic() + PATIENCE, None
    while (now := _read_threads()) and monotonic() < deadline:
        if now == before and all(state[0].startswith(b"S") for state in now.values()):
            return
        before = now
        sleep(PAUSE)


def _read_threads() -> dict[str, list[bytes]]:
    """Return the state of each of gloo's threads, with how often it has begun to wait (proc(5))."""
    found: dict[str, list[bytes]] = {}
    with Suppressed(Exception):
        for thread in os.listdir("/proc/self/task"):
            with Suppressed(OSError, ValueError), open(f"/proc/self/task/{thread}/status", "rb") as file:
                fields = dict(line.split(b":\t", 1) for line in file.read().splitlines())
                if fields.get(b"Name") == THREAD:
                    found[thread] = [fields.get(name, b"") for name in STATE]
    return found
