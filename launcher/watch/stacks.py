"""Python stacks of a running process, without its help.

First by `faulthandler`, which the hook in the rank has registered on a real-time signal with a file: it works
within the signal's handler, so also while C code holds the GIL. Else by torch's server, which needs the
GIL. A process without a handler would die of the signal, and one that has
closed the file may have another behind its descriptor: then no signal is sent.
"""

import ctypes
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from launcher.files import read_stat
from launcher.watch.kernel_state import (
    catches_signal,
    has_open,
    read_entry,
    read_status_field,
    read_system_call,
)
from launcher.watch.rank_server import ServerError, post_handler
from launcher.watch.watch_model import Frame, Stack

SERVER_THREAD = "pt_workerserver"
CUT_SHORT = (
    "nanosleep",
    "clock_nanosleep",
    "poll",
    "ppoll",
    "select",
    "pselect6",
    "epoll_wait",
    "epoll_pwait",
    "pause",
    "rt_sigtimedwait",
)
"""System calls that a signal ends, whatever SA_RESTART says (signal(7)). Python's own calls go on."""
STACK_SIGNAL = signal.SIGRTMIN + 8
"""The signal on which the hook registers faulthandler."""
POLL = 0.02
"""Seconds between two looks at the file."""
TRIES = 5
"""Looks for a thread that can handle the signal."""
SETTLED = 0.06
"""Seconds without a further byte after which a dump is complete; faulthandler writes it at one go."""
LARGEST_DUMP = 1 << 20
"""Bytes of a dump that are read; 100 threads of 100 frames have less."""
LONGEST_NAME = 300
MOST_THREADS = 64
HEADER = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def check_signal(pid: int, path: Path) -> str:
    """Return why a process must not be sent the signal for stacks, or an empty text."""
    if not catches_signal(pid, STACK_SIGNAL):
        return "it has no handler for the stack signal"
    if not has_open(pid, path):
        return "it has closed the file for stacks"
    return ""


def request_stacks(pid: int, path: Path, patience: float) -> tuple[Stack, ...]:
    """Have a process append its stacks to its file, and return them; empty if none came in time.

    It gets no signal if `check_signal` has something against it at the last moment: it may have begun to end,
    or become another program, while its thread was awaited. Processes that share a file are to be asked one
    after the other.
    """
    try:
        start = make_room(path)
        thread = await_thread(pid)
        if check_signal(pid, path):
            return ()
        send_signal(pid, thread)
    except OSError:
        return ()
    size, changed, deadline = start, time.monotonic(), time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(POLL)
        now = path.stat().st_size
        if now != size:
            size, changed = now, time.monotonic()
        elif size > start and time.monotonic() - changed >= SETTLED:
            break
    with path.open("rb") as file:
        file.seek(start)
        return parse_stacks(file.read(LARGEST_DUMP).decode("utf-8", "replace"))


def make_room(path: Path) -> int:
    """Empty a file of stacks that has become large, and return its size; raises OSError.

    Its writers append to it (O_APPEND), so that they go on at its new end. It may be in memory.
    """
    size = path.stat().st_size
    if size <= LARGEST_DUMP:
        return size
    os.truncate(path, 0)
    return 0


def choose_thread(pid: int) -> int:
    """Return the thread that is to handle the signal: the main one, or one that does not mind.

    The handler writes the stacks of all threads, whichever it runs in. A signal cuts short what sleeps or
    polls in C code (signal(7)): `sleep()` would return early. So if the main thread does, an idle thread is
    taken, if possible one of torch's server, which the hook has started. So it is if the main thread waits
    for a dead disk (state D), where no signal reaches it; raises OSError if there is no other then.
    """
    is_stuck = read_stat(pid)[1][0] == "D"
    if not is_stuck and read_system_call(pid) not in CUT_SHORT:
        return pid
    idle = {tid: name for tid, name in list_threads(pid) if tid != pid and is_idle_thread(pid, tid)}
    servers = (tid for tid, name in idle.items() if name == SERVER_THREAD)
    found = next(servers, None) or next(iter(idle), pid)
    if is_stuck and found == pid:
        raise BlockingIOError("its only thread is in state D")
    return found


def await_thread(pid: int) -> int:
    """Return the thread that is to handle the signal; most waits in state D are short. Raises OSError."""
    for _ in range(TRIES):
        with suppress(BlockingIOError):
            return choose_thread(pid)
        time.sleep(POLL)
    return choose_thread(pid)


def list_threads(pid: int) -> list[tuple[int, str]]:
    """Return the threads of a process with their names; raises OSError."""
    found = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    return [(tid, read_entry(pid, f"task/{tid}/comm")) for tid in found]


def is_idle_thread(pid: int, tid: int) -> bool:
    """Tell whether a thread waits in a call that goes on after a signal, and does not block ours."""
    blocked = read_status_field(pid, "SigBlk", f"task/{tid}/status")
    is_blocked = not blocked or bool(int(blocked, 16) >> (STACK_SIGNAL - 1) & 1)
    return not is_blocked and read_system_call(pid, f"task/{tid}/syscall") == "futex"


def send_signal(pid: int, tid: int) -> None:
    """Send the signal for stacks to one thread of a process (tgkill(2)); raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if tid == pid or not hasattr(libc, "tgkill"):  # glibc before 2.30
        os.kill(pid, STACK_SIGNAL)
    elif libc.tgkill(pid, tid, int(STACK_SIGNAL)):
        raise OSError(ctypes.get_errno(), "tgkill")


def parse_stacks(text: str) -> tuple[Stack, ...]:
    """Return the threads of a dump of faulthandler, of which the main thread comes last.

    The thread that handled the signal is called `Current thread`; it is the main thread unless that blocks
    signals. Lines of other forms, such as C frames, are left out.
    """
    threads: list[tuple[str, bool, list[Frame]]] = []
    for line in text.splitlines():
        if header := HEADER.match(line):
            name = header[3] or header[2]
            threads.append((name[:LONGEST_NAME], header[1] == "Current thread", []))
        elif threads and (found := FRAME.match(line)):
            number = int(found[2]) if found[2].isdecimal() else 0
            threads[-1][2].append(Frame(found[1][:LONGEST_NAME], number, found[3][:LONGEST_NAME]))
    current = [number for number, (_, is_current, _) in enumerate(threads) if is_current]
    main = len(threads) - 1 if not text.rstrip().endswith("...") or not current else current[-1]
    kept = threads[-MOST_THREADS:]
    offset = len(threads) - len(kept)
    return tuple(
        Stack(name, tuple(frames), is_current=number + offset == main)
        for number, (name, _, frames) in enumerate(kept)
    )


def request_from_server(socket_path: Path, timeout: float) -> tuple[Stack, ...]:
    """Return the stacks that torch's server in the rank gives, without its own; raises ServerError.

    It waits for the GIL, and calls its own thread the current one.
    """
    found = parse_stacks(post_handler(socket_path, "dump_traceback", timeout).decode("utf-8", "replace"))
    if not found:
        raise ServerError("its stacks are not as expected")
    return tuple(stack for stack in found if stack.frames or stack.is_current)


def find_main(stacks: tuple[Stack, ...]) -> Stack | None:
    """Return the main thread's stack."""
    return next((stack for stack in stacks if stack.is_current), None)
