"""What `sitecustomize` calls in the warm process: imports, then a fork for each rank that is asked for.

Each rank is forked twice, so that the launcher, which takes orphans, becomes its parent.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import PathFinder

from launcher.launch.warm.python_program import ExecNeededError

OWN = ("launcher", "launch_inprocess", "sitecustomize")
"""Packages of ours, which the program does not see."""
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "1")
"""For the imports alone: OpenBLAS starts its threads as it is loaded."""
DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd")
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME = b"launch-warm"
MAX_MESSAGE, STREAMS = 1 << 16, 3
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that SLURM or a terminal may send to all processes of a step."""
ADOPTION_TICK = 0.0002
FileState = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A rank as the launcher asks for it."""

    argv: list[str]
    environ: dict[str, str]
    streams: list[int]
    """Descriptors for stdin, stdout and stderr."""


@dataclass(slots=True)
class Preloaded:
    """What the imports have read, changed and loaded."""

    hook: str
    """Our own folder on PYTHONPATH."""
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPUs that this process may use, of which libraries take note."""
    asked: set[str] = field(default_factory=set)
    """Variables that Python code has asked for in vain, and that a rank may have."""
    changes: dict[str, str | None] = field(default_factory=dict)
    """Variables that the imports have set, and None for those that they have removed."""
    names: frozenset[str] = frozenset()
    """Top-level modules that a program could have files of the same names for."""
    files: dict[str, FileState | None] = field(default_factory=dict)
    """The modules' files, as they were once they were imported."""

    def load(self, names: Sequence[str], before: Collection[str]) -> None:
        """Import modules; raises ExecNeededError if that fails, or leaves what does not go over a fork.

        `before` are the modules that this interpreter had before any of ours, and of what those import.
        """
        _check_customize(self.hook)
        os.putenv(*BLAS_THREADS)  # past `os.environ`, in which Python code would see it
        gc.disable()  # what the imports make stays, and to look at it costs a seventh of the time
        usual = type(os.environ)
        os.environ.__class__ = _record_missing(self.asked)
        try:
            for name in names:
                _import_named(name)
        finally:
            os.environ.__class__ = usual
            gc.enable()
        value = os.environ.get(BLAS_THREADS[0])
        os.unsetenv(BLAS_THREADS[0]) if value is None else os.putenv(BLAS_THREADS[0], value)
        for name in {*self.environ, *os.environ}:
            if os.environ.get(name) != self.environ.get(name):
                self.changes[name] = os.environ.get(name)
        loaded = {name: module for name, module in sys.modules.items() if name not in before}
        loaded = {name: module for name, module in loaded.items() if name.partition(".")[0] not in OWN}
        self.names = frozenset(name for name in loaded if "." not in name) - set(sys.builtin_module_names)
        # The hook notes where functions are that it replaces in a rank; its modules stay for the ranks.
        __import__("launch_inprocess.import_hook").import_hook.note_copies()
        paths = {str(getattr(module, "__file__", None) or "") for module in loaded.values()} - {""}
        self.files = {path: read_state(path) for path in paths}
        _check_forkable()

    def find_changed_file(self) -> str:
        """Return the path of a module's file that was changed since the import; empty if there is none."""
        return next((path for path, state in self.files.items() if read_state(path) != state), "")


def serve_ranks(text: str, hook: str, root: str, before: frozenset[str]) -> None:
    """Serve as the warm process until the launcher ends; returns in each rank that is forked.

    `text` is the variable from the launcher, `hook` our folder on PYTHONPATH, and `root`, first on
    `sys.path`, the folder of our package; `before` are the modules that were there before ours.
    """
    try:
        settings = json.loads(text)
        with open("/proc/self/comm", "rb") as file:
            name = file.read().rstrip(b"\n")
        from launcher.launch.warm.becoming import become_rank

        _end_with_launcher(int(settings["launcher"]))
        sys.path.remove(root)  # the imports find what the program's find
        preloaded = Preloaded(hook)
        request = _fork_ranks(int(settings["socket"]), preloaded, settings["preload"], before)
        sys.path.insert(0, root)
        become_rank(request, preloaded, name)
        forget_own_modules(root)
    except BaseException as error:  # the program must not run in this process
        os.write(2, f"launch-rank: the warm process has failed: {type(error).__name__}: {error}\n".encode())
        os._exit(1)


def forget_own_modules(root: str) -> None:
    """Remove all modules of ours, and their folders: the program may have some by the same names."""
    for name in [name for name in sys.modules if name.partition(".")[0] == OWN[0]]:
        del sys.modules[name]
    sys.path.remove(root)
    folder = os.path.join(root, OWN[0])
    for path in [path for path in sys.path_importer_cache if f"{path}/".startswith(f"{folder}/")]:
        del sys.path_importer_cache[path]
    if root not in sys.path:
        sys.path_importer_cache.pop(root, None)


