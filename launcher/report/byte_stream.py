"""stdout and stderr as descriptors that take bytes; they may be closed, full or stalled."""

import errno
import os
import select
import sys
from dataclasses import dataclass

PIECE = 1 << 16
"""Bytes that are written at once: what a pipe holds, so that a slow reader is seen to take some."""
LEFT = (errno.EPIPE, errno.EBADF, errno.EIO)
"""Errors that nobody has to be told of: the reader has left, or the terminal is gone."""


@dataclass(slots=True)
class Stream:
    """A descriptor that is written to for as long as it takes anything."""

    name: str
    """`stdout` or `stderr`."""
    descriptor: int | None
    """None once it is of no use."""
    taken: int = 0
    """Bytes that it has taken."""
    fault: OSError | None = None
    """Why it is of no use, if the user is to know."""

    def write(self, data: bytes) -> None:
        """Write all of it, however long that takes."""
        view = memoryview(data)
        while view and self.descriptor is not None:
            try:
                count = os.write(self.descriptor, view[:PIECE])
            except BlockingIOError:  # whoever shares it has made it so
                select.select([], [self.descriptor], [])
                continue
            except OSError as error:
                self.descriptor = None
                self.fault = None if error.errno in LEFT else error
                return
            self.taken += count
            view = view[count:]

    def can_take(self) -> bool:
        """Tell whether something short can be written without waiting."""
        if self.descriptor is None:
            return False
        poller = select.poll()
        poller.register(self.descriptor, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poller.poll(0))

    @property
    def is_screen(self) -> bool:
        """Whether it is a terminal on which a line can be erased."""
        if self.descriptor is None or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
            return False
        return os.isatty(self.descriptor)

    @property
    def columns(self) -> int:
        """Width of the terminal; 0 if it does not tell."""
        try:
            return os.get_terminal_size(self.descriptor).columns if self.descriptor is not None else 0
        except OSError:
            return 0

    def is_same_file(self, other: "Stream") -> bool:
        """Tell whether both lead to the same terminal, pipe or file."""
        if self.descriptor is None or other.descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.fstat(other.descriptor))
        except OSError:
            return False


def open_stream(name: str) -> Stream:
    """Return stdout or stderr with what is in its buffer written; one that was closed takes nothing."""
    file = sys.stdout if name == "stdout" else sys.stderr
    try:
        file.flush()
        return Stream(name, file.fileno())
    except (AttributeError, OSError, ValueError):
        return Stream(name, None)
