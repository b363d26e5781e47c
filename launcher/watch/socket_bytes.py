"""Bytes that a process has moved over TCP, by sock_diag(7): a download needs neither CPU nor files.

`/proc/PID/io` does not count what programs receive by recv(2). The kernel lists all TCP connections of the
network namespace with their counters (`struct tcp_info`, linux/tcp.h), also to users without rights; those
of a process are known by the inodes of its descriptors.
"""

import os
import re
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress

SOCKET = re.compile(r"socket:\[(\d+)\]")
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
REQUEST_AND_DUMP = 0x1 | 0x300
ERROR, DONE = 2, 3
INET_DIAG_INFO = 2
STATES = 1 << 1 | 1 << 8
"""TCP_ESTABLISHED and TCP_CLOSE_WAIT."""
HEADER = struct.Struct("=IHHII")
"""`struct nlmsghdr`: length, type, flags, sequence, PID."""
REQUEST = struct.Struct("=BBBBI48x")
"""`struct inet_diag_req_v2`: family, protocol, extensions, padding, states, and any address."""
MESSAGE, INODE = 72, 68
"""Size of `struct inet_diag_msg`, and where its inode is."""
ACKED = 120
"""Where `struct tcp_info` has tcpi_bytes_acked, before tcpi_bytes_received; both are of 64 bits."""
TIMEOUT = 0.5


def read_socket_bytes(pid: int) -> int:
    """Return the bytes that a process's open TCP connections have moved; 0 if that is not shown."""
    with suppress(OSError, struct.error):
        if inodes := list_socket_inodes(pid):
            return sum(moved for inode, moved in list_connections() if inode in inodes)
    return 0


def list_socket_inodes(pid: int) -> Collection[int]:
    """Return the inodes of the sockets that a process has open; raises OSError."""
    found = set()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):  # noqa: PTH208 - names alone
        with suppress(OSError):  # closed meanwhile
            if match := SOCKET.fullmatch(os.readlink(f"{folder}/{name}")):  # noqa: PTH115 - many and short
                found.add(int(match[1]))
    return found


def list_connections() -> Iterator[tuple[int, int]]:
    """Give the inode and the bytes sent and received of each TCP connection; raises OSError."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as diag:
            diag.settimeout(TIMEOUT)
            body = REQUEST.pack(family, socket.IPPROTO_TCP, 1 << INET_DIAG_INFO - 1, 0, STATES)
            size = HEADER.size + len(body)
            diag.send(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, REQUEST_AND_DUMP, 1, 0) + body)
            for message in receive_messages(diag):
                if connection := read_connection(message):
                    yield connection


def receive_messages(diag: socket.socket) -> Iterator[bytes]:
    """Give the contents of the kernel's messages until it has no more; raises OSError."""
    while True:
        data, at = diag.recv(1 << 16), 0
        while at + HEADER.size <= len(data):
            size, kind, *_ = HEADER.unpack_from(data, at)
            if kind in (ERROR, DONE) or size < HEADER.size:
                return
            yield data[at + HEADER.size : at + size]
            at += size + 3 & ~3


def read_connection(message: bytes) -> tuple[int, int] | None:
    """Return a connection's inode and bytes; None if the kernel (before 4.1) does not count them."""
    (inode,) = struct.unpack_from("=I", message, INODE)
    at = MESSAGE
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == INET_DIAG_INFO and size >= 4 + ACKED + 16:
            return inode, sum(struct.unpack_from("=QQ", message, at + 4 + ACKED))
        at += max(size, 4) + 3 & ~3
    return None
