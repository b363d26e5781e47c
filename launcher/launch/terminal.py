"""The pseudo-terminal that the program has in place of the user's terminal, and the copying between them.

See pty(7) and termios(3). What the program prints also goes to its log. The user's terminal is raw while a
program has the other one, so every key reaches the program, which decides what it means: Ctrl-C is SIGINT for
the program alone, or a byte.
"""

import contextlib
import fcntl
import logging
import os
import select
import signal
import struct
import termios
import threading
import time
import tty
from collections import deque
from dataclasses import dataclass, field

from launcher.protocol import LAUNCH_TERMINAL
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

NO_SIZE = struct.pack("4H", 0, 0, 0, 0)
TICK = 0.1
"""Seconds between two looks at the window's size, and at who has the terminal."""
CHUNK = 1 << 16
"""Bytes that are read at once, and of input that may wait for the program to read."""
MOST_WAITING = 64 << 20
"""Bytes that may wait to be shown; then the program waits too, as on any terminal that takes no more."""
PATIENCE = 5.0
"""Seconds for what the program has printed last, at the end."""
PRESSES, SPAN = 3, 3.0
"""So many Ctrl-C within so many seconds end a program that goes on after them."""
KEYS = {signal.SIGINT: termios.VINTR, signal.SIGQUIT: termios.VQUIT}
"""Signals that the terminal driver makes of keys, with each key's index among its characters (termios(3))."""


