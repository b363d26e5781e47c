"""Another user on this machine, who plants files: root gives them away, anybody else has to do without."""

import contextlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
STRANGER = 65534
"""`nobody`, who needs no entry in the password file."""


def give_away(path: Path) -> Path:
    """Make a file, a link or all of a directory the stranger's; skips the test where that is not allowed."""
    if os.geteuid():
        pytest.skip("giving a file to another user needs root")
    for each in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
        os.lchown(each, STRANGER, STRANGER)
    return path


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """Give a temporary directory that all users can go to, as they cannot to those that pytest makes."""
    with tempfile.TemporaryDirectory(prefix="launch-strangers-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def run_as(uid: int, function: Callable[[], T]) -> T:
    """Return what a function returns, or raise what it raises, in a child process of another user."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            result: tuple[bool, object] = (True, function())
        except BaseException as error:
            result = (False, error)
        os.write(writing, pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        worked, value = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if not worked:
        raise value
    return value  # type: ignore[no-any-return]
