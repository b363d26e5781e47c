"""Files that a user names: written whole or not at all, and none of the user's own lost."""

import errno
import os
from pathlib import Path

from launcher.errors import MachineError, UsageError
from launcher.files import ON_THE_WAY, write_whole
from launcher.runs.run_directory import closing_descriptor

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors that are the machine's fault, not the command line's."""


def check_target(key: str, name: str) -> None:
    """Raise UsageError for a name that no file can be written to, before any work is done for it."""
    path = Path(name)
    if not name:
        raise UsageError(f"{key}= is empty: name a file")
    try:
        if path.is_dir() or name.endswith("/"):
            raise UsageError(f"{key}={name} is a directory: name a file in it")
        if not path.parent.is_dir():
            raise UsageError(f"{key}={name}: there is no directory {path.parent}: make it first")
    except OSError as error:
        raise explain(key, name, error) from None


def write_file(key: str, name: str, data: bytes) -> None:
    """Write a file whole or not at all, with the mode of the one that it replaces.

    Raises UsageError or MachineError. What is no regular file, such as /dev/stdout, is written to.
    """
    path = Path(name)
    try:
        if path.exists() and not path.is_file():
            # A device, or a pipe that somebody reads.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            with os.fdopen(descriptor, "wb") as file:
                os.set_blocking(descriptor, True)
                file.write(data)
        else:
            target = path.resolve()  # a link goes on pointing at the file
            with closing_descriptor(os.open(target.parent, ON_THE_WAY)) as folder:
                write_whole(folder, target.name, data, private=False, sync=True)
    except OSError as error:
        raise explain(key, name, error) from None


def explain(key: str, name: str, error: OSError) -> UsageError | MachineError:
    """Say why a file was not written, and what to do."""
    what = f"{key}={name} cannot be written ({error.strerror or error})"
    if error.errno in FULL:
        return MachineError(f"{what}: make room, or name a file on another disk")
    return UsageError(f"{what}: name a file in a directory that you may write to")
