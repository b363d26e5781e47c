"""What a rank does, in a small mapped file that the node's watcher reads without the rank's help.

The file is a structure of ctypes, which `launcher.watch.ranks` reads. Times are CLOCK_MONOTONIC's, which is
the same for all processes of a node and does not jump. A field is written at once. Those that belong together
are written in such an order that a reader between two of them finds the values from before, so that there is
no lock.

Phases beside training are seen by functions of torch's that call the original and note that. They are put in
place before any program has a copy of the original. One that the program replaces is not put back.
"""

from __future__ import annotations

import atexit
import os
import sys
from _thread import get_ident
from time import monotonic

from .import_hook import (
    SAVERS,
    Suppressed,
    call_safely,
    is_foreign,
    replace,
    surround,
    when_framework_is_used,
    when_imported,
)
from .loaders import watch_waits
from .step_counter import on_step

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable, MutableMapping
    from signal import getsignal
    from types import ModuleType
    from typing import Any
else:
    from _signal import getsignal  # `signal` costs a millisecond

STARTING, JOINING, TRAINING, LOADING, COMPILING, SAVING, EVALUATING, ENDED = range(8)
"""Phases, as `launcher.watch.model.PHASES` has them."""
MAGIC = int.from_bytes(b"launchHB", "little")
LAYOUT = 2
"""Version of the layout."""
COUNTS = "magic layout pid start_time start_stack rank local_rank phase step batches dump_signal recorded"
"""Whole numbers. The start's time and stack are fields 22 and 28 of proc(5)'s stat: an exec changes the
latter. The dump's signal is 0 if it is not in place; `recorded` counts the steps in the rings."""
TIMES = "phase_since step_time activity_time data_wait"
RING = 257
"""Entries of a ring: the last 256 are whole, while one is written."""
MAX_NOTES = 1024
"""Bytes of the notes, lines of UTF-8."""
DUMP_OFFSET = 8
"""From SIGRTMIN; programs use SIGUSR1 and SIGUSR2, and the C library's first real-time signals."""
LOG_LEVELS = ("FLAGS_caffe2_log_level", "_ZN3c1022FLAGS_caffe2_log_levelE")
"""Names of libc10's variable below which its messages are not printed; the second one is in a namespace."""
ERROR = 2
structure: Any = None


