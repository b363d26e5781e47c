"""What the coordinator orders after each sequence of events, as tables."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.launch.coordinator import (
    LOSS_PATIENCE,
    PORT_TRIALS,
    Coordinator,
    GroupNode,
    GroupStart,
    JobEnd,
    Order,
)

FAILED, DONE = JobEnd(failed=True), JobEnd(failed=False)
Event = tuple[str, str, int]


def make(hosts: str = "a b", nodes: int = 2, restarts: int = 0) -> Coordinator:
    return Coordinator(tuple(hosts.split()), nodes, restarts, lambda host, number: (host, 1000 + number))


def start(number: int, hosts: str = "a b", sizes: tuple[int, ...] = (2, 2)) -> GroupStart:
    nodes = tuple(GroupNode(host, size) for host, size in zip(hosts.split(), sizes, strict=True))
    return GroupStart(number, nodes, nodes[0].host, 1000 + number)


def forget_patience(order: Order) -> Order:
    return order if isinstance(order, JobEnd) else replace(order, patience=None)


def tell(coordinator: Coordinator, event: Event) -> Order | None:
    kind, host, number = event
    if kind == "lost":
        return coordinator.note_loss(host)
    if kind == "stop":
        coordinator.note_stop()
        return None
    return coordinator.note(kind, host, number, number)


def run(coordinator: Coordinator, text: str) -> list[Order]:
    """Tell it of events, `ready a 2, failed b 0`, and return its orders."""
    orders = []
    for item in text.split(", "):
        kind, host, number = (*item.split(), "", "0")[:3] if " " in item else (item, "", "0")
        if order := tell(coordinator, (kind, host, int(number or 0))):
            orders.append(forget_patience(order))
    return orders


def test_ranks_that_wait_for_lost_ones_have_less_time() -> None:
    coordinator = make("a b c", 2, 9)
    events = (("ready", "a"), ("ready", "b"), ("ready", "c"), ("lost", "b"))
    found = [tell(coordinator, (kind, host, 2)) for kind, host in events]
    assert [one.patience for one in found if isinstance(one, GroupStart)] == [None, LOSS_PATIENCE]
    again = tell(coordinator, ("failed", "a", 1))
    assert isinstance(again, GroupStart) and again.patience is None


READY = "ready a 2, ready b 2"


@pytest.mark.parametrize(
    ("events", "orders"),
    [
        ("ready b 2", []),
        ("ready b 2, ready b 2", []),
        (READY, [start(0)]),
        ("ready b 2, ready a 2", [start(0)]),
        ("ready b 1, ready a 3", [start(0, sizes=(3, 1))]),
        ("ready a 2, ready stranger 2", []),
        ("ready a 2, ready b 0", []),
        (f"{READY}, ready b 2", [start(0)]),
        (f"{READY}, failed b 0", [start(0), FAILED]),
        (f"{READY}, failed b 0, failed a 0", [start(0), FAILED]),
        (f"{READY}, failed stranger 0", [start(0)]),
        (f"{READY}, ended a 0", [start(0)]),
        (f"{READY}, ended a 0, ended a 0", [start(0)]),
        (f"{READY}, ended b 0, ended a 0", [start(0), DONE]),
        (f"{READY}, ended a 0, ended b 7", [start(0)]),
        (f"{READY}, lost b", [start(0), FAILED]),
        ("ready a 2, lost b", [FAILED]),
        ("lost stranger, ready a 2, ready b 2", [start(0)]),
        (f"{READY}, stop, failed b 0", [start(0)]),
        (f"stop, {READY}", []),
        (f"{READY}, ended a 0, ended b 0, failed a 0, lost a", [start(0), DONE]),
        ("failed a 0, ended a 0, taken a 0", []),
    ],
)
def test_without_restarts(events: str, orders: list[Order]) -> None:
    assert run(make(), events) == orders


@pytest.mark.parametrize(
    ("events", "orders"),
    [
        (f"{READY}, failed b 0", [start(0), start(1)]),
        # What ranks of the earlier start do after that is no second failure.
        (f"{READY}, failed b 0, failed a 0, failed b 0", [start(0), start(1)]),
        (f"{READY}, failed b 0, failed a 1", [start(0), start(1), start(2)]),
        (f"{READY}, failed b 0, failed a 1, failed a 2", [start(0), start(1), start(2), FAILED]),
        # Whoever has ended begins again with the others.
        (f"{READY}, ended a 0, failed b 0, ended b 1", [start(0), start(1)]),
        (f"{READY}, ended a 0, failed b 0, ended b 1, ended a 1", [start(0), start(1), DONE]),
        (f"{READY}, failed b 0, stop, failed b 1", [start(0), start(1)]),
        # A port that another process has is no restart of the two.
        (f"{READY}, taken a 0, taken a 0", [start(0), start(1)]),
        (
            f"{READY}, taken a 0, failed b 1, failed b 2, failed b 3",
            [start(0), start(1), start(2), start(3), FAILED],
        ),
        (f"{READY}, failed a 0, lost b", [start(0), start(1), FAILED]),
    ],
)
def test_with_two_restarts(events: str, orders: list[Order]) -> None:
    assert run(make(restarts=2), events) == orders


@pytest.mark.parametrize(
    ("events", "orders"),
    [
        (f"{READY}, lost b", [start(0)]),
        (f"{READY}, lost b, ready c 2", [start(0), start(1, "a c")]),
        (f"{READY}, ready c 4, lost b", [start(0), start(1, "a c", (2, 4))]),
        (f"{READY}, ready c 2, lost a", [start(0), start(1, "c b")]),
        (f"{READY}, ready c 2, lost c", [start(0)]),
        (f"{READY}, lost c, lost a", [start(0), FAILED]),
        (f"{READY}, ready c 2, lost a, lost b", [start(0), start(1, "c b"), FAILED]),
        # While the spare one is not ready, ranks that fail for want of the lost ones are no news.
        (f"{READY}, lost b, failed a 0, ready c 2", [start(0), start(1, "a c")]),
        ("ready c 2, ready a 2, lost b", [start(0, "a c")]),
        ("ready c 2, lost b, ready a 2", [start(0, "a c")]),
        (f"{READY}, ready c 2, lost b, failed a 1", [start(0), start(1, "a c"), FAILED]),
        (f"{READY}, ready c 2, lost b, ended c 1, ended a 1", [start(0), start(1, "a c"), DONE]),
    ],
)
def test_with_a_spare_node(events: str, orders: list[Order]) -> None:
    assert run(make("a b c"), events) == orders


def test_spare_nodes_are_those_that_are_ready_and_take_no_part() -> None:
    coordinator = make("a b c d")
    run(coordinator, f"{READY}, ready d 2")
    assert coordinator.spares == ("d",)
    run(coordinator, "lost a")
    assert not coordinator.spares


def test_ports_that_are_taken_again_and_again_end_the_job() -> None:
    coordinator = make()
    events = [READY, *(f"taken a {number}" for number in range(PORT_TRIALS + 1))]
    orders = run(coordinator, ", ".join(events))
    assert orders == [*(start(number) for number in range(PORT_TRIALS + 1)), FAILED]
    ports = [order.master_port for order in orders if isinstance(order, GroupStart)]
    assert len({*ports}) == len(ports)


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
