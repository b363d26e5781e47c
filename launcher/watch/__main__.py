"""`python -P -m launcher.watch`: the watcher's process, which a supervisor starts; see node.py.

It reads lines of JSON from stdin (`model.WatcherSettings`, then `model.RankMessage`) and writes lines of JSON
to stdout. The end of stdin is its own end.
"""

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from launcher.codec import load
from launcher.files import read_stat
from launcher.probe.limits import list_cgroups
from launcher.probe.nvml import GpuSampler, import_nvml
from launcher.probe.sysfs import Tree
from launcher.watch.model import RankMessage, WatcherSettings
from launcher.watch.node import TICK, NodeWatcher
from launcher.watch.ranks import GpuReader, ReadGpus, read_planned_gpus

_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP),
)
"""SLURM sends a job's signals to every process; ranks may take their time to end, and are watched then."""
_NICENESS = 5
_LAST = 0.2
"""Seconds for the last report: the supervisor waits for this process."""


def main() -> None:
    """Watch until stdin ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    parent, lock = os.getppid(), threading.Lock()
    if not (first := sys.stdin.buffer.readline()):
        return
    settings = load(WatcherSettings, first)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    """The supervisor's lines; at their end an empty one."""

    def read() -> None:
        while line := sys.stdin.buffer.readline():
            inbox.put(line)
        inbox.put(b"")

    def send(message: dict[str, object]) -> None:
        """Write a message to the supervisor, whole; several threads do."""
        data = (json.dumps(message) + "\n").encode()
        try:
            with lock:
                while data:
                    data = data[os.write(1, data) :]
        except OSError:  # it is gone, and so is the reason for this process
            os._exit(1)

    def is_suspended() -> bool:
        """Tell whether the supervisor is stopped by a signal."""
        try:
            return read_stat(parent)[1][0] == "T"
        except OSError:
            return False

    def open_gpus() -> ReadGpus | None:
        """Return what reads the GPUs of the plan; None if it has none, or pynvml is missing."""
        gpus = read_planned_gpus(Path(settings.run_dir), settings.host)
        nvml = import_nvml() if gpus else None
        return GpuSampler(gpus, nvml).sample if nvml else None

    gpus = GpuReader(open_gpus, settings.watch.interval)
    watcher = NodeWatcher(
        settings,
        send,
        is_suspended,
        gpus.latest,
        lambda pid: list_cgroups(Tree(), ("cpu",), pid).get("cpu", (2, []))[1],
    )
    threading.Thread(target=read, name="inbox", daemon=True).start()
    due, line = time.monotonic(), first
    while line:
        with suppress(queue.Empty):
            if line := inbox.get(timeout=max(0.0, due - time.monotonic())):
                with suppress(ValueError):
                    watcher.book.take(load(RankMessage, line))
        if line and time.monotonic() >= due:
            _try_tick(watcher)
            due = max(due + TICK, time.monotonic())
    watcher.end(_LAST)
    if os.getppid() != parent:  # the supervisor was killed, and cannot do it
        shutil.rmtree(settings.folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # threads that wait for a filesystem would hold the interpreter's end up


def _try_tick(watcher: NodeWatcher) -> None:
    """Look at the ranks; a defect in that is a warning, and ends neither this process nor the job.

    Each kind is told of once: the log may be in memory.
    """
    try:
        watcher.tick(time.monotonic())
    except Exception as error:
        text = f"the ranks are not watched as they should be: {type(error).__name__}: {error}"
        if type(error).__name__ not in watcher.told:
            traceback.print_exc()
            watcher.warn(type(error).__name__, text)


if __name__ == "__main__":
    main()
