"""Process groups: torch's server that answers where a collective stands, and gloo's threads at the end.

A thread of gloo's that has carried out a collective drops its references to the program's tensors, for which
it needs the GIL. Who frees a DistributedDataParallel after `destroy_process_group`, or ends the interpreter,
joins that thread and holds the GIL (`Reducer::~Reducer` of torch 2.13): for ever; or the interpreter's end
stops the thread inside a destructor, which aborts the process. Where a rank has one core, the main thread
is often that far before gloo's thread has run again after the last collective.
"""

from __future__ import annotations

import atexit
import os
import sys
from time import monotonic, sleep

from .import_hook import replace, when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from types import ModuleType
    from typing import Any

    from .heartbeat import Heartbeat

THREAD = b"pt_gloo_runloop"
PAUSE = 0.01
"""Seconds between two looks: what waits for the GIL wakes up every 5 ms (`sys.getswitchinterval`)."""
PATIENCE = 5.0
"""Seconds that threads are given at most: they may be in a collective that goes on."""
STATE = (b"State", b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")
MAX_PATH = 107
"""Bytes of a Unix socket's path (unix(7))."""
LOG_LEVELS = ("FLAGS_caffe2_log_level", "_ZN3c1022FLAGS_caffe2_log_levelE")
"""Names of libc10's variable below which its messages are not printed; the second one is in a namespace."""
ERROR = 2


def start_settling() -> None:
    """Have gloo's threads come to rest before the program destroys its process groups, and before it ends."""

    def settle_before_destruction(module: ModuleType) -> None:
        original = module.destroy_process_group

        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # they are the user's
            settle()
            return original(*args, **kwargs)

        replace(module, "destroy_process_group", destroy_process_group, traced=False)

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
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/status", "rb") as file:
                fields = dict(line.split(b":\t", 1) for line in file.read().splitlines())
        except (OSError, ValueError):
            continue
        if fields.get(b"Name") == THREAD:
            found[thread] = [fields.get(name, b"") for name in STATE]
    return found


def start_server(beat: Heartbeat) -> None:
    """Start torch's own server on `rank-RANK.sock`, which answers even while the rank hangs in a collective.

    It is an experimental part of torch: where it is missing or different, there is a note in its place. It is
    started without torch's warnings that it listens, and that it ends; and it is never freed: its end would
    print more, and wait for its threads.
    """
    try:
        path = os.path.join(beat.folder, f"rank-{beat.rank}.sock")
        if len(os.fsencode(path)) > MAX_PATH:
            raise OSError(f"its path has more than {MAX_PATH} bytes")
        if os.path.lexists(path):  # of an earlier program of this rank
            os.unlink(path)
        import ctypes

        from .heartbeat import keep_forever

        torch = sys.modules["torch"]
        server_class = torch._C._distributed_c10d._WorkerServer
        file = os.path.join(os.path.dirname(str(torch.__file__)), "lib", "libc10.so")
        library = ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        names = [name for name in LOG_LEVELS if hasattr(library, name)]
        if not names:
            raise AttributeError("libc10 has no level for its messages that is known")
        level = ctypes.c_int.in_dll(library, names[0])
        before = level.value
        level.value = max(before, ERROR)
        try:
            server = server_class(path)
        finally:
            level.value = before
        keep_forever(server)
    except Exception as error:
        beat.add_note(f"no server of torch's: {type(error).__name__}: {error}"[:200])
