"""The ranks of one start on this node: started, reaped, and ended in stages."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.agent.group import GroupStart
from launcher.launch.processes import RankProcess
from launcher.launch.signals import KILL_GRACE

LOST = 1
"""Exit code of a rank that is gone, and whose own nobody knows: another process has reaped it."""


@dataclass(slots=True)
class RankGroup:
    """The processes of one start."""

    start: GroupStart
    patience: float
    """Seconds from SIGTERM to SIGKILL."""
    ranks: list[RankProcess] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)
    """What ranks ended with, by PID: -n for signal n."""
    reaped: set[int] = field(default_factory=set)
    kill_at: float = math.inf
    """Monotonic time of SIGKILL, once the ranks were asked to end."""
    killed: bool = False

    @property
    def alive(self) -> list[RankProcess]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.pid not in self.exits]

    @property
    def is_stuck(self) -> bool:
        """Whether ranks live on after SIGKILL: they wait in the kernel, which may take for ever."""
        return self.killed and time.monotonic() > self.kill_at + KILL_GRACE

    def note_exits(self) -> Iterator[RankProcess]:
        """Give the ranks that have ended since the last call, and reap those that ended with 0.

        The others stay zombies until `close`, so that their process groups' numbers are not given away.
        """
        for rank in self.alive:
            if (code := read_exit_code(rank.pid)) is None:
                continue
            self.exits[rank.pid] = code
            if code == 0:
                self.reap(rank)
            yield rank

    def stop(self, patience: float | None = None) -> None:
        """Ask the ranks to end by SIGTERM, if that was not done yet; `patience` can shorten their time."""
        is_new = self.kill_at == math.inf
        seconds = self.patience if patience is None else min(patience, self.patience)
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)
        if is_new:
            self.send_signal(signal.SIGTERM)

    def kill_late(self) -> None:
        """Kill ranks whose time to end is over."""
        if not self.killed and time.monotonic() >= self.kill_at:
            self.killed = True
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process groups of the living ranks."""
        for rank in self.alive:
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, number)

    def close(self) -> None:
        """Kill what is left of the groups of ranks that have failed or were ended, and reap these."""
        for rank in self.ranks:
            if rank.pid in self.exits and rank.pid not in self.reaped:
                with contextlib.suppress(OSError):
                    os.killpg(rank.pid, signal.SIGKILL)
                self.reap(rank)

    def reap(self, rank: RankProcess) -> None:
        """Reap a rank that has ended."""
        self.reaped.add(rank.pid)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG)


def read_exit_code(pid: int) -> int | None:
    """Return what a child ended with, -n for signal n, without reaping it; None while it lives."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # not yet adopted, or reaped by somebody else
        return None if process_exists(pid) else LOST
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def process_exists(pid: int) -> bool:
    """Tell whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
