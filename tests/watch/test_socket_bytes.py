"""What the kernel counts of real connections of a real process."""

import os
import socket
import sys

import pytest

from launcher.watch.kernel_state import compare_looks, look_at_process
from launcher.watch.rank_activity import WORKING_IO
from launcher.watch.socket_bytes import list_connections, read_connection, read_socket_bytes


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_bytes_that_only_recv_has_seen_count_as_work(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {address}: {error}")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        connection, _ = server.accept()
        with connection:
            before = look_at_process(os.getpid())
            left = 4 * WORKING_IO
            connection.settimeout(10)
            for _ in range(4):
                connection.sendall(bytes(WORKING_IO))
                received = 0
                while received < WORKING_IO:
                    received += len(client.recv(1 << 16))
            after = look_at_process(os.getpid())
    assert compare_looks(before, after, 1.0).io_bytes >= left


def test_a_process_without_connections_or_that_is_gone_has_none() -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.closerange(3, write_end)
        os.execv(sys.executable, [sys.executable, "-c", f"import os; os.read({read_end}, 1)"])
    try:
        assert read_socket_bytes(pid) == 0
    finally:
        os.close(write_end)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(read_end)
    assert read_socket_bytes(pid) == 0


def test_a_kernel_that_does_not_count_is_no_error() -> None:
    assert read_connection(bytes(72)) is None
    assert all(moved >= 0 for _, moved in list_connections())
