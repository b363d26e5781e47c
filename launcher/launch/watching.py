"""The process that watches the ranks of this node (launcher/watch), as the supervisor sees it.

Nothing that happens to it touches the job: it is talked to without waiting, is started once ranks have been
there for a while, and if it ends, or does not take what it is told, it is given up with one warning.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.codec import DecodeError, load
from launcher.launch.job import Job
from launcher.launch.node_folder import keep_folder
from launcher.launch.processes import Death, RankProcess
from launcher.runs.rank_logs import read_tail
from launcher.runs.run_directory import RunDir
from launcher.text import escape_text

logger = logging.getLogger(__name__)

DELAY = 3.0
"""Seconds from the first rank to the watcher's start, so that nothing of it slows the ranks' own."""
PATIENCE = 0.3
"""Seconds that it has to end by itself at the job's end; then it is killed."""
LOG = "watcher.log"
"""What it prints on stderr, in the folder of heartbeats: a run directory's filesystem may hang."""
MOST_HANGS = 100
"""Hangs, and stragglers, that the manifest tells of."""
MOST_LINES = 20
"""Lines of one message that are shown."""

PREFIX = "launch-watch-"
LONGEST = 80
"""Bytes of the path of the folder of heartbeats: a socket's in it has 107 at most (unix(7))."""


@contextlib.contextmanager
def keep_watch_folder(environ: Mapping[str, str], *, enabled: bool) -> Iterator[str]:
    """Have a folder in which ranks keep their heartbeats while a job runs; empty if they are not watched.

    It is in the first of /dev/shm, $TMPDIR and /tmp that takes one; if none does, a warning tells so.
    """
    parents = ("/dev/shm", environ.get("TMPDIR") or "/tmp", "/tmp") if enabled else ()
    trouble: list[str] = []
    with keep_folder(PREFIX, "", parents, lambda path: len(os.fsencode(path)) <= LONGEST, trouble) as folder:
        if enabled and not folder:
            told = ", ".join(trouble)
            logger.warning(f"the ranks are not watched: no folder for heartbeats can be made ({told})")
        yield folder


