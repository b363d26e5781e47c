"""What a rank does, in a small mapped file that the node's watcher reads without the rank's help.

The file has SIZE bytes: items of 8 bytes in the machine's byte order, integers and floats, then the notes'
text. An item is written at once. Those that belong together are written in such an order that a reader
between two of them finds the values from before, so that there is no lock. Times are CLOCK_MONOTONIC's, which
is the same for all processes of a node and does not jump. `launcher.watch.heartbeats` reads it.
"""

from __future__ import annotations

import os
from _thread import get_ident
from time import monotonic

from .import_hook import when_imported
from .step_counter import on_step

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable, MutableMapping

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
    AT_DUMP_FILE,
    AT_NOTES_SIZE,
    AT_RECORDED,
) = range(18)
"""Items. The start's time and stack are fields 22 and 28 of proc(5)'s stat: an exec changes the latter. The
dump's signal is 0 if it is not in place, its file a descriptor. RECORDED counts the steps in the rings."""
RING = 257
"""Entries of a ring: the last 256 are whole, while one is written."""
AT_ENDS, AT_DURATIONS, AT_NOTES = 32, 32 + RING, 32 + 2 * RING
MAX_NOTES = 1024
"""Bytes of the notes, lines of UTF-8."""

STARTING, JOINING, TRAINING, LOADING, COMPILING, SAVING, EVALUATING, ENDED = range(8)
"""Phases, as `launcher.watch.model.PHASES` has them."""


def start_heartbeat(environ: MutableMapping[str, str]) -> None:
    """Have this rank's heartbeat begin as soon as its program imports torch, or marks a step.

    LAUNCH_WATCH is removed: what the rank starts is not the rank.
    """
    folder = environ.pop("LAUNCH_WATCH", "")
    if folder:
        beat = Heartbeat(folder, int(environ["RANK"]), int(environ.get("LOCAL_RANK", "0")))
        when_imported("torch.version", beat.begin)  # the first module that torch imports
        on_step(beat.end_step)


class Heartbeat:
    """The rank's heartbeat. Until it has a file, and in a forked child, it is written to nowhere."""

    def __init__(self, folder: str, rank: int, local_rank: int) -> None:
        self.folder, self.rank, self.local_rank = folder, rank, local_rank
        self.integers: list[int] | memoryview[int] = [0] * (SIZE // 8)
        self.floats: list[float] | memoryview[float] = [0.0] * (SIZE // 8)
        """The same items."""
        self.memory: memoryview | None = None
        """The file's, as bytes."""
        self.has_begun = False
        self.notes: list[str] = []
        self.thread = get_ident()
        """The one that trains: what others do is no phase of the rank."""
        self.phase = self.base = STARTING
        """The phase now, and the one that it goes back to after a wait."""
        self.phase_since = self.last_end = self.excluded = 0.0
        """`excluded` are seconds since the last step's end that are no part of a step."""
        self.recorded = self.batches = 0
        self.is_handler_ours: Callable[[], bool] = bool
        """Tells whether the signal for stacks still leads to the dump; False until there is one."""

    def begin(self, _module: object = None) -> None:
        """Make the file, once; without it there is no heartbeat."""
        if self.has_begun:
            return
        self.has_begun = True
        self.thread = get_ident()
        os.register_at_fork(after_in_child=self.stop)
        self.memory = map_file(self.folder, f"rank-{self.rank}.beat", self.fill)
        self.integers, self.floats = self.memory.cast("q"), self.memory.cast("d")
        import atexit

        atexit.register(self.end)

    def fill(self, memory: memoryview) -> None:
        """Write what stays as it is into a file that nobody has seen yet."""
        integers, floats = memory.cast("q"), memory.cast("d")
        fields = read_own_stat()
        integers[AT_MAGIC], integers[AT_LAYOUT] = MAGIC, LAYOUT
        integers[AT_PID], integers[AT_START_TIME] = os.getpid(), int(fields[22 - 3])
        integers[AT_START_STACK] = int(fields[28 - 3]) & (1 << 63) - 1
        integers[AT_RANK], integers[AT_LOCAL_RANK] = self.rank, self.local_rank
        integers[AT_DUMP_FILE] = -1
        self.phase_since = floats[AT_PHASE_SINCE] = floats[AT_ACTIVITY_TIME] = monotonic()

    def end_step(self, step: int) -> None:
        """Count a step; its entry is in the rings before it counts."""
        if not self.has_begun:
            self.begin()
        now, floats = monotonic(), self.floats
        if self.base == TRAINING and self.last_end:
            at = self.recorded % RING
            floats[AT_ENDS + at] = now
            floats[AT_DURATIONS + at] = now - self.last_end - self.excluded
            self.recorded += 1
            self.integers[AT_RECORDED] = self.recorded
        self.last_end, self.excluded = now, 0.0
        floats[AT_STEP_TIME] = floats[AT_ACTIVITY_TIME] = now
        self.integers[AT_STEP] = step
        if self.base != TRAINING:
            self.set_base(TRAINING)
            self.excluded = 0.0

    def set_base(self, phase: int) -> None:
        """Begin a phase that lasts until the next one."""
        self.base = phase
        self.set_phase(phase)

    def set_phase(self, phase: int) -> None:
        """Begin a phase; a wait ends with `set_phase(self.base)`."""
        now = monotonic()
        if self.phase not in (TRAINING, LOADING) or self.base not in (TRAINING, self.phase):
            self.excluded += now - self.phase_since
        self.phase, self.phase_since = phase, now
        self.floats[AT_PHASE_SINCE] = self.floats[AT_ACTIVITY_TIME] = now
        self.integers[AT_PHASE] = phase

    def add_note(self, text: str) -> None:
        """Tell what could not be set up."""
        self.notes.append(text)
        if self.memory is not None:
            data = "\n".join(self.notes).encode(errors="replace")[:MAX_NOTES]
            self.memory[8 * AT_NOTES : 8 * AT_NOTES + len(data)] = data
            self.integers[AT_NOTES_SIZE] = len(data)

    def end(self) -> None:
        """Tell that the interpreter has begun to exit."""
        self.set_base(ENDED)

    def stop(self) -> None:
        """Write to nowhere from now on, in a forked child: the file is still mapped there."""
        self.memory = None
        self.integers, self.floats = [0] * (SIZE // 8), [0.0] * (SIZE // 8)


def map_file(folder: str, name: str, fill: Callable[[memoryview], None]) -> memoryview:
    """Map a new file of SIZE bytes that gets its name once it is filled; raises OSError.

    All its blocks are there before it is mapped: to write to a page without one is SIGBUS.
    """
    import mmap

    path, draft = os.path.join(folder, name), os.path.join(folder, f".{name}.{os.getpid()}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)
        memory = memoryview(mmap.mmap(descriptor, SIZE))
        fill(memory)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(descriptor)
    return memory


def read_own_stat() -> list[str]:
    """Return the fields of /proc/self/stat from the third on (proc(5)); raises OSError."""
    with open("/proc/self/stat", "rb") as file:
        return file.read().decode("ascii", "replace").rpartition(")")[2].split()
