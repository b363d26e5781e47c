"""The text to train on, as one file of bytes."""

import hashlib
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.programs.options import OptionError

EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Directories of Python's library that are not taken: tests, and what was installed into it."""


def find_text(path: str | None) -> Path:
    """Give the file to train on: the user's, the files of the user's directory in one, or Python's library.

    Raises OptionError if there is none or it can't be read.
    """
    if path is None:
        return gather_library()
    source = Path(path).expanduser()
    try:
        if source.is_dir():
            return gather_directory(source)
        with source.open("rb"):
            return source
    except OSError as error:
        raise OptionError(f"--data.path {path}: {error.strerror}: give one that can be read") from None


def gather_library() -> Path:
    """Gather the source files of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    key = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    target = find_cache() / f"{version}-library-{key}.txt"
    if target.exists():
        return target
    files = [path for path in walk_files(root, EXCLUDED) if path.suffix == ".py"]
    if not files:
        raise OptionError(f"{root} holds no source files of Python's library: give --data.path")
    return concatenate(target, files)


def gather_directory(root: Path) -> Path:
    """Gather the regular files below the user's directory; a change to any of them gathers again."""
    files = list(walk_files(root, frozenset()))
    if not files:
        raise OptionError(f"--data.path {root} holds no files: give a directory with text in it")
    digest = hashlib.sha256()
    for file in files:
        found = file.stat()
        digest.update(os.fsencode(file.resolve()) + f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    target = find_cache() / f"directory-{digest.hexdigest()[:16]}.txt"
    return target if target.exists() else concatenate(target, files)


def walk_files(root: Path, excluded: frozenset[str]) -> Iterator[Path]:
    """Give the regular files below a directory, always in the same order."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - excluded)
        yield from (path for name in sorted(names) if (path := Path(folder, name)).is_file())


def find_cache() -> Path:
    """Give a directory of this user's for derived files; made if need be."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.expanduser raises if there is no home
    for base in (Path(home), Path(tempfile.gettempdir(), f"cache-{os.getuid()}")):
        folder = base / "launch-text"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        # Another user's directory in a shared /tmp could hold anything.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise OptionError(f"neither {home} nor {tempfile.gettempdir()} can be written: set XDG_CACHE_HOME")


def concatenate(target: Path, files: Iterable[Path]) -> Path:
    """Write the files' bytes one after the other, whole or not at all.

    Ranks that start at once each write a file of their own and rename it: the last one stays.
    """
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as part:
        try:
            for file in files:
                part.write(file.read_bytes())
            part.flush()
            Path(part.name).rename(target)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise
    return target


def describe_origin(path: str | None) -> str:
    """Name the text for people."""
    return path or f"Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
