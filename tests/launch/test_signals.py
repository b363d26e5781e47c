"""Ctrl-C, SIGTERM, a closed terminal, a killed launcher: the ranks end in stages, and nothing is left."""

import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.support import LAUNCH, Started, start, wait_for, write_program

SLEEPER = """
import subprocess, time
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["setsid", "sleep", "300"])
print("ready", flush=True)
time.sleep(300)
"""
STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, frame: print("got", n, flush=True))
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
ASKED = """
import signal, time
signal.signal(signal.SIGUSR2, lambda n, frame: print("saved", flush=True))
print("ready", flush=True)
time.sleep(300)
"""


def wait_ready(started: Started, ranks: int = 2) -> None:
    """Wait until every rank has said `ready` in its own log."""
    wait_for(lambda: count_said(started, "ready") == ranks, "ready")


def count_said(started: Started, word: str) -> int:
    logs = (started.folder / "runs").glob("*/*/logs/*/rank-*.out")
    return sum(word in path.read_text() for path in logs)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_one_signal_ends_ranks_and_their_children(tmp_path: Path, number: int, status: int) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, SLEEPER)) as started:
        wait_ready(started)
        assert len(started.survivors()) >= 7  # the agent, and for each rank itself and two children
        started.process.send_signal(number)
        assert started.wait() == status
        assert started.survivors() == []
        manifest = json.loads((started.run_dir() / "manifest.json").read_text())
    assert manifest["outcome"]["state"] == "stopped"
    assert manifest["outcome"]["signal"] == signal.Signals(number).name
    assert "Traceback" not in started.read("stdout")


def test_ranks_that_ignore_a_signal_get_harder_ones(tmp_path: Path) -> None:
    words = ("nproc_per_node=2", "torchrun.shutdown_timeout=1", "--", write_program(tmp_path, STUBBORN))
    with start(tmp_path, *words) as started:
        wait_ready(started)
        started.process.send_signal(signal.SIGINT)
        wait_for(lambda: count_said(started, "got 15") == 2, "SIGTERM after the grace")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
        assert started.survivors() == []
    assert count_said(started, "got 2") == 2
    assert "SIGKILL" in started.read()


def test_user_signal_reaches_ranks_and_the_job_goes_on(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, ASKED)) as started:
        wait_ready(started)
        started.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: count_said(started, "saved") == 2, "the handler in both ranks")
        os.kill(find_agent(started), signal.SIGUSR2)  # as SLURM does, to every process of a step
        assert started.process.poll() is None
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 143


def test_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, ASKED)) as started:
        wait_ready(started)
        started.process.kill()
        wait_for(lambda: started.survivors() == [], "the end of agent and ranks")


def test_killed_agent_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, ASKED)) as started:
        wait_ready(started)
        os.kill(find_agent(started), signal.SIGKILL)
        assert started.wait() != 0
        assert started.survivors() == []
    assert re.search("(ended with|killed by) SIG", started.read())


def find_agent(started: Started) -> int:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in started.survivors()}
    return next(pid for pid, command in commands.items() if b"torch.distributed.run" in command)


def test_signal_before_ranks_have_started(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, SLEEPER)) as started:
        wait_for(lambda: bool(started.survivors()), "the agent's start")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
        assert started.survivors() == []


def test_closed_terminal_leaves_nothing(tmp_path: Path) -> None:
    program = write_program(tmp_path, SLEEPER)
    mark = f"LAUNCH_TEST_MARK=terminal-{os.getpid()}"
    controller, terminal = pty.openpty()
    environ = {**os.environ, **dict([mark.split("=")])}
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *LAUNCH, "nproc_per_node=2", "--", program],
        cwd=tmp_path,
        env=environ,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    started = Started(process, tmp_path, mark)
    try:
        wait_ready(started)
        assert started.survivors()
        os.close(controller)
        wait_for(lambda: started.survivors() == [], "the end of all processes")
        assert process.wait(20) == 129
    finally:
        for pid in started.survivors():
            os.kill(pid, signal.SIGKILL)
        process.wait(10)


def test_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "wrapper").write_text('#!/bin/sh\ntrap "" HUP\nexec "$@"\n')
    (tmp_path / "wrapper").chmod(0o755)
    program = write_program(tmp_path, ASKED)
    process = subprocess.Popen(
        [str(tmp_path / "wrapper"), *LAUNCH, "--", program],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=-3,
    )
    try:
        started = Started(process, tmp_path, "no mark")
        wait_ready(started, ranks=1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR2)
        wait_for(lambda: count_said(started, "saved") == 1, "the job going on")
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(40) == 143
