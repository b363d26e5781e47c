"""The channel from a job's first node to its tasks, what goes through it, and whom a signal is for."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.launch.coordinator import GroupNode, GroupStart, JobEnd
from launcher.launch.processes import RankSet, list_children, list_ranks, read_signals
from launcher.launch.signals import (
    KILL_WAIT,
    LOST,
    StopStages,
    limit_grace,
    make_signal_channel,
    open_signal_channel,
    write_line_to_tasks,
)
from launcher.slurm.node_channel import (
    NodeReport,
    find_report,
    parse_group_order,
    render_order,
    render_report,
)

START = GroupStart(3, (GroupNode("n1", 8), GroupNode("gpu-12.cluster", 4)), "n1", 29500)
ORDER = render_order(START)
"""A line for the tasks."""


def test_signals_come_through_in_their_order() -> None:
    reading, writing = make_signal_channel()
    control = open_signal_channel(reading)
    assert control.read_signals() == []
    write_line_to_tasks(writing, "SIGUSR2")
    write_line_to_tasks(writing, "SIGTERM")
    assert control.read_signals() == [signal.SIGUSR2, signal.SIGTERM]
    assert control.kill_wait is None
    write_line_to_tasks(writing, f"{KILL_WAIT} 30")
    assert control.read_signals() == [] and control.kill_wait == 30
    write_line_to_tasks(writing, LOST)
    assert control.read_signals() == [] and control.lost_at is not None
    os.close(writing)
    assert control.read_signals() == [signal.SIGTERM], "the first node's process is gone"
    assert control.read_signals() == [] and control.descriptors == () and control.is_cut
    os.close(reading)


def test_words_in_pieces_orders_between_them_and_words_of_a_later_version() -> None:
    reading, writing = os.pipe()
    control = open_signal_channel(reading)
    data = f"HELLO\nDANCE now\n{ORDER}\nSIGUSR1\n".encode() + b"\xff\n"
    signals: list[int] = []
    for at in range(0, len(data), 7):
        os.write(writing, data[at : at + 7])
        signals += control.read_signals()
    assert signals == [signal.SIGUSR1] and control.greeted
    assert [parse_group_order(line) for line in control.take_lines()] == [None, START]
    os.close(writing)
    os.close(reading)


def test_without_a_greeting_the_end_says_nothing() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    control = open_signal_channel(reading)
    assert control.read_signals() == [] and control.descriptors == () and not control.is_cut


def test_orders_come_back_as_they_were_and_other_lines_are_none() -> None:
    for order in (START, JobEnd(failed=True), JobEnd(failed=False)):
        assert "\n" not in render_order(order) and parse_group_order(render_order(order)) == order
    odd = ("", "HELLO", "SIGTERM", "START", "START {}", "START [1]", "END", "END 2", "END 0 0")
    for line in (*odd, ORDER[:-9], f"{ORDER} more", "START " + "[" * 100_000):
        assert parse_group_order(line) is None, line


@given(
    st.builds(NodeReport, st.text(), st.text(), st.integers(-255, 1 << 20), st.integers(-255, 1 << 20)),
    st.text(st.characters(exclude_categories=("C", "Z")), max_size=20),
)
def test_reports_come_back_whatever_stands_before_them(report: NodeReport, before: str) -> None:
    assert find_report(before + render_report(report)) == (before, report)


NO_REPORTS = """
launch-task: ready n2
launch-task: {"kind": "ready"}
launch-task: {"kind": "ready", "host": "n2", "number": "x"}
launch-task: {"kind": "ready", "host": "n2"} says the program
launch: n2: rank 1 failed
"""


def test_other_lines_are_no_reports() -> None:
    for line in NO_REPORTS.splitlines():
        assert find_report(line) is None, line


@pytest.mark.parametrize(
    ("first", "then", "reached"),
    [
        (signal.SIGTERM, signal.SIGTERM, True),
        (signal.SIGTERM, signal.SIGKILL, False),
        (signal.SIGINT, signal.SIGTERM, False),
        (signal.SIGINT, signal.SIGINT, False),
        (signal.SIGHUP, signal.SIGTERM, True),
    ],
)
def test_what_slurm_and_the_first_node_both_send_is_one_stage(first: int, then: int, reached: bool) -> None:
    stop = StopStages.begin(first, 1.0)
    assert stop.next_stage() == first
    assert stop.has_reached(then) is reached


@pytest.mark.parametrize(
    ("grace", "word", "limit"),
    [(30, "", 20), (30, "30", 20), (5, "30", 5), (30, "10", 3), (30, "2", 1), (30, "300", 20), (30, "x", 20)],
)
def test_ranks_are_ended_before_slurm_is_out_of_patience(grace: float, word: str, limit: float) -> None:
    reading, writing = make_signal_channel()
    control = open_signal_channel(reading)
    write_line_to_tasks(writing, f"{KILL_WAIT} {word}")
    control.read_signals()
    assert limit_grace(grace, control.kill_wait) == limit
    os.close(writing)
    os.close(reading)


SLEEPER = "import os, signal, time\n{}\nos.write(1, b'UP\\n')\ntime.sleep(60)"
CATCHER = "signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b'CAUGHT\\n'))"
AGENT = f"""
import os, subprocess, sys
for rank, text in enumerate({[SLEEPER.format(CATCHER), SLEEPER.format("")]!r}):
    env = dict(os.environ, RANK=str(rank + 4), LOCAL_RANK=str(rank), TORCHELASTIC_RESTART_COUNT="2")
    subprocess.Popen([sys.executable, "-c", text], env=env)
subprocess.Popen(["sleep", "60"])
sys.stdin.read()
"""


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_signal_is_for_those_that_catch_it(has_pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives pidfds since Linux 5.3."""
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    ranks = RankSet()
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["UP\n"] * 2
        found = list_ranks(process.pid, first_attempt=10)
        numbers = sorted((rank.rank, rank.local_rank, rank.attempt) for rank in found)
        assert numbers == [(4, 0, 12), (5, 1, 12)], "its other child is none"
        if not has_pidfds:

            def refuse(pid: int) -> int:
                raise OSError(38, "Function not implemented")

            monkeypatch.setattr(os, "pidfd_open", refuse)
        ranks.add(found)
        assert ranks.signal_ranks(signal.SIGUSR2, catchers=True) == 1
        assert process.stdout.readline() == "CAUGHT\n"
        ranks.poll((), 0.1)
        assert len(ranks.alive) == 2, "the one that does not catch it lives on"
        for rank in found:
            os.kill(rank.pid, signal.SIGKILL)
        while len(ranks.deaths) < 2:
            ranks.poll((), 0.1)
        assert not ranks.alive and {death.exitcode for death in ranks.deaths} == {-signal.SIGKILL}
    finally:
        for child in list_children(process.pid):
            os.kill(child, signal.SIGKILL)
        ranks.close()
        process.communicate("")
    assert not read_signals(process.pid, "SigCgt") and list_ranks(process.pid, 0) == [], "it is gone"
