"""torch's server in a rank (`_WorkerServer`), asked over its Unix socket.

It is experimental in torch: what it does not answer in time, or at all, is missing from the evidence.
"""

import contextlib
import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

LARGEST_ANSWER = 16 << 20
"""Bytes of an answer that are read; a flight recorder with 2,000 entries has one MiB."""


class ServerError(Exception):
    """The server did not answer; the text says why."""


class UnknownHandlerError(ServerError):
    """The server has no such handler, as in an older torch."""


class UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        """Connect to the path; raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def post_handler(path: Path, handler: str, timeout: float) -> bytes:
    """Return the answer of a handler, as `fr_trace_json`; raises ServerError.

    The timeout is for each read and write, so that a server that answers byte by byte may take longer.
    """
    if timeout <= 0:
        raise ServerError("no time was left to ask it")
    with closing_connection(path, timeout) as connection:
        try:
            connection.request("POST", f"/handler/{handler}")
            answer = connection.getresponse()
            data = answer.read(LARGEST_ANSWER + 1)
        except TimeoutError:
            raise ServerError(f"no answer within {timeout:g} s") from None
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(str(error) or type(error).__name__) from None
    if answer.status == 404:
        raise UnknownHandlerError(f"it has no {handler}")
    if answer.status != 200:
        raise ServerError(f"answered with status {answer.status}")
    if len(data) > LARGEST_ANSWER:
        raise ServerError(f"answered with more than {LARGEST_ANSWER >> 20} MiB")
    return data


@contextlib.contextmanager
def closing_connection(path: Path, timeout: float) -> Iterator[UnixConnection]:
    """Return a connection that is closed afterwards, whatever state it is in."""
    connection = UnixConnection(path, timeout)
    try:
        yield connection
    finally:
        connection.close()


def read_store_wait(path: Path, timeout: float) -> tuple[bool, str]:
    """Tell whether the rank waits in torch's store, and in which function of `torch.distributed`.

    Source: torch's wait counters, of which those that are being waited in have an `active_count`. Raises
    ServerError.
    """
    return parse_wait_counters(post_handler(path, "wait_counter_values", timeout))


def parse_wait_counters(data: bytes) -> tuple[bool, str]:
    """Return what `read_store_wait` does, from the answer; raises ServerError."""
    try:
        counters: dict[str, Any] = json.loads(data)
        active = [name for name, values in counters.items() if int(values["active_count"]) > 0]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ServerError("its wait counters are not as expected") from None
    functions = [name.rpartition("c10d.")[2] for name in active if "c10d." in name]
    stores = [name for name in active if "Store__" in name]
    return bool(functions or stores), (functions[0] if functions else "")