def load_structure() -> Any:  # noqa: ANN401  # a class that is made here
    """Return the structure of the file, made when it is needed: ctypes costs two milliseconds."""
    global structure  # noqa: PLW0603
    if structure is None:
        import ctypes  # torch imports it anyway

        fields: list[tuple[str, Any]] = [(name, ctypes.c_int64) for name in COUNTS.split()]
        fields += [(name, ctypes.c_double) for name in TIMES.split()]
        fields += [("ends", ctypes.c_double * RING), ("durations", ctypes.c_double * RING)]
        fields += [("notes", ctypes.c_char * MAX_NOTES)]
        structure = type("Beat", (ctypes.Structure,), {"_fields_": fields})
    return structure


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
        self.file: Any = None
        """The mapped structure; in a forked child, one that nobody sees."""
        self.has_joined = False
        self.notes: list[str] = []
        self.thread, self.loader = get_ident(), 0
        """The one that trains: what others do is no phase of the rank; the one whose wait is the phase."""
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
        if self.file is not None:
            return
        self.thread = get_ident()
        os.register_at_fork(after_in_child=self.stop)
        self.phase_since = monotonic()
        self.map_file()
        self.try_or_tell("no stacks by a signal", self._offer_dump)
        call_safely(note_phases, self)
        atexit.register(self.set_base, ENDED)

    def end_step(self, step: int) -> None:
        """Count a step; its entry is in the rings before it counts."""
        if self.file is None:
            self.begin()
        now, file = monotonic(), self.file
        # A program may set a model to evaluate, as one that is not trained, for the step itself.
        is_training = self.base == TRAINING or (
            self.base == EVALUATING and self.batches == self.batches_at_eval
        )
        if is_training and self.last_end:
            at = self.recorded % RING
            file.ends[at], file.durations[at] = now, now - self.last_end - self.excluded
            file.recorded = self.recorded = self.recorded + 1
        self.last_end, self.excluded = now, 0.0
        file.step_time, file.step = now, step
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
        self.file.phase_since, self.file.phase = now, phase

    def note_activity(self) -> None:
        """Tell that the rank goes on."""
        self.file.activity_time = monotonic()

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

    def begin_loading(self) -> bool:
        """Begin a wait for data, which ends saving; False within another one."""
        if self.phase == LOADING:
            return False
        if get_ident() == self.thread:
            self.loader = self.thread
            if self.base in (SAVING, STARTING):
                self.base = self._choose_base()
            self.set_phase(LOADING)
        return True

    def end_loading(self, batch: object) -> None:
        """End a wait for data, and count the batch if one came; in other threads that alone."""
        if get_ident() == self.loader:
            self.loader = 0
            since = self.phase_since
            self.set_phase(self.base)
            self.data_wait += self.phase_since - since
            self.file.data_wait = self.data_wait
        else:
            self.note_activity()
        self.batches += batch is not None
        self.file.batches = self.batches

    def _offer_dump(self) -> None:
        """Have a signal write the Python stacks of all threads to `rank-RANK.stack`; raises OSError.

        `faulthandler` does that in the signal's handler in C, so that it works where the interpreter stands
        still. A handler of the program's stays, and system calls that the signal interrupts are restarted. As
        the interpreter ends, faulthandler puts back what was there before it: the signal is ignored from then
        on, and does not end the process. Programs that the rank executes get the default.
        """
        import faulthandler
        import signal  # torch has imported it by now

        number = signal.SIGRTMIN + DUMP_OFFSET
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            self.add_note(f"no stacks by signal {number}, which the program handles")
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with Suppressed(ValueError):  # a thread that is not the main one may not
            signal.signal(number, signal.SIG_IGN)
        descriptor = os.open(os.path.join(self.folder, f"rank-{self.rank}.stack"), flags, 0o600)
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        self.dump_signal, self.found_handler = number, getsignal(number)
        self.file.dump_signal = number

    def _check_dump(self) -> None:
        """Take the offer back if the program has taken the signal for itself."""
        if self.dump_signal and getsignal(self.dump_signal) is not self.found_handler:
            self.dump_signal = self.file.dump_signal = 0

    def try_or_tell(self, what: str, action: Callable[[], object]) -> None:
        """Do something whose failure is told."""
        try:
            action()
        except Exception as error:
            if is_foreign(error):
                raise
            self.add_note(f"{what}: {type(error).__name__}: {error}"[:200])

    def add_note(self, text: str) -> None:
        """Tell what could not be set up."""
        self.notes.append(text)
        self.file.notes = "\n".join(self.notes).encode(errors="replace")[:MAX_NOTES]

    def stop(self) -> None:
        """Write to nowhere from now on, in a forked child: the file is still mapped there."""
        self.file, self.has_joined = load_structure()(), True  # the old one is not freed: `keep_forever`

    def map_file(self) -> None:
        """Map a new `rank-RANK.beat`, which gets its name once it has its items; raises OSError.

        All its blocks are there before it is mapped: to write to a page without one is SIGBUS.
        """
        import mmap

        self.file = load_structure()()  # where it is written to if there is no other
        path, draft = (os.path.join(self.folder, f"{dot}rank-{self.rank}.beat") for dot in ("", "."))
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(draft, flags, 0o600)
        try:
            size = memoryview(self.file).nbytes
            os.posix_fallocate(descriptor, 0, size)
            file = load_structure().from_buffer(mmap.mmap(descriptor, size))
            with open("/proc/self/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
            file.magic, file.layout, file.pid = MAGIC, LAYOUT, os.getpid()
            file.start_time, file.start_stack = (int(fields[number - 3]) for number in (22, 28))
            file.rank, file.local_rank = self.rank, self.local_rank
            file.phase_since = file.activity_time = self.phase_since
            os.replace(draft, path)
        except BaseException:
            with Suppressed(OSError):  # it has its name already
                os.unlink(draft)
            raise
        finally:
            os.close(descriptor)
        keep_forever(file)
        self.file = file


def keep_forever(kept: object) -> None:
    """Have an object never freed, not even at the interpreter's end.

    A mapping closes its descriptor then, which may be another file's if the program has closed all of ours.
    """
    import ctypes  # torch has imported it by now

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def note_phases(beat: Heartbeat) -> None:
    """Have phases noted in a heartbeat as soon as the modules are imported in which they are."""

    def watch(name: str, action: Callable[[ModuleType], object]) -> None:
        """Run an action with a module once it is imported; tell if the module is not as expected."""
        when_imported(name, lambda module: beat.try_or_tell(f"{name} is not watched", lambda: action(module)))

    def begin_saving() -> None:
        """A phase that lasts until a batch is drawn or a step ends; other threads' savings are none."""
        if get_ident() == beat.thread:
            beat.set_base(SAVING)

    def end_saving() -> None:
        if get_ident() == beat.thread:
            beat.note_activity()

    def begin_joining() -> None:
        """Start torch's server before the first process group."""
        if beat.world_size > 1 and not beat.has_joined:
            beat.has_joined = True
            beat.try_or_tell("no server of torch's", lambda: _start_server(beat))
        beat.set_phase(JOINING)

    def return_to_base() -> None:
        beat.set_phase(beat.base)

    def watch_savers(module: ModuleType) -> None:
        for name in SAVERS[module.__name__].split():
            if callable(getattr(module, name, None)):
                surround(module, name, begin_saving, end_saving)

    def watch_compiling(module: ModuleType) -> None:
        """`torch._dynamo.reset()` forgets callbacks, and these stay."""
        surround(module.callback_handler, "run_start_callbacks", lambda: beat.set_phase(COMPILING))
        surround(module.callback_handler, "run_end_callbacks", return_to_base)

    def replace_train(module: ModuleType, is_compiling: Callable[[], bool]) -> None:
        """Replace the method that `eval` calls, too, and that calls itself for submodules.

        Where torch.compile traces it, it is the original: `is_compiling` comes first, since Dynamo makes a
        guard of what is read before it, and would compile again when the heartbeat has another mode.
        """
        original = module.Module.train

        def train(self: Any, mode: bool = True) -> Any:  # noqa: ANN401  # torch's own form
            if not is_compiling() and mode is not beat.is_training:
                beat.note_mode(is_training=mode is not False)
            return original(self, mode)

        replace(module.Module, "train", train)

    for name in SAVERS:
        watch(name, watch_savers)
    watch_waits(watch, beat.begin_loading, beat.end_loading)
    # The method is replaced once torch can tell whether it compiles it.
    watch(
        "torch.nn.modules.module",
        lambda module: watch("torch.compiler", lambda torch: replace_train(module, torch.is_compiling)),
    )
    watch("torch._dynamo.callback", watch_compiling)
    watch(
        "torch.distributed.distributed_c10d",
        lambda module: surround(module, "init_process_group", begin_joining, return_to_base),
    )


def _start_server(beat: Heartbeat) -> None:
    """Start torch's own server on `rank-RANK.sock`, which answers even while the rank hangs in a collective.

    It is an experimental part of torch: where it is missing or different, there is a note in its place. It is
    started without torch's warnings that it listens, and that it ends; and it is never freed: its end would
    print more, and wait for its threads.
    """
    import ctypes

    path = os.path.join(beat.folder, f"rank-{beat.rank}.sock")
    if os.path.lexists(path):  # of an earlier program of this rank
        os.unlink(path)
    torch = sys.modules["torch"]
    file = os.path.join(os.path.dirname(str(torch.__file__)), "lib", "libc10.so")
    library = ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    name = next(name for name in LOG_LEVELS if hasattr(library, name))
    level = ctypes.c_int.in_dll(library, name)
    before = level.value
    level.value = max(before, ERROR)
    try:
        keep_forever(torch._C._distributed_c10d._WorkerServer(path))
    finally:
        level.value = before
