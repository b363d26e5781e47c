"""The program's own file and folder, which the warm process looks at before it forks a rank."""

import os
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import all_suffixes
from zipfile import BadZipFile, ZipFile, is_zipfile

from launcher.agent.environ_writes import list_written_variables
from launcher.agent.python_program import PythonProgram

MAX_SOURCE = 1 << 24
"""Bytes of a program's file that is read."""
SUFFIXES = tuple(all_suffixes())
"""Endings of modules' files."""
FileState = tuple[int, int, int]


class ProgramFiles:
    """What the program's file sets, read again once it has changed."""

    __slots__ = ("program", "state", "written")

    def __init__(self, program: PythonProgram) -> None:
        self.program = program
        self.state: FileState | None = None
        self.written: frozenset[str] = frozenset()

    def list_written(self) -> frozenset[str]:
        """Return the names of variables that the program's file sets; none if it cannot be read."""
        if self.program.kind == "code":
            return list_written_variables(os.fsencode(self.program.name))
        path = self.find_source()
        state = read_state(path) if path else None
        if state != self.state:
            self.state = state
            self.written = list_written_variables(read_source(path))
        return self.written

    def find_source(self) -> str:
        """Return the path of the program's first file; empty if it is in an archive, or nowhere."""
        name = self.program.name
        if self.program.kind == "module":
            folder = self.find_folder()
            return find_module_file(name, [*([folder] if folder else []), *sys.path])
        return os.path.join(name, "__main__.py") if os.path.isdir(name) else name

    def find_folder(self) -> str:
        """Return the entry that Python puts first on `sys.path` for the program; empty if there is none."""
        name = self.program.name
        if self.program.kind != "file":
            return "" if getattr(sys.flags, "safe_path", False) else os.getcwd()
        if os.path.isdir(name) or is_zipfile(name):
            return name
        return "" if getattr(sys.flags, "safe_path", False) else os.path.dirname(os.path.realpath(name))

    def list_own_modules(self) -> set[str]:
        """Return the names of top-level modules and folders in the program's own folder, or archive."""
        folder = self.find_folder()
        try:
            entries = (
                ZipFile(folder).namelist() if os.path.isfile(folder) else os.listdir(folder or os.devnull)
            )
        except (OSError, BadZipFile):
            return set()
        names = {entry.partition("/")[0] for entry in entries}
        return {name.partition(".")[0] for name in names if "." not in name or name.endswith(SUFFIXES)}


def find_module_file(name: str, path: Sequence[str]) -> str:
    """Return the file that `python -m NAME` runs, by the names of files alone; empty if it is not found."""
    steps = name.split(".")
    for folder in path:
        base = os.path.join(folder, *steps)
        for candidate in (f"{base}.py", os.path.join(base, "__main__.py")):
            if os.path.isfile(candidate):
                return candidate
    return ""


def read_source(path: str) -> bytes:
    """Return a program's text; nothing of what is no plain file, which can be read once only."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_SOURCE) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def read_state(path: str) -> FileState | None:
    """Return what changes if a file is replaced or written; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
