"""The client of the warm process, a Python that has imported torch, and ranks that are forked from it."""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from launcher.config.settings import StartConfig
from launcher.launch.processes import adopt_orphans
from launcher.launch.rank_starter import RankStart, RankStarter
from launcher.launch.warm.program_text import read_program
from launcher.launch.warm.python_program import ExecNeededError, find_python_program
from launcher.protocol import LAUNCH_WARM
from launcher.rank.hook import FOLDER

logger = logging.getLogger(__name__)

NOT_FORKED = "the ranks are not forked from a process with torch: {}"
TORCH = "torch"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
FORK_TIMEOUT = 60.0
"""Seconds in which a rank is forked, or its start fails."""
MAX_REPLY = 1 << 16
END_GRACE = 2.0
LAST_LINE = 200


@dataclass(slots=True)
class WarmProcess:
    """The program's interpreter on this node, held before the program's first line, with torch imported."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    output: int
    """A descriptor of what it has written to stderr."""
    modules: Sequence[str]
    """What it imports."""
    refusal: str = ""
    """Why nothing can be forked from it; empty as long as that is not known."""
    ready: bool = False

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        modules: Sequence[str] = (TORCH,),
        directory: str | Path = ".",
    ) -> Self:
        """Start the interpreter for a program's argv (without the shim); returns while it imports modules.

        `environ` is what the ranks will have, as far as it is known. To be called in the main thread, since
        the kernel ends the process with the thread that started it. Raises ExecNeededError if ranks of this
        program cannot be forked, or if the process cannot be started.
        """
        program = find_python_program(list(argv), dict(environ))
        adopt_orphans()
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = [os.memfd_create(f"launch-warm-{name}") for name in ("out", "err")]
        settings = {"socket": other.fileno(), "launcher": os.getpid(), "preload": [*modules]}
        path = os.pathsep.join([FOLDER, *filter(None, [environ.get("PYTHONPATH")])])
        try:
            process = subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=output[0],
                stderr=output[1],
                cwd=directory,
                env={**environ, "PYTHONPATH": path, LAUNCH_WARM: json.dumps(settings)},
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            own.close()
            os.close(output[1])
            raise ExecNeededError(f"the warm process cannot be started ({error})") from None
        finally:
            other.close()
            os.close(output[0])
        return cls(process, own, output[1], modules)

    @property
    def is_alive(self) -> bool:
        """Whether the process lives; one that has ended is reaped."""
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether `fork_rank` returns at once: the imports are over, or have failed."""
        if not self.ready and not self.refusal:
            self.read_state(0)
        return self.ready or bool(self.refusal)

    def fork_rank(self, start: RankStart, streams: Sequence[int]) -> int:
        """Fork a rank, with these descriptors as stdin, stdout and stderr, and return its PID.

        It is a child of this process then, in a session of its own, and carries out the shim's steps. Waits
        for the imports. Raises ExecNeededError, now and from then on if the process has ended, and OSError if
        it does not answer: nobody knows then whether there is a rank.
        """
        while not self.is_ready:
            self.read_state(None)
        if self.refusal:
            raise ExecNeededError(self.refusal)
        try:
            # What it is started with is a file, since variables can be longer than a packet.
            with os.fdopen(os.memfd_create("launch-rank"), "w") as file:
                json.dump({"argv": start.argv, "environ": start.environ}, file)
                file.flush()
                socket.send_fds(self.channel, [b"rank"], [file.fileno(), *streams])
            message = self.receive(FORK_TIMEOUT)
        except TimeoutError:
            raise OSError(self.give_up("the warm process does not answer")) from None
        except OSError:
            raise ExecNeededError(self.give_up(self.describe_end())) from None
        if "pid" not in message:
            raise ExecNeededError(str(message.get("refused")))
        return int(str(message["pid"]))

    def read_state(self, timeout: float | None) -> None:
        """Read whether the imports are over, if that is told within a time (s)."""
        try:
            message = self.receive(timeout)
        except TimeoutError:
            return
        except OSError:
            self.give_up(self.describe_end())
            return
        self.ready, self.refusal = "ready" in message, str(message.get("refused", ""))

    def receive(self, timeout: float | None) -> dict[str, object]:
        """Wait for a message; raises TimeoutError, and ConnectionError if the process has ended."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            raise TimeoutError("no answer in time")
        text = self.channel.recv(MAX_REPLY)
        if not text:
            raise ConnectionResetError("it has ended")
        message = json.loads(text)
        return message if isinstance(message, dict) else {}

    def describe_end(self) -> str:
        """Say how the process has ended, and the last line that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_GRACE)
        text = os.pread(self.output, MAX_REPLY, max(0, os.fstat(self.output).st_size - MAX_REPLY))
        lines = [line.strip() for line in text.decode(errors="replace").split("\n") if line.strip()]
        code = self.process.returncode
        how = f"signal {-code}" if code and code < 0 else f"code {code}"
        return f"the warm process has ended ({how})" + (f": {lines[-1][:LAST_LINE]}" if lines else "")

    def give_up(self, reason: str) -> str:
        """Fork nothing any more; returns the reason."""
        self.refusal = self.refusal or reason
        self.close()
        return self.refusal

    def close(self) -> None:
        """End the process. Ranks that were forked go on, and one that is on its way does not start."""
        self.refusal = self.refusal or "the warm process is closed"
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


