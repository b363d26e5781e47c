"""The channel from a SLURM job's first node to its nodes' tasks: names of signals and orders, one a line.

srun gives each task a copy of its stdin (`--input=all`). So a signal that is meant for the ranks reaches
them alone; SLURM's own also reach the agent and DataLoader workers.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

GREETING = "HELLO"
"""First line. Without it, the end of the channel says nothing: there was none."""
LOST = "LOST"
"""A node of an elastic job was lost."""
KILL_WAIT = "KILLWAIT"
"""`KILLWAIT 30`: seconds from SLURM's SIGTERM to its SIGKILL, as this cluster has it (slurm.conf)."""
READ_SIZE = 1 << 16
"""Bytes that are read at once: an order to a thousand nodes names them all."""


@dataclass(slots=True)
class SignalChannel:
    """The tasks' end."""

    descriptor: int | None
    """None once it has ended."""
    partial: bytes = b""
    greeted: bool = False
    lost_at: float | None = None
    """Monotonic time of the word that a node was lost, until somebody has acted on it."""
    kill_wait: float | None = None
    """SLURM's patience in seconds; None if the first node has not sent it."""
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
        added, self.added = self.added, []
        if self.descriptor is None:
            return added
        data = self.read_new(self.descriptor)
        if data == b"":
            self.descriptor = None
            return [*added, signal.SIGTERM] if self.greeted else added
        *lines, self.partial = (self.partial + (data or b"")).split(b"\n")
        words = [line.decode("ascii", "replace").strip() for line in lines]
        self.greeted = self.greeted or GREETING in words
        if LOST in words:
            self.lost_at = time.monotonic()
        for name, _, value in (word.partition(" ") for word in words):
            if name == KILL_WAIT and value.isdecimal():
                self.kill_wait = float(value)
        self.lines += [word for word in words if " " in word and not word.startswith(KILL_WAIT)]
        return [*added, *(number for word in words if (number := parse_number(word)) is not None)]

    def add_signal(self, number: int) -> None:
        """Let a signal count as one that the first node asks for."""
        self.added.append(number)

    def take_lines(self) -> list[str]:
        """Return the orders that have come since the last call."""
        taken, self.lines = self.lines, []
        return taken

    def read_new(self, descriptor: int) -> bytes | None:
        """Return what there is to read, empty at the end; None if there is nothing yet."""
        try:
            return os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            return b""


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


def parse_number(word: str) -> int | None:
    """Read a signal's name; None for another word."""
    return signal.Signals[word] if word in signal.Signals.__members__ else None
