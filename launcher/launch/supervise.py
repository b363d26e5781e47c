"""Runs the agent on this node: forwards signals in stages, watches the ranks, and leaves no process."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from launcher.launch.processes import Death, RankProcess, Watch, adopt_orphans, end_leftovers, end_with_parent

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the job; the ones that torchrun handles too."""
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go to the ranks alone: the agent has no handler for them and would die."""
TICK = 0.05
"""Seconds between two looks at the logs."""
TERM_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL, after the first signal's own grace."""
KILL_GRACE = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the agent and its ranks ended."""

    agent_exitcode: int
    """As subprocess gives it: -n for signal n."""
    deaths: tuple[Death, ...]
    """The ranks' ends in the order in which the kernel saw them, over all attempts."""
    signal: int | None
    """The first stopping signal that `launch` was sent."""
    leftovers: tuple[str, ...]
    """Processes that outlived the agent and were ended."""


@dataclass(slots=True)
class Inbox:
    """Signals that have arrived and wait to be handled in the loop."""

    arrived: list[int] = field(default_factory=list)

    def take(self) -> list[int]:
        """Return the signals since the last call."""
        taken, self.arrived = self.arrived, []
        return taken

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler."""
        self.arrived.append(number)


@dataclass(slots=True)
class Stop:
    """The stages of ending a job: the user's signal, SIGTERM, SIGKILL."""

    stages: list[tuple[int, float]]
    """(signal, seconds until the next), those that are still to come."""
    deadline: float = 0.0
    """Monotonic time of the next stage."""

    @classmethod
    def begin(cls, number: int, grace: float) -> "Stop":
        """Plan the stages after a first signal."""
        harder = [(signal.SIGTERM, TERM_GRACE)] if number == signal.SIGINT else []
        return cls([(number, grace), *harder, (signal.SIGKILL, KILL_GRACE)])

    def next_stage(self) -> int | None:
        """Enter the next stage and return its signal; None after the last."""
        if not self.stages:
            self.deadline = time.monotonic() + KILL_GRACE
            return None
        number, seconds = self.stages.pop(0)
        self.deadline = time.monotonic() + seconds
        return number


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    agent_log: Path,
    *,
    grace: float,
    started: Callable[[], None],
    find_ranks: Callable[[], Iterable[RankProcess]],
    look: Callable[[], None],
    announce: Callable[[str], None],
) -> Outcome:
    """Run the agent to its end and return how it went.

    `started` is called once the agent is on its way, `find_ranks` gives the ranks that have started since its
    last call, `look` is called every TICK seconds, `announce` with a line for people. A signal once: the
    ranks get it and have `grace` seconds, then SIGTERM, then SIGKILL; each further one goes a stage on.
    Raises OSError where the agent cannot be started.
    """
    adopt_orphans()
    with catch_signals() as (inbox, wakeup):
        agent = start_agent(command, environ, agent_log)
        started()
        watch, stop, first = Watch(), None, None
        agent_fd = os.pidfd_open(agent.pid)
        while agent.poll() is None:
            watch.poll((agent_fd, wakeup), TICK)
            drain(wakeup)
            admit_ranks(watch, find_ranks(), announce)
            look()
            for number in inbox.take():
                if number in FORWARDED:
                    watch.signal_ranks(number)
                    continue
                first = first or number
                stop = stop or Stop.begin(number, grace)
                advance_stop(stop, agent, watch, announce)
            if stop and time.monotonic() >= stop.deadline:
                advance_stop(stop, agent, watch, announce)
        os.close(agent_fd)
        watch.add_ranks(find_ranks())
        watch.poll((), 0)
        watch.close()
        left = end_leftovers(KILL_GRACE)
        look()
    return Outcome(agent.returncode, tuple(watch.deaths), first, tuple(left))


def admit_ranks(watch: Watch, processes: Iterable[RankProcess], announce: Callable[[str], None]) -> None:
    """Watch ranks that have started, and tell of a restart of the worker group."""
    fresh = list(processes)
    seen = max((process.attempt for process in watch.processes()), default=None)
    newest = max((process.attempt for process in fresh), default=None)
    if seen is not None and newest is not None and newest > seen:
        failed = next((d for d in watch.deaths if d.process.attempt == seen and d.exitcode != 0), None)
        why = f"rank {failed.process.rank} failed, " if failed else ""
        announce(f"{why}torchrun restarted the ranks: attempt {newest}")
    watch.add_ranks(fresh)


def advance_stop(
    stop: Stop, agent: "subprocess.Popen[bytes]", watch: Watch, announce: Callable[[str], None]
) -> None:
    """Enter the next stage. The agent forwards the first signal, later ones go to the ranks directly."""
    first = not stop.deadline
    number = stop.next_stage()
    if number is None or number == signal.SIGKILL:
        announce("the ranks did not end in time: SIGKILL")
        if number is None or not watch.alive:
            agent.kill()
        watch.signal_groups(signal.SIGKILL)
        return
    announce(f"{signal.Signals(number).name} to the ranks, {stop.deadline - time.monotonic():.0f} s to end")
    if first:
        agent.send_signal(number)
    else:
        watch.signal_groups(number)


def start_agent(command: Sequence[str], environ: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start the agent in a session of its own, so that a terminal's Ctrl-C reaches `launch` alone."""
    parent = os.getpid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent),  # noqa: PLW1509 - there is one thread
        )
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def catch_signals() -> Iterator[tuple[Inbox, int]]:
    """Collect signals instead of dying of them; gives a descriptor that is readable when one has come.

    A signal that was ignored at the start (nohup, a shell's background job) stays ignored.
    """
    inbox = Inbox()
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wanted = [n for n in (*STOPPING, *FORWARDED) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, inbox.note) for number in wanted}
    old_wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield inbox, reading
    finally:
        signal.set_wakeup_fd(old_wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def name_signal(number: int) -> str:
    """Return a signal's name, `signal 40` where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def drain(descriptor: int) -> None:
    """Empty the wake-up pipe."""
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 64):
            pass
