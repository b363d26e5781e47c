"""Room on the run directory's disk for the account of a run, so that a full disk can be told of."""

import contextlib
import errno
import os

from launcher.files import open_own, remove
from launcher.runs.run_directory import RunDir, closing_descriptor

RESERVE = ".reserve"
SIZE = 256 << 10
"""Bytes that are held: a manifest of some hundred attempts, the last lines of the log, records."""
TRIAL = 4 << 10
"""Bytes that are written to see whether that is possible."""
FULL = "the run directory's disk is full"
REMOVED = "the run directory was removed during the run"


def reserve_space(run: RunDir) -> None:
    """Take some space while there is some, which `release_space` gives back; if that fails, there is none."""
    with contextlib.suppress(OSError):
        write_bytes(run, RESERVE, SIZE)


def release_space(run: RunDir) -> str:
    """Give back what was held, when the ranks have ended, who would use it up.

    Returns why nothing could be written any more before that, see `find_write_error`.
    """
    trouble = find_write_error(run)
    with contextlib.suppress(OSError):
        remove_file(run, RESERVE)
    return trouble


def find_write_error(run: RunDir) -> str:
    """Say why nothing can be written to the run directory, in words; empty if it can."""
    name = f".trial.{os.getpid()}"
    try:
        try:
            write_bytes(run, name, TRIAL)
        finally:
            remove_file(run, name)
    except OSError as error:
        return explain_write_error(run, error)
    return ""


def explain_write_error(run: RunDir, error: OSError) -> str:
    """Say what the error of a write means for a run directory."""
    if error.errno == errno.EDQUOT:
        return f"your quota on the run directory's disk is used up ({run.path})"
    if error.errno == errno.ENOSPC:
        return f"{FULL} ({run.path})"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"{REMOVED} ({run.path})"
    return f"the run directory cannot be written ({run.path}: {error.strerror})"


def is_full(run: RunDir) -> bool:
    """Tell whether the run directory's disk has no room; a quota is not seen so, and nothing is written."""
    with contextlib.suppress(OSError):
        found = os.statvfs(run.path)
        return found.f_bavail * found.f_frsize < TRIAL
    return False


def explain_missing_end(run: RunDir) -> str:
    """Say why nobody has recorded how a run ended; empty if the run directory does not tell."""
    if not run.path.is_dir():
        return f"{REMOVED} ({run.path})"
    return f"{FULL} ({run.path})" if is_full(run) else ""


def write_bytes(run: RunDir, name: str, count: int) -> None:
    """Write a file of random bytes, which no filesystem makes smaller; raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_descriptor(open_own(run.path)) as at:
        descriptor = os.open(name, flags, 0o600, dir_fd=at)
    try:
        left = count
        while left:
            left -= os.write(descriptor, os.urandom(left))
    finally:
        os.close(descriptor)  # network filesystems tell only here


def remove_file(run: RunDir, name: str) -> None:
    """Remove such a file if it exists; raises OSError if the directory does not."""
    with closing_descriptor(open_own(run.path)) as at:
        remove(at, name)
