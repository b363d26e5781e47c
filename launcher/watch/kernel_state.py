"""What the kernel says of processes, without their help: state, where they wait, CPU and IO over a second.

All of it is read from `/proc/PID` (proc(5)). What may not be read (another user's process, a kernel without
`wchan`) is left out. A look never waits for the process itself, but reading can block in a stuck kernel, so
callers look in a thread that may be left behind.
"""

import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.files import read_stat
from launcher.watch.socket_bytes import read_socket_bytes
from launcher.watch.watch_model import ProcessState

MOST_CHILDREN = 64
"""Descendants of a rank that are looked at."""
LARGEST_ENTRY = 1 << 16
"""Bytes that are read of a file in /proc."""
PPID, UTIME, STIME, START = 4 - 3, 14 - 3, 15 - 3, 22 - 3
"""Indexes into what `read_stat` returns."""
GONE = ProcessState(pid=0, state="X")
SYSTEM_CALLS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 3: "close", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv",
        20: "writev", 23: "select", 24: "sched_yield", 26: "msync", 35: "nanosleep", 42: "connect",
        43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 73: "flock",
        72: "fcntl", 74: "fsync", 75: "fdatasync", 128: "rt_sigtimedwait", 82: "rename", 202: "futex",
        217: "getdents64", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat",
        262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4", 332: "statx",
        34: "pause",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 38: "renameat", 56: "openat", 57: "close",
        61: "getdents64", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64",
        72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync", 83: "fdatasync", 95: "waitid",
        98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 137: "rt_sigtimedwait",
        202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg",
        227: "msync", 242: "accept4", 260: "wait4", 291: "statx",
    },
}  # fmt: skip
"""Numbers of the calls in which programs wait, from the kernel's tables (syscall_64.tbl, unistd.h)."""


@dataclass(frozen=True, slots=True)
class KernelLook:
    """One look at a process: its state, and counters to compare with a later look."""

    process: ProcessState
    start: int = 0
    """Clock ticks since boot: by this a later process with the same PID is known."""
    ticks: int = 0
    """Clock ticks of CPU time, of all of its threads."""
    io_bytes: int = 0
    """Bytes read and written so far."""
    tcp_bytes: int = 0
    """Bytes sent and received so far by TCP connections that are open."""


def look_at_process(pid: int) -> KernelLook:
    """Read what the kernel says of a process now; its state is X if it is gone."""
    try:
        name, fields = read_stat(pid)
        started, ticks = int(fields[START]), int(fields[UTIME]) + int(fields[STIME])
    except (OSError, ValueError):
        return KernelLook(replace(GONE, pid=pid))
    wait_channel = read_entry(pid, "wchan")
    process = ProcessState(
        pid=pid,
        state=fields[0],
        wait_channel="" if wait_channel == "0" else wait_channel,
        system_call=read_system_call(pid),
        tracer=read_tracer(pid),
        command=name,
    )
    return KernelLook(process, started, ticks, read_io(pid) or 0, read_socket_bytes(pid))


def compare_looks(first: KernelLook, second: KernelLook, seconds: float) -> ProcessState:
    """Return the second look's state with the CPU and IO that were used since the first, `seconds` before.

    A process that has ended in between, or is another one by now, has the state X.
    """
    if second.process.state == "X" or first.start != second.start:
        return replace(first.process, state="X", wait_channel="", system_call="")
    ticks = max(second.ticks - first.ticks, 0)
    cores = ticks / os.sysconf("SC_CLK_TCK") / seconds if seconds > 0 else 0.0
    moved = max(second.io_bytes - first.io_bytes, 0) + max(second.tcp_bytes - first.tcp_bytes, 0)
    return replace(second.process, cpu=round(cores, 3), io_bytes=moved)


def read_entry(pid: int, name: str) -> str:
    """Return the text of a file in /proc/PID, or an empty one if it cannot be had."""
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123 - many and short
        return file.read(LARGEST_ENTRY).decode("utf-8", "replace").strip("\x00\n ")
    return ""


def read_system_call(pid: int, entry: str = "syscall") -> str:
    """Return the name of the system call that a thread is in; its number if the name is not known.

    It is the main thread, unless `entry` is another's, `task/TID/syscall`.
    """
    number = read_entry(pid, entry).partition(" ")[0]
    if not number.isdecimal():  # `running`, -1 outside of calls, or no permission
        return ""
    return SYSTEM_CALLS.get(platform.machine(), {}).get(int(number), number)


def read_tracer(pid: int) -> int:
    """Return the PID of the debugger of a process, 0 for none."""
    found = read_status_field(pid, "TracerPid")
    return int(found) if found.isdecimal() else 0


def read_status_field(pid: int, field: str, entry: str = "status") -> str:
    """Return a field of /proc/PID/status, or of a thread's status; empty if it cannot be had."""
    lines = (line.partition(":\t") for line in read_entry(pid, entry).splitlines())
    return next((value.strip() for name, _, value in lines if name == field), "")


def catches_signal(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal (SigCgt): without one, it could end the process."""
    try:
        caught = int(read_status_field(pid, "SigCgt"), 16)
    except ValueError:
        return False
    return bool(caught >> (number - 1) & 1)


def has_open(pid: int, path: Path) -> bool:
    """Tell whether a process has a file open under any descriptor."""
    try:
        wanted = path.stat()
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(is_file(entry, wanted) for entry in entries)
    except OSError:
        return False


def is_file(entry: "os.DirEntry[str]", wanted: os.stat_result) -> bool:
    """Tell whether a descriptor in /proc/PID/fd is open on this file."""
    try:
        return os.path.samestat(entry.stat(), wanted)
    except OSError:  # closed meanwhile
        return False


def read_io(pid: int) -> int | None:
    """Return the bytes that a process has read and written, by system calls and by paging; None if not shown.

    Paging (`read_bytes`) is in both counts if a call caused it: this is to see whether anything moves.
    """
    counters = [line.partition(": ") for line in read_entry(pid, "io").splitlines()]
    shown = [int(value) for name, _, value in counters if name in ("rchar", "wchar", "read_bytes")]
    return sum(shown) if shown else None


def list_descendants(pids: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return the descendants of each process by one pass over /proc, ascending, at most MOST_CHILDREN."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - one of thousands of entries
        if name.isdecimal():
            with suppress(OSError, ValueError):
                children.setdefault(int(read_stat(name)[1][PPID]), []).append(int(name))
    return {pid: collect_descendants(pid, children) for pid in pids}


def collect_descendants(pid: int, children: Mapping[int, list[int]]) -> tuple[int, ...]:
    """Return all processes below one in a tree."""
    found: list[int] = []
    pending = [pid]
    while pending and len(found) <= MOST_CHILDREN:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return tuple(sorted(found)[:MOST_CHILDREN])
