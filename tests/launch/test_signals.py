"""Ctrl-C, SIGTERM, a closed terminal, a killed launcher: the ranks end in stages, and nothing is left."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.terminals import launch_on_terminal
from tests.seam import LAUNCH, PATIENCE, QUICK_AGENT, Started, start, wait_for, write_program, write_script
from tests.slurm.test_node_task import start_task

SLEEPER = """
import subprocess, time
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["setsid", "sleep", "300"])
print("ready", flush=True)
time.sleep(300)
"""
READING = """
print("ready", flush=True)
input()
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
import signal, subprocess, time
for _ in range(15):
    subprocess.run(["sh", "-c", "sleep 0.01 & setsid -f sleep 0.01; exit"])
signal.signal(signal.SIGUSR2, lambda n, frame: print("saved", flush=True))
print("ready", flush=True)
time.sleep(300)
"""


def wait_ready(started: Started, ranks: int = 2) -> None:
    """Wait until every rank has said `ready` in its own log."""
    wait_for(lambda: started.count_said("ready") == ranks, "ready")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_signal_ends_ranks_and_their_children(tmp_path: Path, number: int, status: int) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, SLEEPER)) as started:
        wait_ready(started)
        assert len(started.survivors()) >= 6  # for each rank itself and two children
        started.process.send_signal(number)
        assert started.wait() == status
        assert started.survivors() == []
    outcome = started.manifest()["outcome"]
    assert (outcome["state"], outcome["signal"]) == ("stopped", signal.Signals(number).name)
    assert "Traceback" not in started.read("stdout")


def test_ranks_that_ignore_a_signal_get_harder_ones(tmp_path: Path) -> None:
    words = ("nproc_per_node=2", "torchrun.shutdown_timeout=1", "--", write_program(tmp_path, STUBBORN))
    with start(tmp_path, *words) as started:
        wait_ready(started)
        started.process.send_signal(signal.SIGINT)
        wait_for(lambda: started.count_said("got 15") == 2, "SIGTERM after the grace")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
        assert started.survivors() == []
    assert started.count_said("got 2") == 2
    assert "SIGKILL" in started.read()


@pytest.mark.parametrize("agent", ["direct", "torchrun"])
def test_user_signal_reaches_ranks_and_the_job_goes_on(agent: str, tmp_path: Path) -> None:
    """Orphans of the ranks do not stay as zombies, and a launcher that is killed leaves nothing."""
    words = ("nproc_per_node=2", f"agent={agent}", "watch.enabled=false")
    program = write_program(tmp_path, ASKED)
    with start(tmp_path, *words, "--", program, PYTHONPATH=QUICK_AGENT) as started:
        children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children")
        if agent == "torchrun":  # a launcher that gets no CPU while the ranks start
            wait_for(lambda: "starting the ranks" in started.read(), "torchrun on its way")
            started.process.send_signal(signal.SIGSTOP)
        wait_ready(started)
        started.process.send_signal(signal.SIGUSR2)
        started.process.send_signal(signal.SIGCONT)
        wait_for(lambda: started.count_said("saved") == 2, "the handler in both ranks")
        if agent == "torchrun":
            wait_for(lambda: len(children.read_text().split()) == 1, "the end of all children but the agent")
            os.kill(find_agent(started), signal.SIGUSR2)  # as SLURM does, to every process of a step
            assert started.process.poll() is None
            started.process.send_signal(signal.SIGTERM)
            assert started.wait() == 143
        else:
            assert started.process.poll() is None
            started.process.kill()
            wait_for(lambda: started.survivors() == [], "the end of all ranks")


def test_killed_agent_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    words = ("nproc_per_node=2", "agent=torchrun", "--", write_program(tmp_path, ASKED))
    with start(tmp_path, *words, PYTHONPATH=QUICK_AGENT) as started:
        wait_ready(started)
        os.kill(find_agent(started), signal.SIGKILL)
        assert started.wait() != 0
        assert started.survivors() == []
    assert re.search("(ended with|killed by) SIG", started.read())


def find_agent(started: Started) -> int:
    found = started.survivors_words().items()
    return next(pid for pid, words in found if "torch.distributed.run" in words)


def test_signal_before_ranks_have_started(tmp_path: Path) -> None:
    with start(tmp_path, "nproc_per_node=2", "--", write_program(tmp_path, SLEEPER)) as started:
        wait_for(lambda: bool(started.survivors()), "the agent's start")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
        assert started.survivors() == []


@pytest.mark.parametrize(("ranks", "program"), [(1, READING), (2, SLEEPER)])
def test_a_terminal_that_is_closed_ends_the_program(tmp_path: Path, ranks: int, program: str) -> None:
    with launch_on_terminal(tmp_path, program, f"nproc_per_node={ranks}") as terminal:
        wait_ready(terminal.started(), ranks)
        assert terminal.started().survivors()
        os.close(terminal.master)
        os.close(terminal.slave)
        assert terminal.process.wait(PATIENCE) == 129
        assert terminal.started().survivors() == []
        assert terminal.started().manifest()["outcome"]["signal"] == "SIGHUP"


def test_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    write_script(tmp_path / "wrapper", 'trap "" HUP\nexec "$@"')
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
        wait_for(lambda: started.count_said("saved") == 1, "the job going on")
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 143


NOISY = """
import time
print("ready", flush=True)
while True:
    print("x" * 1000, flush=True)
    time.sleep(0.001)
