"""Runs the agent on this node: watches the ranks, passes signals on in stages, and leaves no process."""

import logging
import math
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Protocol

from launcher.launch.agents import Agent, TorchrunAgent
from launcher.launch.ending import NodeEnd, describe_oom_kills, judge_end
from launcher.launch.job import Job, may_restart
from launcher.launch.processes import Death, RankSet, adopt_orphans, end_leftovers, reap_orphans
from launcher.launch.signals import (
    FORWARDED,
    HARD,
    KILL_GRACE,
    SLURM_GRACE,
    STOPPING,
    SignalChannel,
    SignalQueue,
    StopStages,
    catch_signals,
    name_signal,
)
from launcher.launch.terminal import Terminal
from launcher.launch.watching import Watching
from launcher.runs.progress import Progress
from launcher.runs.provenance import describe_sources
from launcher.runs.rank_logs import measure_file, read_tail
from launcher.runs.run_directory import RunDir

logger = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two looks for new ranks and signals."""
LOST_GRACE = 10.0
"""Seconds in which ranks may notice by themselves that a node was lost."""
AGENT_LINES = 2000
"""Last lines of the agent's log that are searched for its report."""
HEARING = 0.5
"""Seconds in which an agent says that it was sent a signal."""


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
class Supervisor:
    """Runs one agent and its ranks to their end."""

    job: Job
    run: RunDir
    viewer: Viewer
    agent: Agent
    count_oom_kills: Callable[[], int]
    """Returns the processes that the kernel has killed for memory in this process's cgroup."""
    manifest: dict[str, object] | None = None
    """It is completed with the sources' versions while the job runs; None if another process writes it."""
    terminal: Terminal | None = None
    """If the program has the user's terminal."""
    control: SignalChannel | None = None
    """Commands from the job's first node; None outside of a step of SLURM's."""
    watching: Watching | None = None
    """None if the ranks are not watched."""
    helpers: Collection[int] = ()
    """PIDs of processes of the launcher's own, which are not the program's leftovers."""
    deadline: float = math.inf
    """Monotonic time at which the job is ended as by SIGTERM to `launch`."""
    is_starved: Callable[[], bool] | None = None
    """Asked again and again; once it is true, the ranks are killed."""
    on_stop: Callable[[int, bool], None] = lambda *_: None
    """Called once, with the first stopping signal, and whether the job's first node sent it."""

    starved: bool = False
    """That has happened."""
    timed_out: bool = False
    """The deadline has passed."""
    stop: StopStages | None = None
    first_signal: int | None = None
    signal_time: float = math.inf
    commanded: bool = False
    """The first node has asked for the end."""
    rank_seen_at: float = 0.0
    """Monotonic time at which a rank was last seen to have started."""
    newest: int | None = None
    """The newest attempt of a rank."""
    killed_at: float = math.inf
    """When ranks were ended for a lost node's or a hang's sake, in seconds since the epoch."""
    hang: str = ""
    """The hang for which ranks were ended, until they have started again."""
    agent_heard: bool = False
    """SLURM has sent the agent the stopping signal by itself."""

    @property
    def ranks(self) -> RankSet:
        """The ranks on this node."""
        return self.agent.ranks

    def run_to_end(self) -> NodeEnd:
        """Run the agent to its end, and judge that; raises OSError if it cannot be started."""
        adopt_orphans()
        agent, job, log = self.agent, self.job, self.run.agent_log(self.job.host)
        manifest, log_begin = self.manifest, measure_file(log)
        # Asks git and the package index, which can take seconds on a network filesystem.
        sources = Thread(
            target=lambda: manifest and manifest.update(describe_sources(Path(str(manifest["directory"])))),
            daemon=True,
        )
        with catch_signals() as inbox:
            try:
                agent.begin()
                oom_kills = self.count_oom_kills()
                self.viewer.start()
                sources.start()
                if self.terminal:
                    self.terminal.start()
                # Before the agent ends others for one that has failed: the kernel then has their order.
                self.watch_new_ranks()
                while agent.poll() is None:
                    self.attend(inbox)
                    if not sources.is_alive():  # the supervisor must not reap its git with the ranks
                        reap_orphans({*agent.children, *self.list_helpers()})
                self.watch_new_ranks()
                self.ranks.poll((), 0)
                if self.watching:
                    self.watching.finish()
                sources.join()
            except BaseException:
                self.viewer.release_log()
                raise
            finally:
                left = end_leftovers(KILL_GRACE, self.list_helpers())
                self.ranks.close()
                agent.close()
        status = agent.poll()
        code = -signal.SIGKILL if status is None else status
        deaths = tuple(self.ranks.deaths)
        if code == 0:  # torchrun may have looked at a rank before this process
            deaths = tuple(replace(death, exitcode=death.exitcode or 0) for death in deaths)
        end = NodeEnd(code, deaths, self.first_signal, self.signal_time, tuple(left), self.hang, agent.label)
        # In a job of several nodes, a node has done its part if its ranks have, whatever the others need.
        ranks = len(job.plan.ranks) if self.control else 0
        end = judge_end(end, read_tail(log, AGENT_LINES, log_begin), ranks)
        return replace(end, memory=describe_oom_kills(job, self.count_oom_kills() - oom_kills))

    def list_helpers(self) -> set[int]:
        """Return the PIDs of processes of the launcher's own."""
        return {*self.helpers, *self.agent.helpers, *(self.watching.pids if self.watching else ())}

    def attend(self, inbox: SignalQueue) -> None:
        """Wait a moment for what happens, and act on it."""
        ranks, now = self.ranks, time.monotonic()
        # None comes while they end, and looking for it takes time in which the agent reaps others.
        if (ranks.fresh or len(ranks.alive) < len(self.job.plan.ranks)) and self.stop is None:
            self.watch_new_ranks()
        known = len(ranks.deaths)
        channels = self.control.descriptors if self.control else ()
        ranks.poll((inbox.wakeup, *channels, *self.agent.descriptors), TICK)
        fresh = ranks.deaths[known:]
        self.handle_key_signals(fresh)
        self.report_failures(fresh)
        if self.control and self.stop is None and fresh and self.has_agent_heard():
            self.handle_stop_signal(signal.SIGTERM, by_slurm=True)  # the agent alone got it
        self.handle_signals(inbox)
        if now > self.deadline and not self.timed_out:
            self.timed_out = True
            signal.raise_signal(signal.SIGTERM)
        if self.is_starved and not self.starved and self.is_starved():
            self.starved = ranks.signal_groups(signal.SIGKILL)
        # torchrun's agents restart for nodes that come, not for those that go: ranks that do not fail by
        # themselves wait for the lost ones in a collective until that times out.
        control, lost_at = self.control, self.control.lost_at if self.control else None
        if (
            control
            and lost_at is not None
            and not self.stop
            and self.rank_seen_at <= lost_at < now - LOST_GRACE
        ):
            control.lost_at, self.killed_at = None, time.time()
            logger.info("a node was lost: SIGKILL to the ranks, which start again without it")
            ranks.signal_groups(signal.SIGKILL)
        self.attend_watcher()

    def handle_key_signals(self, deaths: Sequence[Death]) -> None:
        """Take the end of a program by the user's Ctrl-C for a stop, after which nothing restarts."""
        pressed = self.terminal.pressed if self.terminal else {}
        for death in deaths:
            number = max(death.status - 128, 0)  # or one that the program reports as a shell does
            if number in pressed and self.stop is None:
                self.begin_stop(
                    number, self.job.config.torchrun.shutdown_timeout, pressed[number]
                ).next_stage()
                self.agent.send_signal(number)

    def report_failures(self, deaths: Sequence[Death]) -> None:
        """Say at once that a rank has failed, since its peers may take long to end; not what follows it."""
        job = self.job
        if job.world_size == 1 and not may_restart(job.config, job.cluster, job.environ):
            return  # the end is at hand, and says it
        for death in deaths:
            attempt, code = death.process.attempt, death.exitcode
            failed = (d for d in self.ranks.deaths if d.process.attempt == attempt and d.exitcode)
            ended = 0 <= death.time - self.killed_at < KILL_GRACE and code == -signal.SIGKILL
            if code and not ended and self.stop is None and next(failed) is death:
                status = f"code {code}" if code > 0 else name_signal(-code)
                asks = code in job.config.cluster.requeue.exit_codes
                what = "asks for another start" if asks else "failed"
                others = "" if job.world_size == 1 else "; the other ranks are ended"
                logger.info(f"rank {death.process.rank} {what} ({status}){others}")

    def watch_new_ranks(self) -> None:
        """Watch ranks that have started, and tell of a restart of the worker group."""
        ranks = self.ranks
        ranks.add(self.agent.list_ranks())
        fresh, ranks.fresh = ranks.fresh, []
        if not fresh:
            return
        self.rank_seen_at = time.monotonic()
        newest = max(process.attempt for process in fresh)
        if self.newest is not None and newest > self.newest:
            logger.info(f"the ranks were started again: attempt {newest}")
            self.hang = ""
        self.newest = max(newest, self.newest or 0)
        for process in fresh:
            self.viewer.watch_rank(process.rank, process.attempt, has_terminal=process.has_terminal)
        if self.watching:
            self.watching.add_ranks(fresh)

    def attend_watcher(self) -> None:
        """Log what the watcher has to say, and end ranks if it says so (`watch.on_hang`)."""
        for order in self.watching.attend(self.ranks.deaths) if self.watching else ():
            if self.stop or order.is_late(self.ranks.alive.values()):
                continue
            self.killed_at = time.time()
            if order.action == "restart":
                # Killed ranks are started again with their group: all if the named ones have ended.
                number = signal.SIGKILL
                if self.ranks.signal_groups(number, order.ranks) or self.ranks.signal_groups(number):
                    logger.info("SIGKILL to ranks that hang, so that all start again")
                    self.hang = order.sentence
                continue
            self.hang, self.first_signal, self.signal_time = order.sentence, signal.SIGTERM, self.killed_at
            self.begin_stop(signal.SIGTERM, self.limit_grace())
            self.advance_stop()

    def handle_signals(self, inbox: SignalQueue) -> None:
        """Pass on what has arrived; each stopping signal goes a stage on, and so does the time.

        The first node asks for a stop by signals too; others are for the ranks that catch them.
        """
        for number in inbox.take():
            if number in FORWARDED:
                # By `scancel --signal=USR2 JOB` or the like: SLURM sends it to a step's tasks alone.
                self.pass_on(number, catchers=self.control is not None)
            else:
                self.handle_stop_signal(number, by_slurm=self.control is not None)
        if self.stop and time.monotonic() >= self.stop.deadline:
            self.advance_stop()
        for number in self.control.read_signals() if self.control else ():
            if number in (*STOPPING, *HARD):
                self.commanded = True
                self.handle_stop_signal(number)
            else:
                self.pass_on(number, catchers=True)

    def pass_on(self, number: int, *, catchers: bool) -> None:
        """Pass a signal on to the ranks, or to those that have a handler for it."""
        self.watch_new_ranks()  # it can be for a rank that has started since the last look
        if spared := self.ranks.signal_ranks(number, catchers=catchers):
            ranks = "1 rank has" if spared == 1 else f"{spared} ranks have"
            logger.info(f"{name_signal(number)} not sent: {ranks} no handler for it")

    def limit_grace(self) -> float:
        """Return the seconds that ranks have after a first signal, within SLURM's patience if it has one."""
        grace = self.job.config.torchrun.shutdown_timeout
        return min(grace, SLURM_GRACE) if self.control else grace

    def begin_stop(self, number: int, grace: float, when: float | None = None) -> StopStages:
        """Begin to stop; how ranks end after the first stopping signal is no failure."""
        if self.first_signal is None:
            self.first_signal, self.signal_time = number, time.time() if when is None else when
            self.hang = ""  # the user's stop comes first
            self.on_stop(number, self.commanded)
        self.stop = StopStages.begin(number, grace)
        return self.stop

    def handle_stop_signal(self, number: int, *, by_slurm: bool = False) -> None:
        """Begin to stop, or enter the next stage. What SLURM and the first node both send is one stage.

        The agent may have got SLURM's signal as well, and then is not to get it from here: if SLURM tracks
        processes by cgroup, it has, and a second one would break off its shutdown, and so the ranks' time.
        """
        grace = self.limit_grace() if by_slurm else self.job.config.torchrun.shutdown_timeout
        if self.stop is None:
            self.begin_stop(number, grace)
            deadline = time.monotonic() + (
                HEARING if by_slurm and isinstance(self.agent, TorchrunAgent) else 0
            )
            while not self.agent_heard and time.monotonic() < deadline and self.agent.poll() is None:
                self.ranks.poll((), TICK)  # what a rank ended with is known until the agent looks
                self.agent_heard = self.has_agent_heard()
        elif self.control and self.stop.has_reached(number):
            return
        self.advance_stop()
        while self.control and self.stop and number in HARD and not self.stop.has_reached(number):
            self.advance_stop()

    def has_agent_heard(self) -> bool:
        """Tell whether a stopping signal has reached torchrun, a process of its own, past this one."""
        return isinstance(self.agent, TorchrunAgent) and self.agent.was_signalled()

    def advance_stop(self) -> None:
        """Enter the next stage. The agent forwards the first signal, later ones go to the ranks directly."""
        if (stop := self.stop) is None:
            return
        first = not stop.deadline
        number = stop.next_stage()
        if number is None or number == signal.SIGKILL:
            logger.info("SIGKILL to the ranks")
            if number is None or not self.ranks.alive:
                self.agent.kill()
            self.ranks.signal_groups(signal.SIGKILL)
            return
        left = stop.deadline - time.monotonic()
        logger.info(f"{name_signal(number)} to the ranks, which have {left:.0f} s to end")
        if not first:
            self.ranks.signal_groups(number)
        elif not self.agent_heard:
            self.agent.send_signal(number)
