"""torchrun's agent as a process: how it is started, and what its log tells at once."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.launch.processes import prepare_agent
from launcher.launch.signals import FORWARDED

HEARD = b"death signal"
"""What torchelastic's agent says of a signal that it got (torch/distributed/elastic/agent/server/api.py)."""


def has_heard(log: Path, begin: int) -> bool:
    """Tell whether an agent's log says that it was sent a signal."""
    try:
        with log.open("rb") as file:
            file.seek(begin)
            return HEARD in file.read()
    except OSError:
        return False


def start_agent(
    command: Sequence[str], environ: Mapping[str, str], log: Path, *, in_step: bool = False
) -> "subprocess.Popen[bytes]":
    """Start the agent in a session of its own, so that a terminal's Ctrl-C reaches `launch` alone.

    SLURM sends a step's signals to every process in it: the agent would die of those for the ranks. There,
    stdin brings what the head says, which is not for the agent.
    """
    parent = os.getpid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL if in_step else None,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - there is one thread
        )
    finally:
        os.close(descriptor)
