"""What a rank does, in a small mapped file that the node's watcher reads without the rank's help.

The file has SIZE bytes: items of 8 bytes in the machine's byte order, integers and floats, then the notes'
text. Times are CLOCK_MONOTONIC's, which is the same for all processes of a node and does not jump. An item is
written at once. Those that belong together are written in such an order that a reader between two of them
finds the values from before, so that there is no lock. `launcher.watch.ranks` reads the file.
"""

from __future__ import annotations

import os
from _thread import get_ident
from time import monotonic

from .import_hook import call_safely, when_framework_is_used
from .step_counter import on_step

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Mapping, MutableMapping
    from signal import getsignal
else:
    from _signal import getsignal  # `signal` costs a millisecond

STARTING, JOINING, TRAINING, LOADING, COMPILING, SAVING, EVALUATING, ENDED = range(8)
"""Phases, as `launcher.watch.model.PHASES` has them."""
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
DUMP_OFFSET = 8
"""From SIGRTMIN; programs use SIGUSR1 and SIGUSR2, and the C library's first real-time signals."""


def start_heartbeat(environ: MutableMapping[str, str]) -> None:
    """Have this rank's heartbeat begin as soon as its program imports torch, or marks a step.

    LAUNCH_WATCH is removed: what the rank starts is not the rank.
    """
    folder = environ.pop("LAUNCH_WATCH", "")
    if folder:
        local_rank, world_size = environ.get("LOCAL_RANK", "0"), environ.get("WORLD_SIZE", "1")
        beat = Heartbeat(folder, int(environ["RANK"]), int(local_rank), int(world_size))
        when_framework_is_used(beat.begin)
        on_step(beat.end_step)


