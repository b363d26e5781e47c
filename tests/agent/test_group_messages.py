"""The lines between a job's first node and its tasks: whole, in pieces, among other output, and wrong."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.coordinator import GroupNode, GroupStart, JobEnd, Order
from launcher.agent.group_messages import (
    NUMBERS,
    NodeReport,
    find_report,
    parse_group_order,
    render_order,
    render_task_report,
)
from launcher.launch.signal_channel import open_signal_channel

START = GroupStart(3, (GroupNode("n1", 8), GroupNode("gpu-12.cluster", 4)), "n1", 29500)


@pytest.mark.parametrize("order", [START, JobEnd(failed=True), JobEnd(failed=False)])
def test_orders_come_back_as_they_were(order: Order) -> None:
    line = render_order(order)
    assert "\n" not in line and parse_group_order(line) == order


@pytest.mark.parametrize(
    "line",
    [
        "",
        "HELLO",
        "SIGTERM",
        "START",
        "START {}",
        "START [1]",
        render_order(START)[:-9],
        f"{render_order(START)} more",
        "START " + "[" * 100_000,
        "END",
        "END 2",
        "END 0 0",
    ],
)
def test_other_lines_are_no_orders(line: str) -> None:
    assert parse_group_order(line) is None


@given(
    st.sampled_from(sorted(NUMBERS)),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True),
    st.lists(st.integers(-255, 1 << 20), min_size=3, max_size=3),
    st.text(st.characters(exclude_categories=("C", "Z")), max_size=20),
)
def test_reports_come_back_whatever_stands_before_them(
    kind: str, host: str, numbers: list[int], before: str
) -> None:
    report = NodeReport(kind, host, tuple(numbers[: NUMBERS[kind]]))
    assert find_report(before + render_task_report(report)) == (before, report)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "launch-task: signalled n2 SIGTERM",
        "launch-task: ready n2",
        "launch-task: ready n2 2 2",
        "launch-task: ready  2",
        "launch-task: failed n2 0 1",
        "launch-task: failed n2 0 1 x",
        "launch-task: alive n2 now",
        f"launch-task: ready n2 {'9' * 4000}",
        "launch-task: ended n2 0 says the program",
        "launch: n2: rank 1 failed",
    ],
)
def test_other_lines_are_no_reports(line: str) -> None:
    assert find_report(line) is None


def test_an_order_that_comes_in_pieces_between_signals() -> None:
    reading, writing = os.pipe()
    control = open_signal_channel(reading)
    text = render_order(START)
    assert len(text) < 4096
    os.write(writing, f"HELLO\nKILLWAIT 30\n{text[:20]}".encode())
    assert control.read_signals() == [] and control.take_lines() == []
    os.write(writing, f"{text[20:]}\nSIGTERM\nEND 1\nEN".encode())
    assert [int(number) for number in control.read_signals()] == [15]
    assert [parse_group_order(line) for line in control.take_lines()] == [START, JobEnd(failed=True)]
    assert control.take_lines() == []
    os.close(writing)
    assert control.read_signals() == [15] and control.take_lines() == []
    os.close(reading)
