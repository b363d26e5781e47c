"""Processes that each work on one device: told what to do, part by part, and given up if they do not answer.

They are forked from a process that has imported torch and started nothing of it, so that many start fast and
share its memory. One that a driver keeps in the kernel cannot be killed: it is left behind.
"""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

LONGEST = 300
"""Characters of an error."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process has said to a call."""

    value: Any = None
    problem: str = ""
    reason: str = ""
    """Why it was not asked, or not waited for."""
    is_late: bool = False
    """It has not answered in time, and was ended."""


@dataclass(slots=True)
class WorkProcess:
    """A process for one device. Functions that it is to call get `state` first."""

    state: Any
    connection: "Connection[Any, Any]" = field(init=False)
    process: multiprocessing.process.BaseProcess = field(init=False)
    problem: str = ""
    """Why it can do no more."""

    def __post_init__(self) -> None:
        """Start it."""
        context = multiprocessing.get_context("fork")
        self.connection, inner = context.Pipe()
        self.process = context.Process(target=serve, args=(inner, self.state, os.getpid()), daemon=True)
        self.process.start()
        inner.close()

    def give_up(self, problem: str) -> None:
        """End it, without waiting for that."""
        self.problem = problem
        self.process.kill()
        self.connection.close()


def serve(connection: "Connection[Any, Any]", state: object, parent: int) -> None:
    """Call the functions that the other end names, until it closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        while True:
            function, arguments = connection.recv()
            connection.send(call_function(function, state, arguments))
    except (EOFError, OSError, KeyboardInterrupt):
        return


class NotMeasuredError(Exception):
    """Why something was not measured, if that says nothing of the device."""


def call_function(function: Callable[..., object], state: object, arguments: Sequence[object]) -> Answer:
    """Return what a function says, or its error on one line."""
    try:
        return Answer(function(state, *arguments))
    except NotMeasuredError as error:
        return Answer(reason=str(error))
    except Exception as error:
        return Answer(problem=describe_error(error))


def describe_error(error: Exception) -> str:
    """Return an error on one line, cut off if it is long."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def ask_all(
    processes: Sequence[WorkProcess],
    function: Callable[..., object],
    arguments: Callable[[int], tuple[object, ...]],
    limit: float,
) -> list[Answer]:
    """Have all processes call a function at once, `limit` seconds at most; one answer for each.

    `arguments` gives those of the process with that number. A process that does not answer is ended.
    """
    deadline = time.monotonic() + limit
    answers: dict[int, Answer] = {}
    for number, one in enumerate(processes):
        try:
            if not one.problem:
                one.connection.send((function, arguments(number)))
        except OSError:
            one.give_up(describe_worker_end(one))
    waiting = {one.connection: number for number, one in enumerate(processes) if not one.problem}
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            number = waiting.pop(connection)  # type: ignore[call-overload]
            answers[number] = receive(processes[number])
    for number in waiting.values():
        processes[number].give_up(f"no answer within {limit:.0f} s")
        answers[number] = Answer(problem=processes[number].problem, is_late=True)
    return [answers.get(number, Answer(problem=one.problem)) for number, one in enumerate(processes)]


def receive(one: WorkProcess) -> Answer:
    """Return the answer of a process that has one, or has ended."""
    try:
        answer: Answer = one.connection.recv()
        return answer
    except (EOFError, OSError):
        one.give_up(describe_worker_end(one))
        return Answer(problem=one.problem)


def describe_worker_end(one: WorkProcess) -> str:
    """Say how a process has ended."""
    one.process.join(1.0)
    code = one.process.exitcode
    if code is not None and code < 0:
        return f"its process was ended by signal {-code}"
    return f"its process ended with exit code {code}"
