"""The log of a followed job, `logs/slurm-JOBID.out`: what the head and its step print, in every attempt."""

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from launcher.descriptors import open_file
from launcher.report.console import JobConsole
from launcher.runs.logs import Follower, decode_line
from launcher.runs.rundir import RunDir

QUIET = 5.0
"""Seconds without a new line after which a log counts as complete."""
FRESH = 2.0
"""Seconds for which a size that a network filesystem tells is believed."""
OWN = "launch: "
"""How the head's lines begin, which has the last word."""
RANK0 = re.compile(r"\[[^][\s]+:0\] (.*)")


@dataclass(slots=True)
class JobLog:
    """Shows what is added to the log: ranks' lines on stdout, the head's on stderr, and rank 0's progress."""

    run: RunDir
    job_id: str
    console: JobConsole
    follower: Follower = field(init=False)
    last: str = ""
    changed: float = field(default_factory=time.monotonic)
    """When the last line came, in monotonic seconds."""
    opened: float = 0.0
    """When the file was last opened for its size."""

    def __post_init__(self) -> None:
        """Begin at the log's start: each job has its own."""
        self.follower = Follower(self.run)
        self.follower.offsets[self.path] = 0

    @property
    def path(self) -> Path:
        """The file, which every attempt appends to."""
        return self.run.path / "logs" / f"slurm-{self.job_id}.out"

    def take_lines(self) -> list[str]:
        """Return what is new."""
        self.refresh_size()
        lines = [decode_line(raw) for raw in self.follower.read_new(self.path)]
        if lines:
            self.changed = time.monotonic()
        return lines

    def refresh_size(self) -> None:
        """Open the file now and then: NFS asks the server then, else it may believe its cache for 60 s."""
        now = time.monotonic()
        if now - self.opened > FRESH:
            self.opened = now
            with contextlib.suppress(OSError):
                os.close(open_file(self.path))

    def show_line(self, text: str) -> None:
        """Show one line."""
        if found := RANK0.match(text):
            self.console.note_progress(found[1])
        self.console.write("err" if text.startswith(OWN) else "out", f"{text}\n")
        self.last = text

    def show_rest(self) -> None:
        """Show a last line that has no end."""
        if rest := self.follower.partial.pop(self.path, b""):
            self.show_line(decode_line(rest))

    def is_complete(self, ended: float) -> bool:
        """Tell whether nothing more is to be expected of a job, and when its end was noticed.

        A network filesystem shows lines some seconds later than the manifest that was written before them.
        """
        quiet = time.monotonic() - max(ended, self.changed) > QUIET
        return quiet or (self.last.startswith(OWN) and not self.follower.partial.get(self.path))
