"""Who decides about a node's starts: the interface to the agent, and one for a job on one node."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from launcher.agent.coordinator import Coordinator, Order


class GroupControl(Protocol):
    """Is told what becomes of a node's ranks, and gives orders: start them so, or end."""

    def report_ready(self, local_size: int) -> None:
        """Take that this node can start so many ranks."""
        ...

    def report_failure(self, restart: int, rank: int, exitcode: int) -> None:
        """Take that a rank of start number `restart` has failed (-n for signal n)."""
        ...

    def report_end(self, restart: int) -> None:
        """Take that all ranks of this node have ended with 0."""
        ...

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        ...


@dataclass(slots=True)
class LocalControl:
    """Decides for the one node of a job."""

    coordinator: Coordinator
    host: str
    orders: list[Order] = field(default_factory=list)

    def report_ready(self, local_size: int) -> None:
        """Order the first start."""
        self.add_order(self.coordinator.note_ready(self.host, local_size))

    def report_failure(self, restart: int, _rank: int, _exitcode: int) -> None:
        """Order another start, or the end."""
        self.add_order(self.coordinator.note_failure(self.host, restart))

    def report_end(self, restart: int) -> None:
        """Order the end."""
        self.add_order(self.coordinator.note_end(self.host, restart))

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        taken, self.orders = self.orders, []
        return taken

    def add_order(self, order: Order | None) -> None:
        """Keep an order for the agent."""
        if order is not None:
            self.orders.append(order)
