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
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.files import read_stat
from launcher.watch.model import ProcessState

TICKS = os.sysconf("SC_CLK_TCK")
UTIME, STIME, START = 14 - 3, 15 - 3, 22 - 3
"""Indexes into what `read_stat` returns."""
_LARGEST_ENTRY = 1 << 16
_MOST_DESCENDANTS = 64
WAITS: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("waits.toml").read_text())
_NAMES: Mapping[int, str] = {
    row[platform.machine()]: name for name, row in WAITS["call"].items() if platform.machine() in row
}


def read_kernel_text(path: str) -> str:
    """Return the text of a small file of procfs or sysfs; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return ""
    try:
        return os.read(descriptor, _LARGEST_ENTRY).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def list_threads(pid: int) -> list[int]:
    """Return the threads of a process; none if they cannot be listed."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - takes microseconds
    except OSError:
        return []


def read_children(pid: int, thread: int) -> list[int]:
    """Return the children that a thread of a process has started."""
    return [int(child) for child in read_kernel_text(f"/proc/{pid}/task/{thread}/children").split()]


def list_descendants(pid: int) -> tuple[int, ...]:
    """Return the processes below one, ascending, at most 64."""
    found: set[int] = set()
    pending = [pid]
    while pending and len(found) <= _MOST_DESCENDANTS:
        parent = pending.pop()
        below = {child for thread in list_threads(parent) for child in read_children(parent, thread)} - found
        found |= below
        pending += below
    return tuple(sorted(found)[:_MOST_DESCENDANTS])


def read_system_call(pid: int, entry: str = "syscall") -> str:
    """Return the name of the system call that a thread is in; its number if the name is not known.

    It is the main thread, unless `entry` is another's, `task/TID/syscall`.
    """
    number = read_kernel_text(f"/proc/{pid}/{entry}").partition(" ")[0].strip()
    if not number.isdecimal():  # `running`, -1 outside of calls, or no permission
        return ""
    return _NAMES.get(int(number), number)


def read_signals(pid: int, field: str, entry: str = "status") -> int | None:
    """Return a set of signals of /proc/PID/status, as `SigCgt`, or of a thread's; None if it is not shown."""
    found = re.search(rf"^{field}:\t([0-9a-f]+)$", read_kernel_text(f"/proc/{pid}/{entry}"), re.MULTILINE)
    return int(found[1], 16) if found else None


def catches_signal(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal: without one, it could end the process."""
    return bool((read_signals(pid, "SigCgt") or 0) >> (number - 1) & 1)


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
    shown = re.findall(
        r"^(?:rchar|wchar|read_bytes): (\d+)$", read_kernel_text(f"/proc/{pid}/io"), re.MULTILINE
    )
    return sum(map(int, shown)) if shown else None


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
    tracer = re.search(r"^TracerPid:\t(\d+)$", read_kernel_text(f"/proc/{pid}/status"), re.MULTILINE)
    process = ProcessState(
        pid=pid,
        state=fields[0],
        wait_channel=read_kernel_text(f"/proc/{pid}/wchan").strip("\x00\n ").removeprefix("0"),
        system_call=read_system_call(pid),
        tracer=int(tracer[1]) if tracer else 0,
        command=name,
    )
    moved = read_io(pid) or 0
    with suppress(OSError, struct.error):
        moved += sum(read_connections([pid]).values())
    return KernelLook(process, started, ticks, moved)


def compare_looks(first: KernelLook, second: KernelLook, seconds: float) -> ProcessState:
    """Return the second look's state with the CPU and IO that were used since the first, `seconds` before.

    A process that has ended in between, or is another one by now, has the state X.
    """
    if second.process.state == "X" or first.start != second.start:
        return replace(first.process, state="X", wait_channel="", system_call="")
    cores = max(second.ticks - first.ticks, 0) / TICKS / seconds if seconds > 0 else 0.0
    moved = max(second.bytes_moved - first.bytes_moved, 0)
    return replace(second.process, cpu=round(cores, 3), io_bytes=moved)


# Bytes over TCP: a download needs neither CPU nor files, and /proc/PID/io does not count what recv(2) has.
# The kernel lists all TCP connections of the network namespace with their counters (`struct tcp_info`,
# linux/tcp.h), also to users without rights; those of a process are known by the inodes of its descriptors.

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


def read_connections(pids: Collection[int]) -> dict[int, int]:
    """Return the bytes that open TCP connections of processes have sent and received, by inode.

    Raises OSError, and struct.error for what the kernel does not say in that form.
    """
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone
            with suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115 - many and short
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
    found: dict[int, int] = {}
    for family in (socket.AF_INET, socket.AF_INET6) if inodes else ():
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as diag:
            diag.settimeout(0.5)
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _INET_DIAG_INFO - 1, 0, _STATES)
            size = _HEADER.size + len(body)
            diag.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + body)
            has_more = True
            while has_more:
                data, at = diag.recv(1 << 16), 0
                while at + _HEADER.size <= len(data):
                    size, kind, *_ = _HEADER.unpack_from(data, at)
                    if kind in (_ERROR, _DONE) or size < _HEADER.size:
                        has_more = False
                        break
                    _add_connection(found, data[at + _HEADER.size : at + size])
                    at += size + 3 & ~3
    return {inode: moved for inode, moved in found.items() if inode in inodes}


def _add_connection(found: dict[int, int], message: bytes) -> None:
    """Add the bytes of a connection by its inode, unless the kernel (before 4.1) does not count them."""
    (inode,) = struct.unpack_from("=I", message, _INODE)
    at = _MESSAGE
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == _INET_DIAG_INFO and size >= 4 + _ACKED + 16:
            found[inode] = sum(struct.unpack_from("=QQ", message, at + 4 + _ACKED))
        at += max(size, 4) + 3 & ~3
