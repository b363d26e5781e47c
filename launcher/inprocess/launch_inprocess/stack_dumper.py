"""The rank writes the Python stacks of its threads to a file when the watcher sends it a signal.

`faulthandler` does that in the signal's handler in C, so that it works where the interpreter stands still.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .heartbeat import Heartbeat

OFFSET = 8
"""From SIGRTMIN; programs use SIGUSR1 and SIGUSR2, and the C library's first real-time signals."""


def register_dump(beat: Heartbeat) -> None:
    """Have the signal write to `rank-RANK.stack`, which stays open; raises OSError and the like.

    A handler of the program's stays, and system calls that the signal interrupts are restarted. As the
    interpreter ends, faulthandler puts back what was there before it: the signal is ignored from then on, and
    does not end the process. Programs that the rank executes get the default.
    """
    import contextlib
    import faulthandler
    import signal  # torch has imported it by now

    number = signal.SIGRTMIN + OFFSET
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        beat.add_note(f"no stacks by signal {number}, which the program handles")
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(ValueError):  # a thread that is not the main one may not
        signal.signal(number, signal.SIG_IGN)
    descriptor = os.open(os.path.join(beat.folder, f"rank-{beat.rank}.stack"), flags, 0o600)
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    beat.offer_dump(number)
