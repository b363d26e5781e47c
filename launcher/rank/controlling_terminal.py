"""The pseudo-terminal that the launcher has made for a job's one rank."""

import os
from fcntl import ioctl
from termios import TIOCSCTTY


def take_terminal(text: str) -> None:
    """Make a terminal this session's own, and the streams that are named lead to it: `0,1,2:/dev/pts/5`.

    Keys that are signals go to this process's group then. Raises OSError and ValueError, leaving the streams.
    """
    names, _, path = text.partition(":")
    streams = [int(name) for name in names.split(",")]
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        ioctl(terminal, TIOCSCTTY, 0)
        for stream in streams:
            os.dup2(terminal, stream)
    finally:
        os.close(terminal)
