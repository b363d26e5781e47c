"""Keys from a terminal as they are pressed, and the signals that come meanwhile; both without waiting."""

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
)
"""What is answered between two looks at the keys, so that the terminal is never left as it is in between."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SEQUENCES = {
    **{"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "Z": "left"},
    **{"1~": "home", "4~": "end", "5~": "page-up", "6~": "page-down", "7~": "home", "8~": "end"},
}
"""Ends of ECMA-48's and xterm's sequences for keys, after `ESC [` or `ESC O`."""
SEQUENCE = re.compile(r"\x1b(?:\[([0-9;]*[@-~])|O([@-~]))")
NAMES = {
    "\r": "enter",
    "\n": "enter",
    " ": "page-down",
    "\x1b": "escape",
    "\x7f": "escape",
    "\x08": "escape",
    "\t": "right",
}
ESCAPE_SECONDS = 0.05
"""Seconds within which the rest of a sequence comes, of which ESC alone would be the key."""


def parse_keys(text: str) -> list[str]:
    """Return the keys that some input stands for: characters, and names such as `up` and `escape`.

    Sequences that are not known, as of function keys, are left out.
    """
    keys, at = [], 0
    while at < len(text):
        if found := SEQUENCE.match(text, at):
            code = re.sub(r"^1;\d+", "", found[1] or found[2])  # with a modifier, as Shift
            keys += [SEQUENCES[code]] if code in SEQUENCES else []
            at = found.end()
            continue
        char = text[at]
        if char in NAMES or char.isprintable():
            keys.append(NAMES.get(char, char))
        at += 1
    return keys


@dataclass(slots=True)
class KeyInput:
    """The keys of standard input, if that is a terminal, and this process's signals, in one place to wait."""

    descriptor: int | None = None
    """The terminal; None if there is none to read from."""
    before: list[Any] = field(default_factory=list)
    """Its settings."""
    handlers: dict[int, object] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    """Signals that have come."""
    wake_read: int = -1
    wake_write: int = -1
    """A pipe that ends the waiting."""
    last_wakeup: int = -1

    def open(self) -> None:
        """Take the terminal's keys one by one and without echo, and keep signals until they are asked for."""
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.last_wakeup = signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN or number in (signal.SIGTSTP, signal.SIGWINCH):
                self.handlers[number] = signal.signal(number, self.note_signal)
        with contextlib.suppress(OSError, ValueError):
            if os.isatty(sys.stdin.fileno()):
                self.descriptor = sys.stdin.fileno()
        self.take_terminal()

    def note_signal(self, number: int, _: FrameType | None) -> None:
        """Keep a signal."""
        self.pending.append(number)

    def take_terminal(self) -> None:
        """Switch the terminal to single keys, also after a shell has changed its settings."""
        if self.descriptor is not None:
            with contextlib.suppress(termios.error, OSError):
                self.before = self.before or termios.tcgetattr(self.descriptor)
                tty.setcbreak(self.descriptor, termios.TCSADRAIN)

    def release_terminal(self) -> None:
        """Give the terminal back as it was."""
        if self.descriptor is not None and self.before:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self.descriptor, termios.TCSADRAIN, self.before)
            self.before = []

    def close(self) -> None:
        """Undo what `open` did."""
        self.release_terminal()
        signal.set_wakeup_fd(self.last_wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as getsignal gave it
        self.handlers.clear()
        for descriptor in (self.wake_read, self.wake_write):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def wake(self) -> None:
        """End the waiting; any thread may call this."""
        with contextlib.suppress(OSError):
            os.write(self.wake_write, b"\0")

    def wait(self, seconds: float) -> list[str]:
        """Wait until a key is pressed, a signal comes or somebody wakes it; return the keys."""
        watched = [self.wake_read] + ([self.descriptor] if self.descriptor is not None else [])
        ready, _, _ = select.select(watched, [], [], seconds)
        if self.wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 4096)
        return self.read_keys() if self.descriptor in ready else []

    def read_keys(self) -> list[str]:
        """Return the keys that were pressed; at the terminal's end there will be none any more."""
        descriptor = self.descriptor
        if descriptor is None:
            return []
        try:
            data = os.read(descriptor, 4096)
            while data.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and self.has_more(descriptor):
                data += os.read(descriptor, 4096)
        except OSError:
            data = b""
        if not data:
            self.descriptor = None
        return parse_keys(data.decode(errors="replace"))

    @staticmethod
    def has_more(descriptor: int) -> bool:
        """Tell whether there is more to read soon."""
        return bool(select.select([descriptor], [], [], ESCAPE_SECONDS)[0])

    def take_signals(self) -> Sequence[int]:
        """Return the signals that have come since the last call."""
        found = tuple(self.pending)
        del self.pending[: len(found)]
        return found

    def suspend(self) -> None:
        """Stop this process as Ctrl-Z does; returns when it goes on."""
        self.release_terminal()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.note_signal)
        self.take_terminal()

    def end_by(self, number: int) -> None:
        """End this process by a signal, as it would have ended without `open`; to be called after `close`."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def reading_keys() -> Iterator[KeyInput]:
    """Read keys, and leave the terminal and the signals as they were, whatever happens."""
    keys = KeyInput()
    try:
        keys.open()
        yield keys
    finally:
        keys.close()
