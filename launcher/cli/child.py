"""A command that a verb tries: run until it ends, takes too long, or the machine's memory runs out."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from launcher.launch.processes import prepare_agent
from launcher.launch.signals import KILL_GRACE, STOPPING, catch_signals

POLL_SECONDS = 0.1


def run_child(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: BinaryIO,
    timeout: float,
    grace: float,
    doing: str = "",
    is_starved: Callable[[], bool] = lambda: False,
) -> tuple[int | None, bool]:
    """Return the exit code, None after the timeout, and whether its processes were killed for memory.

    It ends with this process, and is asked to by each signal that stops this process, which raises
    SystemExit(128+n). After `grace`, SIGTERM is followed by SIGKILL. A terminal shows `doing` meanwhile.
    """
    import psutil

    from launcher.report.tables import show_spinner

    parent, deadline, starved = os.getpid(), time.monotonic() + timeout, False
    signals = list[int]()
    with catch_signals() as inbox:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: prepare_agent(parent, ()),  # noqa: PLW1509 - no other thread forks here
        )
        try:
            with show_spinner(doing) if doing else contextlib.nullcontext():
                while process.poll() is None and not signals and time.monotonic() < deadline:
                    if is_starved():
                        descendants = psutil.Process(process.pid).children(recursive=True)
                        starved |= bool(descendants)
                        for descendant in descendants:
                            with contextlib.suppress(psutil.Error):
                                descendant.kill()
                    time.sleep(POLL_SECONDS)
                    signals += [number for number in inbox.take() if number in STOPPING]
            status = process.returncode
        finally:
            # What is left of it, and of what it has started.
            for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_GRACE)):
                _signal_group(process.pid, number)
                deadline = time.monotonic() + patience
                while process.poll() is None and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                    if any(further in STOPPING for further in inbox.take()):  # to its own next stage
                        _signal_group(process.pid, number)
    if signals:
        raise SystemExit(128 + signals[0])
    return status, starved


def _signal_group(group: int, number: int) -> None:
    """Send a group of processes a signal; nothing happens if none is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
