"""The layout of a rank's heartbeat, and the making of its file.

It has SIZE bytes: items of 8 bytes in the machine's byte order, integers and floats, then the notes' text.
Times are CLOCK_MONOTONIC's, which is the same for all processes of a node and does not jump.
`launcher.watch.heartbeats` reads it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Mapping

MAGIC = int.from_bytes(b"launchHB", "little")
LAYOUT = 1
"""Version of the layout."""
SIZE = 8192
(
    AT_MAGIC,
    AT_LAYOUT,
    AT_PID,
    AT_START_TIME,
    AT_START_STACK,
    AT_RANK,
    AT_LOCAL_RANK,
    AT_PHASE,
    AT_PHASE_SINCE,
    AT_STEP,
    AT_STEP_TIME,
    AT_ACTIVITY_TIME,
    AT_BATCHES,
    AT_DATA_WAIT,
    AT_DUMP_SIGNAL,
    AT_NOTES_SIZE,
    AT_RECORDED,
) = range(17)
"""Items. The start's time and stack are fields 22 and 28 of proc(5)'s stat: an exec changes the latter. The
dump's signal is 0 if it is not in place. RECORDED counts the steps in the rings."""
RING = 257
"""Entries of a ring: the last 256 are whole, while one is written."""
AT_ENDS, AT_DURATIONS, AT_NOTES = 32, 32 + RING, 32 + 2 * RING
MAX_NOTES = 1024
"""Bytes of the notes, lines of UTF-8."""


def map_beat(folder: str, rank: int, integers: Mapping[int, int], floats: Mapping[int, float]) -> memoryview:
    """Map a new `rank-RANK.beat`, which gets its name once it has these items; raises OSError.

    All its blocks are there before it is mapped: to write to a page without one is SIGBUS.
    """
    import mmap

    path, draft = (os.path.join(folder, name.format(rank)) for name in ("rank-{}.beat", ".rank-{}.beat"))
    if is_taken(path):
        raise FileExistsError(path)
    if os.path.lexists(draft):
        os.unlink(draft)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)
        memory = memoryview(mmap.mmap(descriptor, SIZE))
        fill_beat(memory, integers, floats)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(descriptor)
    keep_forever(memory)
    return memory


def fill_beat(memory: memoryview, integers: Mapping[int, int], floats: Mapping[int, float]) -> None:
    """Write the items that identify the process, and these."""
    fields = read_stat_fields("self")
    own = {AT_MAGIC: MAGIC, AT_LAYOUT: LAYOUT, AT_PID: os.getpid()}
    own[AT_START_TIME], own[AT_START_STACK] = (int(fields[number - 3]) for number in (22, 28))
    whole, real = memory.cast("q"), memory.cast("d")
    for at, integer in {**own, **integers}.items():
        whole[at] = integer
    for at, number in floats.items():
        real[at] = number


def is_taken(path: str) -> bool:
    """Tell whether another process of this rank, as of a shell script, steps and has its heartbeat here."""
    try:
        with open(path, "rb") as file:
            items = memoryview(file.read(SIZE)).cast("q")
        if items[AT_MAGIC] != MAGIC or items[AT_LAYOUT] != LAYOUT or not items[AT_STEP]:
            return False
        pid = items[AT_PID]
        return pid != os.getpid() and int(read_stat_fields(pid)[22 - 3]) == items[AT_START_TIME]
    except (OSError, ValueError, TypeError, IndexError):  # none, or no heartbeat
        return False


def read_stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on (proc(5)); raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().decode("ascii", "replace").rpartition(")")[2].split()


def keep_forever(kept: object) -> None:
    """Have an object never freed, not even at the interpreter's end.

    A mapping closes its descriptor then, which may be another file's if the program has closed all of ours.
    """
    try:
        import ctypes  # torch has imported it by now

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    except (ImportError, AttributeError):  # an interpreter without it
        return
