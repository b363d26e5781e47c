"""Monitors the ranks of one node: finds them as they start, and has their output shown."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launcher.codec import load
from launcher.config.settings import SLURM_KINDS
from launcher.files import LARGEST, read_file
from launcher.launch.job import Job
from launcher.launch.processes import RankProcess, list_ranks
from launcher.launch.terminal import Terminal, open_terminal
from launcher.protocol import name_applied_file
from launcher.runs.progress import Progress
from launcher.runs.provenance import describe_sources
from launcher.runs.run_directory import RunDir
from launcher.runs.run_records import Applied, AppliedReader

logger = logging.getLogger(__name__)

STARTING = "starting the ranks: their program and its imports take a few seconds to load"
"""Until the first line of a rank there are seconds, most of them torch's import."""


class Viewer(Protocol):
    """Shows what the ranks print, and what is logged."""

    def start(self) -> None:
        """Begin to show; the agent is on its way."""

    def use_terminal(self, read: Callable[[], bytes], is_raw: Callable[[], bool]) -> None:
        """Show what the program prints on its pseudo-terminal; to be called before the start."""

    def notify(self) -> None:
        """Show at once what the program has printed on its terminal."""

    def watch_rank(self, rank: int, attempt: int, *, has_terminal: bool = False) -> None:
        """Show what a rank prints; with `has_terminal`, its stdout comes from its terminal."""

    def release_log(self) -> None:
        """Let what is logged go to stderr again: something has failed that nobody has foreseen."""

    def finish(self, *, patient: bool = True) -> Sequence[Progress]:
        """Show what the ranks have printed to its end; return the first and the last logging step."""

    def close(self) -> bool:
        """Show what was logged last; False if the reader of our output takes none."""


@dataclass(slots=True)
class RankMonitor:
    """Keeps what is known of a node's ranks, and runs what goes with a job: viewer, terminal, provenance."""

    job: Job
    run: RunDir
    viewer: Viewer
    count_oom_kills: Callable[[], int]
    """Returns the processes that the kernel has killed for memory in this process's cgroup."""
    manifest: dict[str, object] | None = None
    """It is completed with the sources' versions while the job runs; None if another process writes it."""
    on_stop: Callable[[int, bool], None] = lambda *_: None
    """Called once, with the first stopping signal, and whether the job's first node sent it."""
    ranks: dict[int, RankProcess] = field(default_factory=dict)
    """By PID, over all restarts."""
    oom_kills: int = 0
    """What was counted when the agent started."""
    terminal: Terminal | None = None
    """If the program has the user's terminal."""
    reader: AppliedReader = field(init=False)
    sources: threading.Thread = field(init=False)
    """Asks git and the package index, which can take seconds on a network filesystem."""

    def __post_init__(self) -> None:
        """Make the thread; it starts with the job."""
        self.reader = AppliedReader(self.run.path)
        self.sources = threading.Thread(target=self.find_sources, daemon=True)

    def use_terminal(self) -> None:
        """Let the program have the user's terminal, if there is one; to be called before the start."""
        run = self.run
        terminal = open_terminal(
            lambda attempt: run.rank_log(0, attempt, "out"), run.first_attempt, self.viewer.notify
        )
        if terminal:
            self.terminal = terminal
            self.viewer.use_terminal(terminal.take, lambda: terminal.is_raw)

    def start(self) -> None:
        """Start what could wait until the agent was on its way."""
        self.oom_kills = self.count_oom_kills()
        self.viewer.start()
        if self.manifest is not None:
            self.sources.start()
        if self.terminal:
            self.terminal.start()

    def count_new_oom_kills(self) -> int:
        """Return the processes that the kernel has killed for memory since the agent's start."""
        return self.count_oom_kills() - self.oom_kills

    def find_sources(self) -> None:
        """Complete the manifest with the git commit of the working directory, and package versions."""
        if self.manifest is not None:
            self.manifest.update(describe_sources(Path(str(self.manifest["directory"]))))

    def add_ranks(self, found: Sequence[RankProcess]) -> list[RankProcess]:
        """Have the output shown of those ranks that are new, and return them."""
        fresh = [process for process in found if self.ranks.get(process.pid) != process]
        for process in fresh:
            self.ranks[process.pid] = process
            self.viewer.watch_rank(process.rank, process.attempt, has_terminal=process.has_terminal)
        return fresh

    def find_ranks(self, agent: int) -> list[RankProcess]:
        """Return ranks that an agent in a process of its own (a PID) has started, new ones at least.

        Their records tell, of those too that came and went between two calls. If other nodes share the
        folder of records, the ranks are found among the agent's children, and the records are read once, when
        the agent has ended and there are too few.
        """
        if self.job.cluster.max_nodes > 1 and (
            len(self.ranks) >= len(self.job.plan.ranks) or Path(f"/proc/{agent}").exists()
        ):
            return list_ranks(agent, self.run.first_attempt)
        # There are records of other nodes and of earlier starts: their PIDs say nothing here.
        own = [r for r in self.reader.read_new() if (r.host, r.agent) == (self.job.host, agent)]
        return [RankProcess(r.rank, r.local_rank, r.attempt, r.pid, r.has_terminal) for r in own]

    def read_applied(self) -> list[Applied]:
        """Read what this node's ranks have recorded of themselves."""
        found = []
        for rank in {process.rank for process in self.ranks.values()}:
            with contextlib.suppress(OSError, ValueError):
                path = self.run.path / name_applied_file(rank)
                found.append(load(Applied, read_file(path, LARGEST, own=True)))
        return [record for record in found if record.host == self.job.host]

    def is_busy(self) -> bool:
        """Tell whether our git is still running: the supervisor must not reap it with the ranks."""
        return self.sources.is_alive()

    def end(self) -> None:
        """Wait for git, after the agent's end."""
        if self.manifest is not None:
            self.sources.join()


def describe_job(job: Job, run: RunDir) -> tuple[str, ...]:
    """Say what was chosen and why."""
    count = len(job.plan.ranks)
    first = f", the first of {job.cluster.max_nodes} nodes" if job.cluster.kind in SLURM_KINDS else ""
    ranks = (
        f"{count} rank{'s' if count > 1 else ''} on {job.host}{first if job.cluster.max_nodes > 1 else ''}"
    )
    lines = [f"{ranks} (cluster={job.cluster.kind}: {job.cluster.why}), run directory {run.path}"]
    if job.cluster.max_nodes > 1:
        lines.append(f"the ranks start when {job.cluster.min_nodes} nodes have met at {job.cluster.endpoint}")
    return tuple(lines)