@dataclass(slots=True)
class WarmStarter(RankStarter):
    """Has the warm process fork each rank; the first reason against that is told, and ranks are executed."""

    warm: WarmProcess = field(kw_only=True)
    ranks_left: int = -1
    """Ranks after which the process is ended, so that it takes no memory; -1 if they may start anew."""
    is_told: bool = False

    @property
    def pids(self) -> Collection[int]:
        """The warm process, as long as it lives."""
        return (self.warm.process.pid,) if self.warm.is_alive else ()

    @property
    def is_ready(self) -> bool:
        """Whether a rank starts at once: the warm process has imported its modules, or it never will."""
        return self.warm.is_ready

    @property
    def descriptors(self) -> Collection[int]:
        """The warm process's channel as long as the imports go on."""
        return () if self.is_ready else (self.warm.channel.fileno(),)

    def start_rank(self, start: RankStart) -> int:
        """Start a rank and return its PID; raises OSError."""
        try:
            if start.local_rank == 0 and start.environ.get(RESTART_COUNT, "0") != "0":
                self.check_text(start)  # the program may have been edited since its last start
            with self.open_streams() as streams:
                pid = self.warm.fork_rank(start, streams)
        except ExecNeededError as error:
            if not self.is_told:
                logger.info(NOT_FORKED.format(error))
            self.is_told = True
            pid = RankStarter.start_rank(self, start)
        self.ranks_left -= self.ranks_left > 0
        if not self.ranks_left:
            self.close()
        return pid

    def check_text(self, start: RankStart) -> None:
        """Raise ExecNeededError, and fork nothing any more, if the program's text is against it."""
        text = read_program(start.argv, start.environ, to_the_end=len(self.warm.modules) > 1)
        if text and text.obstacle:
            raise ExecNeededError(self.warm.give_up(text.obstacle))

    def expect_ranks(self, count: int) -> None:
        """End the process after so many more ranks."""
        self.ranks_left = count

    def close(self) -> None:
        """End the warm process."""
        self.warm.close()


def choose_starter(
    by_exec: RankStarter, argv: Sequence[str], config: StartConfig, environ: Mapping[str, str]
) -> RankStarter:
    """Return what starts a program's ranks: forks of a process with torch unless `start.warm` forbids it.

    Ranks of a program that does not use torch are executed, unless it has modules to preload.
    """
    text = read_program(argv, environ, to_the_end=bool(config.preload))
    if config.warm == "off" or not (config.preload or (text and text.uses_torch)):
        return by_exec
    try:
        if text and text.obstacle:
            raise ExecNeededError(text.obstacle)
        warm = WarmProcess.start(argv, environ, (TORCH, *config.preload))
        return WarmStarter(by_exec.log, by_exec.reads_stdin, warm=warm)
    except ExecNeededError as error:
        logger.info(NOT_FORKED.format(error))
        return by_exec