class Heartbeat:
    """The rank's heartbeat. Until it has a file, and in a forked child, it is written to nowhere."""

    def __init__(self, folder: str, rank: int, local_rank: int, world_size: int) -> None:
        self.folder, self.rank, self.local_rank, self.world_size = folder, rank, local_rank, world_size
        self.integers: list[int] | memoryview[int] = [0] * (SIZE // 8)
        self.floats: list[float] | memoryview[float] = [0.0] * (SIZE // 8)
        """The same items."""
        self.memory: memoryview | None = None
        """The file's, as bytes."""
        self.has_begun = self.has_joined = False
        self.notes: list[str] = []
        self.thread = get_ident()
        """The one that trains: what others do is no phase of the rank."""
        self.phase = self.base = STARTING
        """The phase now, and the one that it goes back to after a wait."""
        self.phase_since = self.last_end = self.data_wait = self.excluded = 0.0
        """`excluded` are seconds since the last step's end that are no part of a step."""
        self.is_excluded = True
        """The time in this phase is none."""
        self.recorded = self.batches = self.batches_at_eval = 0
        self.is_training = True
        """The program has not set a model to evaluate since the last step."""
        self.dump_signal = 0
        self.found_handler: object = None
        """The signal for stacks, if it is in place, and its handler in the eyes of the module `signal`."""

    def begin(self, _module: object = None) -> None:
        """Make the file, once; without it there is no heartbeat."""
        if self.has_begun:
            return
        self.has_begun = True
        self.thread = get_ident()
        os.register_at_fork(after_in_child=self.stop)
        self.phase_since = monotonic()
        integers = {AT_RANK: self.rank, AT_LOCAL_RANK: self.local_rank}
        floats = {AT_PHASE_SINCE: self.phase_since, AT_ACTIVITY_TIME: self.phase_since}
        self.memory = map_beat(self.folder, self.rank, integers, floats)
        self.integers, self.floats = self.memory.cast("q"), self.memory.cast("d")
        try:
            self._offer_dump()
        except Exception as error:
            self.add_note(f"no stacks by a signal: {type(error).__name__}: {error}"[:200])
        call_safely(_note_phases, self)
        import atexit

        atexit.register(self.set_base, ENDED)

    def end_step(self, step: int) -> None:
        """Count a step; its entry is in the rings before it counts."""
        if not self.has_begun:
            self.begin()
        now, integers, floats = monotonic(), self.integers, self.floats
        # A program may set a model to evaluate, as one that is not trained, for the step itself.
        is_training = self.base == TRAINING or (
            self.base == EVALUATING and self.batches == self.batches_at_eval
        )
        if is_training and self.last_end:
            at = self.recorded % RING
            floats[AT_ENDS + at] = now
            floats[AT_DURATIONS + at] = now - self.last_end - self.excluded
            self.recorded += 1
            integers[AT_RECORDED] = self.recorded
        self.last_end, self.excluded = now, 0.0
        floats[AT_STEP_TIME] = now
        integers[AT_STEP] = step
        self.thread = get_ident()
        if self.base != TRAINING:
            self.is_training = True
            self.set_base(TRAINING)
            self.excluded = 0.0
        else:
            self._check_dump()

    def set_base(self, phase: int) -> None:
        """Begin a phase that lasts until the next one."""
        self.base = phase
        self.set_phase(phase)
        self._check_dump()

    def set_phase(self, phase: int) -> None:
        """Begin a phase; a wait ends with `set_phase(self.base)`."""
        now = monotonic()
        if self.is_excluded:
            self.excluded += now - self.phase_since
        self.is_excluded = self.base != TRAINING or phase not in (TRAINING, LOADING)
        self.phase, self.phase_since = phase, now
        self.floats[AT_PHASE_SINCE] = now
        self.integers[AT_PHASE] = phase

    def note_activity(self) -> None:
        """Tell that the rank goes on."""
        self.floats[AT_ACTIVITY_TIME] = monotonic()

    def note_mode(self, *, is_training: bool) -> None:
        """Begin or end an evaluation. Before the first step, models are set to evaluate for other reasons."""
        if get_ident() != self.thread:
            return
        self.is_training, self.batches_at_eval = is_training, self.batches
        if self.base in (STARTING, TRAINING, EVALUATING) and self.base != self._choose_base():
            self.set_base(self._choose_base())

    def _choose_base(self) -> int:
        """Return the phase outside of waits and of saving."""
        if not self.last_end and (self.is_training or self.batches == self.batches_at_eval):
            return STARTING
        return TRAINING if self.is_training else EVALUATING

    def begin_loading(self) -> None:
        """Begin a wait for data, which ends saving."""
        if self.base in (SAVING, STARTING):
            self.base = self._choose_base()
        self.set_phase(LOADING)

    def end_loading(self, batches: int) -> None:
        """End a wait for data, and count the batches that came."""
        since = self.phase_since
        self.set_phase(self.base)
        self.data_wait += self.phase_since - since
        self.batches += batches
        self.floats[AT_DATA_WAIT] = self.data_wait
        self.integers[AT_BATCHES] = self.batches

    def count_batches(self, number: int) -> None:
        """Count batches of another thread."""
        self.batches += number
        self.integers[AT_BATCHES] = self.batches
        self.note_activity()

    def _offer_dump(self) -> None:
        """Have a signal write the Python stacks of all threads to `rank-RANK.stack`; raises OSError.

        `faulthandler` does that in the signal's handler in C, so that it works where the interpreter stands
        still. A handler of the program's stays, and system calls that the signal interrupts are restarted. As
        the interpreter ends, faulthandler puts back what was there before it: the signal is ignored from then
        on, and does not end the process. Programs that the rank executes get the default.
        """
        import contextlib
        import faulthandler
        import signal  # torch has imported it by now

        number = signal.SIGRTMIN + DUMP_OFFSET
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            self.add_note(f"no stacks by signal {number}, which the program handles")
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(ValueError):  # a thread that is not the main one may not
            signal.signal(number, signal.SIG_IGN)
        descriptor = os.open(os.path.join(self.folder, f"rank-{self.rank}.stack"), flags, 0o600)
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        self.dump_signal, self.found_handler = number, getsignal(number)
        self.integers[AT_DUMP_SIGNAL] = number

    def _check_dump(self) -> None:
        """Take the offer back if the program has taken the signal for itself."""
        if self.dump_signal and getsignal(self.dump_signal) is not self.found_handler:
            self.dump_signal = self.integers[AT_DUMP_SIGNAL] = 0

    def add_note(self, text: str) -> None:
        """Tell what could not be set up."""
        self.notes.append(text)
        if self.memory is not None:
            data = "\n".join(self.notes).encode(errors="replace")[:MAX_NOTES]
            self.memory[8 * AT_NOTES : 8 * AT_NOTES + len(data)] = data
            self.integers[AT_NOTES_SIZE] = len(data)

    def stop(self) -> None:
        """Write to nowhere from now on, in a forked child: the file is still mapped there."""
        self.memory, self.has_joined = None, True  # not freed: `map_beat` keeps it
        self.integers, self.floats = [0] * (SIZE // 8), [0.0] * (SIZE // 8)


def _note_phases(beat: Heartbeat) -> None:
    from .phases import note_phases

    note_phases(beat)


def map_beat(folder: str, rank: int, integers: Mapping[int, int], floats: Mapping[int, float]) -> memoryview:
    """Map a new `rank-RANK.beat`, which gets its name once it has these items; raises OSError.

    All its blocks are there before it is mapped: to write to a page without one is SIGBUS.
    """
    import mmap

    path, draft = (os.path.join(folder, name.format(rank)) for name in ("rank-{}.beat", ".rank-{}.beat"))
    if _is_taken(path):
        raise FileExistsError(path)
    if os.path.lexists(draft):
        os.unlink(draft)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)
        memory = memoryview(mmap.mmap(descriptor, SIZE))
        fields = _read_stat_fields("self")
        own = {AT_MAGIC: MAGIC, AT_LAYOUT: LAYOUT, AT_PID: os.getpid()}
        own[AT_START_TIME], own[AT_START_STACK] = (int(fields[number - 3]) for number in (22, 28))
        whole, real = memory.cast("q"), memory.cast("d")
        for at, integer in {**own, **integers}.items():
            whole[at] = integer
        for at, number in floats.items():
            real[at] = number
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(descriptor)
    keep_forever(memory)
    return memory


def _is_taken(path: str) -> bool:
    """Tell whether another process of this rank, as of a shell script, steps and has its heartbeat here."""
    try:
        with open(path, "rb") as file:
            items = memoryview(file.read(SIZE)).cast("q")
        if items[AT_MAGIC] != MAGIC or items[AT_LAYOUT] != LAYOUT or not items[AT_STEP]:
            return False
        pid = items[AT_PID]
        return pid != os.getpid() and int(_read_stat_fields(pid)[22 - 3]) == items[AT_START_TIME]
    except (OSError, ValueError, TypeError, IndexError):  # none, or no heartbeat
        return False


def _read_stat_fields(pid: int | str) -> list[str]:
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
