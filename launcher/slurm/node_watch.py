"""Watches from a job's first node whether the other nodes are there, and tells of those that are lost.

SLURM itself tells of a lost node after SlurmdTimeout, 300 s by default. A failure of a rank is held back
until each node has been heard of after it: the peers of a lost node's ranks fail before that is known.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from launcher.agent.group_messages import ASK_ALIVE, NodeReport
from launcher.agent.liveness import Liveness, Loss
from launcher.errors import SchedulerError
from launcher.slurm.node_probe import NodeAddress, ask_addresses, is_frozen, try_connection

logger = logging.getLogger(__name__)

TICK = 1.0
"""Seconds between two looks, and so between two connections to a node."""
LONGEST_HOLD = 25.0
"""Seconds after which a failure counts, whatever is known of the nodes."""
MAX_CONNECTIONS = 16
"""Connections that are tried at the same time."""


@dataclass(slots=True)
class NodeWatch:
    """Hears the tasks, tries nodes that fall silent, and holds failures back."""

    hosts: tuple[str, ...]
    own_host: str
    """The node of this process, which is never lost: the process would not run."""
    environ: Mapping[str, str]
    send: Callable[[Iterable[str]], None]
    """Writes lines to all tasks."""
    deliver: Callable[[NodeReport], None]
    """Takes a failure that was held back."""
    report_losses: Callable[[list[Loss]], None]
    count_spares: Callable[[], int]
    """Gives the nodes that could take the place of another."""
    liveness: Liveness = field(init=False)
    held: list[tuple[float, NodeReport]] = field(default_factory=list)
    """Failures, and when they came."""
    addresses: dict[str, NodeAddress] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    """Suspects that were asked to run a step in this silence."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    wakeup: threading.Event = field(default_factory=threading.Event)
    stopped: bool = False
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Begin to watch."""
        self.liveness = Liveness(self.hosts, time.monotonic())
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def note_report(self, report: NodeReport) -> bool:
        """Take a report; true if it is held back."""
        with self.lock:
            now = time.monotonic()
            self.liveness.note_heard(report.host, now)
            is_held = report.kind == "failed" and len(self.hosts) > 1
            if is_held:
                self.held.append((now, report))
                self.liveness.note_failure(now)
        if self.held:
            if is_held:
                self.send((ASK_ALIVE,))
            self.wakeup.set()
        return is_held

    def stop(self) -> None:
        """End the watch."""
        self.stopped = True
        self.wakeup.set()

    def watch(self) -> None:
        """Look again and again: the thread's body."""
        last = 0.0
        while not self.stopped:
            self.wakeup.wait(TICK)
            self.wakeup.clear()
            if time.monotonic() - last >= TICK:
                last = time.monotonic()
                self.look()
            self.release_failures()

    def look(self) -> None:
        """Try the nodes that are silent, and report those that are lost."""
        with self.lock:
            self.liveness.note_look(time.monotonic())
            suspects = [host for host in self.liveness.list_suspects() if host != self.own_host]
        self.tried &= {*suspects}
        if suspects:
            self.try_suspects(suspects)
        with self.lock:
            losses = self.liveness.take_losses()
        if losses:
            self.report_losses(losses)

    def try_suspects(self, suspects: list[str]) -> None:
        """Connect to suspects, and have those that take it run a step; nothing if this node is cut off."""
        witness = next((host for host in self.hosts if host not in suspects), self.own_host)
        missing = [host for host in (*suspects, witness) if host not in self.addresses]
        try:
            self.addresses |= ask_addresses(missing, self.environ) if missing else {}
        except SchedulerError as error:
            logger.debug(f"no addresses ({error})")
        known = [host for host in (witness, *suspects) if host in self.addresses]
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            found = dict(
                zip(known, pool.map(lambda host: try_connection(self.addresses[host]), known), strict=True)
            )
        if not found.get(witness):
            return
        with self.lock:
            for host in suspects:
                is_open = found.get(host)
                if is_open is not None:
                    self.liveness.note_connection(host, is_open=is_open)
        self.ask_for_steps([host for host in suspects if found.get(host)], witness)

    def ask_for_steps(self, suspects: list[str], witness: str) -> None:
        """Have suspects that take connections run a step, if they are no more than can be replaced."""
        silent = [host for host in suspects if self.liveness.is_silent(host) and host not in self.tried]
        if len(silent) <= self.count_spares():
            for host in silent:
                self.tried.add(host)
                threading.Thread(target=self.try_step_on, args=(host, witness), daemon=True).start()

    def try_step_on(self, host: str, witness: str) -> None:
        """Have a suspect run a step, again later if that tells nothing: a thread's body."""
        frozen = is_frozen(host, witness, self.environ)
        with self.lock:
            if frozen is None:
                self.tried.discard(host)
            elif self.liveness.is_silent(host):
                self.liveness.note_step(host, has_run=not frozen)

    def release_failures(self) -> None:
        """Pass on the failures after which each node was heard of."""
        with self.lock:
            now = time.monotonic()
            ready = [
                item
                for item in self.held
                if now - item[0] > LONGEST_HOLD or self.liveness.has_heard_all(self.hosts, item[0])
            ]
            self.held = [item for item in self.held if item not in ready]
        for _, report in ready:
            self.deliver(report)
