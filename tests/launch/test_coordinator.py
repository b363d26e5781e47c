"""What the coordinator orders after each sequence of events, as tables."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.launch.coordinator import Coordinator, GroupStart, JobEnd
from tests.data_files import read_cases

Event = tuple[str, str, int]
Order = GroupStart | JobEnd


def make(hosts: str = "a b", nodes: int = 2, restarts: int = 0) -> Coordinator:
    return Coordinator(tuple(hosts.split()), nodes, restarts, lambda host, number: (host, 1000 + number))


def tell(coordinator: Coordinator, event: Event) -> Order | None:
    kind, host, number = event
    if kind == "stop":
        coordinator.stopped = True
        return None
    return coordinator.note(kind, host, number, number)


def run(coordinator: Coordinator, text: str) -> list[Order]:
    """Tell it of events, `ready a 2, failed b 0`, and return its orders."""
    orders = []
    for item in text.split(", "):
        kind, host, number = (*item.split(), "", "0")[:3] if " " in item else (item, "", "0")
        if order := tell(coordinator, (kind, host, int(number or 0))):
            orders.append(order)
    return orders


def test_ranks_that_wait_for_lost_ones_have_less_time() -> None:
    coordinator = make("a b c", 2, 9)
    events = (("ready", "a"), ("ready", "b"), ("ready", "c"), ("lost", "b"))
    found = [tell(coordinator, (kind, host, 2)) for kind, host in events]
    assert [one.patience for one in found if isinstance(one, GroupStart)] == [None, 10.0]
    again = tell(coordinator, ("failed", "a", 1))
    assert isinstance(again, GroupStart) and again.patience is None


READY = "ready a 2, ready b 2"


def show(order: Order) -> str:
    if isinstance(order, JobEnd):
        return "FAILED" if order.failed else "DONE"
    assert (order.master_addr, order.master_port) == (order.nodes[0].host, 1000 + order.restart)
    return f"{order.restart} on {' '.join(f'{node.host}:{node.local_size}' for node in order.nodes)}"


@pytest.mark.parametrize("case", read_cases("coordinator", "case"), ids=lambda case: str(case["events"]))
def test_orders(case: dict[str, Any]) -> None:
    orders = run(make(case["hosts"], restarts=case["restarts"]), case["events"].replace("READY", READY))
    assert list(map(show, orders)) == case["orders"]


EVENTS = st.tuples(
    st.sampled_from(("ready", "failed", "ended", "taken", "lost", "stop")),
    st.sampled_from("abcdx"),
    st.integers(0, 4),
)


@given(st.lists(EVENTS, max_size=40), st.integers(1, 4), st.integers(0, 3))
def test_whatever_happens(events: list[Event], nodes: int, restarts: int) -> None:
    coordinator = make("a b c d", nodes, restarts)
    orders: list[Order] = []
    lost: set[str] = set()
    stopped = False
    for event in events:
        lost |= {event[1]} if event[0] == "lost" else set()
        stopped = stopped or event[0] == "stop"
        order = tell(coordinator, event)
        if order is None:
            continue
        assert not stopped and (not orders or not isinstance(orders[-1], JobEnd)), (
            "nothing comes after the end"
        )
        orders.append(order)
        if isinstance(order, GroupStart):
            hosts = [node.host for node in order.nodes]
            assert len({*hosts}) == nodes and {*hosts} <= {*"abcd"} - lost
    starts = [order for order in orders if isinstance(order, GroupStart)]
    assert [each.restart for each in starts] == list(range(len(starts)))
    assert coordinator.restarts <= restarts
