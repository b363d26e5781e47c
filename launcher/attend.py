"""Looks after a job while it runs: finds its ranks, and shows what they print."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.job import Job
from launcher.launch.processes import RankProcess
from launcher.runs.applied import Applied, AppliedReader
from launcher.runs.logs import Follower
from launcher.runs.manifest import describe_sources
from launcher.runs.rundir import RunDir

if TYPE_CHECKING:
    from launcher.report.console import JobConsole


@dataclass(slots=True)
class Attendant:
    """Looks after a running job: finds its ranks and shows their output."""

    job: Job
    run: RunDir
    own_files: Sequence[str]
    """Configuration files that are not the shipped ones."""
    manifest: dict[str, object]
    applied: dict[int, Applied] = field(default_factory=dict)
    """The newest record of each rank of this node."""
    console: "JobConsole | None" = None
    follower: Follower = field(init=False)
    reader: AppliedReader = field(init=False)
    sources: threading.Thread = field(init=False)
    """Asks git and the package index, which can take seconds on a network filesystem."""

    def __post_init__(self) -> None:
        """Open the readers of logs and records."""
        self.follower, self.reader = Follower(self.run), AppliedReader(self.run.path)
        self.sources = threading.Thread(target=self.find_sources, daemon=True)

    def find_sources(self) -> None:
        """Complete the manifest with the git commit of where the job was started, and package versions."""
        self.manifest.update(describe_sources(Path(str(self.manifest["directory"]))))

    def begin(self) -> None:
        """Start what could wait until the agent was on its way."""
        self.sources.start()

    def finish(self) -> None:
        """Show the last lines, and wait for the manifest's sources."""
        self.look(final=True)
        self.sources.join()

    def find_ranks(self, agent: int) -> list[RankProcess]:
        """Return the ranks that this agent (a PID) has started since the last call.

        In a shared run directory there are records of other nodes and of earlier starts: their PIDs are
        nothing to us.
        """
        fresh = [r for r in self.reader.read_new() if (r.host, r.agent) == (self.job.host, agent)]
        for record in fresh:
            self.applied[record.rank] = record
            self.follower.watch_rank(record.rank, record.attempt)
        return [RankProcess(r.rank, r.local_rank, r.attempt, r.pid) for r in fresh]

    def look(self, *, final: bool = False) -> None:
        """Show what the ranks have printed since the last call; at first, where they are placed."""
        console = self.get_console()
        for line in self.follower.read_lines(final=final):
            console.show_line(line)

    def announce(self, text: str) -> None:
        """Show one of our own lines."""
        self.get_console().say(text)

    def get_console(self) -> "JobConsole":
        """Return the console; its import waits until the agent is on its way, and is hidden by torch's."""
        if self.console is None:
            from launcher.report.console import JobConsole, make_console
            from launcher.report.placement import print_placement

            explain = self.job.config.explain
            self.console = JobConsole(self.job.config.logs.console, self.job.host, make_console())
            for line in describe_job(self.job, self.run, self.own_files):
                self.console.say(line)
            self.console.guard(lambda console: print_placement(console, self.job.plan, explain=explain))
        return self.console


def describe_job(job: Job, run: RunDir, own_files: Sequence[str]) -> list[str]:
    """Say what was chosen and why."""
    count = len(job.plan.ranks)
    ranks = f"{count} rank{'s' if count > 1 else ''} on {job.host}"
    lines = [f"{ranks} (cluster={job.cluster.kind}: {job.cluster.why}), run directory {run.path}"]
    if own_files:
        lines.append(f"configuration from {', '.join(own_files)}")
    if job.words is not None and job.composed.choices.get("model") not in (None, "tiny"):
        lines.append(
            f"model={job.composed.choices['model']} is not used: the program after -- has its own arguments"
        )
    return lines
