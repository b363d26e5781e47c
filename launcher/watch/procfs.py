"""What the kernel says of processes, without their help: state, where they wait, CPU, files and TCP.

It is read from `/proc/PID` (proc(5)) and by sock_diag(7). What may not be read (another user's process, a
kernel without `wchan`) is left out. A look never waits for the process itself, but reading can block in a
stuck kernel, so callers look in a thread that may be left behind.
"""

import os
import platform
import re
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from launcher.files import read_stat
from launcher.watch.model import ProcessState

TICKS = os.sysconf("SC_CLK_TCK")
UTIME, STIME, START = 14 - 3, 15 - 3, 22 - 3
"""Indexes into what `read_stat` returns."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_LARGEST_ENTRY = 1 << 16
_MOST_DESCENDANTS = 64
_SYSTEM_CALLS: Mapping[str, Mapping[int, str]] = {
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


# Files


def read_kernel_text(path: str) -> str | None:
    """Return the text of a small file of procfs or sysfs; None if it cannot be read."""
    try:
        descriptor = os.open(path, _READ)
    except (OSError, ValueError):
        return None
    try:
        return os.read(descriptor, _LARGEST_ENTRY).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_status_field(pid: int, field: str, entry: str = "status") -> str:
    """Return a field of /proc/PID/status, or of a thread's status; empty if it cannot be had."""
    for line in (read_kernel_text(f"/proc/{pid}/{entry}") or "").splitlines():
        name, _, value = line.partition(":\t")
        if name == field:
            return value.strip()
    return ""


def list_numbers(folder: str) -> list[int]:
    """Return the names in a directory that are numbers, as processes and threads in /proc."""
    try:
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]  # noqa: PTH208 - takes microseconds
    except OSError:
        return []


# Looks


@dataclass(frozen=True, slots=True)
class KernelLook:
    """One look at a process: its state, and counters to compare with a later look."""

    process: ProcessState
    start: int = 0
    """Clock ticks since boot: by this a later process with the same PID is known."""
    ticks: int = 0
    """Clock ticks of CPU time, of all of its threads."""
    bytes_moved: int = 0
    """Bytes read and written so far, and sent and received by TCP connections that are open."""


def look_at_process(pid: int) -> KernelLook:
    """Read what the kernel says of a process now; its state is X if it is gone."""
    try:
        name, fields = read_stat(pid)
        started, ticks = int(fields[START]), int(fields[UTIME]) + int(fields[STIME])
    except (OSError, ValueError):
        return KernelLook(ProcessState(pid, "X"))
    tracer = read_status_field(pid, "TracerPid")
    process = ProcessState(
        pid=pid,
        state=fields[0],
        wait_channel=(read_kernel_text(f"/proc/{pid}/wchan") or "").strip("\x00\n ").removeprefix("0"),
        system_call=read_system_call(pid),
        tracer=int(tracer) if tracer.isdecimal() else 0,
        command=name,
    )
    return KernelLook(process, started, ticks, (read_io(pid) or 0) + read_socket_bytes(pid))


def compare_looks(first: KernelLook, second: KernelLook, seconds: float) -> ProcessState:
    """Return the second look's state with the CPU and IO that were used since the first, `seconds` before.

    A process that has ended in between, or is another one by now, has the state X.
    """
    if second.process.state == "X" or first.start != second.start:
        return replace(first.process, state="X", wait_channel="", system_call="")
    cores = max(second.ticks - first.ticks, 0) / TICKS / seconds if seconds > 0 else 0.0
    moved = max(second.bytes_moved - first.bytes_moved, 0)
    return replace(second.process, cpu=round(cores, 3), io_bytes=moved)


def read_system_call(pid: int, entry: str = "syscall") -> str:
    """Return the name of the system call that a thread is in; its number if the name is not known.

    It is the main thread, unless `entry` is another's, `task/TID/syscall`.
    """
    number = (read_kernel_text(f"/proc/{pid}/{entry}") or "").partition(" ")[0].strip()
    if not number.isdecimal():  # `running`, -1 outside of calls, or no permission
        return ""
    return _SYSTEM_CALLS.get(platform.machine(), {}).get(int(number), number)


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
            for entry in entries:
                with suppress(OSError):  # closed meanwhile
                    if os.path.samestat(entry.stat(), wanted):
                        return True
    except OSError:
        return False
    return False


def read_io(pid: int) -> int | None:
    """Return the bytes that a process has read and written, by system calls and by paging; None if not shown.

    Paging (`read_bytes`) is in both counts if a call caused it: this is to see whether anything moves.
    """
    counters = [line.partition(": ") for line in (read_kernel_text(f"/proc/{pid}/io") or "").splitlines()]
    shown = [int(value) for name, _, value in counters if name in ("rchar", "wchar", "read_bytes")]
    return sum(shown) if shown else None


