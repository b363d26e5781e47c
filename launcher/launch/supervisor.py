"""Runs the agent on this node: watches the ranks, passes signals on in stages, and leaves no process."""

import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.launch.agent_process import Agent
from launcher.launch.job import may_restart
from launcher.launch.monitor import RankMonitor
from launcher.launch.processes import (
    Death,
    RankPidfds,
    RankProcess,
    adopt_orphans,
    end_leftovers,
    reap_orphans,
)
from launcher.launch.signal_channel import SignalChannel
from launcher.launch.signals import (
    FORWARDED,
    HARD,
    KILL_GRACE,
    STOPPING,
    SignalQueue,
    StopStages,
    catch_signals,
    limit_grace,
    name_signal,
)
from launcher.launch.watching import HangOrder, Watching
from launcher.text import escape_text

logger = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two looks for new ranks and signals."""
LOST_GRACE = 10.0
"""Seconds in which ranks may notice by themselves that a node was lost."""
HEARING = 0.5
"""Seconds in which an agent says that it was sent a signal."""
LATE = 60.0
"""Seconds for which a rank is idle after a peer has ended with 0 until that is told."""
LATE_LOOK = 5.0
"""Seconds between two looks at such ranks."""
IDLE_TICKS, IDLE_BYTES = 10, 1 << 14
"""CPU (clock ticks) and bytes that an idle rank may use between two looks: our own questions cost some."""


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How the agent and its ranks ended."""

    agent_exitcode: int
    """As subprocess gives it: -n for signal n."""
    deaths: tuple[Death, ...]
    """The ranks' ends in the order in which the kernel saw them, over all attempts."""
    signal: int | None
    """The first stopping signal that `launch` was sent."""
    signal_time: float
    """When it came, in seconds since the epoch; infinite if none did."""
    leftovers: tuple[str, ...]
    """Processes that outlived the agent and were ended."""
    hang: str = ""
    """The hang, in words, for which ranks were ended from here."""
    label: str = "torchrun"
    """The agent's name."""


