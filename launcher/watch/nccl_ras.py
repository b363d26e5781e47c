"""NCCL's RAS: the status of all communicators of a job, as NCCL 2.24 and later serve it on each node.

The answer is kept as text for people; its JSON form is not dependable yet (2.28.9).
"""

import os
import socket

from launcher.text import tame_text

ADDRESS = "localhost:28028"
"""Where NCCL listens if NCCL_RAS_ADDR does not say otherwise."""
QUESTION = b"verbose status\n"
LARGEST_ANSWER = 1 << 20
CONNECT_PATIENCE = 0.2
READ_PATIENCE = 1.0


def ask_ras(address: str | None = None) -> tuple[str, tuple[str, ...]]:
    """Return what NCCL's RAS answers, and notes on what is missing.

    Two jobs on one host contend for the port, so the answer may be another job's.
    """
    address = address or os.environ.get("NCCL_RAS_ADDR") or ADDRESS
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), CONNECT_PATIENCE) as link:
            link.settimeout(READ_PATIENCE)
            link.sendall(QUESTION)
            answer = read_answer(link)
    except (OSError, ValueError):
        return "", (f"NCCL's RAS does not answer at {address}",)
    return tame_text(answer.decode("utf-8", "replace")), ()


def read_answer(link: socket.socket) -> bytes:
    """Return what comes until the end, a pause of READ_PATIENCE, or LARGEST_ANSWER."""
    data = b""
    try:
        while len(data) < LARGEST_ANSWER and (part := link.recv(1 << 16)):
            data += part
    except TimeoutError:
        pass
    return data
