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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from launcher.launch.job import Job
from launcher.launch.processes import Death, RankProcess
from launcher.launch.watch_folder import WatchFolder
from launcher.runs.run_directory import RunDir
from launcher.text import escape_text

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

DELAY = 3.0
"""Seconds from the first rank to the watcher's start, so that nothing of it slows the ranks' own."""
MOST_WAITING = 1 << 20
"""Bytes that it may have left to read, or have written without a line's end, before it is given up."""
PATIENCE = 0.3
"""Seconds that it has to end by itself at the job's end; then it is killed."""
LOG = "watcher.log"
"""What it prints on stderr, in the folder of heartbeats: a run directory's filesystem may hang."""
LAST_WORDS = 4096
"""Bytes of that which are looked at."""
MOST_HANGS = 100
"""Hangs, and stragglers, that the manifest tells of."""
MOST_LINES = 20
"""Lines of one message that are shown."""
NOT_WATCHED = "the ranks are no longer watched, and run on: "


@dataclass(frozen=True, slots=True)
class HangOrder:
    """What is to be done because of a hang."""

    action: str
    """`restart` or `stop`."""
    ranks: tuple[int, ...]
    """Ranks to kill for a restart; none for all of this node."""
    sentence: str
    pids: tuple[int, ...] = ()
    """Of all ranks on this node that it is about."""

    def is_late(self, running: Iterable[RankProcess]) -> bool:
        """Tell whether ranks were started again since: others run than it knows of."""
        return any(process.pid not in self.pids for process in running)


