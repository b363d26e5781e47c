"""The user's terminal, the pseudo-terminal that the program has in its place, and the copying between them.

See pty(7) and termios(3). What the program prints also goes to its log.
"""

import contextlib
import fcntl
import logging
import os
import select
import signal
import struct
import subprocess
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from launcher.launch.processes import ignores
from launcher.protocol import LAUNCH_TERMINAL

logger = logging.getLogger(__name__)

GUARD = """trap '' HUP INT QUIT TERM; saved=$(stty -g <&2) && read -r end || stty "$saved" <&2 2>/dev/null"""
"""Shell script that sets the terminal behind its stderr as it was, if its stdin ends without a line."""
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
KEYS = {
    signal.SIGINT: termios.VINTR,
    signal.SIGQUIT: termios.VQUIT,
    signal.SIGTSTP: termios.VSUSP,
}
"""Signals that the terminal driver makes of keys, with each key's index among its characters (termios(3))."""


@dataclass(slots=True)
class PseudoTerminal:
    """A pseudo-terminal with the settings of the user's terminal, which is raw while a program has the one.

    So every key reaches the program, and what a key means is decided as the program has set its terminal:
    Ctrl-C is SIGINT for the program alone, or a byte.
    """

    master: int
    slave: int
    """Kept open, so that the master can be read before the program has come, and after it has gone."""
    streams: tuple[int, ...]
    """Of stdin, stdout and stderr, those that are the terminal."""
    cooked: list[int | list[bytes | int]]
    """Settings of the user's terminal as they were found, which the program's gets too."""
    guard: "subprocess.Popen[bytes]"
    """Restores the user's terminal if this process is killed; not if another group has it then."""
    pressed: dict[int, float] = field(default_factory=dict)
    """When a key last sent the program each signal, in seconds since the epoch."""
    size: bytes = NO_SIZE
    used: bool = False
    """A program has it."""
    is_raw: bool = False
    """The user's terminal is raw: its keys are to be read here."""
    is_idle: bool = False
    """It is suspended, or closed: the user's terminal is left as it is."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def variables(self) -> dict[str, str]:
        """What the shim is told."""
        return {LAUNCH_TERMINAL: f"{','.join(map(str, self.streams))}:{os.ttyname(self.slave)}"}

    def find_group(self) -> int:
        """Return the process group that has the pseudo-terminal in the foreground; 0 if there is none."""
        try:
            return os.tcgetpgrp(self.master)
        except OSError:
            return 0

    def update(self) -> None:
        """Let the user's terminal be raw while the program has the other, with the same size."""
        with self.lock:
            if self.is_idle:
                return
            group = self.find_group()
            if self.used and not group:  # as the program has left it is not for a next one
                termios.tcsetattr(self.slave, termios.TCSANOW, self.cooked)
            self.used = bool(group)
            if not (group and is_foreground()):
                self.restore()
                return
            with contextlib.suppress(OSError, termios.error):
                if not self.is_raw or termios.tcgetattr(0)[tty.LFLAG] & termios.ICANON:
                    tty.setraw(0, termios.TCSANOW)
                    self.is_raw = True
                self.copy_size()

    def copy_size(self) -> None:
        """Give the pseudo-terminal the window's size, as the kernel tells the program; raises OSError."""
        size = fcntl.ioctl(0, termios.TIOCGWINSZ, NO_SIZE)
        if size != self.size:
            self.size = size
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def restore(self) -> None:
        """Set the user's terminal as it was; not one that a shell has given to somebody else."""
        with self.lock:
            if self.is_raw and is_foreground():
                with contextlib.suppress(OSError, termios.error):
                    termios.tcsetattr(0, termios.TCSANOW, self.cooked)
            self.is_raw = False

    def suspend(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Stop the program and this process's group until they are to go on: a signal handler for SIGTSTP.

        The kernel stops no group that nobody could wake: then both go on at once. The program's own is always
        such a group, since it is the leader of a session, and so gets SIGSTOP.
        """
        group = self.find_group()
        self.is_idle = True
        if group:
            signal_group(group, signal.SIGSTOP)
        self.restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.suspend)
        self.is_idle = False
        self.update()
        if group:
            signal_group(group, signal.SIGCONT)

    def close(self) -> None:
        """Restore the user's terminal for good."""
        with self.lock:
            self.restore()
            if not self.is_idle:
                self.is_idle = True
                self.guard.communicate(b"\n")


def open_terminal() -> PseudoTerminal | None:
    """Return a pseudo-terminal to stand for the user's; None if there is none, or it is not ours."""
    try:
        if not (os.isatty(0) and leads_where(0, 1) and is_foreground()):
            return None
        cooked = termios.tcgetattr(0)
        master, slave = os.openpty()
        termios.tcsetattr(slave, termios.TCSANOW, cooked)
        os.set_blocking(master, False)
        words, null = ["sh", "-c", GUARD], subprocess.DEVNULL
        guard = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=null, stderr=0)
        streams = (0, 1, 2) if leads_where(0, 2) else (0, 1)
        terminal = PseudoTerminal(master, slave, streams, cooked, guard)
        terminal.copy_size()
    except (OSError, termios.error):
        return None
    return terminal


