"""The log of a followed job, `logs/slurm-JOBID.out`: what the head and its step print, in every attempt."""

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from launcher.files import open_file
from launcher.report.console import JobConsole
from launcher.report.output_target import Source
from launcher.runs.rank_logs import Follower
from launcher.runs.run_directory import RunDir
from launcher.slurm.marked_lines import MarkedLines

QUIET = 5.0
"""Seconds without a new line after which a log counts as complete."""
FRESH = 2.0
"""Seconds for which a size that a network filesystem tells is believed."""
OWN = b"launch: "
"""How the head's lines begin, which has the last word."""
OTHERS = re.compile(rb"^\[[^][\s]+:(?!0\] )\d+\] .*\n", re.MULTILINE)
"""Lines of other ranks than rank 0."""
RANKS = Source(0, "out", b"")
"""The log has the ranks' lines with their origin already."""


@dataclass(slots=True)
class JobLog:
    """Shows what is added to the log: ranks' output on stdout, the head's on stderr, rank 0's progress."""

    run: RunDir
    job_id: str
    console: JobConsole
    follower: Follower = field(init=False)
    lines: MarkedLines = field(default_factory=lambda: MarkedLines((OWN,)))
    heads_last: bool = False
    """The last line is the head's."""
    changed: float = field(default_factory=time.monotonic)
    """When something last came, in monotonic seconds."""
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

    def read_new(self) -> bytes:
        """Return some of what is new."""
        self.refresh_size()
        data = self.follower.read_chunk(self.path)
        if data:
            self.changed = time.monotonic()
        return data

    def refresh_size(self) -> None:
        """Open the file now and then: NFS asks the server then, else it may believe its cache for 60 s."""
        now = time.monotonic()
        if now - self.opened > FRESH:
            self.opened = now
            with contextlib.suppress(OSError):
                os.close(open_file(self.path))

    def show(self, data: bytes) -> None:
        """Show some of the log."""
        for is_own, piece in self.lines.split(data):
            self.heads_last = is_own
            if is_own:
                self.console.write_lines(piece)
            else:
                self.console.note_progress("out", OTHERS.sub(b"", piece))
                self.console.put(RANKS, piece)

    def show_rest(self) -> None:
        """Show a last line of the head's that has no end."""
        if rest := self.lines.finish():
            self.console.put(RANKS, rest)

    def is_complete(self, ended: float) -> bool:
        """Tell whether nothing more is to be expected of a job, and when its end was noticed.

        A network filesystem shows lines some seconds later than the manifest that was written before them.
        """
        quiet = time.monotonic() - max(ended, self.changed) > QUIET
        return quiet or (self.heads_last and not self.lines.kept)
