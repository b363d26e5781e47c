"""torchrun's agent as a process: how it is started, and what its log tells at once."""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit

from launcher.errors import MachineError
from launcher.files import open_append, open_below
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import FORWARDED

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


def was_signalled(log: Path, begin: int) -> bool:
    """Tell whether an agent's log says that it was sent a signal."""
    return HEARD in read_log(log, begin)


def read_exits(log: Path, begin: int) -> dict[int, int]:
    """Return what an agent's children ended with, -n for signal n, by their PIDs, as far as its log tells."""
    return {int(pid): int(code) for pid, code in EXIT.findall(read_log(log, begin).decode(errors="replace"))}


def read_log(log: Path, begin: int) -> bytes:
    """Return an agent's log from a byte on; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(begin)
            return file.read()
    except OSError:
        return b""


def open_agent(
    command: Sequence[str], environ: Mapping[str, str], log: Path, stdin: int | None, files: Sequence[int]
) -> "subprocess.Popen[bytes]":
    """Start the agent in a session of its own, so that a terminal's Ctrl-C reaches `launch` alone.

    SLURM sends a step's signals to every process in it: the agent would die of those for the ranks. There,
    stdin brings the first node's commands, which are not for the agent. `files` stay open.
    """
    parent = os.getpid()
    logs = open_below(log.parents[1], log.parent.name)
    try:
        descriptor = open_append(logs, log.name)
    finally:
        os.close(logs)
    try:
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
    finally:
        os.close(descriptor)
