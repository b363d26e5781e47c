"""A folder on a node's own memory or disk that lasts as long as this process, whatever becomes of it."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from launcher.files import DIRECTORY

FRESH = 300.0
"""Seconds in which a draft without a lock may be one that is being made."""


@contextlib.contextmanager
def keep_folder(
    begin: str,
    name: str,
    parents: Iterable[str],
    may_be: Callable[[Path], bool],
    trouble: list[str] | None = None,
) -> Iterator[str]:
    """Give a new folder, for its owner alone, in the first of some places that takes one; empty if none does.

    Its name is `begin`, `name` and something random. It is removed in the end. What a process that was killed
    has left in the same place, with a name of the same beginning, is removed by the next one: the kernel has
    let go of its lock. PIDs would not tell, since containers can share a place and not their PIDs. `trouble`
    gets why a place has taken none.
    """
    folder, lock = "", None
    for parent in dict.fromkeys(map(Path, parents)):
        path = parent / f"{begin}{name}{os.urandom(6).hex()}"
        draft = parent / f".{path.name}"
        try:
            if path.is_absolute() and may_be(path):
                _remove_leftovers(parent, begin)
                draft.mkdir(0o700)
                (draft / "owner").write_text("launch\n")  # there is room for more than names
                lock = _lock_folder(draft)
                draft.rename(path)  # by this name it is locked
                folder = str(path)
                break
        except (OSError, ValueError) as error:
            if trouble is not None:
                trouble.append(f"{parent}: {getattr(error, 'strerror', error)}")
            shutil.rmtree(draft, ignore_errors=True)
    try:
        yield folder
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock_folder(folder: str | Path) -> int | None:
    """Return a descriptor that keeps `_remove_leftovers` off a folder until closed; None without locks."""
    descriptor = os.open(folder, DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_leftovers(parent: Path, begin: str) -> None:
    """Remove this user's folders whose processes were killed."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.removeprefix(".").startswith(begin):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_left = entry.name.startswith(begin) or time.time() - status.st_mtime > FRESH
                if (
                    is_left
                    and status.st_uid == os.geteuid()
                    and (lock := _lock_folder(entry.path)) is not None
                ):
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)
