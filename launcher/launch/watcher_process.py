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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launcher.launch.job import Job
from launcher.launch.processes import Death, RankProcess
from launcher.launch.watch_folder import WatchFolder
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

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


@dataclass(slots=True)
class WatcherProcess:
    """Starts the watcher, tells it of ranks, and takes its messages."""

    folder: WatchFolder
    settings: Mapping[str, object]
    """Its first line: `watch.model.WatcherSettings`."""
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
        """Tell it of ranks that have started."""
        if found := [asdict(rank) for rank in ranks]:
            self.begin = min(self.begin, time.monotonic() + DELAY)
            self.tell({"found": found})

    def attend(self, deaths: Sequence[Death]) -> list[dict[str, object]]:
        """Tell it of the ranks' ends, start it when it is time, and return its messages since the last call.

        `deaths` are all of them so far.
        """
        if fresh := deaths[self.told_deaths :]:
            self.told_deaths = len(deaths)
            self.tell({"ended": [{**asdict(death.process), "exit_code": death.exitcode} for death in fresh]})
        if self.process is None:
            if time.monotonic() >= self.begin and not self.given_up:
                self.start()
            return []
        if self.given_up:
            self.process.poll()
            return []
        self.flush()
        messages = self.read_messages(self.process)
        if self.process.poll() is not None:
            self.give_up(f"it ended with code {self.process.returncode}{self.read_last_words()}")
        return messages

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

    def read_messages(self, process: "subprocess.Popen[bytes]") -> list[dict[str, object]]:
        """Return what it has said in whole lines; what is no message is left out."""
        if process.stdout is None:
            return []
        with contextlib.suppress(BlockingIOError):
            self.partial += os.read(process.stdout.fileno(), MOST_WAITING)
        if len(self.partial) > 2 * MOST_WAITING:
            self.partial = b""
        *lines, self.partial = self.partial.split(b"\n")
        return [message for line in lines if (message := decode_message(line)) is not None]

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

    def give_up(self, reason: str) -> None:
        """Go on without it, and say so once."""
        if not self.given_up:
            logger.warning(f"the ranks are no longer watched, and run on: the watcher failed ({reason})")
        self.given_up = True
        self.outbox.clear()

    def finish(self) -> None:
        """Tell it that the job has ended; it has a moment to write its last report."""
        self.flush() if not self.given_up else None
        if self.process and self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> list[dict[str, object]]:
        """End it for good, remove the folder, and return its last messages.

        One that the kernel keeps in a call, as to a filesystem that hangs, is left behind.
        """
        self.finish()
        messages: list[dict[str, object]] = []
        if self.process:
            for seconds in (PATIENCE, PATIENCE):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
                    break
                self.process.kill()
            messages = [] if self.given_up else self.read_messages(self.process)
            self.process.stdout.close() if self.process.stdout else None
        self.folder.remove()
        return messages


def encode_line(message: Mapping[str, object]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def decode_message(line: bytes) -> dict[str, object] | None:
    """Read a message; None for a line that is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def describe_watching(job: Job, run: RunDir, folder: WatchFolder, node_rank: int) -> dict[str, object]:
    """Return the watcher's settings for a node's part of a job."""
    config = job.config
    return {
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
    }
