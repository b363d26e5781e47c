"""Whether the paths that a job needs answer, and what is free there."""

import contextlib
import errno
import os
import secrets
import stat

from launcher.doctor.model import PathFacts
from launcher.probe.guarded_calls import Answer

WRITTEN = ("run directory", "checkpoints", "temporary directory")
"""Purposes of directories that the job writes to."""
SAMPLE = bytes(4096)
"""What is written on trial: a block, which takes space where an empty file would not."""
STATES = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "read_only",
}
UNNAMED_REFUSED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""What file systems and kernels without O_TMPFILE say (open(2))."""


def describe_path(path: str, purpose: str, answer: Answer[PathFacts]) -> PathFacts:
    """Return what was found, or that nothing was."""
    if answer.value is None:
        state = "stuck" if answer.stuck else "failed"
        return PathFacts(path, purpose, state, round(answer.seconds, 3), detail=answer.problem)
    found = answer.value
    return PathFacts(
        path,
        purpose,
        found.state,
        round(answer.seconds, 3),
        found.free_kib,
        found.free_inodes,
        found.detail,
    )


def read_path(path: str, purpose: str) -> PathFacts:
    """Look at one path; this may hang."""
    free_kib = free_inodes = None
    try:
        mode = os.stat(path).st_mode
        space = os.statvfs(path)
        free_kib = space.f_bavail * space.f_frsize >> 10
        free_inodes = space.f_favail if space.f_files else None  # Btrfs and others have no table of inodes.
        if purpose in WRITTEN:
            write_sample(path)
        elif stat.S_ISREG(mode):
            read_sample(path)
        elif stat.S_ISDIR(mode) and not os.access(path, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        code = getattr(error, "errno", None) or 0
        reason = getattr(error, "strerror", None) or str(error)
        return PathFacts(path, purpose, STATES.get(code, "failed"), 0.0, free_kib, free_inodes, reason)
    return PathFacts(path, purpose, "ok", 0.0, free_kib, free_inodes)


def read_sample(path: str) -> None:
    """Read the first block of a file; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.read(descriptor, len(SAMPLE))
    finally:
        os.close(descriptor)


def write_sample(folder: str) -> None:
    """Write a block to a file without a name, or else to one that is removed; raises OSError."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in UNNAMED_REFUSED:
            raise
    else:
        write_block(descriptor)
        return
    name = os.path.join(folder, f".launch-{secrets.token_hex(8)}")
    descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        write_block(descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def write_block(descriptor: int) -> None:
    """Write the sample and close the file, which is where NFS tells that a disk is full; raises OSError."""
    try:
        os.write(descriptor, SAMPLE)
    finally:
        os.close(descriptor)
