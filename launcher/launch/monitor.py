"""Looks after a job while it runs: finds its ranks, and shows what they print."""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.launch.job import Job
from launcher.launch.processes import RankProcess
from launcher.launch.pseudo_terminal import PseudoTerminal
from launcher.launch.terminal_output import TerminalOutput
from launcher.launch.terminal_relay import Pump
from launcher.probe.cgroups import count_oom_kills
from launcher.probe.sysfs import Tree
from launcher.runs.applied_records import Applied, AppliedReader
from launcher.runs.progress import Progress
from launcher.runs.provenance import describe_sources
from launcher.runs.rank_logs import Chunk, Follower
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launcher.report.console import JobConsole

TICK = 0.04
"""Seconds between two looks at the logs, while there is nothing new."""
MANAGED = ("slurm", "allocation")
"""Kinds of clusters where one node speaks for all."""
STARTING = "starting the ranks: their program and its imports take a few seconds to load"
PATIENCE = 10.0
"""Seconds that a terminal or pipe has, at the end, to take some of what is still to be shown."""


@dataclass(slots=True)
class Viewer:
    """Shows the ranks' output and our own lines, in a thread: a stalled reader must not hold up the job."""

    job: Job
    run: RunDir
    follower: Follower
    terminal: PseudoTerminal | None = None
    """The program's, where it has the user's terminal to itself."""
    output: TerminalOutput | None = None
    """What it prints there."""
    messages: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    news: threading.Event = field(default_factory=threading.Event)
    """There is something to show, and no time to lose."""
    ending: threading.Event = field(default_factory=threading.Event)
    """The ranks have ended: what they printed is all there."""
    shown: threading.Event = field(default_factory=threading.Event)
    """All of that has been shown."""
    closing: threading.Event = field(default_factory=threading.Event)
    """No message will follow."""
    shows_job: bool = True
    """Begin with what was chosen and with the placement; of several nodes, one does."""
    hold: float = 0
    """Seconds that the console's import waits for something to show: it slows down the agent's."""
    console: "JobConsole | None" = None
    steps: Sequence[Progress] = ()
    """The first and the last logging step that rank 0 has printed."""

    def run_view(self) -> None:
        """Show the job to its end: the thread's body. If that fails, the job goes on without."""
        try:
            self.show_job()
        except Exception as error:
            logger.warning(f"the display failed ({error!r}): see {self.run.path}")
            self.shown.set()

    def show_job(self) -> None:
        """Show what is new until there is no more; the console's import is hidden by torch's in the agent."""
        self.await_news()
        self.console = console = self.open_console()
        while not self.ending.is_set():
            if not self.show_new(console):
                self.news.wait(TICK)
                self.news.clear()
        while self.show_new(console):
            pass
        console.close()
        self.steps = tuple(console.progress.steps)
        self.shown.set()
        self.closing.wait()
        self.show_messages(console)

    def await_news(self) -> None:
        """Wait until a rank has started, there is a message, the end has come, or it has been long enough."""
        deadline = time.monotonic() + self.hold
        while time.monotonic() < deadline and not self.follower.offsets and self.messages.empty():
            if self.ending.wait(TICK):
                return

    def show_new(self, console: "JobConsole") -> bool:
        """Show some of what is new; False where there is nothing of the ranks'."""
        busy = False
        if self.output and (data := self.output.take()):
            console.show(Chunk(0, "out", data))
            busy = True
        busy = console.show_turn(self.follower, final=self.ending.is_set()) or busy
        if not (busy and console.is_within_line):  # whose rest is on its way
            self.show_messages(console)
        console.tick()
        return busy

    def show_messages(self, console: "JobConsole") -> None:
        """Show our own lines that wait."""
        while not self.messages.empty():
            console.print_message(self.messages.get())

    def watch_rank(self, rank: int, attempt: int, *, has_terminal: bool = False) -> None:
        """Show what a rank prints, as far as that is asked for; rank 0 tells of progress in any case."""
        if rank == 0 or self.job.config.logs.console == "all":
            for stream in ("err",) if has_terminal else ("out", "err"):
                self.follower.watch_stream(rank, attempt, stream)

    def open_console(self) -> "JobConsole":
        """Return the console, with the placement on it."""
        from launcher.report.console import JobConsole, make_console

        job, mode = self.job, self.job.config.logs.console
        alone = len(job.plan.ranks) * job.cluster.max_nodes == 1
        console = JobConsole(
            mode,
            make_console(),
            str(self.run.path / "logs"),
            origin=None if alone else lambda _: job.host,
            shared=job.cluster.kind in MANAGED and job.cluster.max_nodes > 1 and mode == "all",
            followed=job.cluster.kind == "slurm",
            is_raw=lambda: self.terminal is not None and self.terminal.is_raw,
        )
        if not self.shows_job:
            return console
        from launcher.report.placement_table import print_placement

        for line in describe_job(job, self.run):
            console.print_message(line)
        console.print_renderable(lambda out: print_placement(out, job.plan, explain=job.config.explain))
        # Until the first line of a rank there are seconds, most of them torch's import.
        if mode != "none" and job.cluster.max_nodes == 1 and not self.follower.offsets:
            console.print_message(STARTING)
        return console

    def await_shown(self, *, patient: bool = True) -> bool:
        """Have the ranks' output shown to its end, for as long as its reader keeps taking some of it."""
        self.ending.set()
        self.news.set()
        taken = -1
        while not self.shown.wait(PATIENCE):
            if not patient or taken == self.count_taken():
                return False
            taken = self.count_taken()
        return True

    def count_taken(self) -> int:
        """Return the bytes that the readers of our output have taken."""
        return self.console.out.taken + self.console.err.taken if self.console else 0

    def tell_rest(self) -> None:
        """Say that a reader has left some of the output, where that can be said without waiting for it."""
        from launcher.report.byte_stream import open_stream

        stderr = open_stream("stderr")
        if stderr.can_take():
            logs = self.run.path / "logs"
            stderr.write(f"launch: warning: not all output was taken: see {logs}\n".encode(errors="replace"))


