"""What connects a node's agent with the coordinator of its job: in the same process, or on another node."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from launcher.agent.coordinator import Coordinator, Order


class GroupLink(Protocol):
    """Takes one node's reports to the coordinator, and brings its orders."""

    def report_ready(self, local_size: int) -> None:
        """Say that this node can start so many ranks."""

    def report_failure(self, restart: int, rank: int, exitcode: int) -> None:
        """Say that a rank of a start has failed, `exitcode` as subprocess gives it; once for each start.

        The order that follows is another start, or the job's end. It may come before this node's other ranks
        have ended.
        """

    def report_end(self, restart: int) -> None:
        """Say that all of this node's ranks of a start have ended with 0. An order follows here too."""

    def report_taken_port(self, restart: int) -> None:
        """Say that this node, the first of a start, cannot serve its port; no rank of it was started."""

    def take_order(self) -> Order | None:
        """Return the next order, without waiting for one; a start may replace a running one."""
        ...


@dataclass(slots=True)
class LocalLink:
    """The link of a job's only node, whose agent has the coordinator beside it."""

    coordinator: Coordinator
    host: str
    orders: deque[Order] = field(default_factory=deque)

    def report_ready(self, local_size: int) -> None:
        """See GroupLink."""
        self.keep(self.coordinator.note_ready(self.host, local_size))

    def report_failure(self, restart: int, rank: int, exitcode: int) -> None:
        """See GroupLink."""
        self.keep(self.coordinator.note_failure(self.host, restart))

    def report_end(self, restart: int) -> None:
        """See GroupLink."""
        self.keep(self.coordinator.note_end(self.host, restart))

    def report_taken_port(self, restart: int) -> None:
        """See GroupLink."""
        self.keep(self.coordinator.note_taken_port(self.host, restart))

    def keep(self, order: Order | None) -> None:
        """Add an order to those that wait."""
        if order is not None:
            self.orders.append(order)

    def take_order(self) -> Order | None:
        """See GroupLink."""
        return self.orders.popleft() if self.orders else None
