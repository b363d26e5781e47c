"""`launch cancel` of real runs on this machine; those of SLURM are in tests/slurm."""

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from launcher.runs.run_process import hold_directory, identify_process
from tests.cli.make_runs import make_run
from tests.seam import LAUNCH, Launch, Started, clean_environ, start, wait_for, write_program

WAITS = """
import time
print("here", flush=True)
time.sleep(1000)
"""


def begin(here: Path, run: Started) -> None:
    wait_for(lambda: any(log.stat().st_size for log in here.glob("runs/real/*/logs/0/rank-0.out")), "a line")
    assert run.process.poll() is None


def answer(here: Path, text: bytes, *words: str) -> tuple[int, str]:
    """Run a command on a terminal of its own, type an answer, and return code and what is shown."""
    master, slave = pty.openpty()
    environ = {**clean_environ(), "COLUMNS": "200"}
    process = subprocess.Popen(
        [*LAUNCH, *words], cwd=here, env=environ, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown = b""
    while b"[y/N] " not in shown:
        shown += os.read(master, 1000)
    os.write(master, text)
    code = process.wait(60)
    while True:
        try:
            shown += os.read(master, 10000)
        except OSError:  # EIO: the terminal's last user has left
            break
    os.close(master)
    return code, shown.decode()


def test_a_run_ends_and_leaves_nothing(here: Path, launch: Launch) -> None:
    with start(here, "nproc_per_node=2", "name=real", "--", write_program(here, WAITS)) as run:
        begin(here, run)
        code, shown = answer(here, b"n\n", "cancel", "real")
        assert code == 1 and "nothing was cancelled" in shown
        assert f", process {run.process.pid}, running on {os.uname().nodename} for " in shown
        assert run.process.poll() is None
        code, shown = answer(here, b"y\n", "cancel", "real")
        assert code == 0 and "has ended: stopped" in shown
        assert run.wait() == 143
        assert run.survivors() == []
        again = launch("cancel", "real")
        assert (again.code, again.out) == (0, "") and "has ended already: stopped" in again.err


@pytest.mark.usefixtures("quick_agent")
def test_without_a_terminal_yes_is_asked_for_and_enough(here: Path, launch: Launch) -> None:
    with start(here, "nproc_per_node=1", "name=real", "--", write_program(here, WAITS)) as run:
        begin(here, run)
        launch("cancel", "real").assert_error(2, "yes=true")
        assert run.process.poll() is None
        result = launch("cancel", "real", "yes=true")
        assert result.code == 0 and "has ended: stopped" in result.err
        assert run.wait() == 143


def test_several_runs_are_asked_about_once(here: Path) -> None:
    for stamp in ("20260801-120000", "20260801-120001"):
        run = make_run(here / "runs", stamp=stamp, state="running", process=identify_process(os.getpid()))
        hold_directory(run)
    code, shown = answer(here, b"\n", "cancel", "20260801-120000", "20260801-120001")
    assert code == 1
    assert "  tiny/20260801-120000, process" in shown and "cancel these 2 runs? [y/N]" in shown


def test_a_process_that_took_over_the_number_is_left_alone(here: Path, launch: Launch) -> None:
    other = subprocess.Popen(["sleep", "100"])
    record = {**identify_process(other.pid), "start": 1}
    make_run(here / "runs", state="running", process=record)
    result = launch("cancel", "tiny", "yes=true")
    assert result.code == 0 and "has ended already: lost" in result.err
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"process": {**identify_process(os.getpid()), "host": "far"}}, f"is process {os.getpid()} on far"),
        ({}, "names no process"),
    ],
    ids=["another host's", "one that names no process"],
)
def test_what_cannot_be_reached_is_said(
    here: Path, launch: Launch, more: dict[str, object], part: str
) -> None:
    path = make_run(here / "runs", "tiny", "20260801-120000", "running", **more)
    launch("cancel", "tiny", "yes=true").assert_error(3, part)
    assert json.loads((path / "manifest.json").read_text())["outcome"] == {"state": "running"}


def test_mistakes(here: Path, launch: Launch) -> None:
    launch("cancel").assert_error(2, "launch cancel NAME/ID")
    launch("cancel", "tiny").assert_error(2, "no run 'tiny'")
    (make_run(here / "runs") / "manifest.json").write_text("{")
    launch("cancel", "tiny", "yes=true").assert_error(3, "left alone")
