"""What the coordinator orders after events, and which nodes count as lost: tables in `coordinator.toml`."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.coordinator import LOSS_PATIENCE, PORT_TRIALS, Coordinator, JobEnd, Order
from launcher.agent.group import GroupStart
from launcher.agent.liveness import BEGINNING, SILENCE, Liveness, Loss

TABLES = tomllib.loads(Path(__file__).with_name("coordinator.toml").read_text())
CASES = [(job, events, orders) for job in TABLES["job"] for events, orders in job["orders"]]
READY = "ready a 2, ready b 2"
HOSTS = ("a", "b", "c")
Event = tuple[str, str, int]


def make(hosts: str = "a b", nodes: int = 2, restarts: int = 0) -> Coordinator:
    return Coordinator(tuple(hosts.split()), nodes, restarts, lambda host, number: (host, 1000 + number))


def tell(coordinator: Coordinator, event: Event) -> Order | None:
    kind, host, number = event
    calls: dict[str, Callable[[], Order | None]] = {
        "ready": lambda: coordinator.note_ready(host, number),
        "failed": lambda: coordinator.note_failure(host, number),
        "ended": lambda: coordinator.note_end(host, number),
        "taken": lambda: coordinator.note_taken_port(host, number),
        "lost": lambda: coordinator.note_loss(host),
        "stop": coordinator.note_stop,
    }
    return calls[kind]()


def run(coordinator: Coordinator, text: str) -> list[Order]:
    """Tell it of events, `ready a 2, failed b 0`, and return its orders."""
    orders = []
    for item in text.split(", "):
        kind, host, number = (*item.split(), "", "0")[:3] if " " in item else (item, "", "0")
        if order := tell(coordinator, (kind, host, int(number or 0))):
            orders.append(order)
    return orders


def show(order: Order) -> str:
    """An order as in the table; a start's ranks meet on its first host, at a port by its number."""
    if isinstance(order, JobEnd):
        return "failed" if order.failed else "done"
    assert (order.master_addr, order.master_port) == (order.nodes[0].host, 1000 + order.restart)
    sizes = {node.host: "" if node.local_size == 2 else f":{node.local_size}" for node in order.nodes}
    return " ".join([str(order.restart), *(host + size for host, size in sizes.items())])


@pytest.mark.parametrize(("job", "events", "orders"), CASES, ids=[case[1] for case in CASES])
def test_what_follows_from_events(job: dict[str, object], events: str, orders: str) -> None:
    coordinator = make(str(job["hosts"]), restarts=int(str(job["restarts"])))
    assert ", ".join(map(show, run(coordinator, events.replace("{R}", READY)))) == orders


def test_ranks_that_wait_for_lost_ones_have_less_time() -> None:
    coordinator = make("a b c", 2, 9)
    events = (("ready", "a"), ("ready", "b"), ("ready", "c"), ("lost", "b"))
    found = [tell(coordinator, (kind, host, 2)) for kind, host in events]
    assert [one.patience for one in found if isinstance(one, GroupStart)] == [None, LOSS_PATIENCE]
    again = tell(coordinator, ("failed", "a", 1))
    assert isinstance(again, GroupStart) and again.patience is None


def test_spare_nodes_are_those_that_are_ready_and_take_no_part() -> None:
    coordinator = make("a b c d")
    run(coordinator, f"{READY}, ready d 2")
    assert coordinator.spares == ("d",)
    run(coordinator, "lost a")
    assert not coordinator.spares


def test_ports_that_are_taken_again_and_again_end_the_job() -> None:
    events = [READY, *(f"taken a {number}" for number in range(PORT_TRIALS + 1))]
    orders = list(map(show, run(make(), ", ".join(events))))
    assert orders == [*(f"{number} a b" for number in range(PORT_TRIALS + 1)), "failed"]


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


def play(text: str) -> tuple[Liveness, list[tuple[float, str]]]:
    """Play events `TIME WHAT [HOST]` after a first word of all at 0; returns the losses with their times.

    `look` is one look of the caller's; those in between, each second, are filled in.
    """
    liveness, found = Liveness(HOSTS, 0.0), []
    for host in HOSTS:
        liveness.note_heard(host, 0.0)
    before = 0.0
    for item in filter(None, text.split(", ")):
        moment, what, *hosts = item.split()
        now = float(moment)
        while what != "gap" and before + 1 < now:
            before += 1
            liveness.note_look(before)
        before = now
        match what:
            case "heard":
                for host in hosts:
                    liveness.note_heard(host, now)
            case "failed":
                liveness.note_failure(now)
            case "refused" | "open":
                liveness.note_look(now)
                for host in hosts:
                    liveness.note_connection(host, is_open=what == "open")
            case "stuck" | "runs":
                liveness.note_step(hosts[0], has_run=what == "runs")
            case _:
                liveness.note_look(now)
        found += [(now, loss.host) for loss in liveness.take_losses()]
    return liveness, found


@pytest.mark.parametrize(("events", "losses"), TABLES["liveness"]["losses"])
def test_silence_and_a_second_sign_make_a_loss(events: str, losses: str) -> None:
    assert ", ".join(f"{moment:g} {host}" for moment, host in play(events)[1]) == losses


def test_what_is_told_of_a_loss() -> None:
    liveness, _ = play("9 heard a c, 9 refused b")
    liveness.note_connection("b", is_open=False)
    assert liveness.take_losses() == [Loss("b", "its SLURM daemon cannot be reached", 9.0)]


def test_a_task_that_has_not_said_a_word_has_more_time() -> None:
    liveness = Liveness(HOSTS, 0.0)
    for moment in range(round(BEGINNING) + 1):
        liveness.note_look(float(moment))
        assert not liveness.list_suspects()
    liveness.note_look(BEGINNING + 1)
    assert liveness.list_suspects() == ["a", "b", "c"]


def test_who_is_to_be_tried() -> None:
    liveness, _ = play(f"3 heard a, 3 failed, 4 heard b, {3 + SILENCE + 1} look")
    assert liveness.list_suspects() == ["a", "c"]
    liveness, _ = play("3 failed, 3.5 heard b, 5 look")
    assert liveness.list_suspects() == ["a", "c"] and not liveness.is_silent("a")


def test_strangers_say_nothing() -> None:
    liveness, _ = play("1 heard stranger")
    assert set(liveness.signs) == {*HOSTS}


def test_all_have_been_heard_of() -> None:
    liveness, _ = play("2 heard a b, 9 refused c, 10 refused c")
    assert liveness.has_heard_all(HOSTS, 1.0) and not liveness.has_heard_all(HOSTS, 2.0)
