"""Room on the run directory's disk for the account of a run, so that a full disk can be told of."""

import contextlib
import errno
import os
from pathlib import Path

from launcher.files import open_own, remove
from launcher.runs.run_directory import RunDir, closing_descriptor

SIZE = 256 << 10
"""Bytes that are held: a manifest of some hundred attempts, the last lines of the log, records."""
TRIAL = 4 << 10
"""Bytes that are written to see whether that is possible."""
FULL = "the run directory's disk is full"
REMOVED = "the run directory was removed during the run"
held: dict[Path, int] = {}
"""What holds the space of each run: a file without a name, so that nothing is left of it after a SIGKILL."""


def reserve_space(run: RunDir) -> None:
    """Take some space while there is some, which `release_space` gives back; if that fails, there is none."""
    if run.path not in held:
        with contextlib.suppress(OSError):
            held[run.path] = write_nameless(run, SIZE)


def release_space(run: RunDir) -> str:
    """Give back what was held, when the ranks have ended, who would use it up.

    Returns why nothing could be written any more before that, see `find_write_error`.
    """
    trouble = find_write_error(run)
    if run.path in held:
        os.close(held.pop(run.path))
    return trouble


def find_write_error(run: RunDir) -> str:
    """Say why nothing can be written to the run directory, in words; empty if it can."""
    try:
        os.close(write_nameless(run, TRIAL))
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


def write_nameless(run: RunDir, count: int) -> int:
    """Write random bytes, which no filesystem makes smaller, to a file that then loses its name.

    Returns a descriptor that holds them; raises OSError.
    """
    name = f".reserve-{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_descriptor(open_own(run.path)) as at:
        writing = os.open(name, flags, 0o600, dir_fd=at)
        try:
            holding = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            remove(at, name)
    try:
        with os.fdopen(writing, "wb") as file:  # network filesystems tell of a full disk when it is closed
            file.write(os.urandom(count))
    except OSError:
        os.close(holding)
        raise
    return holding
