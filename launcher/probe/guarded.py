"""Calls that may never return, such as of a file system or driver that hangs, in child processes.

A process that waits in the kernel without interruption (state D) cannot be killed, and whoever waits for it
waits too. So each call gets a child of its own; one that does not answer in time is killed and left behind.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, NoReturn, TypeVar

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


def call_in_children(calls: Sequence[Callable[[], T]], limit: float) -> tuple[Answer[T], ...]:
    """Make all calls at once, each in a child of its own, and wait `limit` seconds for their answers.

    A result has to be something that pickle can carry. Raises OSError if no process can be made.
    """
    begin = time.monotonic()
    pids: dict[Connection, int] = {}
    answers: dict[Connection, Answer[T]] = {}
    try:
        for call in calls:
            _start_child(call, pids)
        waiting = set(pids)
        while waiting and (left := begin + limit - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)  # noqa: S101 - for mypy
                waiting.remove(pipe)
                try:
                    value, problem = pipe.recv()
                except (EOFError, OSError):
                    value, problem = None, f"its process ended with {_reap_child(pids[pipe]) or 'no answer'}"
                answers[pipe] = Answer(value, time.monotonic() - begin, problem=problem)
    finally:
        for pipe, pid in pids.items():
            pipe.close()
            if pipe not in answers:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
        for pid in pids.values():
            _reap_child(pid)
    stuck: Answer[T] = Answer(None, limit, stuck=True, problem=f"no answer in {limit:g} s")
    return tuple(answers.get(pipe, stuck) for pipe in pids)


def _start_child(call: Callable[[], Any], pids: dict[Connection, int]) -> None:
    """Fork a child that makes a call and sends the result; raises OSError."""
    receiver, sender = Pipe(duplex=False)
    with sender:
        try:
            pid = os.fork()
        except OSError:
            receiver.close()
            raise
        if pid == 0:
            _run_child(call, sender)
        pids[receiver] = pid
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # Here too: the child may not have come to it when it is killed.


def _run_child(call: Callable[[], Any], pipe: Connection) -> NoReturn:
    """Make the call and end; nothing else of this process is kept open, since the child may stay for ever."""
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, pipe.fileno())
        os.closerange(pipe.fileno() + 1, HIGHEST)
        try:
            result: tuple[Any, str] = call(), ""
        except Exception as error:  # It is told to the parent.
            result = None, f"{type(error).__name__}: {error}"
        pipe.send(result)
    finally:
        os._exit(0)


def _reap_child(pid: int) -> str:
    """Wait a moment for a child to be gone; return the signal that ended it, if one has."""
    end = time.monotonic() + GRACE
    while time.monotonic() < end:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except OSError:
            break
        if found:
            return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
        time.sleep(0.001)
    return ""