@dataclass(slots=True)
class Supervisor:
    """Runs one agent and its ranks to their end."""

    monitor: RankMonitor
    expected: int
    """Ranks on this node: while fewer are alive, new ones are looked for."""
    grace: float
    """Seconds that ranks have after the first stopping signal; then SIGTERM, then SIGKILL."""
    pressed: Mapping[int, float] = field(default_factory=dict)
    """When the user's keys last sent the program each signal, past this process (s since the epoch)."""
    helpers: Collection[int] = ()
    """PIDs of processes of the launcher's own, which are not the program's leftovers."""
    pidfds: RankPidfds = field(default_factory=RankPidfds)
    stop: StopStages | None = None
    first_signal: int | None = None
    signal_time: float = math.inf
    control: SignalChannel | None = None
    """Commands from the job's first node; None outside of a step of SLURM's."""
    commanded: bool = False
    """The first node has asked for the end."""
    rank_seen_at: float = 0.0
    """Monotonic time at which a rank was last seen to have started."""
    killed_at: float = math.inf
    """When ranks were ended for a lost node's or a hang's sake, in seconds since the epoch."""
    watching: Watching | None = None
    """None if the ranks are not watched."""
    hang: str = ""
    """The hang for which ranks were ended, until they have started anew."""
    agent_heard: bool = False
    """SLURM has sent the agent the stopping signal by itself."""
    exit_codes: Collection[int] = ()
    """Those by which a rank asks for another start."""
    deadline: float = math.inf
    """Monotonic time at which the job is ended as by SIGTERM to `launch`."""
    is_starved: Callable[[], bool] | None = None
    """Asked again and again; once it is true, the ranks are killed."""
    starved: bool = False
    """That has happened."""
    late_look: float = 0.0
    """Monotonic time of the next look at ranks that stay behind."""
    late_thread: threading.Thread | None = None
    """The last one that looked at them."""
    idle: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    """By PID: since when such a rank is idle, and the CPU and bytes that it had used at the last look."""

    @property
    def timed_out(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline < 0

    def run(self, agent: Agent) -> AgentExit:
        """Run an agent to its end; raises OSError if it cannot be started."""
        adopt_orphans()
        self.pidfds.read_exit = agent.read_exit
        with catch_signals() as inbox:
            try:
                agent.begin()
                self.monitor.start()
                self.monitor_ranks(agent, inbox)
                if self.watching:
                    self.watching.finish()
                self.monitor.end()
            except BaseException:
                self.monitor.viewer.release_log()
                raise
            finally:
                left = end_leftovers(KILL_GRACE, self.list_own(agent))
                self.pidfds.close()
                agent.close()
        status, exits = agent.poll(), agent.read_exits()
        deaths = tuple(
            replace(death, exitcode=exits.get(death.process.pid)) if death.exitcode is None else death
            for death in self.pidfds.deaths
        )
        code = -signal.SIGKILL if status is None else status
        return AgentExit(
            code, deaths, self.first_signal, self.signal_time, tuple(left), self.hang, agent.label
        )

    def list_own(self, agent: Agent) -> set[int]:
        """Return the PIDs of processes of the launcher's own."""
        return {*self.helpers, *agent.pids, *(self.watching.pids if self.watching else ())}

    def monitor_ranks(self, agent: Agent, inbox: SignalQueue) -> None:
        """Watch ranks and pass on signals until the agent ends."""
        # Before the agent ends others for one that has failed: the kernel then has the order of their ends.
        self.watch_new_ranks(agent)
        while agent.poll() is None:
            # None comes while they end, and looking for it takes time in which the agent reaps others.
            if len(self.pidfds.alive) < self.expected and self.stop is None:
                self.watch_new_ranks(agent)
            known = len(self.pidfds.deaths)
            channels = self.control.descriptors if self.control else ()
            self.pidfds.poll((inbox.wakeup, *channels, *agent.descriptors), TICK)
            self.handle_key_signals(self.pidfds.deaths[known:], agent)
            self.report_failures(self.pidfds.deaths[known:])
            if self.control and self.stop is None and known < len(self.pidfds.deaths):
                self.check_agent_signal(agent)
            self.handle_signals(inbox, agent)
            self.handle_commands(agent)
            self.restart_without_lost_node(agent)
            if time.monotonic() > self.deadline >= 0:
                self.deadline = -1.0
                signal.raise_signal(signal.SIGTERM)
            if self.is_starved and not self.starved and self.is_starved():
                self.starved = bool(self.pidfds.signal_groups(signal.SIGKILL))
            self.attend_watcher(agent)
            if time.monotonic() >= self.late_look:
                self.look_for_late_ranks()
            if not self.monitor.is_busy():
                reap_orphans({*agent.children, *self.list_own(agent)})
        self.watch_new_ranks(agent)
        self.pidfds.poll((), 0)

    def handle_key_signals(self, deaths: Sequence[Death], agent: Agent) -> None:
        """Take the end of a program by the user's Ctrl-C for a stop, after which nothing restarts."""
        for number in (find_end_signal(death) for death in deaths):
            if number in self.pressed and self.stop is None:
                self.record_first_signal(number, self.pressed[number], by_first_node=False)
                self.stop = StopStages.begin(number, self.grace)
                self.stop.next_stage()
                agent.send_signal(number)

    def report_failures(self, deaths: Sequence[Death]) -> None:
        """Say at once that a rank has failed, since its peers may take long to end; not what follows it."""
        for death in deaths:
            attempt, code = death.process.attempt, death.exitcode
            failed = (d for d in self.pidfds.deaths if d.process.attempt == attempt and d.exitcode)
            ended = 0 <= death.time - self.killed_at < KILL_GRACE and code == -signal.SIGKILL
            if code and not ended and self.stop is None and next(failed) is death:
                status = f"code {code}" if code > 0 else name_signal(-code)
                what = "asks for another start" if code in self.exit_codes else "failed"
                job = self.monitor.job
                if job.world_size == 1 and not may_restart(job.config, job.cluster, job.environ):
                    return  # the end is at hand, and says it
                others = "" if job.world_size == 1 else "; the other ranks are ended"
                logger.info(f"rank {death.process.rank} {what} ({status}){others}")

    def look_for_late_ranks(self) -> None:
        """Have ranks looked at whose peer has ended with 0: in a thread, since reading /proc can block."""
        self.late_look = time.monotonic() + LATE_LOOK
        ended = {death.process.attempt for death in self.pidfds.deaths if death.exitcode == 0}
        late = [process for process in self.pidfds.alive.values() if process.attempt in ended]
        if self.stop is None and late and not (self.late_thread and self.late_thread.is_alive()):
            self.late_thread = threading.Thread(target=self.report_late_ranks, args=(late,), daemon=True)
            self.late_thread.start()

    def report_late_ranks(self, late: Sequence[RankProcess]) -> None:
        """Say once of a rank that it stays, idle, though a peer has ended with 0, and where its threads wait.

        It may be stuck in the interpreter's end, where no Python stack tells why.
        """
        now = time.monotonic()
        # Few jobs need it, and importing it takes long.
        from launcher.watch.procfs import list_descendants, look_at_process

        for process in late:
            looks = [look_at_process(pid) for pid in (process.pid, *list_descendants(process.pid))]
            ticks = sum(look.ticks for look in looks)
            moved = sum(look.bytes_moved for look in looks)
            since, ticks_before, moved_before = self.idle.get(process.pid, (now, ticks, moved))
            used = abs(ticks - ticks_before) > IDLE_TICKS or abs(moved - moved_before) > IDLE_BYTES
            if used and since < math.inf:
                since = now  # also where a child has ended, and its counters with it
            if now - since >= LATE:
                since = math.inf
                logger.info(
                    f"rank {process.rank} on {self.monitor.job.host} has been idle for {LATE:.0f} s after a "
                    f"peer ended with 0: {describe_waits(process.pid)}"
                )
            self.idle[process.pid] = since, ticks, moved

    def check_agent_signal(self, agent: Agent) -> None:
        """Stop, too, if a rank has ended because the agent alone got a signal."""
        if agent.was_signalled():
            self.handle_slurm_signal(signal.SIGTERM, agent)

    def watch_new_ranks(self, agent: Agent) -> None:
        """Watch ranks that have started, and tell of a restart of the worker group."""
        fresh = self.monitor.add_ranks(agent.list_ranks())
        self.rank_seen_at = time.monotonic() if fresh else self.rank_seen_at
        seen = max((process.attempt for process in self.pidfds.processes()), default=None)
        newest = max((process.attempt for process in fresh), default=None)
        if seen is not None and newest is not None and newest > seen:
            logger.info(f"the ranks were started anew: attempt {newest}")
            self.hang = ""
        self.pidfds.add_ranks(fresh)
        if self.watching:
            self.watching.add_ranks(fresh)

    def attend_watcher(self, agent: Agent) -> None:
        """Log what the watcher has to say, and end ranks if it says so (`watch.on_hang`)."""
        for order in self.watching.attend(self.pidfds.deaths) if self.watching else ():
            if self.stop is not None or order.is_late((*self.pidfds.alive.values(), *self.pidfds.unseen)):
                continue
            self.killed_at = time.time()
            if order.action == "restart":
                self.restart_hung_ranks(order)
                continue
            self.hang, self.first_signal, self.signal_time = order.sentence, signal.SIGTERM, self.killed_at
            grace = limit_grace(self.grace, self.control.kill_wait) if self.control else self.grace
            self.stop = StopStages.begin(signal.SIGTERM, grace)
            self.advance_stop(self.stop, agent)

    def restart_hung_ranks(self, order: HangOrder) -> None:
        """Kill ranks for a hang, so that the agent restarts the group: all if the named ones have ended."""
        number = signal.SIGKILL
        if self.pidfds.signal_groups(number, order.ranks) or self.pidfds.signal_groups(number):
            logger.info("SIGKILL to ranks that hang, so that all start anew")
            self.hang = order.sentence

    def handle_signals(self, inbox: SignalQueue, agent: Agent) -> None:
        """Pass on what has arrived; each stopping signal goes a stage on, and so does the time."""
        arrived = inbox.take()
        if not {*arrived}.isdisjoint(FORWARDED):
            self.watch_new_ranks(agent)  # it can be for a rank that has started since the last look
        for number in arrived:
            if number not in FORWARDED:
                self.handle_slurm_signal(number, agent) if self.control else self.handle_stop_signal(
                    number, agent, self.grace
                )
            elif self.control is None:
                self.pidfds.signal_ranks(number)
            else:  # by `scancel --signal=USR2 JOB` or the like: SLURM sends it to a step's tasks alone
                self.signal_catchers(number)
        if self.stop and time.monotonic() >= self.stop.deadline:
            self.advance_stop(self.stop, agent)

    def handle_stop_signal(self, number: int, agent: Agent, grace: float) -> None:
        """Begin to stop, or enter the next stage. What SLURM and the first node both send is one stage."""
        if self.stop is None:
            self.record_first_signal(number, by_first_node=self.commanded)
            self.stop = StopStages.begin(number, grace)
        elif self.control and self.stop.has_reached(number):
            return
        self.advance_stop(self.stop, agent)
        while self.control and number in HARD and not self.stop.has_reached(number):
            self.advance_stop(self.stop, agent)

    def record_first_signal(self, number: int, when: float | None = None, *, by_first_node: bool) -> None:
        """Remember the first stopping signal: how ranks end after it is no failure."""
        if self.first_signal is None:
            self.first_signal, self.signal_time = number, time.time() if when is None else when
            self.hang = ""  # the user's stop comes first
            self.monitor.on_stop(number, by_first_node)

    def handle_slurm_signal(self, number: int, agent: Agent) -> None:
        """Stop by SLURM's signal, which the agent may have got as well, and then is not to get from here.

        If SLURM tracks processes by cgroup, it has: a second one would break off the agent's own shutdown,
        and so the ranks' time to end.
        """
        deadline = time.monotonic() + HEARING
        if self.stop is None:
            self.record_first_signal(number, by_first_node=False)
            waits = agent.gets_signals
            while waits and not self.agent_heard and time.monotonic() < deadline and agent.poll() is None:
                self.pidfds.poll((), TICK)  # what a rank ended with is known until the agent looks
                self.agent_heard = agent.was_signalled()
        kill_wait = self.control.kill_wait if self.control else None
        self.handle_stop_signal(number, agent, limit_grace(self.grace, kill_wait))

    def handle_commands(self, agent: Agent) -> None:
        """Do what the first node asks: stop by its signals, pass others on to the ranks that catch them."""
        for number in self.control.read_signals() if self.control else ():
            if number in (*STOPPING, *HARD):
                self.commanded = True
                self.handle_stop_signal(number, agent, self.grace)
                continue
            self.watch_new_ranks(agent)
            self.signal_catchers(number)

    def signal_catchers(self, number: int) -> None:
        """Pass a signal on to the ranks that have a handler for it."""
        _, spared = self.pidfds.signal_catchers(number)
        if spared:
            ranks = "1 rank has" if spared == 1 else f"{spared} ranks have"
            logger.info(f"{name_signal(number)} not sent: {ranks} no handler for it")

    def restart_without_lost_node(self, agent: Agent) -> None:
        """End ranks that go on as if a lost node were there, so that the agent starts them anew without it.

        Those that notice fail by themselves. Others wait in a collective, or for the lost ranks to connect,
        until that times out: torchrun's agents restart for nodes that come, not for those that go.
        """
        lost_at = self.control.lost_at if self.control else None
        if self.control is None or lost_at is None or self.stop or self.rank_seen_at > lost_at:
            return
        if time.monotonic() > lost_at + LOST_GRACE:
            self.control.lost_at, self.killed_at = None, time.time()
            logger.info("a node was lost: SIGKILL to the ranks, which start anew without it")
            self.pidfds.signal_groups(signal.SIGKILL)

    def advance_stop(self, stop: StopStages, agent: Agent) -> None:
        """Enter the next stage. The agent forwards the first signal, later ones go to the ranks directly."""
        first = not stop.deadline
        number = stop.next_stage()
        if number is None or number == signal.SIGKILL:
            logger.info("SIGKILL to the ranks")
            if number is None or not (self.pidfds.alive or self.pidfds.unseen):
                agent.kill()
            self.pidfds.signal_groups(signal.SIGKILL)
            return
        left = stop.deadline - time.monotonic()
        logger.info(f"{name_signal(number)} to the ranks, which have {left:.0f} s to end")
        if first:
            agent.send_signal(number) if not self.agent_heard else None
        else:
            self.pidfds.signal_groups(number)


def describe_waits(pid: int) -> str:
    """Say in which system calls the threads of a process wait: the main one, then the others by name."""
    from launcher.watch.procfs import list_threads, read_system_call

    try:
        threads = list_threads(pid)
    except OSError:
        return "it is ending"
    calls = {tid: read_system_call(pid, f"task/{tid}/syscall") or "no system call" for tid, _ in threads}
    others = Counter(f"{name} in {calls[tid]}" for tid, name in threads if tid != pid)
    texts = [f"{count} of {text}" if count > 1 else text for text, count in others.items()]
    main = f"its main thread is in {calls.get(pid, 'no system call')}"
    return escape_text(f"{main}, its other threads: {', '.join(texts)}" if texts else main)


def find_end_signal(death: Death) -> int:
    """Return the signal that a rank ended by, or reported by 128+n as a shell does; 0 for none."""
    code = death.exitcode or 0
    return -code if code < 0 else max(code - 128, 0)
