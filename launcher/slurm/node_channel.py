"""The lines between a SLURM job's first node and the tasks that start its ranks, and the tasks' end of them.

A report is a line of a task's stderr, which srun brings to the first node; an order is a line of the tasks'
stdin, of which srun gives each task a copy (see `launcher.launch.signals`).
"""

import contextlib
import logging
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from launcher.codec import dump, load
from launcher.launch.coordinator import GroupStart, JobEnd, Order
from launcher.launch.signals import SignalChannel

logger = logging.getLogger(__name__)

MARK = "launch-task: "
"""What begins a report; what stands before it is the start of a line that somebody else has not ended."""
ORDERS: dict[str, type[GroupStart] | type[JobEnd]] = {"START": GroupStart, "END": JobEnd}
"""What a line of JSON after one of these words is."""
ASK_ALIVE = "ASK alive"
"""Each task says at once that it is there."""
ALIVE_PERIOD = 2.0
"""Seconds from one word of a task to the next, and of the first node to those that guard it."""
OWN_GAP = 4.0
"""Seconds between two looks of a process after which it has slept itself, and knows nothing of others."""
CLOSE_TIMEOUT = 5.0
"""Seconds for a short step, and for what is still to be read or written when srun has ended."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node's task tells the first node."""

    kind: str
    """`ready`, `failed`, `ended`, `taken` (the port), `alive`, `signalled` (not by the first node); the first
    node itself finds out that a node is `lost`, or its task `gone`."""
    host: str
    restart: int = 0
    """Number of the start that it is about."""
    number: int = 0
    """Of the node's ranks, if they are ready; of the rank that has failed; of the signal."""


def render_report(report: NodeReport) -> str:
    """Return a report as a line without its end."""
    return MARK + dump(report)


def find_report(line: str) -> tuple[str, NodeReport] | None:
    """Return what stands before a report in a line, and the report; None if there is none."""
    before, mark, text = line.rpartition(MARK)
    with contextlib.suppress(ValueError):
        return (before, load(NodeReport, text)) if mark else None
    return None


def render_order(order: Order) -> str:
    """Return an order as a line without its end."""
    return f"{'END' if isinstance(order, JobEnd) else 'START'} {dump(order)}"


def parse_group_order(line: str) -> Order | None:
    """Read an order; None for another line, or one that is not whole."""
    word, _, text = line.partition(" ")
    with contextlib.suppress(ValueError):
        return load(ORDERS[word], text) if word in ORDERS else None
    return None


@dataclass(slots=True)
class NodeControl:
    """A task's end: decides nothing itself, but the end of a job in which nothing is started again."""

    host: str
    channel: SignalChannel
    """The supervisor reads it; orders are among what it has read."""
    may_restart: bool
    """The first node answers a failure, or the end of this node's ranks, with an order."""
    is_port_free: Callable[[int], bool]
    descriptor: int = 2
    """srun brings the first node what is written to it."""
    unsent: deque[NodeReport] = field(default_factory=deque)
    orders: list[Order] = field(default_factory=list)
    newest: GroupStart | None = None
    has_failed: bool = False
    """A rank of the newest start has failed here."""

    def report(self, kind: str, restart: int = 0, number: int = 0) -> None:
        """Say what has become of this node's ranks, unless that is the end, since nothing starts again."""
        if kind == "failed":
            self.has_failed = self.newest is not None and restart == self.newest.restart
        if kind == "ready" or self.may_restart:
            self.send(kind, restart, number)
        else:
            self.orders.append(JobEnd(failed=kind == "failed"))

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        self.flush()
        for line in self.channel.take_lines():
            if line == ASK_ALIVE:
                self.send("alive")
            elif order := parse_group_order(line):
                self.take_order(order)
        if self.newest is None and self.channel.descriptor is None and not self.channel.greeted:
            logger.error("the first node's orders do not reach this task: leave cluster.srun.input out")
            self.orders.append(JobEnd(failed=True))
        taken, self.orders = self.orders, []
        return taken

    def take_order(self, order: Order) -> None:
        """Keep an order for the agent, or do what it asks for."""
        if isinstance(order, JobEnd):
            takes_part = self.newest and self.newest.find_group_rank(self.host) is not None
            if order.failed and takes_part and not self.has_failed:
                self.channel.added.append(signal.SIGTERM)  # they end as by any stop that the first node sends
                return
        else:
            if order.find_group_rank(self.host) == 0 and not self.is_port_free(order.master_port):
                self.send("taken", order.restart)
                return
            self.newest, self.has_failed = order, False
        self.orders.append(order)

    def send(self, kind: str, restart: int = 0, number: int = 0) -> None:
        """Send a report, now or as soon as somebody reads."""
        self.unsent.append(NodeReport(kind, self.host, restart, number))
        self.flush()

    def flush(self) -> None:
        """Write the reports that wait, one by one, and never wait for a reader."""
        while self.unsent and write_report(self.unsent[0], self.descriptor):
            self.unsent.popleft()


def write_report(report: NodeReport, descriptor: int = 2) -> bool:
    """Write a report, whole, if that needs no waiting; tells whether that was so."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(0):
        return False
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{render_report(report)}\n".encode())
    return True


def start_alive_sender(host: str) -> None:
    """Begin, by a thread of its own: the task may wait for a filesystem, or for its ranks' ends."""

    def send_lines() -> None:
        while not pause.wait(ALIVE_PERIOD):
            write_report(report)

    report, pause = NodeReport("alive", host), threading.Event()
    write_report(report)
    threading.Thread(target=send_lines, daemon=True).start()
