"""What a program prints on its pseudo-terminal: written to its log, and kept until it has been shown."""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MOST_WAITING = 4 << 20
"""Bytes that wait in memory to be shown; what comes after them is read from the log again."""
CHUNK = 1 << 20
"""Bytes of the log that are read at once."""


@dataclass(slots=True)
class TerminalOutput:
    r"""Takes bytes from one thread, and gives them to another that shows them, however slow that is.

    The log has `\n` where the terminal driver has made `\r\n` of it.
    """

    find_log: Callable[[int], Path]
    """Returns the log of an attempt, which the shim makes before the first byte of it comes."""
    attempt: int
    log: int | None = None
    """Descriptor."""
    size: int = 0
    """Bytes of the log."""
    returned: bool = False
    r"""A `\r` waits to be written, until it is known whether a newline follows."""
    pieces: deque[bytes] = field(default_factory=deque)
    waiting: int = 0
    """Bytes of the pieces."""
    unread: tuple[int, int] | None = None
    """Attempt and offset from which the log is to be read to be shown; None if nothing else waits."""
    fault: OSError | None = None
    """Why the log is not complete."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, data: bytes) -> None:
        """Take what has been printed."""
        if self.log is None:
            self.open_log()
        with self.lock:
            begin = (self.attempt, self.size)
            self.write_log(data)
            if self.unread is None and self.waiting + len(data) <= MOST_WAITING:
                self.pieces.append(data)
                self.waiting += len(data)
            elif self.unread is None:
                self.unread = begin

    def take(self) -> bytes:
        """Return some of what is to be shown next; nothing if all has been shown."""
        with self.lock:
            if self.pieces:
                data = b"".join(self.pieces)
                self.pieces.clear()
                self.waiting = 0
                return data
            return self.read_back() if self.unread else b""

    def read_back(self) -> bytes:
        """Return some of what waits in the log alone."""
        attempt, offset = self.unread or (0, 0)
        try:
            with self.find_log(attempt).open("rb") as file:
                file.seek(offset)
                data = file.read(CHUNK)
            if len(data) == CHUNK and (end := data.rfind(b"\n") + 1):
                data = data[:end]
        except OSError as error:
            self.fault, data = self.fault or error, b""
        if data:
            self.unread = (attempt, offset + len(data))
        elif attempt < self.attempt:
            self.unread = (attempt + 1, 0)
            return self.read_back()
        else:
            self.unread = None
        return data.replace(b"\n", b"\r\n")

    def find_attempt(self) -> None:
        """Turn to the log of another attempt, if there is one: what comes next is of its program."""
        newest = self.attempt
        while self.find_log(newest + 1).exists():
            newest += 1
        if newest != self.attempt:
            self.close()
            self.attempt = newest

    def open_log(self) -> None:
        """Open the log; before there is one, what is printed is an echo of what is typed."""
        try:
            self.log = os.open(self.find_log(self.attempt), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self.size = os.fstat(self.log).st_size
        except FileNotFoundError:
            return
        except OSError as error:
            self.fault = self.fault or error

    def write_log(self, data: bytes) -> None:
        """Write to the log what the terminal driver has been given."""
        data = b"\r" + data if self.returned else data
        self.returned = data.endswith(b"\r")
        self.append((data[:-1] if self.returned else data).replace(b"\r\n", b"\n"))

    def append(self, data: bytes) -> None:
        """Write to the log; a disk that is full is no reason not to go on."""
        view = memoryview(data)
        try:
            while view and self.log is not None:
                count = os.write(self.log, view)
                self.size += count
                view = view[count:]
        except OSError as error:
            self.fault = self.fault or error

    def close(self) -> None:
        """Close the log: nothing more belongs there."""
        with self.lock:
            if self.log is not None:
                self.append(b"\r" if self.returned else b"")
                os.close(self.log)
            self.log, self.returned, self.size = None, False, 0
