"""torchrun as the agent, which starts the ranks in a process of its own."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit
from typing import ClassVar

from launcher.errors import MachineError
from launcher.files import open_append, open_below
from launcher.launch.processes import RankProcess, RankSet, prepare_agent
from launcher.launch.signals import FORWARDED
from launcher.runs.run_directory import closing_descriptor

HEARD = b"death signal"
"""What torchelastic's agent says of a signal that it got (torch/distributed/elastic/agent/server/api.py)."""
MIN_FILES, DEFAULT_FILES = 32, 1024
"""Open files without which torchrun's agent hangs or fails (with 12 it waits for ever; 26 are enough for two
ranks of torch 2.13), and the limit that most shells have."""


@dataclass(slots=True)
class TorchrunAgent:
    """Runs torchrun, whose children are the ranks."""

    command: Sequence[str]
    environ: Mapping[str, str]
    log: Path
    stdin: int | None
    find_ranks: Callable[[int], Sequence[RankProcess]]
    """Returns ranks that a process of this PID has started: all of them, or those since the last call."""

    label: ClassVar[str] = "torchrun"
    pids: ClassVar[Collection[int]] = ()
    descriptors: ClassVar[Collection[int]] = ()
    ranks: RankSet = field(default_factory=RankSet)
    """All ranks that the supervisor has found."""
    log_begin: int = 0
    """Bytes of the log that are of earlier starts."""
    process: "subprocess.Popen[bytes]" = field(init=False)

    @property
    def children(self) -> Collection[int]:
        """PID of torchrun: nobody else may reap it."""
        return (self.process.pid,)

    def begin(self) -> None:
        """Start torchrun in a session of its own, so that a terminal's Ctrl-C reaches `launch` alone.

        Raises OSError. It ends with this process.
        """
        parent = os.getpid()
        with open_log(self.log) as descriptor:
            self.log_begin = os.fstat(descriptor).st_size
            self.process = subprocess.Popen(
                self.command,
                env=dict(self.environ),
                stdin=self.stdin,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - there is one thread
            )

    def poll(self) -> int | None:
        """Return torchrun's exit code (-n for signal n); None while it runs."""
        return self.process.poll()

    def list_ranks(self) -> Sequence[RankProcess]:
        """Return the ranks that torchrun has started, at least those since the last call."""
        return self.find_ranks(self.process.pid)

    def was_signalled(self) -> bool:
        """Tell whether torchrun has said, since this start, that it was sent a signal."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self.log_begin)
            return HEARD in file.read()
        return False

    def send_signal(self, number: int) -> None:
        """Send torchrun a signal, which it passes on to the ranks."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End torchrun at once."""
        self.process.kill()

    def close(self) -> None:
        """Its ranks have ended, or are ended by others."""


@contextlib.contextmanager
def open_log(log: Path) -> Iterator[int]:
    """Open an agent's log in a run directory, to append to it; raises OSError."""
    with closing_descriptor(open_below(log.parents[1], log.parent.name)) as logs:
        descriptor = open_append(logs, log.name)
    with closing_descriptor(descriptor):
        yield descriptor


def check_open_files() -> None:
    """Let this process, and so the agent, open as many files as is usual.

    Raises MachineError if the hard limit is too low for any agent.
    """
    soft, hard = getrlimit(RLIMIT_NOFILE)
    wanted = DEFAULT_FILES if hard == RLIM_INFINITY else min(hard, DEFAULT_FILES)
    if wanted < MIN_FILES:
        raise MachineError(
            f"this process may open {hard} files, and a job needs {MIN_FILES}: raise the hard"
            " limit (`ulimit -Hn`, limits.conf, docker --ulimit nofile=1048576, LimitNOFILE of slurmd)"
        )
    if soft != RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            setrlimit(RLIMIT_NOFILE, (wanted, hard))
