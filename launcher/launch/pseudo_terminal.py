"""The user's terminal and the pseudo-terminal that the program has in its place (pty(7), termios(3))."""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
import threading
import tty
from dataclasses import dataclass, field
from types import FrameType

from launcher.protocol import LAUNCH_TERMINAL

GUARD = """trap '' HUP INT QUIT TERM; saved=$(stty -g <&2) && read -r end || stty "$saved" <&2 2>/dev/null"""
"""Shell script that sets the terminal behind its stderr as it was, if its stdin ends without a line."""
NO_SIZE = struct.pack("4H", 0, 0, 0, 0)


@dataclass(slots=True)
class PseudoTerminal:
    """A pseudo-terminal with the settings of the user's terminal, which is raw while a program has the one.

    So every key reaches the program, and what a key means is decided as the program has set its terminal:
    Ctrl-C is SIGINT for the program alone, or a byte.
    """

    master: int
    slave: int
    """Kept open, so that the master can be read before the program has come, and after it has gone."""
    path: str
    streams: tuple[int, ...]
    """Of stdin, stdout and stderr, those that are the terminal."""
    cooked: list[int | list[bytes | int]]
    """Settings of the user's terminal as they were found, which the program's gets too."""
    pressed: dict[int, float] = field(default_factory=dict)
    """When a key last sent the program each signal, in seconds since the epoch."""
    size: bytes = NO_SIZE
    used: bool = False
    """A program has it."""
    is_raw: bool = False
    """The user's terminal is raw: its keys are to be read here."""
    suspended: bool = False
    guard: "subprocess.Popen[bytes] | None" = None
    """Restores the user's terminal if this process is killed."""
    closed: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def variables(self) -> dict[str, str]:
        """What the shim is told."""
        return {LAUNCH_TERMINAL: f"{','.join(map(str, self.streams))}:{self.path}"}

    @property
    def helpers(self) -> tuple[int, ...]:
        """PIDs of processes that are there for the terminal."""
        return (self.guard.pid,) if self.guard else ()

    def find_group(self) -> int:
        """Return the process group that has the pseudo-terminal in the foreground; 0 if there is none."""
        try:
            return os.tcgetpgrp(self.master)
        except OSError:
            return 0

    def update(self) -> None:
        """Let the user's terminal be raw while the program has the other, with the same size."""
        with self.lock:
            if self.closed or self.suspended:
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
        such a group, since torchrun gives it a session, and so gets SIGSTOP.
        """
        group = self.find_group()
        self.suspended = True
        if group:
            signal_group(group, signal.SIGSTOP)
        self.restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.suspend)
        self.suspended = False
        self.update()
        if group:
            signal_group(group, signal.SIGCONT)

    def start_guard(self) -> None:
        """Have the user's terminal restored even if this process is killed; not if another group has it."""
        with contextlib.suppress(OSError):
            self.guard = subprocess.Popen(
                ["sh", "-c", GUARD], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=0
            )

    def close(self) -> None:
        """Restore the user's terminal for good."""
        with self.lock:
            self.restore()
            self.closed = True
            if self.guard:
                self.guard.communicate(b"\n")
                self.guard = None


def open_terminal() -> PseudoTerminal | None:
    """Return a pseudo-terminal to stand for the user's; None if there is none, or it is not ours."""
    try:
        if not (os.isatty(0) and leads_where(0, 1) and is_foreground()):
            return None
        cooked = termios.tcgetattr(0)
        master, slave = os.openpty()
        streams = (0, 1, 2) if leads_where(0, 2) else (0, 1)
        terminal = PseudoTerminal(master, slave, os.ttyname(slave), streams, cooked)
        termios.tcsetattr(slave, termios.TCSANOW, cooked)
        terminal.copy_size()
        os.set_blocking(master, False)
        terminal.start_guard()
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
