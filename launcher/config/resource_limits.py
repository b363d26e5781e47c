"""Limits of CPU time and memory for composing a configuration, which a user's file can make endless."""

import contextlib
import signal
from collections.abc import Iterator
from resource import RUSAGE_SELF, getrusage
from types import FrameType

from launcher.config.search_path import Sources, find_shipped
from launcher.errors import UsageError

MAX_SECONDS = 10.0
"""CPU time for composing a configuration: thirty times what the shipped one takes."""
MAX_KIB = 1 << 20
"""Growth of memory while a configuration is composed."""
TICK = 0.25
"""Seconds of CPU time between two checks."""


class ExhaustedError(BaseException):
    """The time or the memory is used up; a BaseException, so that no `except Exception` catches it."""


@contextlib.contextmanager
def limit_work(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Raise ExhaustedError in a block that takes more CPU time (s), or more than MAX_KIB of memory.

    Only the main thread can be limited. Limits do not nest: an inner block ends that of the outer one.
    """
    start = getrusage(RUSAGE_SELF)

    def check_usage(_number: int, _frame: FrameType | None) -> None:
        now = getrusage(RUSAGE_SELF)
        if now.ru_utime - start.ru_utime > seconds:
            raise ExhaustedError(f"more than {seconds:g} s")
        if now.ru_maxrss - start.ru_maxrss > MAX_KIB:
            raise ExhaustedError(f"more than {MAX_KIB >> 20} GiB of memory")

    try:
        before = signal.signal(signal.SIGVTALRM, check_usage)
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
    """Raise UsageError if the block, which composes a configuration from these sources, exceeds a limit.

    None sets no limit.
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