@dataclass(slots=True)
class Attendant:
    """Looks after a running job: keeps the ranks' records, and has their output shown."""

    job: Job
    run: RunDir
    manifest: dict[str, object]
    viewer: Viewer
    reader: AppliedReader
    pump: Pump | None = None
    """Where the program has the user's terminal."""
    applied: dict[int, Applied] = field(default_factory=dict)
    """The newest record of each rank of this node."""
    oom_kills: int = 0
    """Processes that the kernel had killed for memory here when the agent started."""
    view: threading.Thread = field(init=False)
    sources: threading.Thread = field(init=False)
    """Asks git and the package index, which can take seconds on a network filesystem."""

    def __post_init__(self) -> None:
        """Make the threads; they start with the job."""
        self.view = threading.Thread(target=self.viewer.run_view, daemon=True)
        self.sources = threading.Thread(target=self.find_sources, daemon=True)

    def use_terminal(self, terminal: PseudoTerminal) -> None:
        """Let the program have the user's terminal; to be called before the start."""
        self.viewer.terminal = terminal
        self.viewer.output = TerminalOutput(
            lambda attempt: self.run.rank_log(0, attempt, "out"), self.run.first_attempt
        )
        self.pump = Pump(terminal, self.viewer.output, self.announce, self.viewer.news.set)

    def begin(self) -> None:
        """Start what could wait until the agent was on its way."""
        self.oom_kills = count_oom_kills(Tree())
        self.view.start()
        self.sources.start()
        if self.pump:
            self.pump.start()

    def find_sources(self) -> None:
        """Complete the manifest with the git commit of where the job was started, and package versions."""
        self.manifest.update(describe_sources(Path(str(self.manifest["directory"]))))

    def find_ranks(self, agent: int) -> list[RankProcess]:
        """Return the ranks that this agent (a PID) has started since the last call.

        In a shared run directory there are records of other nodes and of earlier starts: their PIDs are
        nothing to us.
        """
        fresh = [r for r in self.reader.read_new() if (r.host, r.agent) == (self.job.host, agent)]
        for record in fresh:
            self.applied[record.rank] = record
            self.viewer.watch_rank(record.rank, record.attempt, has_terminal=record.has_terminal)
        return [RankProcess(r.rank, r.local_rank, r.attempt, r.pid) for r in fresh]

    def announce(self, text: str) -> None:
        """Show one of our own lines."""
        self.viewer.messages.put(text)

    def note_stop(self, number: int, *, by_head: bool) -> None:
        """Nothing to do: the manifest is written at the end."""

    def may_reap(self) -> bool:
        """Tell whether no git of ours is running."""
        return not self.sources.is_alive()

    def end(self) -> None:
        """Wait for git."""
        self.sources.join()

    def restore_terminal(self) -> None:
        """Give the user's terminal back as it was, however the job has ended."""
        if self.pump:
            self.pump.finish()
            if fault := self.pump.output.fault:
                self.announce(f"warning: the log of the program's terminal is not complete ({fault})")

    def finish_lines(self, *, patient: bool = True) -> Sequence[Progress]:
        """Have the ranks' last lines shown, and return the first and last logging step."""
        self.viewer.await_shown(patient=patient)
        return self.viewer.steps

    def close(self) -> bool:
        """Have our last lines shown; False where the reader of our output takes none."""
        self.viewer.closing.set()
        self.view.join(PATIENCE if self.viewer.shown.is_set() else 0)
        if self.view.is_alive():
            self.viewer.tell_rest()
        return not self.view.is_alive()


def attend_job(job: Job, run: RunDir, manifest: dict[str, object]) -> Attendant:
    """Return the attendant of a job that is about to start."""
    viewer = Viewer(job, run, Follower(run))
    return Attendant(job, run, manifest, viewer, AppliedReader(run.path))


def describe_job(job: Job, run: RunDir) -> list[str]:
    """Say what was chosen and why."""
    count = len(job.plan.ranks)
    first = f", the first of {job.cluster.max_nodes} nodes" if job.cluster.kind in MANAGED else ""
    ranks = (
        f"{count} rank{'s' if count > 1 else ''} on {job.host}{first if job.cluster.max_nodes > 1 else ''}"
    )
    lines = [f"{ranks} (cluster={job.cluster.kind}: {job.cluster.why}), run directory {run.path}"]
    if job.cluster.max_nodes > 1:
        lines.append(f"the ranks start when {job.cluster.min_nodes} nodes have met at {job.cluster.endpoint}")
    if job.words is not None and job.choices.get("model") not in (None, "tiny"):
        lines.append(f"model={job.choices['model']} is not used: the program after -- has its own arguments")
    return lines
