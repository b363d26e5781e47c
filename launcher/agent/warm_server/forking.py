"""Serves requests for ranks over a socket, and forks each one twice, so that the supervisor adopts it."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping

from launcher.agent.python_program import ExecNeededError, split_command
from launcher.agent.start_method import check_environment, check_written
from launcher.agent.warm_server.fork_state import require_forkable
from launcher.agent.warm_server.preloading import Preloaded, PreloadError
from launcher.agent.warm_server.program_files import ProgramFiles
from launcher.protocol import LAUNCH_FIT

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME = b"launch-warm"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
MAX_MESSAGE, STREAMS = 1 << 16, 3
STOPPING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
"""Signals that a rank does not ignore at its start, even if the launcher does (nohup)."""
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that SLURM or a terminal may send to all processes of a step."""
ADOPTION_TICK = 0.0002
FORK_FAILED = "a rank could not be forked"


class RankRequest:
    """A rank as the launcher asks for it."""

    __slots__ = ("argv", "environ", "streams")

    def __init__(self, raw: Mapping[str, object], streams: list[int]) -> None:
        """Read a message; raises KeyError, TypeError or ValueError if it is none."""
        argv, environ = raw["argv"], raw["environ"]
        if not isinstance(argv, list) or not isinstance(environ, dict):
            raise TypeError("argv is a list, environ an object")
        self.argv = [str(word) for word in argv]
        self.environ = {str(name): str(value) for name, value in environ.items()}
        self.streams = streams
        """Descriptors for stdin, stdout and stderr."""


class ForkServer:
    """Forks ranks until the launcher closes its end of the socket."""

    def __init__(self, descriptor: int, hook: str) -> None:
        """Take the socket; `hook` is the entry that starts this process from PYTHONPATH."""
        os.set_inheritable(descriptor, False)
        self.socket = socket.socket(fileno=descriptor)
        self.hook = hook
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        self.restart = "0"
        """The newest start for which the modules' files were looked at."""
        self.files = ProgramFiles(split_command(sys.orig_argv))

    def run(self, names: list[str], before: frozenset[str]) -> tuple[RankRequest, Preloaded]:
        """Import modules, then serve; returns in a rank alone, and ends this process otherwise."""
        try:
            preloaded = Preloaded(names, self.hook, before)
            require_forkable()
        except (PreloadError, ExecNeededError) as error:
            self.reply(refused=str(error))
            os._exit(0)
        import gc

        gc.freeze()  # a collection in a rank would copy the pages that all share
        self.reply(ready=os.getpid())
        while True:
            request = self.receive()
            if request is None:
                os._exit(0)
            try:
                self.check_fork(request, preloaded)
                if self.fork_twice():
                    return request, preloaded
            except (ExecNeededError, OSError) as error:
                self.reply(refused=str(error))
            for stream in request.streams:
                os.close(stream)

    def receive(self) -> RankRequest | None:
        """Wait for a request: a file with its JSON, and the rank's streams; None if there are no more."""
        _, descriptors, _, _ = socket.recv_fds(self.socket, MAX_MESSAGE, STREAMS + 1)
        if len(descriptors) != STREAMS + 1:
            return None
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            return RankRequest(json.loads(file.read()), list(descriptors[1:]))

    def check_fork(self, request: RankRequest, preloaded: Preloaded) -> None:
        """Raise ExecNeededError if a rank cannot be forked now."""
        require_forkable()
        preloaded.check_shadows(self.files.list_own_modules())
        check_written(self.files.list_written(), preloaded.read)
        self.check_rank(request.environ, preloaded)
        restart = request.environ.get(RESTART_COUNT, "0")
        if restart != self.restart:
            if path := preloaded.find_changed_file():
                raise ExecNeededError(f"{path} has changed since it was imported")
            self.restart = restart

    def check_rank(self, environ: dict[str, str], preloaded: Preloaded) -> None:
        """Raise ExecNeededError if a rank's environment is not the one in which the imports were made."""
        check_environment(self.forget_hook(preloaded.environ), self.forget_hook(environ), preloaded.read)
        if LAUNCH_FIT in environ:
            raise ExecNeededError("its tensors are to be fake from the first import on")

    def forget_hook(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment without our folder in PYTHONPATH."""
        entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry != self.hook]
        path = {"PYTHONPATH": os.pathsep.join(entries)} if any(entries) else {}
        return {**{name: value for name, value in environ.items() if name != "PYTHONPATH"}, **path}

    def fork_twice(self) -> bool:
        """Fork a process whose parent ends at once; returns True in that process, which tells its PID.

        Raises OSError.
        """
        middle = os.fork()
        if middle:
            if os.waitpid(middle, 0)[1]:
                raise OSError(FORK_FAILED)
            return False
        middle = os.getpid()
        try:
            if os.fork():
                os._exit(0)
            os.setsid()
            while os.getppid() == middle:
                time.sleep(ADOPTION_TICK)
            if not self.reply(pid=os.getpid()):
                os._exit(1)
            self.socket.close()
        except BaseException:  # neither of the two may go on to serve
            os._exit(1)
        return True

    def reply(self, **message: object) -> bool:
        """Send a message to the launcher; tell whether it is there to get it."""
        try:
            self.socket.send(json.dumps(message).encode())
        except OSError:
            return False
        return True


def end_with_launcher(launcher: int) -> None:
    """Have the kernel end this process with the launcher, and name it for who looks at the processes."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(0)