"""


def test_a_reader_that_stalls_does_not_hold_up_a_signal(tmp_path: Path) -> None:
    program = write_program(tmp_path, NOISY)
    process = subprocess.Popen(
        [*LAUNCH, "--", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        wait_ready(Started(process, tmp_path, "no mark"), ranks=1)
        log = next((tmp_path / "runs").glob("*/*/logs/0/rank-0.out"))
        wait_for(lambda: log.stat().st_size > 500_000, "more output than a pipe holds")
        process.terminate()
        assert process.wait(PATIENCE) == 143
    finally:
        process.kill()
        process.communicate()
    manifest = json.loads((log.parents[2] / "manifest.json").read_text())
    assert manifest["outcome"]["state"] == "stopped"


CATCHER = """
import os, signal, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGUSR2, lambda *_: print("caught", flush=True))
signal.signal(signal.SIGTERM, lambda *_: print("term", flush=True))
print("up", flush=True)
while True:
    time.sleep(0.1)
"""


def test_a_task_of_slurm_passes_signals_on_as_the_first_node_says_and_within_slurms_patience(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Words of a later version are no signals; what SLURM and the first node both send is one stage."""
    logs = [tmp_path / f"run/logs/0/rank-{rank}.out" for rank in range(2)]
    spared, said = "SIGUSR2 not sent: 1 rank has no handler for it", ""

    def hear(words: str, count: int = 1) -> None:
        def look() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return said.count(words) >= count

        wait_for(look, words, tell=lambda: said)

    with start_task(tmp_path, text=CATCHER) as task:
        assert task.stdin
        wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs), "both ranks")
        for piece in ("DANCE no", "w\nHELLO\nSIGU", "SR2\n"):
            task.stdin.write(piece.encode())
            task.stdin.flush()
        hear(spared)
        wait_for(lambda: "caught" in logs[1].read_text(), "the handler")
        task.send_signal(signal.SIGTERM)
        hear("SIGTERM to the ranks, which have 20 s to end")
        task.stdin.write(b"SIGTERM\nSIGUSR2\n")
        task.stdin.flush()
        hear(spared, 2)
        assert "SIGKILL" not in said
        task.stdin.write(b"SIGKILL\n")
        task.stdin.flush()
        assert task.wait(PATIENCE) == 0
        assert [log.read_text().count("term") for log in logs] == [1, 1]
