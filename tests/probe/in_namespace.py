"""Runs Python in a mount namespace of its own: small, full and stuck file systems that nobody else sees."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.seam import PATIENCE, clean_environ

HEAD = """
import ctypes, json, os, pathlib, subprocess, sys, threading
from dataclasses import asdict
from launcher.probe.node import read_node_facts
from tests.probe.in_namespace import mount_stuck, mount_tmpfs
folder = pathlib.Path(sys.argv[1])
"""


def run_in_namespace(script: str, folder: object) -> Any:
    """Return what a script prints as JSON; it has `folder`, the readers and the mounts of this module."""
    unshare = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", str(folder)], check=False).returncode:
        pytest.skip("this machine does not let mount namespaces be made")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", HEAD + script, str(folder)],
        env=clean_environ(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mount_tmpfs(path: str | Path, options: str) -> None:
    """Mount a file system in memory."""
    Path(path).mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)


def mount_stuck(path: str | Path, *, reads: bool) -> int:
    """Mount a FUSE file system whose server never answers; returns what aborts it when it is closed.

    Without `reads` requests stay in the queue, and who waits can be killed. With it the server has taken
    them, and who waits is in state D until it answers: request_wait_answer in the kernel's fs/fuse/dev.c.
    """
    import threading

    Path(path).mkdir(exist_ok=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"stuck", os.fsencode(path), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount of a FUSE file system")
    if reads:
        answer_init(device)
        threading.Thread(target=take_requests, args=(device,), daemon=True).start()
    return device


def answer_init(device: int) -> None:
    """Agree on a version, as linux/fuse.h has it: without, no request is handed out."""
    request = os.read(device, 1 << 20)
    reply = (7).to_bytes(4, "little") + (31).to_bytes(4, "little") + bytes(8) + (1).to_bytes(2, "little")
    reply += bytes(2) + (4096).to_bytes(4, "little") + bytes(40)
    header = (16 + len(reply)).to_bytes(4, "little") + bytes(4) + request[8:16]
    os.write(device, header + reply)


def take_requests(device: int) -> None:
    """Take all requests and answer none."""
    while True:
        try:
            os.read(device, 1 << 20)
        except OSError:
            return
