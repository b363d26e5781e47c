"""The imports of the warm process, and what has to be known of them before a rank is forked."""

import gc
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.machinery import PathFinder

from launcher.agent.python_program import ExecNeededError
from launcher.agent.warm_server.program_files import read_state
from launcher.agent.warm_server.recorded_environ import EnvironRecorder

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "1")
"""For the imports alone: OpenBLAS starts its threads as it is loaded."""
RARELY = 1 << 30
"""New objects until a collection, during the imports: what these make stays, and to look at it again and
again takes a seventh of the CPU time of `import torch`."""


OWN = ("launcher", "launch_inprocess", "sitecustomize")
"""Packages of ours, which the program does not see."""


class PreloadError(Exception):
    """The imports did not succeed, or left what does not go over a fork; the text says why."""


class Preloaded:
    """What the imports have read, changed and loaded."""

    __slots__ = ("changes", "cpus", "environ", "files", "names", "output", "read")

    def __init__(self, names: Sequence[str], hook: str, before: Collection[str]) -> None:
        """Import these modules; `hook` is our own folder on PYTHONPATH. Raises PreloadError.

        `before` are the modules that this interpreter had before any of ours, and of what those import.
        """
        check_customize(hook)
        recorder = EnvironRecorder()
        self.environ = recorder.before
        self.cpus = len(os.sched_getaffinity(0))
        """CPUs that this process may use, of which libraries take note."""
        os.putenv(*BLAS_THREADS)  # past `os.environ`, in which Python code would see it
        usual = gc.get_threshold()
        gc.set_threshold(RARELY, *usual[1:])
        try:
            for name in names:
                import_named(name)
        finally:
            if gc.get_threshold()[0] == RARELY:  # else a module has set its own
                gc.set_threshold(*usual)
            restore_variable(BLAS_THREADS[0])
            self.read = recorder.stop()
        self.changes = recorder.list_changes()
        new = [(name, module) for name, module in list(sys.modules.items()) if name not in before]
        loaded = {name: module for name, module in new if name.partition(".")[0] not in OWN}
        self.names = frozenset(name for name in loaded if "." not in name) - set(sys.builtin_module_names)
        """Top-level modules that a program could have files of the same names for."""
        note_copied_names()
        files = {str(getattr(module, "__file__", None) or "") for module in loaded.values()}
        self.files = {path: state for path in files if path and (state := read_state(path))}
        """The modules' files, as they were once they were imported."""
        self.output = tuple(read_import_output(descriptor) for descriptor in (1, 2))
        """What the imports have written to stdout and stderr."""

    def find_changed_file(self) -> str:
        """Return the path of a module's file that was changed since the import; empty if there is none."""
        return next((path for path, state in self.files.items() if read_state(path) != state), "")

    def check_shadows(self, own: Collection[str]) -> None:
        """Raise ExecNeededError if a module in the program's own folder has an imported one's name."""
        for name in sorted(self.names.intersection(own)):
            raise ExecNeededError(f"the program's folder has a module {name} of its own")


def note_copied_names() -> None:
    """Have the hook note where functions are that it replaces in a rank; its modules stay for the ranks."""
    __import__("launch_inprocess.import_hook").import_hook.note_copies()


def import_named(name: str) -> None:
    """Import one module; raises PreloadError whatever it raises."""
    try:
        import_module(name)
    except BaseException as error:
        text = " ".join(str(error).split())
        raise PreloadError(f"`import {name}` fails: {type(error).__name__}: {text}") from None


def check_customize(hook: str) -> None:
    """Raise PreloadError if the interpreter would run a `sitecustomize` of the user's before the imports."""
    names = ("sitecustomize", *(["usercustomize"] if is_user_site() else []))
    for name in names:
        spec = PathFinder.find_spec(name, [entry for entry in sys.path if entry not in ("", hook)])
        path = (spec and spec.origin) or ""
        if path and os.path.dirname(path) not in (os.path.dirname(os.__file__), "/usr/lib/python3"):
            raise PreloadError(f"{path} runs before the program, and may change what is imported")


def is_user_site() -> bool:
    """Tell whether `site` looks into the user's own folder of modules."""
    return bool(getattr(sys.modules.get("site"), "ENABLE_USER_SITE", False))


def restore_variable(name: str) -> None:
    """Have the C library's environment hold what `os.environ` does."""
    value = os.environ.get(name)
    os.unsetenv(name) if value is None else os.putenv(name, value)


def read_import_output(descriptor: int) -> bytes:
    """Return what has been written to an unnamed file, and empty it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    try:
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        return b""
    return text