def leads_where(one: int, other: int) -> bool:
    """Tell whether two descriptors lead to the same terminal; one that is closed leads nowhere."""
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def is_foreground() -> bool:
    """Tell whether the terminal behind stdin is this process's, rather than of another job of its shell's."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, which may be gone."""
    with contextlib.suppress(OSError):
        os.killpg(group, number)


@dataclass(slots=True)
class TerminalRelay:
    r"""Copies between the two terminals in a thread, and handles keys that end or stop the program.

    What the program prints is kept until somebody takes it to show it. The log has `\n` where the terminal
    driver has made `\r\n` of it.
    """

    terminal: PseudoTerminal
    find_log: Callable[[int], Path]
    """Returns the log of an attempt, which the shim makes before the first byte of it comes."""
    attempt: int
    notify: Callable[[], None]
    """Says that there is something to show."""
    log: int | None = None
    """Descriptor."""
    held: bytes = b""
    r"""A `\r` that waits to be written to the log, until it is known whether a newline follows."""
    fault: OSError | None = None
    """Why the log is not complete."""
    pieces: deque[bytes] = field(default_factory=deque)
    """What waits to be shown: one thread adds, and another takes."""
    waiting: int = 0
    """Bytes that were added and not taken yet."""
    interrupts: deque[float] = field(default_factory=lambda: deque(maxlen=PRESSES))
    """When Ctrl-C was pressed, in monotonic seconds."""
    insisted: bool = False
    """Ctrl-C is for the launcher from now on."""
    group: int = 0
    """The process group that had the program's terminal when it was last read."""
    typed: bytes = b""
    """Input that the program's terminal has not taken yet."""
    hung_up: bool = False
    """The user's terminal is gone."""
    ending: threading.Event = field(default_factory=threading.Event)
    wakeup: int = field(default_factory=lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    """Descriptor that is readable at the end."""
    thread: threading.Thread | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Begin to copy; Ctrl-Z and `kill -TSTP` stop the program with the launcher."""
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self.terminal.suspend)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Take what the program has printed to its end, and give the user's terminal back as it was."""
        if self.thread:
            self.ending.set()
            os.eventfd_write(self.wakeup, 1)
            self.thread.join(PATIENCE)
        self.terminal.close()
        if signal.getsignal(signal.SIGTSTP) == self.terminal.suspend:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def take(self) -> bytes:
        """Return what is to be shown next; nothing if all has been shown."""
        with self.lock:
            data = b"".join(self.pieces)
            self.pieces.clear()
            self.waiting = 0
            return data

    def run(self) -> None:
        """Copy to the end: the thread's body. If that fails, the program goes on and does not wait."""
        try:
            while not self.ending.is_set():
                ready = self.wait_ready()
                self.terminal.update()  # whoever sees what follows may answer with a key
                if self.terminal.master in ready:
                    self.read_output()
                    self.write_input()
                if 0 in ready:
                    self.read_input()
            while self.read_output():
                pass
            self.close_log()
        except Exception as error:
            self.terminal.close()
            logger.warning(f"the program's terminal failed ({error!r}): no more of it is shown")
            while not self.ending.is_set():  # take what the program prints, and throw it away
                select.select([self.terminal.master, self.wakeup], [], [], TICK)
                try:
                    os.read(self.terminal.master, CHUNK)
                except OSError:  # there is nothing, or nobody
                    self.ending.wait(TICK)

    def wait_ready(self) -> list[int]:
        """Wait for TICK at most until something can be read, or written to if there is input for it."""
        poller = select.poll()
        poller.register(self.wakeup, select.POLLIN)
        wanted = select.POLLIN if self.waiting < MOST_WAITING else 0
        poller.register(self.terminal.master, wanted | (select.POLLOUT if self.typed else 0))
        if self.terminal.is_raw and not self.hung_up and len(self.typed) < CHUNK:
            poller.register(0, select.POLLIN)
        return [descriptor for descriptor, _ in poller.poll(1000 * TICK)]

    def read_output(self) -> bool:
        """Take some of what the program has printed; False if there is nothing."""
        if self.waiting >= MOST_WAITING and not self.ending.is_set():
            return False
        try:
            data = os.read(self.terminal.master, CHUNK)
        except BlockingIOError:
            return False
        if self.group != (group := self.terminal.find_group()):
            self.group = group
            self.find_attempt()
        if self.log is None:
            self.open_log()
        self.write_log(data)
        with self.lock:
            self.pieces.append(data)
            self.waiting += len(data)
        self.notify()
        return True

    def find_attempt(self) -> None:
        """Turn to the log of another attempt, if there is one: what comes next is of its program."""
        newest = self.attempt
        while self.find_log(newest + 1).exists():
            newest += 1
        if newest != self.attempt:
            self.close_log()
            self.attempt = newest

    def open_log(self) -> None:
        """Open the log; before there is one, what is printed is an echo of what is typed."""
        try:
            self.log = os.open(self.find_log(self.attempt), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            self.fault = self.fault or error

    def write_log(self, data: bytes, *, is_last: bool = False) -> None:
        """Write to the log what the terminal driver has been given; a full disk is no reason not to go on."""
        data = self.held + data
        self.held = b"\r" if data.endswith(b"\r") and not is_last else b""
        view = memoryview(data.removesuffix(self.held).replace(b"\r\n", b"\n"))
        try:
            while view and self.log is not None:
                view = view[os.write(self.log, view) :]
        except OSError as error:
            self.fault = self.fault or error

    def close_log(self) -> None:
        """Close the log: nothing more belongs there."""
        if self.log is not None:
            self.write_log(b"", is_last=True)
            os.close(self.log)
        self.log, self.held = None, b""

    def read_input(self) -> None:
        """Take some of what the user has typed."""
        try:
            data = os.read(0, CHUNK)
        except OSError:
            data = b""
        if not data:  # the end of the input is a byte here: this is the terminal's
            self.hung_up = True
            return
        self.typed += data
        self.write_input()
        # Notice the keys of which the program's terminal has made signals.
        settings = termios.tcgetattr(self.terminal.master)
        for number, index in KEYS.items() if settings[tty.LFLAG] & termios.ISIG else ():
            key = settings[tty.CC][index]
            if key != b"\0" and key in data:
                self.handle_key_signal(number, data.count(key))

    def write_input(self) -> None:
        """Hand input on, as far as the program's terminal takes it."""
        with contextlib.suppress(OSError):
            while self.typed:
                self.typed = self.typed[os.write(self.terminal.master, self.typed) :]

    def handle_key_signal(self, number: int, count: int) -> None:
        """Do the launcher's part when a key was pressed: for one Ctrl-C there is none."""
        if number == signal.SIGTSTP:
            if is_stoppable(self.terminal.find_group()):
                os.kill(os.getpid(), signal.SIGTSTP)
            return
        self.terminal.pressed[number] = time.time()
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        self.interrupts.extend([now] * count)
        if not self.insisted and len(self.interrupts) == PRESSES and now - self.interrupts[0] < SPAN:
            self.insisted = True
            logger.info("Ctrl-C three times: the program is ended")
        if self.insisted:
            os.kill(os.getpid(), signal.SIGINT)


def is_stoppable(group: int) -> bool:
    """Tell whether Ctrl-Z is to stop a process group as a whole: a rank's own, not a job of a shell in it."""
    try:
        return bool(group) and os.getsid(group) == group and not ignores(group, signal.SIGTSTP)
    except OSError:
        return False
