"""Copies between the user's terminal and the program's, in a thread, and handles keys that end or stop it."""

import contextlib
import logging
import os
import select
import signal
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.launch.processes import ignores
from launcher.launch.pseudo_terminal import PseudoTerminal
from launcher.launch.terminal_output import TerminalOutput

logger = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between two looks at the window's size, and at who has the terminal."""
CHUNK = 1 << 16
"""Bytes that are read at once."""
MOST_TYPED = 1 << 16
"""Bytes of input that wait for the program to read."""
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
class TerminalRelay:
    """The program's terminal as the launcher sees it."""

    terminal: PseudoTerminal
    output: TerminalOutput
    notify: Callable[[], None]
    """Says that there is something to show."""
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
    looked: float = 0.0
    """When there was a look at who has the terminal, in monotonic seconds."""
    ending: threading.Event = field(default_factory=threading.Event)
    wakeup: int = field(default_factory=lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    """Descriptor that is readable at the end."""
    thread: threading.Thread | None = None

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

    def run(self) -> None:
        """Copy to the end: the thread's body. If that fails, the program goes on and does not wait."""
        try:
            while not self.ending.is_set():
                self.copy_some()
            while self.read_output():
                pass
            self.output.close()
        except Exception as error:
            self.terminal.close()
            logger.warning(f"the program's terminal failed ({error!r}): no more of it is shown")
            self.drain()

    def copy_some(self) -> None:
        """Wait for something to copy, at most for TICK, and copy it."""
        if time.monotonic() - self.looked > TICK:
            self.looked = time.monotonic()
            self.terminal.update()
        for descriptor in self.wait_ready():
            if descriptor == 0:
                self.read_input()
            elif descriptor == self.terminal.master:
                self.read_output()
                self.write_input()

    def wait_ready(self) -> list[int]:
        """Return what can be read, or written to if there is input for it."""
        poller = select.poll()
        poller.register(self.terminal.master, select.POLLIN | (select.POLLOUT if self.typed else 0))
        poller.register(self.wakeup, select.POLLIN)
        if self.terminal.is_raw and not self.hung_up and len(self.typed) < MOST_TYPED:
            poller.register(0, select.POLLIN)
        return [descriptor for descriptor, _ in poller.poll(1000 * TICK)]

    def read_output(self) -> bool:
        """Take some of what the program has printed; False if there is nothing."""
        try:
            data = os.read(self.terminal.master, CHUNK)
        except BlockingIOError:
            return False
        if not self.terminal.is_raw:  # whoever sees it may answer with a key
            self.terminal.update()
        if self.group != (group := self.terminal.find_group()):
            self.group = group
            self.output.find_attempt()
        self.output.add(data)
        self.notify()
        return True

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
        self.find_key_signals(data)

    def write_input(self) -> None:
        """Hand input on, as far as the program's terminal takes it."""
        with contextlib.suppress(OSError):
            while self.typed:
                self.typed = self.typed[os.write(self.terminal.master, self.typed) :]

    def find_key_signals(self, data: bytes) -> None:
        """Notice the keys of which the program's terminal has made signals."""
        settings = termios.tcgetattr(self.terminal.master)
        if not settings[tty.LFLAG] & termios.ISIG:
            return
        for number, index in KEYS.items():
            key = settings[tty.CC][index]
            if key != b"\0" and key in data:
                self.handle_key_signal(number, data.count(key))

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
            os.kill(os.getpid(), signal.SIGINT)
        elif self.insisted:
            os.kill(os.getpid(), signal.SIGINT)

    def drain(self) -> None:
        """Take what the program prints, and throw it away."""
        while not self.ending.is_set():
            select.select([self.terminal.master, self.wakeup], [], [], TICK)
            try:
                os.read(self.terminal.master, CHUNK)
            except OSError:  # there is nothing, or nobody
                self.ending.wait(TICK)


def is_stoppable(group: int) -> bool:
    """Tell whether Ctrl-Z is to stop a process group as a whole: a rank's own, not a job of a shell in it."""
    try:
        return bool(group) and os.getsid(group) == group and not ignores(group, signal.SIGTSTP)
    except OSError:
        return False