@dataclass(frozen=True, slots=True)
class WatcherMessage:
    """What the watcher says."""

    event: str
    lines: tuple[str, ...] = ()
    hang: dict[str, Any] | None = None
    """`watch.model.Hang`."""
    straggler: dict[str, Any] | None = None
    """`watch.model.Straggler`."""
    action: str = ""
    """What is to be done because of a hang: `restart` or `stop`; empty if nothing."""
    sentence: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks to kill for a restart; none for all of this node."""
    pids: tuple[int, ...] = ()
    """Of all ranks on this node that it is about."""

    def is_late(self, running: Iterable[RankProcess]) -> bool:
        """Tell whether ranks were started again since: others run than it knows of."""
        return any(process.pid not in self.pids for process in running)


@dataclass(slots=True)
class Watching:
    """Starts the watcher, tells it of ranks, and takes its messages."""

    folder: str
    settings: Mapping[str, object]
    """Its first line: `watch.model.WatcherSettings`."""
    found: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"hangs": [], "stragglers": []})
    """What this node has told of, as `watch.model.Hang` and `watch.model.Straggler`."""
    process: "subprocess.Popen[bytes] | None" = None
    reader: threading.Thread | None = None
    """Takes what it says, line by line."""
    orders: list[WatcherMessage] = field(default_factory=list)
    """Messages that ask for an action and were not taken yet."""
    begin: float = float("inf")
    """Monotonic time of its start."""
    given_up: bool = False
    told_deaths: int = 0
    waiting: list[object] = field(default_factory=list)
    """What it is told once it has started."""

    @property
    def pids(self) -> tuple[int, ...]:
        """PIDs of processes of our own."""
        return () if self.process is None else (self.process.pid,)

    def add_ranks(self, ranks: Iterable[RankProcess]) -> None:
        """Have ranks watched that have started."""
        if found := [asdict(rank) for rank in ranks]:
            self.begin = min(self.begin, time.monotonic() + DELAY)
            self.tell(found)

    def attend(self, deaths: Sequence[Death]) -> list[WatcherMessage]:
        """Start it when it is time, tell it of the ranks' ends, and return what its messages ask for.

        `deaths` are all of them so far.
        """
        try:
            if fresh := deaths[self.told_deaths :]:
                self.told_deaths = len(deaths)
                ended = {"has_ended": True}
                self.tell([{**asdict(one.process), **ended, "exit_code": one.exitcode} for one in fresh])
            if self.process is None and not self.given_up and time.monotonic() >= self.begin:
                self.start()
            elif self.process and self.process.poll() is not None and not self.given_up:
                said = [line.strip() for line in read_tail(Path(self.folder) / LOG, 1)]
                self.give_up(": ".join([f"it ended with code {self.process.returncode}", *said]))
        except Exception as error:
            self.give_up(repr(error))
        return [self.orders.pop(0) for _ in range(len(self.orders))]

    def start(self) -> None:
        """Start it in a session of its own, which a terminal's Ctrl-C does not reach."""
        with open(f"{self.folder}/{LOG}", "ab") as log:
            self.process = subprocess.Popen(
                (sys.executable, "-P", "-m", "launcher.watch"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",  # the working directory may be on a filesystem that hangs
                # NumPy would start a thread for each core
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.reader = threading.Thread(target=self.read_messages, daemon=True)
        self.reader.start()
        if self.process.stdin:
            os.set_blocking(self.process.stdin.fileno(), False)
        for message in (self.settings, *self.waiting):
            self.tell(message)

    def tell(self, message: object) -> None:
        """Send it a message, which a pipe has room for; keep it until the process has started."""
        if self.process is None:
            self.waiting.append(message)
        elif self.process.stdin and not self.given_up:
            data = json.dumps(message).encode() + b"\n"
            try:
                taken = os.write(self.process.stdin.fileno(), data)
            except BlockingIOError:
                taken = 0
            except BrokenPipeError:  # its end is seen elsewhere
                return
            if taken < len(data):
                self.give_up("it does not take what it is told")

    def read_messages(self) -> None:
        """Take its messages, each a line, and keep those that ask for an action; the thread's body."""
        for line in (self.process and self.process.stdout) or ():
            try:
                message = load(WatcherMessage, line)
            except DecodeError:
                continue
            level = logging.WARNING if message.event == "warning" else logging.INFO
            for text in message.lines[:MOST_LINES]:
                logger.log(level, escape_text(text))
            if message.action in ("restart", "stop"):
                self.orders.append(replace(message, sentence=escape_text(message.sentence)))
            elif message.hang:  # one, or what has become of it
                others = [hang for hang in self.found["hangs"] if hang["number"] != message.hang["number"]]
                self.found["hangs"] = [*others, message.hang][-MOST_HANGS:]
            if message.straggler:
                self.found["stragglers"] = [*self.found["stragglers"], message.straggler][-MOST_HANGS:]

    def give_up(self, reason: str) -> None:
        """Go on without it, and say so once."""
        if not self.given_up:
            logger.warning(f"the ranks are no longer watched, and run on: the watcher failed ({reason})")
        self.given_up = True

    def finish(self) -> None:
        """Tell it that the job has ended; it has a moment to write its last report."""
        if self.process and self.process.stdin:
            self.process.stdin.close()

    def close(self) -> None:
        """End it for good, and take its last messages.

        One that the kernel keeps in a call, as to a filesystem that hangs, is left behind.
        """
        self.finish()
        if process := self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        if self.reader:
            self.reader.join(PATIENCE)


def watch_node(job: Job, run: RunDir, folder: str, node_rank: int) -> Watching:
    """Return what watches a node's part of a job, once ranks have started; nothing does without a folder."""
    settings = {
        "run_dir": str(run.path),
        "run": f"{run.path.parent.name}/{run.id}",
        "folder": folder,
        "host": job.host,
        "node_rank": node_rank,
        "nodes": job.cluster.max_nodes,
        "attempt": run.first_attempt,
        "ranks": len(job.plan.ranks),
        "watch": asdict(job.config.watch),
        "notify": asdict(job.config.notify),
    }
    return Watching(folder, settings, given_up=not folder)
