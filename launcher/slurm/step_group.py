"""The first node's part in the starts of a step's ranks: the tasks' reports in, orders to all of them out."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from launcher.agent.coordinator import Coordinator, GroupStart, JobEnd, Order
from launcher.agent.group_messages import NodeReport, render_order
from launcher.config.settings import Settings
from launcher.config.start import parse_endpoint
from launcher.launch.job import choose_restarts
from launcher.slurm.attempt import Attempt

logger = logging.getLogger(__name__)


def make_coordinator(attempt: Attempt, endpoint: str, find_port: Callable[[int], int]) -> Coordinator:
    """Return what decides about the starts of an attempt's ranks.

    `endpoint` is where those of the first start meet, HOST:PORT, and `find_port` gives the port of each start
    by its number. A node that replaces the first one is called as SLURM calls it.
    """
    config, first = attempt.request.config, attempt.hosts[0]
    address, port = parse_endpoint(config.rdzv_endpoint or endpoint)

    def find_endpoint(host: str, restart: int) -> tuple[str, int]:
        return (address if host == first else host), (find_port(restart) if restart else port)

    restarts = choose_restarts(config, attempt.environ) or 0
    return Coordinator(attempt.step_hosts, len(attempt.hosts), restarts, find_endpoint)


def count_known_ranks(config: Settings) -> int | None:
    """Return the ranks of each node if that is known before the nodes tell; None if they have to."""
    text = str(config.nproc_per_node)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 and int(text) else None


@dataclass(slots=True)
class StepGroup:
    """Tells the coordinator what happens, and sends its orders."""

    coordinator: Coordinator
    send: Callable[[Iterable[str]], None]
    """Writes lines to all tasks."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Reports come by one thread, and signals by another."""
    holds_back: Callable[[NodeReport], bool] | None = None
    """Hears each report; true if it is to be passed on later, see `NodeWatch`."""

    def begin(self, hosts: Sequence[str], local_size: int) -> None:
        """Order the first start before any task is ready: each of these nodes will have so many ranks."""
        for host in hosts:
            self.take_report(NodeReport("ready", host, (local_size,)))

    def take_report(self, report: NodeReport) -> None:
        """Pass a task's report on, unless it is held back until more is known."""
        if self.holds_back is None or not self.holds_back(report):
            self.pass_report_on(report)

    def pass_report_on(self, report: NodeReport) -> None:
        """Tell the coordinator what a task has reported, and send the order that follows from it."""
        note = self.coordinator
        host, numbers = report.host, report.numbers
        with self.lock:
            before = note.start
            match report.kind:
                case "ready":
                    order = note.note_ready(host, numbers[0])
                case "failed":
                    order = note.note_failure(host, numbers[0])
                case "ended":
                    order = note.note_end(host, numbers[0])
                case "taken":
                    order = note.note_taken_port(host, numbers[0])
                case _:
                    order = None
            self.send_order(order)
        self.tell(order, before, describe_task_report(report))

    def take_losses(self, hosts: Iterable[str]) -> None:
        """Take that nodes are lost, and send the order that follows."""
        for host in hosts:
            with self.lock:
                before = self.coordinator.start
                order = self.coordinator.note_loss(host)
                self.send_order(order)
            self.tell(order, before, f"{host} was lost")

    def note_task_end(self, host: str) -> None:
        """Take that a node's task has ended badly by itself; a step without spare nodes ends by that.

        A spare node without its task is none any more.
        """
        coordinator = self.coordinator
        with self.lock:
            start = coordinator.start
            takes_part = start is None or start.find_group_rank(host) is not None
            if coordinator.is_over or host in coordinator.lost:
                return
            self.send_order(coordinator.finish(failed=True) if takes_part else coordinator.note_loss(host))

    def drop_spare(self, host: str) -> None:
        """Do without a spare node, unless it has taken another's place already."""
        with self.lock:
            if host in self.coordinator.spares or host not in self.coordinator.sizes:
                self.send_order(self.coordinator.note_loss(host))

    def stop(self) -> None:
        """Order no start any more: the tasks are sent a signal that ends the ranks."""
        with self.lock:
            self.coordinator.note_stop()

    def send_order(self, order: Order | None) -> None:
        """Send an order, if there is one."""
        if order is not None:
            self.send((render_order(order),))

    def tell(self, order: Order | None, before: GroupStart | None, reason: str) -> None:
        """Log another start, or why there is none."""
        if isinstance(order, GroupStart) and before is not None:
            logger.info(f"{reason}: all ranks start anew{self.count_restarts()}")
        elif order == JobEnd(failed=True) and self.coordinator.restarts:
            logger.info(f"{reason}, after {self.coordinator.restarts} restarts: the job ends")

    def count_restarts(self) -> str:
        """Say which of the restarts this is."""
        done, limit = self.coordinator.restarts, self.coordinator.max_restarts
        return f" (restart {done} of {limit})" if done else ""


def describe_task_report(report: NodeReport) -> str:
    """Say what a task has reported."""
    if report.kind == "failed":
        return f"rank {report.numbers[1]} on {report.host} has ended"
    if report.kind == "taken":
        return f"{report.host} cannot serve the ranks' port"
    return report.host
