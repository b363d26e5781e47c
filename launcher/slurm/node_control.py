"""A node's task and its job's first node: what the task reports of its ranks, and the orders that it gets."""

import contextlib
import logging
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from launcher.launch.coordinator import GroupStart, JobEnd, Order
from launcher.launch.signal_channel import SignalChannel
from launcher.slurm.group_messages import ASK_ALIVE, NodeReport, parse_group_order, render_task_report
from launcher.slurm.liveness import ALIVE_PERIOD

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeControl:
    """Decides nothing itself, but the end of a job in which nothing is started anew."""

    host: str
    channel: SignalChannel
    """The supervisor reads it; orders are among what it has read."""
    may_restart: bool
    """The first node answers a failure, or the end of this node's ranks, with an order."""
    is_port_free: Callable[[int], bool]
    descriptor: int = 2
    """srun brings the first node what is written to it."""
    unsent: deque[str] = field(default_factory=deque)
    orders: list[Order] = field(default_factory=list)
    newest: GroupStart | None = None
    has_failed: bool = False
    """A rank of the newest start has failed here."""

    def report_ready(self, local_size: int) -> None:
        """Say that this node can start so many ranks."""
        self.send("ready", local_size)

    def report_failure(self, restart: int, rank: int, exitcode: int) -> None:
        """Say that a rank has failed; the order is another start, or the end."""
        self.has_failed = self.newest is not None and restart == self.newest.restart
        if self.may_restart:
            self.send("failed", restart, rank, exitcode)
        else:
            self.orders.append(JobEnd(failed=True))

    def report_end(self, restart: int) -> None:
        """Say that all ranks of this node have ended with 0; it may have to start anew with the others."""
        if self.may_restart:
            self.send("ended", restart)
        else:
            self.orders.append(JobEnd(failed=False))

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
            if order.failed and self.takes_part and not self.has_failed:
                self.channel.add_signal(signal.SIGTERM)  # they end as by any stop that the first node sends
            else:
                self.orders.append(order)
            return
        if (
            order.restart
            and order.find_group_rank(self.host) == 0
            and not self.is_port_free(order.master_port)
        ):
            self.send("taken", order.restart)
            return
        self.newest, self.has_failed = order, False
        self.orders.append(order)

    @property
    def takes_part(self) -> bool:
        """Whether the newest start has ranks on this node."""
        return self.newest is not None and self.newest.find_group_rank(self.host) is not None

    def send(self, kind: str, *numbers: int) -> None:
        """Send a report, now or as soon as somebody reads."""
        self.unsent.append(render_task_report(NodeReport(kind, self.host, numbers)))
        self.flush()

    def flush(self) -> None:
        """Write the reports that wait, one by one and whole, and never wait for a reader."""
        while self.unsent and can_write(self.descriptor):
            with contextlib.suppress(OSError):
                os.write(self.descriptor, f"{self.unsent[0]}\n".encode())
            self.unsent.popleft()


def can_write(descriptor: int) -> bool:
    """Tell whether a short line can be written without waiting, or in vain."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(0))


def start_alive_sender(host: str, descriptor: int = 2) -> None:
    """Begin, by a thread of its own: the task may wait for a filesystem, or for its ranks' ends.

    It ends with the process. A line is written whole or not at all.
    """
    line = f"{render_task_report(NodeReport('alive', host))}\n".encode()
    pause = threading.Event()

    def send_lines() -> None:
        while True:
            try:
                if can_write(descriptor):
                    os.write(descriptor, line)
            except OSError:
                return
            pause.wait(ALIVE_PERIOD)

    threading.Thread(target=send_lines, daemon=True).start()
