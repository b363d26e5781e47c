"""A task's reports and orders, as they are on the wire, over real pipes and without SLURM."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from launcher.launch.coordinator import GroupNode, GroupStart, JobEnd
from launcher.launch.signals import open_signal_channel
from launcher.slurm.node_channel import NodeControl

MARK = "launch-task: "
NODES = (GroupNode("n0", 2), GroupNode("n1", 2))
FIRST, SECOND = GroupStart(0, NODES, "n0", 20000), GroupStart(1, NODES, "n0", 20001)
SUCCEEDED, FAILED = 'END {"failed": false}', 'END {"failed": true}'


def render_start(start: GroupStart) -> str:
    return f"START {json.dumps(asdict(start))}"


@dataclass
class Ends:
    """Both ends of a task's channel and of its stderr."""

    reading: int
    writing: int
    stderr: int
    written: int

    def order(self, *lines: str) -> None:
        for line in lines:
            os.write(self.writing, f"{line}\n".encode())

    def read_reports(self) -> list[dict[str, Any]]:
        """Return the reports since the last call; empty lines are passed over."""
        os.set_blocking(self.stderr, False)
        try:
            lines = os.read(self.stderr, 1 << 16).decode().splitlines()
        except BlockingIOError:
            return []
        lines = [line for line in lines if line]
        assert all(line.startswith(MARK) for line in lines)
        return [json.loads(line.removeprefix(MARK)) for line in lines]


def make_report(kind: str, host: str, restart: int = 0, number: int = 0) -> dict[str, Any]:
    return {"kind": kind, "host": host, "restart": restart, "number": number}


@pytest.fixture
def ends() -> Iterator[Ends]:
    pipes = Ends(*os.pipe(), *os.pipe())
    pipes.order("HELLO")
    yield pipes
    for descriptor in (pipes.reading, pipes.writing, pipes.stderr, pipes.written):
        os.close(descriptor)


def make_control(
    ends: Ends, host: str = "n1", *, restarts: bool = True, is_free: Callable[[int], bool] = lambda _: True
) -> NodeControl:
    channel = open_signal_channel(ends.reading)
    return NodeControl(host, channel, may_restart=restarts, is_port_free=is_free, descriptor=ends.written)


def test_reports_go_out_and_orders_come_in(ends: Ends) -> None:
    control = make_control(ends)
    control.report("ready", number=2)
    assert list(control.take_orders()) == []
    ends.order(render_start(FIRST))
    assert control.channel.read_signals() == []
    assert list(control.take_orders()) == [FIRST]
    control.report("failed", 0, 3)
    control.report("ended", 0)
    assert list(control.take_orders()) == [], "the first node decides"
    ends.order(render_start(SECOND), SUCCEEDED)
    control.channel.read_signals()
    assert list(control.take_orders()) == [SECOND, JobEnd(failed=False)]
    assert ends.read_reports() == [
        make_report("ready", "n1", number=2),
        make_report("failed", "n1", 0, 3),
        make_report("ended", "n1"),
    ]


def test_without_restarts_nobody_is_asked(ends: Ends) -> None:
    control = make_control(ends, restarts=False)
    control.report("failed", 0, 3)
    assert list(control.take_orders()) == [JobEnd(failed=True)]
    control.report("ended", 0)
    assert list(control.take_orders()) == [JobEnd(failed=False)] and ends.read_reports() == []


def test_the_jobs_failure_elsewhere_ends_this_node_as_a_stop_does(ends: Ends) -> None:
    control = make_control(ends)
    ends.order(render_start(FIRST), render_start(SECOND))
    control.channel.read_signals()
    assert list(control.take_orders()) == [FIRST, SECOND]
    control.report("failed", 0, 3)  # of the earlier start: no failure of this one
    ends.order(FAILED)
    assert control.channel.read_signals() == []
    assert list(control.take_orders()) == []
    assert control.channel.read_signals() == [signal.SIGTERM]
    control.report("failed", 1, 2)
    ends.order(FAILED)
    control.channel.read_signals()
    assert list(control.take_orders()) == [JobEnd(failed=True)], "it has failed itself"


def test_the_node_that_serves_the_store_looks_at_its_port(ends: Ends) -> None:
    control = make_control(ends, "n0", is_free=lambda port: port != 20001)
    ends.order(render_start(FIRST), render_start(SECOND))
    control.channel.read_signals()
    assert list(control.take_orders()) == [FIRST]
    assert ends.read_reports() == [make_report("taken", "n0", 1)]


def test_a_task_whose_stdin_is_not_the_first_nodes(ends: Ends) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    channel = open_signal_channel(reading)
    control = NodeControl(
        "n1", channel, may_restart=True, is_port_free=lambda _: True, descriptor=ends.written
    )
    channel.read_signals()
    assert list(control.take_orders()) == [JobEnd(failed=True)]


def test_a_report_that_nobody_can_take_waits(ends: Ends) -> None:
    control = make_control(ends)
    os.set_blocking(ends.written, False)
    try:
        while os.write(ends.written, b"\n" * 4096):
            pass
    except BlockingIOError:
        pass
    control.report("ready", number=2)
    assert list(control.take_orders()) == []
    os.set_blocking(ends.stderr, False)
    with contextlib.suppress(BlockingIOError):
        while os.read(ends.stderr, 1 << 16):
            pass
    assert list(control.take_orders()) == []
    assert ends.read_reports() == [make_report("ready", "n1", number=2)]


def test_a_line_longer_than_a_pipe_stays_whole() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"HELLO\n")
    nodes = tuple(GroupNode(f"node-{number:05d}", 8) for number in range(4000))
    start = GroupStart(0, nodes, "node-00000", 20000)
    lines = f"{render_start(start)}\nSIGUSR2\n".encode()
    writer = threading.Thread(target=os.write, args=(writing, lines))
    writer.start()
    control = open_signal_channel(reading)
    signals: list[int] = []
    while not signals:
        signals = control.read_signals()
    assert signals == [signal.SIGUSR2] and control.take_lines() == [render_start(start)]
    writer.join()
    os.close(writing)
    os.close(reading)
