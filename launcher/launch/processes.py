"""Processes as the kernel shows them: ranks, their deaths in order, signals to groups, and what is left."""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from launcher.files import read_signals, read_stat

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SETTLE = 1.0
"""Seconds in which helpers of a rank that has ended end by themselves: multiprocessing's resource tracker and
fork server notice by the end of a pipe."""
EXIT_CODE_FIELD = 52
"""Field of /proc/PID/stat with the exit status in waitpid's form (proc(5))."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process on this node, which has a session and process group of its own."""

    rank: int
    local_rank: int
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class Death:
    """A rank's end."""

    process: RankProcess
    time: float
    """Seconds since the epoch."""
    exitcode: int | None
    """As subprocess gives it: -n for signal n; None if somebody else has reaped the process first."""

    @property
    def status(self) -> int:
        """The exit code as a shell gives it: 128+n for signal n."""
        code = self.exitcode or 0
        return 128 - code if code < 0 else code


def read_exit(pid: int) -> int | None:
    """Return what a process has ended with, -n for signal n, without reaping it.

    None while it lives, and if its parent has reaped it. procfs tells of other processes' children.
    """
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        with contextlib.suppress(OSError, ValueError):
            _, fields = read_stat(pid)
            return os.waitstatus_to_exitcode(int(fields[EXIT_CODE_FIELD - 3])) if fields[0] in "ZX" else None
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


@dataclass(slots=True)
class RankSet:
    """The ranks of this node over all starts: those alive, and the deaths in their order.

    An epoll instance gives pidfds in the order in which they have become readable (ep_poll_callback of the
    kernel's fs/eventpoll.c), so that ranks that die at almost the same time are in order too.
    """

    alive: dict[int, RankProcess] = field(default_factory=dict)
    """By pidfd; by -PID if the kernel gives none (before Linux 5.3)."""
    deaths: list[Death] = field(default_factory=list)
    known: dict[int, RankProcess] = field(default_factory=dict)
    """All that were added, by PID."""
    fresh: list[RankProcess] = field(default_factory=list)
    """Those that nobody has taken note of yet."""
    epoll: select.epoll = field(default_factory=select.epoll)

    def add(self, processes: Iterable[RankProcess]) -> None:
        """Start to watch those that are new; a process that is gone already is a death."""
        for process in processes:
            if self.known.get(process.pid) == process:
                continue
            self.known[process.pid] = process
            self.fresh.append(process)
            key = -process.pid
            try:
                key = os.pidfd_open(process.pid)
                self.epoll.register(key, select.EPOLLIN)
            except ProcessLookupError:
                self.deaths.append(Death(process, time.time(), None))
                continue
            except OSError:
                pass
            self.alive[key] = process

    def poll(self, others: Iterable[int], timeout: float) -> None:
        """Wait until a rank dies, another descriptor is readable, or the time (s) is over."""
        poller = select.poll()
        for descriptor in (self.epoll.fileno(), *others):
            poller.register(descriptor, select.POLLIN)
        poller.poll(timeout * 1000)
        unseen = [key for key in self.alive if key < 0]
        gone = [key for key in unseen if read_exit(-key) is not None or not Path(f"/proc/{-key}").exists()]
        for key in (*(descriptor for descriptor, _ in self.epoll.poll(0)), *gone):
            process = self.alive.pop(key)
            if key > 0:
                self.epoll.unregister(key)
                os.close(key)
            self.deaths.append(Death(process, time.time(), read_exit(process.pid)))

    def signal_groups(self, number: int, ranks: Collection[int] = ()) -> bool:
        """Send a signal to the process group of every living rank, or of some; tell whether any got it."""
        reached = False
        for process in self.alive.values():
            if not ranks or process.rank in ranks:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, number)
                    reached = True
        return reached

    def signal_ranks(self, number: int, *, catchers: bool = False) -> int:
        """Send a signal to each living rank's own process, or to those alone that have a handler for it.

        Returns how many ranks were left out.
        """
        chosen = [process.pid for process in self.alive.values()]
        if catchers:
            chosen = [pid for pid in chosen if (read_signals(pid, "SigCgt") or 0) >> (number - 1) & 1]
        for pid in chosen:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        return len(self.alive) - len(chosen)

    def close(self) -> None:
        """Close the pidfds."""
        for key in self.alive:
            os.close(key) if key > 0 else None
        self.alive.clear()
        self.epoll.close()


def list_ranks(agent: int, first_attempt: int) -> list[RankProcess]:
    """Return the ranks among an agent's children, as their environments tell (proc(5)).

    It asks this node's kernel alone: with records on a shared filesystem, all ranks would look for them.
    """
    found = []
    try:
        own = Path(f"/proc/{agent}/environ").read_bytes()
        tasks = os.listdir(f"/proc/{agent}/task")  # noqa: PTH208 - names are what is wanted
        lists = [Path(f"/proc/{agent}/task/{task}/children").read_text() for task in tasks]
    except OSError:
        return []
    for pid in map(int, " ".join(lists).split()):
        with contextlib.suppress(OSError, KeyError, ValueError):  # it has ended, or is no rank
            text = Path(f"/proc/{pid}/environ").read_bytes()
            if text == own:  # it is still to execute the rank
                continue
            pairs = dict(item.partition(b"=")[::2] for item in text.split(b"\0"))
            numbers = [int(pairs[name]) for name in (b"RANK", b"LOCAL_RANK", b"TORCHELASTIC_RESTART_COUNT")]
            found.append(RankProcess(numbers[0], numbers[1], first_attempt + numbers[2], pid))
    return found


def adopt_orphans() -> None:
    """Make this process the one that orphaned descendants fall to, so that none escapes."""
    call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def prepare_agent(parent: int, ignored: Iterable[int], end: signal.Signals = signal.SIGTERM) -> None:
    """Ask for a signal when the parent dies, and ignore others; for the child, between fork and exec."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    call_prctl(PR_SET_PDEATHSIG, end)
    if os.getppid() != parent:
        os.kill(os.getpid(), end)


def call_prctl(option: int, value: int) -> None:
    """Call prctl(2); a kernel that refuses leaves the process as it is."""
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def reap_orphans(spare: Collection[int]) -> None:
    """Wait for adopted children that have ended, so that a long job leaves no zombies.

    Others wait for `spare`, and for what is in this process's own session, as git is.
    """
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in spare or os.getsid(found.si_pid) == os.getsid(0):
                return
            os.waitpid(found.si_pid, 0)


def end_leftovers(grace: float, helpers: Collection[int] = ()) -> list[str]:
    """End every descendant of this process, SIGTERM first; return what they were, as `name (pid)`.

    Those that end by themselves within SETTLE are none. `helpers` are PIDs of processes of our own, which are
    left alone, as are their children.
    """
    import psutil

    names: dict[int, str] = {}
    for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        left = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                is_own = process.pid in helpers or process.ppid() in helpers
                if not is_own and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
                    if number:
                        names[process.pid] = f"{process.name()} ({process.pid})"
                        process.send_signal(number)
        if not left:
            break
        psutil.wait_procs(left, timeout=grace if number else SETTLE)
    return list(names.values())
