"""The client of the warm process: the program's interpreter, which has imported torch and forks the ranks."""

import contextlib
import json
import logging
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from launcher.config.settings import StartConfig
from launcher.launch.processes import adopt_orphans
from launcher.launch.warm.program import ExecNeededError, check_environment, find_python_program, read_program
from launcher.protocol import LAUNCH_WARM
from launcher.rank.hook import FOLDER

logger = logging.getLogger(__name__)

NOT_FORKED = "the ranks are not forked from a process with torch: {}"
TORCH = "torch"
FORK_TIMEOUT = 60.0
"""Seconds in which a rank is forked, or its start fails."""
MAX_REPLY = 1 << 16
END_GRACE = 2.0


@dataclass(slots=True)
class WarmProcess:
    """The program's interpreter on this node, held before the program's first line, with torch imported."""

    argv: tuple[str, ...]
    """The program that it was started for."""
    environ: Mapping[str, str]
    """What it was started with."""
    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    refusal: str | None = None
    """Why nothing can be forked from it; empty if it can; None while it imports, as far as it was asked."""

    @classmethod
    def start(
        cls, argv: Sequence[str], environ: Mapping[str, str], modules: Sequence[str] = (TORCH,)
    ) -> Self:
        """Start the interpreter for a program's argv (without the shim); returns while it imports modules.

        `environ` is what the ranks will have, as far as it is known. To be called in the main thread, since
        the kernel ends the process with the thread that started it. Raises ExecNeededError if ranks of this
        program cannot be forked, or if the process cannot be started.
        """
        program = find_python_program(argv, environ)
        adopt_orphans()
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {"socket": other.fileno(), "launcher": os.getpid(), "preload": [*modules]}
        path = os.pathsep.join([FOLDER, *filter(None, [environ.get("PYTHONPATH")])])
        try:
            with other, os.fdopen(os.memfd_create("launch-warm"), "wb") as output:
                process = subprocess.Popen(
                    program.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**environ, "PYTHONPATH": path, LAUNCH_WARM: json.dumps(settings)},
                    pass_fds=[other.fileno()],
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            own.close()
            raise ExecNeededError(f"the warm process cannot be started ({error})") from None
        return cls(tuple(argv), environ, process, own)

    def await_imports(self, timeout: float | None) -> bool:
        """Wait for the end of the imports, from which on `fork_rank` returns at once; tell if it was."""
        with contextlib.suppress(BlockingIOError):
            if self.refusal is None:
                answer = self.receive(timeout)
                self.refusal = answer if isinstance(answer, str) else ""
        return self.refusal is not None

    def fork_rank(self, argv: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> int:
        """Fork a rank, with these descriptors as stdin, stdout and stderr, and return its PID.

        It is a child of this process then, in a session of its own, and carries out the shim's steps. Waits
        for the imports. Raises ExecNeededError, now and from then on if the process has ended, and OSError if
        it does not answer: nobody knows then whether there is a rank.
        """
        self.await_imports(None)
        if self.refusal:
            raise ExecNeededError(self.refusal)
        # What it is started with is a file, since variables can be longer than a packet.
        with os.fdopen(os.memfd_create("launch-rank"), "w") as file, contextlib.suppress(ConnectionError):
            json.dump({"argv": argv, "environ": environ}, file)
            file.flush()
            socket.send_fds(self.channel, [b"rank"], [file.fileno(), *streams])
        try:
            answer = self.receive(FORK_TIMEOUT)
        except TimeoutError:
            self.close("the warm process does not answer")
            raise OSError(self.refusal) from None
        if isinstance(answer, str):
            raise ExecNeededError(answer)
        return answer

    def receive(self, timeout: float | None) -> int | str:
        """Wait for an answer, or the end of the process: a PID, or why there is none.

        Raises TimeoutError, with 0 s BlockingIOError.
        """
        self.channel.settimeout(timeout)
        with contextlib.suppress(ConnectionError):
            if text := self.channel.recv(MAX_REPLY):
                answer: int | str = json.loads(text)
                return answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_GRACE)
        self.close(f"the warm process has ended (code {self.process.returncode})")
        return self.refusal or ""

    def close(self, reason: str = "the warm process is closed") -> None:
        """End the process. Ranks that were forked go on, and one that is on its way does not start."""
        self.refusal = self.refusal or reason
        self.channel.close()
        self.process.kill()
        self.process.wait()


def start_warm(
    argv: Sequence[str], config: StartConfig, environ: Mapping[str, str], early: WarmProcess | None = None
) -> WarmProcess | None:
    """Return a warm process for a program: the early one, if it is for this and still there, or a new one.

    None if the ranks are to be executed: with `start.warm=off`, for a program that does not use torch, unless
    it has modules to preload, and for one that cannot be forked, of which a line tells.
    """
    # The early one has imported torch and nothing else.
    is_plain = config.warm != "off" and not config.preload
    if early and is_plain and not early.refusal and early.argv == tuple(argv):
        with contextlib.suppress(ExecNeededError):
            check_environment(early.environ, environ)
            return early
    if early:
        early.close()
    text = read_program(argv, environ, to_the_end=bool(config.preload))
    if config.warm == "off" or not (config.preload or (text and text.uses_torch)):
        return None
    try:
        if text and text.obstacle:
            raise ExecNeededError(text.obstacle)
        return WarmProcess.start(argv, environ, (TORCH, *config.preload))
    except ExecNeededError as error:
        logger.info(NOT_FORKED.format(error))
        return None
