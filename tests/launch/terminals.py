"""A terminal with somebody at it: starts a command on a pseudo-terminal, reads what it shows, and types."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyte
import pytest

from tests.seam import LAUNCH, PATIENCE, Started, clean_environ, find_processes

ROWS, COLUMNS = 24, 80


@dataclass
class Terminal:
    """The user's side of a terminal, on which a command runs as in a window of its own."""

    process: "subprocess.Popen[bytes]"
    master: int
    slave: int
    folder: Path
    mark: str
    seen: bytearray = field(default_factory=bytearray)
    read: int = 0
    """Bytes of `seen` that have been waited for."""
    before: list[object] = field(default_factory=list)
    """Settings of the terminal before the command."""

    def expect(self, *words: str, timeout: float = PATIENCE) -> str:
        """Read until words have come, one after the other, after those waited for last; return it all."""
        begin, deadline = self.read, time.monotonic() + timeout
        for word in words:
            while (at := self.seen.find(word.encode(), self.read)) < 0:
                if not self.take_some(deadline):
                    text = self.seen[begin:].decode(errors="replace")
                    pytest.fail(f"waited for {word!r} in vain after {text[-3000:]!r}")
            self.read = at + len(word.encode())
        return self.seen[begin : self.read].decode(errors="replace")

    def take_some(self, deadline: float) -> bool:
        """Read what is shown; False at the deadline, and when nobody shows anything any more."""
        ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
        data = b""
        if ready:
            with contextlib.suppress(OSError):
                data = os.read(self.master, 65536)
        # A line that is shown while the terminal stops being raw may end with `\r\r\n`, which looks the same.
        begin = max(self.read, len(self.seen) - 2)
        self.seen[begin:] = re.sub(rb"\r+\n", b"\r\n", bytes(self.seen[begin:]) + data)
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        termios.tcsetwinsize(self.master, (rows, columns))

    def finish(self, timeout: float = PATIENCE) -> int:
        """Read to the end of the command, and return its exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            self.take_some(time.monotonic() + 0.05)
        while self.take_some(time.monotonic()):
            pass
        return self.process.wait(1)

    def text(self) -> str:
        return self.seen.decode(errors="replace")

    def rows(self, rows: int = 200, columns: int = COLUMNS) -> list[str]:
        """What the terminal would show, if it was high."""
        screen = pyte.Screen(columns, rows)
        pyte.ByteStream(screen).feed(bytes(self.seen))
        return [row.rstrip() for row in screen.display if row.strip()]

    def settings(self) -> list[object]:
        return termios.tcgetattr(self.slave)

    def is_restored(self) -> bool:
        return self.settings() == self.before

    def started(self) -> Started:
        return Started(self.process, self.folder, self.mark)


@contextlib.contextmanager
def open_terminal(folder: Path, *command: str, **variables: str) -> Iterator[Terminal]:
    """Start a command on a terminal that is its session's own; whatever is left at the end is killed."""
    mark = f"LAUNCH_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    master, slave = pty.openpty()
    termios.tcsetwinsize(master, (ROWS, COLUMNS))
    environ = {**clean_environ(), "TERM": "xterm", **dict([mark.split("=")]), **variables}
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        cwd=folder,
        env=environ,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    terminal = Terminal(process, master, slave, folder, mark, before=termios.tcgetattr(slave))
    try:
        yield terminal
    finally:
        for pid in (process.pid, *find_processes(mark)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(PATIENCE)
        for descriptor in (master, slave):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@contextlib.contextmanager
def launch_on_terminal(folder: Path, program: str, *words: str, **variables: str) -> Iterator[Terminal]:
    """Start `launch` with a program of this text on a terminal."""
    (folder / "program.py").write_text(program)
    with open_terminal(folder, *LAUNCH, *words, "--", "program.py", **variables) as terminal:
        yield terminal