@dataclass(slots=True)
class Watching:
    """Starts the watcher, tells it of ranks, and takes its messages."""

    folder: WatchFolder
    settings: Mapping[str, object]
    """Its first line: `watch.model.WatcherSettings`."""
    hangs: list[dict[str, object]] = field(default_factory=list)
    """Those that this node has told of, as `watch.model.Hang`."""
    stragglers: list[dict[str, object]] = field(default_factory=list)
    """Those that this node has told of, as `watch.model.Straggler`."""
    process: "subprocess.Popen[bytes] | None" = None
    begin: float = float("inf")
    """Monotonic time of its start."""
    given_up: bool = False
    told_deaths: int = 0
    outbox: bytearray = field(default_factory=bytearray)
    partial: bytes = b""

    @property
    def pids(self) -> tuple[int, ...]:
        """PIDs of processes of our own."""
        return () if self.process is None else (self.process.pid,)

    def add_ranks(self, ranks: Iterable[RankProcess]) -> None:
        """Have ranks watched that have started."""
        if found := [asdict(rank) for rank in ranks]:
            self.begin = min(self.begin, time.monotonic() + DELAY)
            self.tell({"found": found})

    def attend(self, deaths: Sequence[Death]) -> list[HangOrder]:
        """Start it when it is time, tell it of the ranks' ends, and return what its messages ask for.

        `deaths` are all of them so far.
        """
        return self.guard(lambda: self.exchange(deaths)) or []

    def exchange(self, deaths: Sequence[Death]) -> list[HangOrder]:
        """Do what `attend` says; may raise what nobody has foreseen."""
        fresh, self.told_deaths = deaths[self.told_deaths :], len(deaths)
        if fresh:
            self.tell({"ended": [{**asdict(death.process), "exit_code": death.exitcode} for death in fresh]})
        if self.process is None:
            if time.monotonic() >= self.begin and not self.given_up:
                self.start()
            return []
        if self.given_up:
            self.process.poll()
            return []
        self.flush()
        orders = self.read_messages(self.process)
        if self.process.poll() is not None:
            self.give_up(f"it ended with code {self.process.returncode}{self.read_last_words()}")
        return orders

    def start(self) -> None:
        """Start it in a session of its own, which a terminal's Ctrl-C does not reach."""
        command = (sys.executable, "-P", "-m", "launcher.watch")
        try:
            with open(f"{self.folder.path}/{LOG}", "ab") as log:  # noqa: PTH123
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd="/",  # the working directory may be on a filesystem that hangs
                    start_new_session=True,
                )
        except OSError as error:
            self.give_up(f"it could not be started: {error}")
            return
        for stream in (self.process.stdin, self.process.stdout):
            os.set_blocking(stream.fileno(), False) if stream else None
        self.outbox[:0] = encode_line(self.settings)
        self.flush()

    def tell(self, message: Mapping[str, object]) -> None:
        """Send it a message, or keep it until the process takes it."""
        if not self.given_up:
            self.outbox += encode_line(message)

    def flush(self) -> None:
        """Write what the pipe takes."""
        stdin = self.process.stdin if self.process else None
        if not self.outbox or stdin is None or stdin.closed:
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            del self.outbox[: os.write(stdin.fileno(), self.outbox)]
        if len(self.outbox) > MOST_WAITING:
            self.give_up("it does not take what it is told")

    def read_messages(self, process: "subprocess.Popen[bytes]") -> list[HangOrder]:
        """Take what it has said in whole lines, and return the orders; what is no message is left out."""
        if process.stdout is None:
            return []
        with contextlib.suppress(BlockingIOError):
            self.partial += os.read(process.stdout.fileno(), MOST_WAITING)
        if len(self.partial) > 2 * MOST_WAITING:
            self.partial = b""
        *lines, self.partial = self.partial.split(b"\n")
        orders = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict) and (order := self.take_message(message)):
                    orders.append(order)
        return orders

    def take_message(self, message: dict[str, object]) -> HangOrder | None:
        """Log a message, keep the hang or straggler in it, and return the order that it is."""
        event, hang, straggler = message.get("event"), message.get("hang"), message.get("straggler")
        if not isinstance(event, str):
            return None
        for line in select_texts(message.get("lines"))[:MOST_LINES]:
            logger.log(logging.WARNING if event == "warning" else logging.INFO, escape_text(line))
        if event in ("hang", "recovered") and isinstance(hang, dict):  # one, or what has become of it
            others = [one for one in self.hangs if one.get("number") != hang.get("number")]
            self.hangs = [*others, hang][-MOST_HANGS:]
        if event == "straggler" and isinstance(straggler, dict):
            self.stragglers = [*self.stragglers, straggler][-MOST_HANGS:]
        return decode_order(message) if event == "act" else None

    def read_last_words(self) -> str:
        """Return the last line that it printed, for the warning; empty if it printed nothing."""
        try:
            path = Path(self.folder.path) / LOG
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LAST_WORDS))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")

    def guard(self, call: Callable[[], Result]) -> Result | None:
        """Call what must not touch the job."""
        try:
            return call()
        except Exception as error:
            if not self.given_up:
                logger.warning(f"{NOT_WATCHED}{error!r}")
            self.given_up = True
            return None

    def give_up(self, reason: str) -> None:
        """Go on without it, and say so once."""
        if not self.given_up:
            logger.warning(f"{NOT_WATCHED}the watcher failed ({reason})")
        self.given_up = True
        self.outbox.clear()

    def finish(self) -> None:
        """Tell it that the job has ended; it has a moment to write its last report."""
        self.flush() if not self.given_up else None
        if self.process and self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """End it for good, remove the folder, and take its last messages.

        One that the kernel keeps in a call, as to a filesystem that hangs, is left behind.
        """
        self.guard(self.finish)
        if self.process:
            for seconds in (PATIENCE, PATIENCE):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
                    break
                self.process.kill()
            if not self.given_up:
                process = self.process
                self.guard(lambda: self.read_messages(process))
            self.process.stdout.close() if self.process.stdout else None
        self.folder.remove()


def watch_node(job: Job, run: RunDir, folder: WatchFolder, node_rank: int) -> Watching:
    """Return what watches a node's part of a job, once ranks have started."""
    config = job.config
    return Watching(
        folder,
        {
            "run_dir": str(run.path),
            "run": f"{run.path.parent.name}/{run.id}",
            "folder": folder.path,
            "host": job.host,
            "node_rank": node_rank,
            "nodes": job.cluster.max_nodes,
            "attempt": run.first_attempt,
            "ranks": len(job.plan.ranks),
            "watch": asdict(config.watch),
            "notify": asdict(config.notify),
        },
    )


def encode_line(message: Mapping[str, object]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decode_order(message: Mapping[str, object]) -> HangOrder:
    """Return what a message asks for."""
    ranks, pids = take_numbers(message.get("ranks")), take_numbers(message.get("pids"))
    sentence = escape_text(str(message.get("sentence") or ""))
    return HangOrder(str(message.get("action")), ranks, sentence, pids)


def take_numbers(value: object) -> tuple[int, ...]:
    """Return the whole numbers of a list."""
    return tuple(item for item in value if type(item) is int) if isinstance(value, list) else ()


def select_texts(value: object) -> list[str]:
    """Return the texts of a list."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
