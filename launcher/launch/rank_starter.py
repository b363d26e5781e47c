"""How a rank's process comes to be: the interface, and the way by exec."""

import contextlib
import os
import signal
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.launch.agent import open_log
from launcher.launch.job import render_shim
from launcher.launch.signals import FORWARDED, STOPPING
from launcher.runs.run_directory import closing_descriptor


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank's process is started with, before the shim has applied the plan."""

    local_rank: int
    argv: tuple[str, ...]
    """The program's argv, without the shim."""
    environ: dict[str, str]
    """All variables: the agent's, and those that torchrun would set."""


@dataclass(slots=True)
class RankStarter:
    """Starts ranks, each in a session of its own, as children of this process or adopted by it.

    Here it execs the shim, which ends with this process, and execs the program.
    """

    log: Path
    """The agent's log, which takes what a rank prints before the shim has opened the rank's own logs."""
    reads_stdin: bool = True
    """Ranks have this process's stdin, as torchrun's have; else they have an empty one, as several ranks
    have in place of a terminal."""

    @property
    def pids(self) -> Collection[int]:
        """PIDs of processes of its own, which are no ranks."""
        return ()

    @property
    def is_ready(self) -> bool:
        """Whether a rank can be started without waiting."""
        return True

    @property
    def descriptors(self) -> Collection[int]:
        """Descriptors that become readable once that may have changed."""
        return ()

    def expect_ranks(self, count: int) -> None:
        """Take that no more than so many ranks are to come: what only later ones need can end."""

    def close(self) -> None:
        """End processes of its own."""

    def start_rank(self, start: RankStart) -> int:
        """Start a rank and return its PID; raises OSError.

        Signals that `launch` passes on would end the shim: they are blocked until it has the program's own
        dispositions. Those that end a job are as torchrun's ranks have them: not ignored, even with nohup.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with self.open_streams() as streams:
            return os.posix_spawn(
                sys.executable,
                render_shim(start.argv),
                start.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, stream, number) for number, stream in enumerate(streams)],
                setsid=True,
                setsigmask=(*mask, *FORWARDED),
                setsigdef=(*STOPPING, signal.SIGPIPE),
            )

    @contextlib.contextmanager
    def open_streams(self) -> Iterator[tuple[int, int, int]]:
        """Open a rank's stdin, stdout and stderr; raises OSError."""
        with open_log(self.log) as log:
            if self.reads_stdin:
                yield 0, log, log
                return
            with closing_descriptor(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) as stdin:
                yield stdin, log, log


def close_on_exec() -> None:
    """Keep descriptors beyond stderr that this process was started with from its children."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are what is wanted
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)
