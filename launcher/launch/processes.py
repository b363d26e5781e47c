"""Processes as the kernel shows them: ranks, their deaths in order, signals to groups, and what is left."""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from launcher.files import read_stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    import psutil

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
    has_terminal: bool = False
    """Its output goes to a pseudo-terminal of the launcher's rather than to its log."""


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
        try:
            _, fields = read_stat(pid)
            return os.waitstatus_to_exitcode(int(fields[EXIT_CODE_FIELD - 3])) if fields[0] in "ZX" else None
        except (OSError, ValueError):
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
            key = -process.pid
            if self.known.get(process.pid) == process:
                continue
            self.known[process.pid] = process
            self.fresh.append(process)
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
        gone = [key for key in unseen if read_exit(-key) is not None or not os.path.exists(f"/proc/{-key}")]  # noqa: PTH110
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
        spared = 0
        for key, process in self.alive.items():
            if catchers and number not in read_signals(process.pid, "SigCgt"):
                spared += 1
                continue
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(key, number) if key > 0 else os.kill(process.pid, number)
        return spared

    def close(self) -> None:
        """Close the pidfds."""
        for key in self.alive:
            os.close(key) if key > 0 else None
        self.alive.clear()
        self.epoll.close()


def read_signals(pid: int, name: str) -> set[int]:
    """Return the signals of one of the masks in /proc/PID/status (proc(5)); none if it cannot be read."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            masks = [int(line.split()[1], 16) for line in file if line.startswith(f"{name}:")]
    except (OSError, ValueError, IndexError):
        return set()
    return {bit + 1 for mask in masks for bit in range(mask.bit_length()) if mask >> bit & 1}


def list_ranks(agent: int, first_attempt: int) -> list[RankProcess]:
    """Return the ranks among an agent's children, as their environments tell (proc(5)).

    It asks this node's kernel alone: with records on a shared filesystem, all ranks would look for them.
    """
    found = []
    for pid in list_children(agent):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
                pairs = dict(item.partition(b"=")[::2] for item in file.read().split(b"\0"))
            numbers = [int(pairs[name]) for name in (b"RANK", b"LOCAL_RANK", b"TORCHELASTIC_RESTART_COUNT")]
        except (OSError, KeyError, ValueError):  # it has ended, or is none
            continue
        found.append(RankProcess(numbers[0], numbers[1], first_attempt + numbers[2], pid))
    return found


def list_children(parent: int) -> list[int]:
    """Return the PIDs of a process's children; if the kernel keeps no such list, psutil makes one."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208 - no pathlib in what is asked so often
            with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    except OSError:
        import psutil

        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(parent).children()]
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
    """Wait for adopted children that have ended, so that a long job leaves no zombies; not for `spare`."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in spare:
                return
            os.waitpid(found.si_pid, 0)


def end_leftovers(grace: float, helpers: Collection[int] = ()) -> list[str]:
    """End every descendant of this process, SIGTERM first; return what they were, as `name (pid)`.

    Those that end by themselves within SETTLE are none. `helpers` are PIDs of processes of our own, which are
    left alone, as are their children.
    """
    import psutil

    def list_leftovers() -> "list[psutil.Process]":
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                is_helper = process.pid in helpers or process.ppid() in helpers
                if not is_helper and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    names: dict[int, str] = {}
    psutil.wait_procs(list_leftovers(), timeout=SETTLE)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        left = list_leftovers()
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                names[process.pid] = f"{process.name()} ({process.pid})"
                process.send_signal(number)
        psutil.wait_procs(left, timeout=grace)
    return list(names.values())
