"""What a rank does, in a small mapped file that the node's watcher reads without the rank's help.

An item of the file is written at once. Those that belong together are written in such an order that a reader
between two of them finds the values from before, so that there is no lock.
"""

from __future__ import annotations

import os
from _thread import get_ident
from time import monotonic

from .beat_file import (
    AT_ACTIVITY_TIME,
    AT_BATCHES,
    AT_DATA_WAIT,
    AT_DUMP_SIGNAL,
    AT_DURATIONS,
    AT_ENDS,
    AT_LOCAL_RANK,
    AT_NOTES,
    AT_NOTES_SIZE,
    AT_PHASE,
    AT_PHASE_SINCE,
    AT_RANK,
    AT_RECORDED,
    AT_STEP,
    AT_STEP_TIME,
    MAX_NOTES,
    RING,
    SIZE,
    map_beat,
)
from .import_hook import call_safely, when_framework_is_used
from .step_counter import on_step

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import MutableMapping
    from signal import getsignal
else:
    from _signal import getsignal  # `signal` costs a millisecond

STARTING, JOINING, TRAINING, LOADING, COMPILING, SAVING, EVALUATING, ENDED = range(8)
"""Phases, as `launcher.watch.watch_model.PHASES` has them."""


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


def register_in_process(beat: Heartbeat) -> None:
    """Have the program's phases noted, and stacks written at the watcher's signal."""
    from .phases import note_phases
    from .stack_dumper import register_dump

    try:
        register_dump(beat)
    except Exception as error:
        beat.add_note(f"no stacks by a signal: {type(error).__name__}: {error}"[:200])
    note_phases(beat, beat.world_size)


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
        call_safely(register_in_process, self)
        import atexit

        atexit.register(self.end)

    def end_step(self, step: int) -> None:
        """Count a step; its entry is in the rings before it counts."""
        if not self.has_begun:
            self.begin()
        now, integers, floats = monotonic(), self.integers, self.floats
        if (self.base == TRAINING or self.is_without_batches()) and self.last_end:
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
        elif self.dump_signal and getsignal(self.dump_signal) is not self.found_handler:
            self.withdraw_dump()

    def set_base(self, phase: int) -> None:
        """Begin a phase that lasts until the next one."""
        self.base = phase
        self.set_phase(phase)
        if self.dump_signal and getsignal(self.dump_signal) is not self.found_handler:
            self.withdraw_dump()

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
        if self.base in (STARTING, TRAINING, EVALUATING) and self.base != self.choose_base():
            self.set_base(self.choose_base())

    def choose_base(self) -> int:
        """Return the phase outside of waits and of saving."""
        if not self.last_end and (self.is_training or self.batches == self.batches_at_eval):
            return STARTING
        return TRAINING if self.is_training else EVALUATING

    def is_without_batches(self) -> bool:
        """Tell whether the step that ends set a model to evaluate, as one that is not trained, for itself."""
        return self.base == EVALUATING and self.batches == self.batches_at_eval

    def begin_loading(self) -> None:
        """Begin a wait for data, which ends saving."""
        if self.phase != TRAINING:
            if self.base in (SAVING, STARTING):
                self.base = self.choose_base()
            self.set_phase(LOADING)
            return
        self.phase = LOADING
        self.phase_since = self.floats[AT_PHASE_SINCE] = monotonic()
        self.integers[AT_PHASE] = LOADING

    def end_loading(self, batches: int) -> None:
        """End a wait for data, and count the batches that came."""
        since, integers, floats = self.phase_since, self.integers, self.floats
        if self.base == TRAINING:  # as `set_phase` does
            self.phase = TRAINING
            self.phase_since = floats[AT_PHASE_SINCE] = monotonic()
            integers[AT_PHASE] = TRAINING
        else:
            self.set_phase(self.base)
        self.data_wait += self.phase_since - since
        self.batches += batches
        floats[AT_DATA_WAIT] = self.data_wait
        integers[AT_BATCHES] = self.batches

    def count_batches(self, number: int) -> None:
        """Count batches of another thread."""
        self.batches += number
        self.integers[AT_BATCHES] = self.batches
        self.note_activity()

    def is_first_join(self) -> bool:
        """Tell whether this is the first process group, once."""
        before, self.has_joined = self.has_joined, True
        return not before

    def offer_dump(self, number: int) -> None:
        """Tell that a signal has stacks written to the rank's file."""
        self.dump_signal, self.found_handler = number, getsignal(number)
        self.integers[AT_DUMP_SIGNAL] = number

    def withdraw_dump(self) -> None:
        """Take the offer back: the program has taken the signal for itself."""
        self.dump_signal = self.integers[AT_DUMP_SIGNAL] = 0

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
        self.memory, self.has_joined = None, True  # not freed: `map_beat` keeps it
        self.integers, self.floats = [0] * (SIZE // 8), [0.0] * (SIZE // 8)
