"""torch's own server in the rank, which answers where a collective stands even while the rank hangs in it.

It is an experimental part of torch: where it is missing or different, there is a note in its place.
"""

from __future__ import annotations

import os
import sys

from .beat_file import keep_forever

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

    from .heartbeat import Heartbeat

MAX_PATH = 107
"""Bytes of a Unix socket's path (unix(7))."""
LOG_LEVELS = ("FLAGS_caffe2_log_level", "_ZN3c1022FLAGS_caffe2_log_levelE")
"""Names of libc10's variable below which its messages are not printed; the second one is in a namespace."""
ERROR = 2


def start_server(beat: Heartbeat) -> None:
    """Start the server on `rank-RANK.sock`; without it, leave a note."""
    try:
        path = os.path.join(beat.folder, f"rank-{beat.rank}.sock")
        if len(os.fsencode(path)) > MAX_PATH:
            raise OSError(f"its path has more than {MAX_PATH} bytes")
        if os.path.lexists(path):  # of an earlier program of this rank
            os.unlink(path)
        serve_quietly(path)
    except Exception as error:
        beat.add_note(f"no server of torch's: {type(error).__name__}: {error}"[:200])


def serve_quietly(path: str) -> None:
    """Start the server for good, without torch's warnings that it listens, and that it ends.

    It is never freed: its end would print more, and wait for its threads.
    """
    import ctypes

    torch = sys.modules["torch"]
    server_class = torch._C._distributed_c10d._WorkerServer
    library = os.path.join(os.path.dirname(str(torch.__file__)), "lib", "libc10.so")
    level = find_log_level(ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    before = level.value
    level.value = max(before, ERROR)
    try:
        server = server_class(path)
    finally:
        level.value = before
    keep_forever(server)


def find_log_level(library: ctypes.CDLL) -> ctypes.c_int:
    """Return the level of libc10's log; raises AttributeError for a libc10 with another one."""
    import ctypes

    for name in LOG_LEVELS:
        try:
            return ctypes.c_int.in_dll(library, name)
        except ValueError:
            continue
    raise AttributeError("libc10 has no level for its messages that is known")
