"""Signals that `launch` gets, from the kernel or from a SLURM job's first node, and the stages of a stop.

The first node has a channel to its nodes' tasks: names of signals and orders, one a line. srun gives each
task a copy of its stdin (`--input=all`). So a signal that is meant for the ranks reaches them alone; SLURM's
own also reach the agent and DataLoader workers.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the job; the ones that torchrun handles too."""
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go to the ranks alone: the agent has no handler for them and would die."""
HARD = (signal.SIGTERM, signal.SIGKILL)
"""Stages that come from several sides in a SLURM job: from SLURM itself, and from the job's first node."""
TERM_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL, after the first signal's own grace."""
KILL_GRACE = 5.0
"""Seconds that the kernel and the agent have after SIGKILL."""
SLURM_GRACE = 20.0
"""Seconds that ranks have after SLURM's SIGTERM at most: its own patience (KillWait) is 30 by default."""
GREETING = "HELLO"
"""First line of the channel. Without it, the end of the channel says nothing: there was none."""
LOST = "LOST"
"""A node of an elastic job was lost."""
READ_SIZE = 1 << 16
"""Bytes that are read at once: an order to a thousand nodes names them all."""

early_signals: list[int] = []
"""What came since `note_early_signals` and before somebody collects signals."""


def note_early_signals() -> None:
    """Keep the checkpoint signals that come before there is anybody to pass them on to, and do not die."""
    for number in FORWARDED:
        signal.signal(number, lambda number, _frame: early_signals.append(number))


@dataclass(slots=True)
class SignalQueue:
    """Signals that have arrived and wait to be handled."""

    wakeup: int
    """Descriptor that is readable when a signal has come, by its number (signal.set_wakeup_fd)."""
    wanted: Collection[int]

    def take(self) -> list[int]:
        """Return the signals since the last call."""
        taken = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.wakeup, READ_SIZE):
                taken += part
        return [number for number in taken if number in self.wanted]


@contextlib.contextmanager
def catch_signals(others: Iterable[int] = ()) -> Iterator[SignalQueue]:
    """Collect the signals above, and others, until the end of the block.

    A signal that was ignored at the start (nohup, a shell's background job) stays ignored.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wanted = [n for n in {*STOPPING, *FORWARDED, *others} if signal.getsignal(n) is not signal.SIG_IGN]
    old_wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in wanted}
    os.write(writing, bytes(early_signals))
    early_signals.clear()
    try:
        yield SignalQueue(reading, wanted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_wakeup)
        os.close(reading)
        os.close(writing)


@dataclass(slots=True)
class StopStages:
    """The stages of ending a job: the user's signal, SIGTERM, SIGKILL."""

    stages: list[tuple[int, float]]
    """(signal, seconds until the next), those that are still to come."""
    deadline: float = 0.0
    """Monotonic time of the next stage; 0 before the first."""
    current: int | None = None
    """Signal of the stage that it is in."""

    @classmethod
    def begin(cls, number: int, grace: float) -> "StopStages":
        """Plan the stages after a first signal, which has `grace` seconds."""
        harder = [(signal.SIGTERM, TERM_GRACE)] if number == signal.SIGINT else []
        return cls([(number, grace), *harder, (signal.SIGKILL, KILL_GRACE)])

    def has_reached(self, number: int) -> bool:
        """Tell whether SIGTERM's or SIGKILL's stage has come; signals of a user always go a stage on."""
        return number in HARD and number not in (stage for stage, _ in self.stages)

    def next_stage(self) -> int | None:
        """Enter the next stage and return its signal; None after the last."""
        number, seconds = self.stages.pop(0) if self.stages else (None, KILL_GRACE)
        self.deadline = time.monotonic() + seconds
        self.current = number
        return number


def name_signal(number: int) -> str:
    """Return a signal's name, `signal 40` if it has none."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@dataclass(slots=True)
class SignalChannel:
    """The tasks' end of the channel from the first node."""

    descriptor: int | None
    """It does not block; None once it has ended."""
    partial: bytes = b""
    greeted: bool = False
    lost_at: float = math.inf
    """Monotonic time of the word that a node was lost, until somebody has acted on it; else infinite."""
    lines: list[str] = field(default_factory=list)
    """What is neither a signal nor any of the words above: orders for the node's agent."""
    added: list[int] = field(default_factory=list)
    """Signals that an order of the first node stands for."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What to poll."""
        return () if self.descriptor is None else (self.descriptor,)

    @property
    def is_cut(self) -> bool:
        """Tell whether the first node's process, or srun's daemon on this node, was there and is gone."""
        return self.greeted and self.descriptor is None

    def read_signals(self) -> list[int]:
        """Return the signals that the first node asks for; SIGTERM if its process is gone."""
        found, self.added, data = self.added, [], b""
        if self.descriptor is None:
            return found
        try:
            data = os.read(self.descriptor, READ_SIZE)
        except BlockingIOError:
            return found
        except OSError:
            pass
        if not data:
            self.descriptor = None
            return [*found, signal.SIGTERM] if self.greeted else found
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            word = line.decode("ascii", "replace").strip()
            name, _, value = word.partition(" ")
            if word == GREETING:
                self.greeted = True
            elif word == LOST:
                self.lost_at = time.monotonic()
            elif value:
                self.lines.append(word)
            elif name in signal.Signals.__members__:
                found.append(signal.Signals[name])
        return found

    def take_lines(self) -> list[str]:
        """Return the orders that have come since the last call."""
        taken, self.lines = self.lines, []
        return taken


def open_signal_channel(descriptor: int) -> SignalChannel:
    """Return the channel behind a descriptor, which is read without waiting."""
    os.set_blocking(descriptor, False)
    return SignalChannel(descriptor)


def make_signal_channel() -> tuple[int, int]:
    """Return the descriptors of a new channel: what srun reads, and what the first node writes to."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.write(writing, f"{GREETING}\n".encode())
    return reading, writing


def write_line_to_tasks(descriptor: int, word: str) -> None:
    """Send the tasks a line; nothing happens if the tasks are gone."""
    data = f"{word}\n".encode()
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
