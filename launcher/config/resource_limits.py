"""A watchdog over code that a file of somebody's can keep busy for ever."""

import contextlib
import signal
from collections.abc import Iterator
from resource import RUSAGE_SELF, getrusage
from types import FrameType

from launcher.config.search_path import Sources, find_shipped
from launcher.errors import UsageError

MAX_SECONDS = 10.0
"""CPU time in which any configuration is put together: thirty times what the shipped one takes."""
MAX_KIB = 1 << 20
"""Memory that it may take."""
TICK = 0.25
"""Seconds of CPU time between two looks."""


class ExhaustedError(BaseException):
    """The time or the memory is used up; no `except Exception` on the way is to catch it."""


@contextlib.contextmanager
def limit_work(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Raise ExhaustedError in what takes more CPU time (s), or more than MAX_KIB of memory.

    In other threads than the main one, and within another watchdog, nothing is watched.
    """
    start = getrusage(RUSAGE_SELF)

    def look(_number: int, _frame: FrameType | None) -> None:
        now = getrusage(RUSAGE_SELF)
        if now.ru_utime - start.ru_utime > seconds:
            raise ExhaustedError(f"more than {seconds:g} s")
        if now.ru_maxrss - start.ru_maxrss > MAX_KIB:
            raise ExhaustedError(f"more than {MAX_KIB >> 20} GiB of memory")

    try:
        before = signal.signal(signal.SIGVTALRM, look)
    except ValueError:  # not the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_VIRTUAL, TICK, TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def limit_composition(sources: Sources, seconds: float | None = MAX_SECONDS) -> Iterator[None]:
    """Raise UsageError for a configuration from these sources that would take for ever to put together.

    None leaves it unwatched.
    """
    try:
        with contextlib.nullcontext() if seconds is None else limit_work(seconds):
            yield
    except ExhaustedError as error:
        own = [str(folder) for folder in sources.folders if folder != find_shipped()]
        raise UsageError(
            f"the configuration takes {error} to put together: look for references that multiply, ${{…}} or"
            f" defaults, in {', '.join(own) or 'the overrides'}"
        ) from None
