"""What the supervisor needs of an agent, which starts the ranks, and torchrun as one."""

import contextlib
import json
import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit
from typing import ClassVar

from launcher.errors import MachineError
from launcher.files import open_append, open_below
from launcher.launch.job import Job
from launcher.launch.processes import RankProcess, RankSet, prepare_agent
from launcher.launch.signals import FORWARDED
from launcher.runs.run_directory import RunDir, closing_descriptor

HEARD = b"death signal"
"""What torchelastic's agent says of a signal that it got (torch/distributed/elastic/agent/server/api.py)."""
ENDED = "launch-agent: process "
"""`launch-agent: process 4711 ended with -15`: how the lines begin by which a preloaded agent tells of its
children, as it finds them to have ended."""
EXIT = re.compile(rf"^{ENDED}(\d+) ended with (-?\d+)$", re.MULTILINE)
PRELOAD = f"""\
import contextlib, json, os, subprocess, sys
pipe = os.fdopen(int(sys.argv[1]))
import torch.distributed.run as torchrun
words = pipe.read() or sys.exit(1)
pipe.close()
keep = getattr(subprocess.Popen, "_handle_exitstatus", None)
def tell(process, *status):
    keep(process, *status)
    with contextlib.suppress(OSError):
        print({ENDED!r} + str(process.pid), "ended with", process.returncode, file=sys.stderr, flush=True)
if keep:
    subprocess.Popen._handle_exitstatus = tell
sys.argv[:] = json.loads(words)
torchrun.main()
"""
"""An agent that imports torch, takes over a second for that, and is told what to do while it does.

It tells what its children ended with, since nobody else learns that once it has looked (waitpid(2)).
"""
MIN_FILES, DEFAULT_FILES = 32, 1024
"""Open files without which torchrun's agent hangs or fails (with 12 it waits for ever; 26 are enough for two
ranks of torch 2.13), and the limit that most shells have."""


class Agent(ABC):
    """Starts a node's ranks, waits for them, ends all if one has failed, and starts them again."""

    label: ClassVar[str] = "launch"
    """Its name in messages: `torchrun`, or `launch`."""
    gets_signals: ClassVar[bool] = False
    """It is a process of its own, which signals can reach past the supervisor."""
    ranks: RankSet
    """All ranks that the supervisor has found."""

    @property
    def pids(self) -> Collection[int]:
        """PIDs of processes of the agent's own, which it ends itself and which are no leftovers."""
        return ()

    @property
    @abstractmethod
    def children(self) -> Collection[int]:
        """PIDs of children that the agent waits for: nobody else may reap them."""

    @property
    def descriptors(self) -> Collection[int]:
        """Descriptors that become readable once `poll` has something to do."""
        return ()

    @abstractmethod
    def begin(self) -> None:
        """Start it; raises OSError if that is not possible."""

    @abstractmethod
    def poll(self) -> int | None:
        """Do what is due; return its exit code once all is over (-n for signal n), None before."""

    @abstractmethod
    def list_ranks(self) -> Sequence[RankProcess]:
        """Return the ranks that it has started, at least those since the last call."""

    def was_signalled(self) -> bool:
        """Tell whether a stopping signal has reached the agent past the supervisor."""
        return False

    def read_exits(self) -> Mapping[int, int]:
        """Return what ranks ended with that the agent has reaped, by PID, as far as it tells."""
        return {}

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """End the ranks by a signal, and start none after that."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    def close(self) -> None:  # noqa: B027 - most agents hold nothing
        """Give back what it holds; its ranks have ended, or will be ended by others."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """What an agent of this process is made from."""

    job: Job
    run: RunDir
    environ: Mapping[str, str]
    """Each rank's, before the agent's own variables (see `launcher.launch.job.build_agent_environ`)."""
    has_terminal: bool = False
    """The job's one rank has a pseudo-terminal."""


@dataclass(slots=True)
class TorchrunAgent(Agent):
    """Runs torchrun, whose children are the ranks. `start` starts it, or has done so to import torch."""

    start: Callable[[], "subprocess.Popen[bytes]"]
    log: Path
    find_ranks: Callable[[int], Sequence[RankProcess]]
    """Returns ranks that a process of this PID has started: all of them, or those since the last call."""
    ranks: RankSet = field(default_factory=RankSet)
    log_begin: int = 0
    """Bytes of the log that are of earlier starts."""
    process: "subprocess.Popen[bytes]" = field(init=False)

    label: ClassVar[str] = "torchrun"
    gets_signals: ClassVar[bool] = True

    @property
    def children(self) -> Collection[int]:
        """PID of torchrun."""
        return (self.process.pid,)

    def begin(self) -> None:
        """Start torchrun; raises OSError."""
        self.log_begin = self.log.stat().st_size if self.log.exists() else 0
        self.process = self.start()

    def poll(self) -> int | None:
        """Return torchrun's exit code; None while it runs."""
        return self.process.poll()

    def list_ranks(self) -> Sequence[RankProcess]:
        """Return the ranks that torchrun has started, at least those since the last call."""
        return self.find_ranks(self.process.pid)

    def was_signalled(self) -> bool:
        """Tell whether torchrun has said that it was sent a signal."""
        return HEARD in self.read_log()

    def read_exits(self) -> Mapping[int, int]:
        """Return what torchrun's children ended with, -n for signal n, as far as its log tells."""
        return {int(pid): int(code) for pid, code in EXIT.findall(self.read_log().decode(errors="replace"))}

    def read_log(self) -> bytes:
        """Return torchrun's log since this start; empty if it cannot be read."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self.log_begin)
            return file.read()
        return b""

    def send_signal(self, number: int) -> None:
        """Send torchrun a signal, which it passes on to the ranks."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End torchrun at once."""
        self.process.kill()


@dataclass(frozen=True, slots=True)
class PreloadedAgent:
    """An agent on its way, which waits for its command line."""

    process: "subprocess.Popen[bytes]"
    pipe: int

    def begin(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Tell it its command line, that of `render_torchrun`; one that has ended already is returned too."""
        words = command[command.index("-m") + 1 :]
        with contextlib.suppress(BrokenPipeError), os.fdopen(self.pipe, "w") as pipe:
            json.dump(words, pipe)
        return self.process


def preload_agent(python: str, environ: Mapping[str, str], log: Path) -> PreloadedAgent:
    """Start an agent of a step before its node is planned; it ends with this process.

    The plan and what it takes are hidden by torch's import so; the environment is the agent's from its start.
    """
    reading, writing = os.pipe()
    try:
        # The last word is for those who look at the processes.
        command = (python, "-P", "-c", PRELOAD, str(reading), f"torchrun for {log.parents[1]}")
        return PreloadedAgent(open_agent(command, environ, log, subprocess.DEVNULL, (reading,)), writing)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)


def open_agent(
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    stdin: int | None,
    files: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start the agent in a session of its own, so that a terminal's Ctrl-C reaches `launch` alone.

    SLURM sends a step's signals to every process in it: the agent would die of those for the ranks. There,
    stdin brings the first node's commands, which are not for the agent. `files` stay open.
    """
    parent = os.getpid()
    with open_log(log) as descriptor:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=stdin,
            stdout=descriptor,
            stderr=descriptor,
            pass_fds=files,
            start_new_session=True,
            preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - there is one thread
        )


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