# Threads and children


def list_threads(pid: int) -> list[tuple[int, str]]:
    """Return the threads of a process with their names; raises OSError."""
    found = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - names alone
    return [(tid, (read_kernel_text(f"/proc/{pid}/task/{tid}/comm") or "").strip()) for tid in found]


def read_children(pid: int, thread: int) -> list[int]:
    """Return the children that a thread of a process has started.

    A kernel without lists of them (CONFIG_PROC_CHILDREN) is searched; all are the main thread's then.
    """
    text = read_kernel_text(f"/proc/{pid}/task/{thread}/children")
    if text is not None:
        return [int(child) for child in text.split()]
    if thread == pid:
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
    return []


def list_descendants(pid: int) -> tuple[int, ...]:
    """Return the processes below one, ascending, at most 64."""
    found: list[int] = []
    pending = [pid]
    while pending and len(found) <= _MOST_DESCENDANTS:
        parent = pending.pop()
        for thread in list_numbers(f"/proc/{parent}/task"):
            below = [child for child in read_children(parent, thread) if child not in found]
            found += below
            pending += below
    return tuple(sorted(found)[:_MOST_DESCENDANTS])


# Bytes over TCP: a download needs neither CPU nor files, and /proc/PID/io does not count what recv(2) has.
# The kernel lists all TCP connections of the network namespace with their counters (`struct tcp_info`,
# linux/tcp.h), also to users without rights; those of a process are known by the inodes of its descriptors.

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_AND_DUMP = 0x1 | 0x300
_ERROR, _DONE = 2, 3
_INET_DIAG_INFO = 2
_STATES = 1 << 1 | 1 << 8
"""TCP_ESTABLISHED and TCP_CLOSE_WAIT."""
_HEADER = struct.Struct("=IHHII")
"""`struct nlmsghdr`: length, type, flags, sequence, PID."""
_REQUEST = struct.Struct("=BBBBI48x")
"""`struct inet_diag_req_v2`: family, protocol, extensions, padding, states, and any address."""
_MESSAGE, _INODE = 72, 68
"""Size of `struct inet_diag_msg`, and where its inode is."""
_ACKED = 120
"""Where `struct tcp_info` has tcpi_bytes_acked, before tcpi_bytes_received; both are of 64 bits."""
_TIMEOUT = 0.5


def read_socket_bytes(pid: int) -> int:
    """Return the bytes that a process's open TCP connections have moved; 0 if that is not shown."""
    with suppress(OSError, struct.error):
        return sum(list_connections(list_socket_inodes(pid)).values())
    return 0


def list_socket_inodes(pid: int) -> Collection[int]:
    """Return the inodes of the sockets that a process has open; raises OSError."""
    found = set()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):  # noqa: PTH208 - names alone
        with suppress(OSError):  # closed meanwhile
            if match := _SOCKET.fullmatch(os.readlink(f"{folder}/{name}")):  # noqa: PTH115 - many and short
                found.add(int(match[1]))
    return found


def list_connections(inodes: Collection[int]) -> dict[int, int]:
    """Return the bytes sent and received of these sockets' TCP connections, by inode; raises OSError."""
    found: dict[int, int] = {}
    for family in (socket.AF_INET, socket.AF_INET6) if inodes else ():
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as diag:
            diag.settimeout(_TIMEOUT)
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _INET_DIAG_INFO - 1, 0, _STATES)
            size = _HEADER.size + len(body)
            diag.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + body)
            for message in _receive_messages(diag):
                inode, moved = read_connection(message)
                if moved is not None and inode in inodes:
                    found[inode] = moved
    return found


def _receive_messages(diag: socket.socket) -> Iterator[bytes]:
    """Give the contents of the kernel's messages until it has no more; raises OSError."""
    while True:
        data, at = diag.recv(1 << 16), 0
        while at + _HEADER.size <= len(data):
            size, kind, *_ = _HEADER.unpack_from(data, at)
            if kind in (_ERROR, _DONE) or size < _HEADER.size:
                return
            yield data[at + _HEADER.size : at + size]
            at += size + 3 & ~3


def read_connection(message: bytes) -> tuple[int, int | None]:
    """Return a connection's inode and bytes; None if the kernel (before 4.1) does not count them."""
    (inode,) = struct.unpack_from("=I", message, _INODE)
    at = _MESSAGE
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == _INET_DIAG_INFO and size >= 4 + _ACKED + 16:
            return inode, sum(struct.unpack_from("=QQ", message, at + 4 + _ACKED))
        at += max(size, 4) + 3 & ~3
    return inode, None