@dataclass(slots=True)
class Terminal:
    r"""A pseudo-terminal with the settings of the user's, and a thread that copies between the two.

    What the program prints is kept until somebody takes it to show it. The log has `\n` where the terminal
    driver has made `\r\n` of it.
    """

    master: int
    slave: int
    """Kept open, so that the master can be read before the program has come, and after it has gone."""
    streams: tuple[int, ...]
    """Of stdin, stdout and stderr, those that are the terminal."""
    cooked: list[int | list[bytes | int]]
    """Settings of the user's terminal as they were found, which the program's gets too."""
    run_dir: RunDir
    attempt: int
    """Of the log that is written, which the shim makes before the first byte of it comes."""
    news: threading.Event = field(default_factory=threading.Event)
    """There is something to show."""
    pressed: dict[int, float] = field(default_factory=dict)
    """When a key last sent the program each signal, in seconds since the epoch."""
    is_raw: bool = False
    """The user's terminal is raw: its keys are to be read here."""
    size: bytes = NO_SIZE
    log: int = -1
    """Descriptor."""
    is_complete: bool = True
    """The log has everything so far."""
    held: bytes = b""
    r"""A `\r` that waits to be written to the log, until it is known whether a newline follows."""
    output: bytearray = field(default_factory=bytearray)
    """What waits to be shown: one thread adds, and another takes."""
    typed: bytes = b""
    """Input that the program's terminal has not taken yet."""
    hung_up: bool = False
    """The user's terminal is gone."""
    interrupts: deque[float] = field(default_factory=lambda: deque([-SPAN] * PRESSES, PRESSES))
    """When Ctrl-C was pressed, in monotonic seconds."""
    wakeup: int = field(default_factory=lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    """Descriptor that is readable at the end."""
    thread: threading.Thread | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of the output."""

    @property
    def variables(self) -> dict[str, str]:
        """What the shim is told."""
        return {LAUNCH_TERMINAL: f"{','.join(map(str, self.streams))}:{os.ttyname(self.slave)}"}

    def start(self) -> None:
        """Begin to copy."""
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Take what the program has printed to its end, and give the user's terminal back as it was."""
        if self.thread:
            os.eventfd_write(self.wakeup, 1)
            self.thread.join(PATIENCE)
        self.restore()

    def take(self) -> bytes:
        """Return what is to be shown next; nothing if all has been shown."""
        with self.lock:
            data = bytes(self.output)
            self.output.clear()
        return data

    def run(self) -> None:
        """Copy to the end: the thread's body."""
        try:
            ready: list[int] = []
            while self.wakeup not in ready:
                poller = select.poll()
                poller.register(self.wakeup, select.POLLIN)
                wanted = select.POLLIN if len(self.output) < MOST_WAITING else 0
                poller.register(self.master, wanted | (select.POLLOUT if self.typed else 0))
                if self.is_raw and not self.hung_up and len(self.typed) < CHUNK:
                    poller.register(0, select.POLLIN)
                ready = [descriptor for descriptor, _ in poller.poll(1000 * TICK)]
                self.update()  # whoever sees what follows may answer with a key
                if self.master in ready and wanted:
                    self.read_output()
                if 0 in ready:
                    self.read_input()
                with contextlib.suppress(OSError):
                    while self.typed:
                        self.typed = self.typed[os.write(self.master, self.typed) :]
            while self.read_output():
                pass
            self.write_log(self.held)
        except Exception as error:
            self.restore()
            logger.warning(f"the program's terminal failed ({error!r}), and is closed")
            os.close(self.master)

    def update(self) -> None:
        """Let the user's terminal be raw while the program has the other, with the same size."""
        is_taken = False
        with contextlib.suppress(OSError):
            is_taken = os.tcgetpgrp(self.master) > 0
        if not is_taken or not is_foreground():  # nobody has the other, or a shell has taken this one back
            self.restore()
            return
        with contextlib.suppress(OSError, termios.error):
            if not self.is_raw or termios.tcgetattr(0)[tty.LFLAG] & termios.ICANON:
                tty.setraw(0, termios.TCSANOW)
                self.is_raw = True
            size = fcntl.ioctl(0, termios.TIOCGWINSZ, NO_SIZE)
            if size != self.size:
                self.size = size
                fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def restore(self) -> None:
        """Set the user's terminal as it was; not one that a shell has given to somebody else."""
        if self.is_raw and is_foreground():
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSANOW, self.cooked)
        self.is_raw = False

    def read_output(self) -> bool:
        """Take some of what the program has printed; False if there is nothing."""
        try:
            data = os.read(self.master, CHUNK)
        except BlockingIOError:
            return False
        newest = self.attempt
        while self.run_dir.rank_log(0, newest + 1, "out").exists():
            newest += 1
        if newest != self.attempt or self.log < 0:  # before the first, only what is typed is echoed
            self.write_log(self.held)
            self.held = b""
            os.close(self.log) if self.log >= 0 else None
            self.log, self.attempt = -1, newest
            with contextlib.suppress(FileNotFoundError):
                log = self.run_dir.rank_log(0, newest, "out")
                self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        text = self.held + data
        self.held = b"\r" if text.endswith(b"\r") else b""
        self.write_log(text.removesuffix(self.held).replace(b"\r\n", b"\n"))
        with self.lock:
            self.output += data
        self.news.set()
        return True

    def write_log(self, data: bytes) -> None:
        """Write to the log, if there is one; a full disk is no reason not to go on."""
        try:
            while data and self.log >= 0:
                data = data[os.write(self.log, data) :]
        except OSError as error:
            if self.is_complete:
                logger.warning(f"the log of the program's terminal is not complete ({error})")
            self.is_complete = False

    def read_input(self) -> None:
        """Take some of what the user has typed, and the launcher's part in keys that end the program."""
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(0, CHUNK)
        self.hung_up = not data  # the end of the input is a byte here: this is the terminal's
        self.typed += data
        settings = termios.tcgetattr(self.master)
        for number, index in KEYS.items() if settings[tty.LFLAG] & termios.ISIG else ():
            key = settings[tty.CC][index]
            if key == b"\0" or key not in data:
                continue
            self.pressed[number] = time.time()
            if number == signal.SIGINT:
                self.interrupts.extend([time.monotonic()] * data.count(key))
                if self.interrupts[-1] - self.interrupts[0] < SPAN:
                    logger.info("Ctrl-C three times: the program is ended")
                    os.kill(os.getpid(), signal.SIGINT)


def open_terminal(run: RunDir) -> Terminal | None:
    """Return a pseudo-terminal to stand for the user's; None if there is none, or it is not ours."""
    try:
        terminal = os.fstat(0)
        streams = tuple(number for number in range(3) if os.path.samestat(os.fstat(number), terminal))
        if not os.isatty(0) or not is_foreground() or 1 not in streams:
            return None
        cooked = termios.tcgetattr(0)
        master, slave = os.openpty()
        termios.tcsetattr(slave, termios.TCSANOW, cooked)
        os.set_blocking(master, False)
    except (OSError, termios.error):
        return None
    found = Terminal(master, slave, streams, cooked, run, run.first_attempt)
    found.size = fcntl.ioctl(0, termios.TIOCGWINSZ, NO_SIZE)
    fcntl.ioctl(master, termios.TIOCSWINSZ, found.size)
    return found


def is_foreground() -> bool:
    """Tell whether the user's terminal is this process's: a shell may have given it to another job."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False