def read_state(path: str) -> FileState | None:
    """Return what changes if a file is replaced or written; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def list_mapped_files() -> list[str]:
    """Return the paths of files that are mapped into this process, libraries among them."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return list(dict.fromkeys(f"/{line.partition('/')[2].rstrip()}" for line in file if "/" in line))


def find_device(paths: Sequence[str]) -> str:
    """Return the first of these files that is a GPU's; empty if none is."""
    return next((path for path in paths if path.startswith(DEVICES)), "")


def _fork_ranks(
    descriptor: int, preloaded: Preloaded, names: Sequence[str], before: frozenset[str]
) -> RankRequest:
    """Import modules, then serve on a socket; returns in a rank alone, and ends this process otherwise."""
    os.set_inheritable(descriptor, False)
    server = socket.socket(fileno=descriptor)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        preloaded.load(names, before)
    except ExecNeededError as error:
        _reply(server, refused=str(error))
        os._exit(0)
    gc.freeze()  # a collection in a rank would copy the pages that all share
    _reply(server, ready=os.getpid())
    while True:
        # A file with the request's JSON, and the rank's streams.
        _, descriptors, _, _ = socket.recv_fds(server, MAX_MESSAGE, STREAMS + 1)
        if len(descriptors) != STREAMS + 1:
            os._exit(0)
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            request = RankRequest(**json.loads(file.read()), streams=list(descriptors[1:]))
        try:
            if _fork_twice(server):
                return request
        except OSError as error:
            _reply(server, refused=f"a rank could not be forked ({error})")
        for stream in request.streams:
            os.close(stream)


def _fork_twice(server: socket.socket) -> bool:
    """Fork a process whose parent ends at once; returns True in that process, which tells its PID.

    Raises OSError.
    """
    middle = os.fork()
    if middle:
        if os.waitpid(middle, 0)[1]:
            raise OSError("its parent has ended")
        return False
    middle = os.getpid()
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
        while os.getppid() == middle:
            time.sleep(ADOPTION_TICK)
        if not _reply(server, pid=os.getpid()):
            os._exit(1)
        server.close()
    except BaseException:  # neither of the two may go on to serve
        os._exit(1)
    return True


def _reply(server: socket.socket, **message: object) -> bool:
    """Send a message to the launcher; tell whether it is there to get it."""
    try:
        server.send(json.dumps(message).encode())
    except OSError:
        return False
    return True


def _end_with_launcher(launcher: int) -> None:
    """Have the kernel end this process with the launcher, and name it for who looks at the processes."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(0)


def _record_missing(asked: set[str]) -> "type[os._Environ[str]]":
    """Return a class for `os.environ` that notes the names that it has not."""

    class RecordedEnviron(os._Environ):  # type: ignore[type-arg]  # it takes none when it runs
        def __getitem__(self, name: str) -> str:
            try:
                return str(super().__getitem__(name))
            except KeyError:
                asked.add(name)
                raise

    return RecordedEnviron


def _import_named(name: str) -> None:
    """Import one module; raises ExecNeededError whatever it raises."""
    try:
        import_module(name)
    except BaseException as error:
        text = " ".join(str(error).split())
        raise ExecNeededError(f"`import {name}` fails: {type(error).__name__}: {text}") from None


def _check_customize(hook: str) -> None:
    """Raise ExecNeededError if a `sitecustomize` of the user's would run before the imports."""
    is_user_site = bool(getattr(sys.modules.get("site"), "ENABLE_USER_SITE", False))
    for name in ("sitecustomize", "usercustomize")[: 1 + is_user_site]:
        spec = PathFinder.find_spec(name, [entry for entry in sys.path if entry not in ("", hook)])
        path = (spec and spec.origin) or ""
        if path and os.path.dirname(path) not in (os.path.dirname(os.__file__), "/usr/lib/python3"):
            raise ExecNeededError(f"{path} runs before the program, and may change what is imported")


def _check_forkable() -> None:
    """Raise ExecNeededError if a fork of this process would not be as a process of its own."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise ExecNeededError(f"the imports have started {threads - 1} more thread{'s' * (threads > 2)}")
    targets = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor
            targets.append(os.readlink(f"/proc/self/fd/{entry}"))
    if device := find_device([*targets, *list_mapped_files()]):
        raise ExecNeededError(f"the imports have opened {device}")
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        raise ExecNeededError("the imports have started a process")
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if any(os.fstat(descriptor).st_size for descriptor in (1, 2)):
        raise ExecNeededError("the imports have printed something")
