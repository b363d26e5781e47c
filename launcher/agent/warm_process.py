"""The client of the warm process: a Python that has imported torch, from which ranks are forked."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from launcher.agent.group import RankStart
from launcher.agent.python_program import ExecNeededError, find_python_program
from launcher.launch.processes import adopt_orphans
from launcher.protocol import LAUNCH_WARM

HOOK = Path(__file__).parents[1] / "inprocess"
"""The folder whose `sitecustomize` holds the interpreter before the program's first line."""
TORCH = "torch"
FORK_TIMEOUT = 10.0
"""Seconds in which a rank is forked, or the warm process is taken for broken."""
MAX_REPLY = 1 << 16
END_GRACE = 2.0
LAST_LINE = 200


class WarmRefusedError(Exception):
    """A rank cannot be forked from the warm process; the text says why, and the caller execs the shim."""


@dataclass(slots=True)
class WarmProcess:
    """The program's interpreter on this node, held before the program's first line, with torch imported."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    output: int
    """A descriptor of what it has written to stderr."""
    refusal: str = ""
    """Why nothing can be forked from it; empty as long as that is not known."""
    ready: bool = field(default=False)

    @classmethod
    def start(
        cls, argv: Sequence[str], preload: Sequence[str], directory: Path, environ: Mapping[str, str]
    ) -> Self:
        """Start the interpreter for a program's argv (without the shim); returns while it imports torch.

        `environ` is what the ranks will have, as far as it is known. To be called in the main thread, since
        the kernel ends the process with the thread that started it. Raises WarmRefusedError if ranks of this
        program cannot be forked, or if the process cannot be started.
        """
        try:
            program = find_python_program(list(argv), dict(environ))
        except ExecNeededError as error:
            raise WarmRefusedError(str(error)) from None
        adopt_orphans()
        try:
            return cls.open_process(program.command, [TORCH, *preload], directory, environ)
        except (OSError, ValueError) as error:
            raise WarmRefusedError(f"the warm process cannot be started ({error})") from None

    @classmethod
    def open_process(
        cls, command: Sequence[str], modules: Sequence[str], directory: Path, environ: Mapping[str, str]
    ) -> Self:
        """Start the process, in a session of its own; raises OSError and ValueError."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = [os.memfd_create(f"launch-warm-{name}") for name in ("out", "err")]
        settings = {"socket": other.fileno(), "launcher": os.getpid(), "preload": [*modules]}
        path = os.pathsep.join([str(HOOK), *filter(None, [environ.get("PYTHONPATH")])])
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output[0],
                stderr=output[1],
                cwd=directory,
                env={**environ, "PYTHONPATH": path, LAUNCH_WARM: json.dumps(settings)},
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        except BaseException:
            own.close()
            os.close(output[1])
            raise
        finally:
            other.close()
            os.close(output[0])
        return cls(process, own, output[1])

    @property
    def pid(self) -> int:
        """Its PID, a process of the launcher's own."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process lives; one that has ended is reaped."""
        return self.process.poll() is None

    @property
    def descriptor(self) -> int:
        """Readable once `is_ready` or `refusal` has something new."""
        return self.channel.fileno()

    @property
    def is_ready(self) -> bool:
        """Whether `fork_rank` returns at once: the imports are over, or have failed."""
        if not self.ready and not self.refusal:
            self.read_state(0)
        return self.ready or bool(self.refusal)

    def fork_rank(self, start: RankStart, streams: Sequence[int] = (0, 1, 2)) -> int:
        """Fork a rank, with these descriptors as stdin, stdout and stderr, and return its PID.

        It is a child of this process then, in a session of its own, and carries out the shim's steps. Waits
        for the imports. Raises WarmRefusedError, now and from then on if the process has ended.
        """
        while not self.is_ready:
            self.read_state(None)
        if self.refusal:
            raise WarmRefusedError(self.refusal)
        try:
            self.send_request(start, streams)
            message = self.receive(FORK_TIMEOUT)
        except TimeoutError:
            message = self.take_last_answer()
            reason = self.give_up("the warm process does not answer")
            if not message:
                raise WarmRefusedError(reason) from None
        except OSError:
            raise WarmRefusedError(self.give_up(self.describe_end())) from None
        if "pid" not in message:
            raise WarmRefusedError(str(message.get("refused")))
        return int(str(message["pid"]))

    def send_request(self, start: RankStart, streams: Sequence[int]) -> None:
        """Send what a rank is started with as a file, since variables can be longer than a packet."""
        text = json.dumps({"argv": start.argv, "environ": start.environ}).encode()
        with os.fdopen(os.memfd_create("launch-rank"), "wb") as file, open(os.devnull, "rb") as null:  # noqa: PTH123
            file.write(text)
            file.flush()
            given = [stream if is_open_descriptor(stream) else null.fileno() for stream in streams]
            socket.send_fds(self.channel, [b"rank"], [file.fileno(), *given])

    def read_state(self, timeout: float | None) -> None:
        """Read whether the imports are over, if that is told within a time (s)."""
        try:
            message = self.receive(timeout)
        except TimeoutError:
            return
        except OSError:
            self.give_up(self.describe_end())
            return
        self.ready = "ready" in message
        self.refusal = str(message.get("refused", ""))

    def receive(self, timeout: float | None) -> dict[str, object]:
        """Wait for a message; raises TimeoutError, and ConnectionError if the process has ended."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            raise TimeoutError("no answer in time")
        text = self.channel.recv(MAX_REPLY)
        if not text:
            raise ConnectionResetError("it has ended")
        return parse_message(text)

    def take_last_answer(self) -> dict[str, object]:
        """Take no answer from now on, and return the one that has come meanwhile; empty if none has.

        A rank that cannot tell its PID any more ends: it is not to run beside one that is executed.
        """
        try:
            self.channel.shutdown(socket.SHUT_RD)
            text = self.channel.recv(MAX_REPLY, socket.MSG_DONTWAIT)
        except OSError:
            return {}
        return parse_message(text) if text else {}

    def describe_end(self) -> str:
        """Say how the process has ended, and the last line that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_GRACE)
        size = os.fstat(self.output).st_size
        lines = (
            os.pread(self.output, MAX_REPLY, max(0, size - MAX_REPLY)).decode(errors="replace").split("\n")
        )
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        code = self.process.returncode
        how = f"signal {-code}" if code and code < 0 else f"code {code}"
        return f"the warm process has ended ({how}){': ' if last else ''}{last[:LAST_LINE]}"

    def give_up(self, reason: str) -> str:
        """Fork nothing any more, and let no rank start that is still on its way; returns the reason."""
        self.refusal = self.refusal or reason
        self.close()
        return self.refusal

    def close(self) -> None:
        """End the process; ranks that were forked from it go on."""
        self.refusal = self.refusal or "the warm process is closed"
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


def parse_message(text: bytes) -> dict[str, object]:
    """Read a message of the warm process."""
    message = json.loads(text)
    return message if isinstance(message, dict) else {}


def is_open_descriptor(descriptor: int) -> bool:
    """Tell whether this process has a descriptor."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
