"""Calls that may never return, such as of a file system or driver that hangs, in child processes.

A process that waits in the kernel without interruption (state D) cannot be killed, and whoever waits for it
waits too. So each call gets a child of its own; one that does not answer in time is killed and left behind.
"""

import contextlib
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

CHUNK = 1 << 16
HIGHEST = 1 << 20
"""Descriptors from here on are not looked for: the usual hard limit."""
GRACE = 0.05
"""Seconds in which a killed child is gone, unless it is in state D."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What became of a call."""

    value: T | None
    """None if it failed or did not answer."""
    seconds: float
    stuck: bool = False
    """It had not answered at the limit."""
    problem: str = ""
    """The error that it ended with, or the signal that ended its process."""


@dataclass(slots=True)
class Child:
    """A call under way."""

    pid: int
    pipe: int
    data: bytearray
    seconds: float | None = None
    """Until its answer was complete; None before that."""


def call_in_children(calls: Sequence[Callable[[], T]], limit: float) -> tuple[Answer[T], ...]:
    """Make all calls at once, each in a child of its own, and wait `limit` seconds for their answers.

    A result has to be something that pickle can carry. Raises OSError if no process can be made.
    """
    begin = time.monotonic()
    children: list[Child] = []
    try:
        for call in calls:
            children.append(start_child(call))
        collect_answers(children, begin, limit)
    finally:
        for child in children:
            os.close(child.pipe)
            if child.seconds is None:
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
        codes = [reap_child(child.pid) for child in children]
    return tuple(make_answer(child, code, limit) for child, code in zip(children, codes, strict=True))


def start_child(call: Callable[[], Any]) -> Child:
    """Fork a child that makes a call and writes the result to a pipe."""
    read_end, write_end = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if pid == 0:
        run_child(call, write_end)
    os.close(write_end)
    os.set_blocking(read_end, False)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # Here too: the child may not have come to it when it is killed.
    return Child(pid, read_end, bytearray())


def run_child(call: Callable[[], Any], pipe: int) -> NoReturn:
    """Make the call and end; nothing else of this process is kept open, since the child may stay for ever."""
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, HIGHEST)
        try:
            result: tuple[Any, str] = call(), ""
        except Exception as error:  # It is told to the parent.
            result = None, f"{type(error).__name__}: {error}"
        data = memoryview(pickle.dumps(result))
        while data:
            data = data[os.write(pipe, data) :]
    finally:
        os._exit(0)


def collect_answers(children: list[Child], begin: float, limit: float) -> None:
    """Read what the children write until all have ended or the limit has come."""
    poller = select.poll()
    waiting = {child.pipe: child for child in children}
    for pipe in waiting:
        poller.register(pipe, select.POLLIN)
    while waiting and (left := begin + limit - time.monotonic()) > 0:
        for pipe, _ in poller.poll(left * 1000):
            part = read_output_part(pipe)
            waiting[pipe].data += part
            if not part:
                waiting.pop(pipe).seconds = time.monotonic() - begin
                poller.unregister(pipe)


def read_output_part(pipe: int) -> bytes:
    """Return what a pipe holds now; empty at its end."""
    try:
        return os.read(pipe, CHUNK)
    except OSError:
        return b""


def reap_child(pid: int) -> int | None:
    """Return the wait status of a child; None for one that cannot be ended and is left behind."""
    end = time.monotonic() + GRACE
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except OSError:
            return None
        if found:
            return status
        if time.monotonic() > end:
            return None
        time.sleep(0.001)


def make_answer(child: Child, status: int | None, limit: float) -> Answer[Any]:
    """Say what became of a child's call."""
    if child.seconds is None:
        return Answer(None, limit, stuck=True, problem=f"no answer in {limit:g} s")
    try:
        value, problem = pickle.loads(bytes(child.data))  # noqa: S301  # Our own child has written it.
    except (EOFError, pickle.PickleError, ValueError):
        ended = f"signal {os.WTERMSIG(status)}" if status and os.WIFSIGNALED(status) else "no answer"
        return Answer(None, child.seconds, problem=f"its process ended with {ended}")
    return Answer(value, child.seconds, problem=problem)
