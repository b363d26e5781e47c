"""The folder on a node's memory or disk in which the ranks keep their heartbeats while a job runs.

Its owner holds a lock on a file in it: what another launcher has left that was killed is known by its lock,
which is free. PIDs would not tell, since containers can share /dev/shm and not their PIDs.
"""

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PREFIX = "launch-watch-"
LOCK = "lock"
LONGEST = 80
"""Bytes of the path: a socket's in it has 107 at most (unix(7))."""
FRESH = 60.0
"""Seconds in which a folder without a lock may be one that is being made."""


@dataclass(slots=True)
class WatchFolder:
    """A folder of mode 0700, there until it is removed."""

    path: str
    lock: int
    """Descriptor; -1 once the folder is removed."""

    def remove(self) -> None:
        """Remove it with what the ranks have left in it, if that has not been done."""
        if self.lock >= 0:
            remove_folder(self.path)
            os.close(self.lock)
            self.lock = -1


@contextlib.contextmanager
def keep_watch_folder(environ: Mapping[str, str], *, enabled: bool) -> Iterator[WatchFolder | None]:
    """Have a folder until the end of the block; None if ranks are not to be watched, or it cannot be made."""
    folder = open_watch_folder(environ) if enabled else None
    try:
        yield folder
    finally:
        if folder:
            folder.remove()


def open_watch_folder(environ: Mapping[str, str]) -> WatchFolder | None:
    """Make a folder in the first of /dev/shm, $TMPDIR and /tmp that takes one.

    None, with a warning, if none does.
    """
    trouble = []
    for parent in dict.fromkeys(("/dev/shm", environ.get("TMPDIR") or "/tmp", "/tmp")):
        path = f"{parent}/{PREFIX}{os.urandom(6).hex()}"
        if not parent.startswith("/") or len(os.fsencode(path)) > LONGEST:
            continue
        try:
            return make_watch_folder(path)
        except OSError as error:
            trouble.append(f"{parent}: {error.strerror}")
    logger.warning(f"the ranks are not watched: no folder for heartbeats can be made ({', '.join(trouble)})")
    return None


def make_watch_folder(path: str) -> WatchFolder:
    """Make a folder and lock it; raises OSError, leaving nothing."""
    parent = os.path.dirname(path)
    os.mkdir(path, 0o700)
    lock = -1
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(f"{path}/{LOCK}", flags, 0o600)
        os.write(lock, b"held by a launcher\n")  # there is room for more than names
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if lock >= 0:
            os.close(lock)
        remove_folder(path)
        raise
    if parent == "/dev/shm":
        remove_stale(parent)
    return WatchFolder(path, lock)


def remove_stale(parent: str) -> None:
    """Remove the folders of this user's launchers that were killed; /dev/shm is memory."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and is_stale(entry):
                remove_folder(entry.path)


def is_stale(entry: "os.DirEntry[str]") -> bool:
    """Tell whether a folder is this user's, and nobody holds its lock."""
    try:
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if time.time() - status.st_mtime < FRESH:
            return False
        lock = os.open(f"{entry.path}/{LOCK}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def remove_folder(path: str) -> None:
    """Remove a folder of plain files, which has no other folders in it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            with contextlib.suppress(OSError):
                os.unlink(f"{path}/{name}")
        os.rmdir(path)
