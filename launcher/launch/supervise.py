"""Runs the agent on this node: watches the ranks, passes signals on in stages, and leaves no process."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launcher.launch.processes import (
    Death,
    RankProcess,
    Watch,
    adopt_orphans,
    end_leftovers,
    prepare_agent,
    reap_orphans,
)
from launcher.launch.signals import FORWARDED, KILL_GRACE, Inbox, Stop, catch_signals, name_signal

TICK = 0.05
"""Seconds between two looks for new ranks and signals."""


class Observer(Protocol):
    """Who is told of a running job."""

    def begin(self) -> None:
        """Told once, when the agent is on its way."""

    def find_ranks(self, agent: int) -> Iterable[RankProcess]:
        """Return the ranks that the agent (a PID) has started since the last call."""

    def announce(self, text: str) -> None:
        """Told a line for people."""

    def may_reap(self) -> bool:
        """Tell whether the agent is the only child that somebody waits for."""

    def end(self) -> None:
        """Told once, when the agent has ended, before what it left is ended; waits for its own children."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the agent and its ranks ended."""

    agent_exitcode: int
    """As subprocess gives it: -n for signal n."""
    deaths: tuple[Death, ...]
    """The ranks' ends in the order in which the kernel saw them, over all attempts."""
    signal: int | None
    """The first stopping signal that `launch` was sent."""
    signal_time: float
    """When it came, in seconds since the epoch; infinite where none did."""
    leftovers: tuple[str, ...]
    """Processes that outlived the agent and were ended."""


@dataclass(slots=True)
class Supervisor:
    """Keeps one agent and its ranks company until their end."""

    observer: Observer
    expected: int
    """Ranks on this node: while fewer are alive, new ones are looked for."""
    grace: float
    """Seconds that ranks have after the first stopping signal; then SIGTERM, then SIGKILL."""
    watch: Watch = field(default_factory=Watch)
    stop: Stop | None = None
    first_signal: int | None = None
    signal_time: float = math.inf

    def run(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Outcome:
        """Run the agent to its end; raises OSError where it cannot be started."""
        adopt_orphans()
        with catch_signals() as inbox:
            agent = start_agent(command, environ, log)
            try:
                self.observer.begin()
                self.attend(agent, inbox)
                self.observer.end()
            finally:
                left = end_leftovers(KILL_GRACE)
                self.watch.close()
        deaths = tuple(self.watch.deaths)
        return Outcome(agent.wait(), deaths, self.first_signal, self.signal_time, tuple(left))

    def attend(self, agent: "subprocess.Popen[bytes]", inbox: Inbox) -> None:
        """Watch ranks and pass on signals until the agent ends."""
        while agent.poll() is None:
            known = len(self.watch.deaths)
            self.watch.poll((inbox.wakeup,), TICK)
            self.tell_deaths(self.watch.deaths[known:])
            if len(self.watch.alive) < self.expected:
                self.admit_ranks(agent.pid)
            self.handle_signals(inbox, agent)
            if self.observer.may_reap():
                reap_orphans(agent.pid)
        self.admit_ranks(agent.pid)
        self.watch.poll((), 0)

    def tell_deaths(self, deaths: Sequence[Death]) -> None:
        """Say at once that a rank has failed, since its peers may take long to end; not what follows it."""
        for death in deaths:
            attempt, code = death.process.attempt, death.exitcode
            failed = (d for d in self.watch.deaths if d.process.attempt == attempt and d.exitcode)
            if code and self.stop is None and next(failed) is death:
                status = f"code {code}" if code > 0 else name_signal(-code)
                rank = death.process.rank
                self.observer.announce(f"rank {rank} failed ({status}); torchrun ends the others")

    def admit_ranks(self, agent: int) -> None:
        """Watch ranks that have started, and tell of a restart of the worker group."""
        fresh = list(self.observer.find_ranks(agent))
        seen = max((process.attempt for process in self.watch.processes()), default=None)
        newest = max((process.attempt for process in fresh), default=None)
        if seen is not None and newest is not None and newest > seen:
            self.observer.announce(f"torchrun restarted the ranks: attempt {newest}")
        self.watch.add_ranks(fresh)

    def handle_signals(self, inbox: Inbox, agent: "subprocess.Popen[bytes]") -> None:
        """Pass on what has arrived; each stopping signal goes a stage on, and so does the time."""
        for number in inbox.take():
            if number in FORWARDED:
                self.watch.signal_ranks(number)
                continue
            if self.first_signal is None:
                self.first_signal, self.signal_time = number, time.time()
            self.stop = self.stop or Stop.begin(number, self.grace)
            self.advance_stop(self.stop, agent)
        if self.stop and time.monotonic() >= self.stop.deadline:
            self.advance_stop(self.stop, agent)

    def advance_stop(self, stop: Stop, agent: "subprocess.Popen[bytes]") -> None:
        """Enter the next stage. The agent forwards the first signal, later ones go to the ranks directly."""
        first = not stop.deadline
        number = stop.next_stage()
        if number is None or number == signal.SIGKILL:
            self.observer.announce("SIGKILL to the ranks")
            if number is None or not (self.watch.alive or self.watch.unseen):
                agent.kill()
            self.watch.signal_groups(signal.SIGKILL)
            return
        left = stop.deadline - time.monotonic()
        self.observer.announce(f"{name_signal(number)} to the ranks, which have {left:.0f} s to end")
        if first:
            agent.send_signal(number)
        else:
            self.watch.signal_groups(number)


def start_agent(command: Sequence[str], environ: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start the agent in a session of its own, so that a terminal's Ctrl-C reaches `launch` alone.

    SLURM sends a step's signals to every process in it: the agent would die of those for the ranks.
    """
    parent = os.getpid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - there is one thread
        )
    finally:
        os.close(descriptor)
