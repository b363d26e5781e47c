"""`python -P -m launcher.watch`: the watcher's process, which a supervisor starts; see node_watcher.py.

It reads lines of JSON from stdin (watcher_settings.py) and writes lines of JSON to stdout. The end of stdin
is its own end.
"""

import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.codec import load
from launcher.files import read_stat
from launcher.probe.limits import list_cgroups
from launcher.probe.nvml import GpuSampler, import_nvml
from launcher.probe.sysfs import Tree
from launcher.watch.collective_times import CollectiveReader
from launcher.watch.evidence import WatchedRank, gather_node
from launcher.watch.gpu_reader import GpuReader, ReadGpus, read_planned_gpus
from launcher.watch.hang_judge import HangJudge
from launcher.watch.heartbeats import read_heartbeat
from launcher.watch.node_watcher import TICK, NodeWatcher
from launcher.watch.process_samples import Sampler
from launcher.watch.rank_book import RankBook
from launcher.watch.shared_files import SharedFiles
from launcher.watch.verdict import decide
from launcher.watch.watch_model import NodeEvidence
from launcher.watch.watch_outputs import open_outputs
from launcher.watch.watcher_settings import RankMessage, WatcherSettings

IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)
"""SLURM sends a job's signals to every process; ranks may take their time to end, and are watched then."""
NICENESS = 5
LAST = 0.2
"""Seconds for the last report: the supervisor waits for this process."""


@dataclass(slots=True)
class Inbox:
    """The supervisor's lines."""

    partial: bytes = b""
    has_ended: bool = False

    def wait(self, until: float) -> list[bytes]:
        """Return the lines that came, at the latest at this monotonic time."""
        if not select.select([0], [], [], max(0.0, until - time.monotonic()))[0]:
            return []
        data = os.read(0, 1 << 16)
        self.has_ended = not data
        *lines, self.partial = (self.partial + data).split(b"\n")
        return lines


def main() -> None:
    """Watch until stdin ends."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICENESS)
    parent, inbox = os.getppid(), Inbox()
    lines: list[bytes] = []
    while not lines and not inbox.has_ended:
        lines = inbox.wait(time.monotonic() + 3600)
    if not lines:
        return
    watcher = make_watcher(load(WatcherSettings, lines[0]), parent)
    run_watcher(watcher, inbox, lines[1:])
    watcher.end(LAST)
    if os.getppid() != parent:  # the supervisor was killed, and cannot do it
        shutil.rmtree(watcher.book.folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # threads that wait for a filesystem would hold the interpreter's end up


def run_watcher(watcher: NodeWatcher, inbox: Inbox, lines: list[bytes]) -> None:
    """Take lines and look at ranks in turn."""
    due = time.monotonic()
    while not inbox.has_ended:
        for line in lines:
            with suppress(ValueError):
                watcher.take(load(RankMessage, line))
        if time.monotonic() >= due:
            try_tick(watcher)
            due = max(due + TICK, time.monotonic())
        lines = inbox.wait(due)


def try_tick(watcher: NodeWatcher) -> None:
    """Look at the ranks; a defect in that is a warning, and ends neither this process nor the job.

    Each place at which one is raised is told of once: the log may be in memory.
    """
    try:
        watcher.tick(time.monotonic())
    except Exception as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        place = f"{type(error).__name__} at {frame.f_code.co_filename}:{line}"
        if place not in watcher.told:
            traceback.print_exc()
            text = f"the ranks are not watched as they should be: {type(error).__name__}: {error}"
            watcher.warn(place, text)


def make_watcher(settings: WatcherSettings, parent: int) -> NodeWatcher:
    """Join the parts."""
    folder, send = Path(settings.folder), partial(send_message, threading.Lock())
    read_gpus = GpuReader(lambda: open_gpus(settings), settings.watch.interval).latest
    return NodeWatcher(
        settings=settings,
        book=RankBook(folder, read_heartbeat),
        files=SharedFiles(Path(settings.run_dir)),
        judge=HangJudge(decide, settings.watch.on_hang, settings.watch.hang_seconds),
        gather=partial(gather_evidence, settings, read_gpus),
        send=send,
        is_suspended=lambda: is_stopped(parent),
        outputs=open_outputs(settings, lambda text: send({"event": "warning", "lines": [text]})),
        read_gpus=read_gpus,
        sampler=Sampler(lambda pid: list_cgroups(Tree(), ("cpu",), pid)),
        collectives=CollectiveReader(folder, settings.ranks * settings.nodes),
    )


def open_gpus(settings: WatcherSettings) -> ReadGpus | None:
    """Return what reads the GPUs of the plan; None if it has none, or pynvml is missing."""
    gpus = read_planned_gpus(Path(settings.run_dir), settings.host)
    nvml = import_nvml() if gpus else None
    return GpuSampler(gpus, nvml).sample if nvml else None


def gather_evidence(
    settings: WatcherSettings, read_gpus: ReadGpus, ranks: Sequence[WatchedRank], book: RankBook, number: int
) -> NodeEvidence:
    """Gather this node's evidence; of GPUs it has the last reading, for which nothing waits."""
    return gather_node(
        Path(settings.folder),
        ranks,
        book.list_beats(),
        host=settings.host,
        node_rank=settings.node_rank,
        number=number,
        sample_gpu=read_gpus().get,
    )


def send_message(lock: threading.Lock, message: dict[str, object]) -> None:
    """Write a message to the supervisor, whole; if it is gone, so is the reason for this process.

    Several threads do.
    """
    data = (json.dumps(message) + "\n").encode()
    try:
        with lock:
            while data:
                data = data[os.write(1, data) :]
    except OSError:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal."""
    try:
        return read_stat(pid)[1][0] == "T"
    except OSError:
        return False


if __name__ == "__main__":
    main()
