"""Shows what the ranks print, and what is logged meanwhile, on stdout and stderr.

It does so in a thread, since a stalled reader must not hold up the job. rich is loaded with the first
thing to show: its import would slow down the start of the ranks.
"""

import errno
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from launcher.runs.progress import Progress
from launcher.runs.rank_logs import Chunk, Follower
from launcher.runs.run_directory import RunDir
from launcher.text import format_record, redirect_log

if TYPE_CHECKING:
    from launcher.launch.terminal import Terminal
    from launcher.plan.model import Plan
    from launcher.report.console import JobConsole

logger = logging.getLogger(__name__)

TICK = 0.04
"""Seconds between two looks at the logs, while there is nothing new."""
TICK_FILE = 0.0005
"""Seconds more for each file that is looked at, which on a network filesystem is a question to its server."""
PATIENCE = 10.0
"""Seconds that a terminal or pipe has, at the end, to take some of what is still to be shown."""
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


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """What is shown of a job, and how."""

    mode: str
    """`logs.console`: `rank0`, `all` or `none`."""
    origin: Callable[[int], str] | None = None
    """Returns the host of a rank, which stands before its lines; None if there is only one rank."""
    log_prefix: str = ""
    """Stands before what is logged."""
    shared: bool = False
    """Other nodes write to the same file."""
    followed: bool = False
    """Others write to the same file after this."""
    heading: tuple[str, ...] = ()
    """Lines that come first."""
    plan: "Plan | None" = None
    """Its placement comes next."""
    explain: bool = False
    notice: str = ""
    """Line after that, unless the job has ended by then."""
    hold: float = 0
    """Seconds that the console's import waits for something to show: it slows down the agent's."""


@dataclass(slots=True)
class OutputViewer:
    """Shows the ranks' output, and what is logged until `close`."""

    run_dir: RunDir
    follower: Follower
    options: ViewOptions
    terminal: "Terminal | None" = None
    """The pseudo-terminal that the program has in place of the user's."""
    waiting: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    """Lines of ours to show."""
    news: threading.Event = field(default_factory=threading.Event)
    """There is something to show, and no time to lose."""
    ending: threading.Event = field(default_factory=threading.Event)
    """The ranks have ended: what they printed is all there."""
    shown: threading.Event = field(default_factory=threading.Event)
    """All of that has been shown."""
    closing: threading.Event = field(default_factory=threading.Event)
    """No line of ours will follow."""
    console: "JobConsole | None" = None
    steps: Sequence[Progress] = ()
    """The first and the last logging step that rank 0 has printed."""
    thread: threading.Thread = field(init=False)
    release_log: Callable[[], None] = lambda: None
    """Lets what is logged go to stderr again."""

    def __post_init__(self) -> None:
        """Make the thread; it starts with the job."""
        if self.terminal:
            self.news = self.terminal.news
        self.thread = threading.Thread(target=self.run, daemon=True)

    @property
    def logs(self) -> str:
        """Where all that the ranks print is kept."""
        return str(self.run_dir.path / "logs")

    def start(self) -> None:
        """Begin to show."""
        prefix = self.options.log_prefix
        self.release_log = redirect_log(lambda record: self.waiting.put(prefix + format_record(record)))
        self.thread.start()

    def is_raw(self) -> bool:
        """Tell whether the user's terminal is in raw mode."""
        return self.terminal is not None and self.terminal.is_raw

    def watch_rank(self, rank: int, attempt: int) -> None:
        """Show what a rank prints, if the mode says so; rank 0 tells of progress in any case.

        What comes from its terminal is not shown from its log too.
        """
        if rank == 0 or self.options.mode == "all":
            for stream in ("err",) if self.terminal else ("out", "err"):
                self.follower.watch(self.run_dir.rank_log(rank, attempt, stream))

    def run(self) -> None:
        """Show the job to its end: the thread's body. If that fails, the job goes on without."""
        try:
            self.show_job()
        except Exception as error:
            self.release_log()
            logger.warning(f"the display failed ({error!r}): see {self.logs}")
            self.shown.set()

    def show_job(self) -> None:
        """Show what is new until there is no more.

        The console's import waits until a rank has started, something is logged, the end has come, or for
        long enough: it is hidden by torch's in the agent.
        """
        deadline = time.monotonic() + self.options.hold
        while time.monotonic() < deadline and not self.follower.offsets and self.waiting.empty():
            if self.ending.wait(TICK):
                break
        self.console = console = self.open_console()
        while not self.ending.is_set():
            if not self.show_new(console):
                self.news.wait(TICK + TICK_FILE * len(self.follower.offsets))
                self.news.clear()
        while self.show_new(console):
            pass
        console.close()
        self.steps = tuple(console.progress.steps)
        self.shown.set()
        self.closing.wait()
        self.show_waiting(console)

    def show_new(self, console: "JobConsole") -> bool:
        """Show some of what is new; False if there is nothing of the ranks'."""
        data = self.terminal.take() if self.terminal else b""
        if not self.is_raw():  # the user's terminal makes `\r\n` of `\n` itself again
            data = data.replace(b"\r\n", b"\n")
        busy = False
        for chunk in chain([Chunk(0, "out", data)] if data else [], self.follower.read_turn()):
            console.show_chunk(chunk)
            busy = True
        if not (busy and console.is_within_line):  # whose rest is on its way
            self.show_waiting(console)
        console.tick()
        return busy

    def show_waiting(self, console: "JobConsole") -> None:
        """Show the lines that wait."""
        while not self.waiting.empty():
            console.print_own_line(self.waiting.get())

    def open_console(self) -> "JobConsole":
        """Return the console, with the heading and the placement on it."""
        from launcher.report.console import JobConsole

        options = self.options
        console = JobConsole(options, self.logs, self.is_raw)
        for line in options.heading:
            console.print_own_line(line)
        if plan := options.plan:
            from launcher.report.placement import print_placement

            console.print_renderable(lambda out: print_placement(out, plan, explain=options.explain))
        if options.notice and not self.ending.is_set():
            console.print_own_line(options.notice)
        return console

    def finish(self, *, patient: bool = True) -> Sequence[Progress]:
        """Have the ranks' last lines shown, for as long as their reader keeps taking some of them.

        Returns the first and the last logging step.
        """
        self.ending.set()
        self.news.set()
        taken = -1
        while not self.shown.wait(PATIENCE):
            now = self.console.taken if self.console else 0
            if not patient or taken == now:
                break
            taken = now
        return self.steps

    def close(self) -> bool:
        """Have the last lines shown; False if the reader of our output takes none.

        That is told if it can be said without waiting for it.
        """
        self.release_log()
        self.closing.set()
        self.thread.join(PATIENCE if self.shown.is_set() else 0)
        stderr = open_stream("stderr")
        if self.thread.is_alive() and stderr.can_take():
            text = f"launch: warning: not all output was taken: see {self.logs}\n"
            stderr.write(text.encode(errors="replace"))
        return not self.thread.is_alive()
