"""The channel from a job's first node to its tasks, and the ranks that a signal is for."""

import os
import signal
import subprocess
import sys

import pytest

from launcher.launch.processes import RankSet, list_children, list_ranks, read_signals
from launcher.launch.signal_channel import (
    KILL_WAIT,
    LOST,
    make_signal_channel,
    open_signal_channel,
    write_line_to_tasks,
)
from launcher.launch.signals import StopStages, limit_grace

SLEEPER = "import os, signal, time\n{}\nos.write(1, b'UP\\n')\ntime.sleep(60)"
CATCHER = "signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b'CAUGHT\\n'))"


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


def test_a_word_in_two_pieces_and_words_of_a_later_version() -> None:
    reading, writing = os.pipe()
    control = open_signal_channel(reading)
    os.write(writing, b"HELLO\nDANCE now\nSIGU")
    assert control.read_signals() == []
    os.write(writing, b"SR1\n\xff\n")
    assert control.read_signals() == [signal.SIGUSR1]
    os.close(writing)
    os.close(reading)


def test_without_a_greeting_the_end_says_nothing() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    control = open_signal_channel(reading)
    assert control.read_signals() == [] and control.descriptors == () and not control.is_cut


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


def test_a_signal_is_for_those_that_catch_it() -> None:
    agent = f"""
import os, subprocess, sys
for rank, text in enumerate({[SLEEPER.format(CATCHER), SLEEPER.format("")]!r}):
    env = dict(os.environ, RANK=str(rank + 4), LOCAL_RANK=str(rank), TORCHELASTIC_RESTART_COUNT="2")
    subprocess.Popen([sys.executable, "-c", text], env=env)
subprocess.Popen(["sleep", "60"])
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", agent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    watch = RankSet()
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["UP\n"] * 2
        ranks = list_ranks(process.pid, first_attempt=10)
        found = sorted((rank.rank, rank.local_rank, rank.attempt) for rank in ranks)
        assert found == [(4, 0, 12), (5, 1, 12)], "its other child is none"
        watch.add(ranks)
        assert watch.signal_ranks(signal.SIGUSR2, catchers=True) == 1
        assert process.stdout.readline() == "CAUGHT\n"
        watch.poll((), 0.1)
        assert len(watch.alive) == 2, "the one that does not catch it lives on"
    finally:
        for child in list_children(process.pid):
            os.kill(child, signal.SIGKILL)
        watch.close()
        process.communicate("")


def test_a_process_that_is_gone_catches_nothing() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert not read_signals(done.pid, "SigCgt")
    assert list_ranks(done.pid, 0) == []


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
