"""`launch cancel` of runs on this machine, and of what others have planted; SLURM's are in tests/slurm."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.make_runs import identify_process, make_run, read_manifest
from tests.launch.terminals import open_terminal
from tests.seam import LAUNCH, PATIENCE, Launch, Started, start, wait_for, write_program
from tests.strangers import give_away

WAITS = "import time\nprint('here', flush=True)\ntime.sleep(1000)\n"
NUMBER = "20260801-120000"


def begin(here: Path, run: Started) -> None:
    wait_for(lambda: any(log.stat().st_size for log in here.glob("runs/real/*/logs/0/rank-0.out")), "a line")
    assert run.process.poll() is None


def answer(here: Path, text: str, *names: str) -> tuple[int, str]:
    """Run it on a terminal, type an answer, and return code and what is shown."""
    with open_terminal(here, *LAUNCH, "cancel", *names, COLUMNS="200") as terminal:
        terminal.expect("[y/N] ")
        terminal.type(text)
        return terminal.finish(), terminal.text()


def test_a_run_ends_and_leaves_nothing(here: Path, launch: Launch) -> None:
    with start(here, "nproc_per_node=2", "name=real", "--", write_program(here, WAITS)) as run:
        begin(here, run)
        code, shown = answer(here, "n\n", "real")
        assert code == 1 and "nothing was cancelled" in shown
        assert f", process {run.process.pid}, running on {os.uname().nodename} for " in shown
        launch("cancel", "real").assert_error(2, "yes=true")  # there is no terminal here
        assert run.process.poll() is None
        code, shown = answer(here, "y\n", "real")
        assert code == 0 and "has ended: stopped" in shown
        assert run.wait() == 143
        assert run.survivors() == []
        again = launch("cancel", "real")
        assert (again.code, again.out) == (0, "") and "has ended already: stopped" in again.err


def test_several_runs_are_asked_about_once(here: Path) -> None:
    for stamp in (NUMBER, "20260801-120001"):
        os.open(make_mine(here, stamp=stamp), os.O_RDONLY)
    code, shown = answer(here, "\n", NUMBER, "20260801-120001")
    assert code == 1
    assert f"  tiny/{NUMBER}, process" in shown and "cancel 2 runs? [y/N]" in shown


# A `launch` keeps the directory of its run open, and is known by that.
HOLD = """
import os, sys, time
os.open(sys.argv[1], os.O_RDONLY)
print(flush=True)
time.sleep(1000)
"""


def test_runs_of_one_name_in_two_places_both_end(here: Path, launch: Launch) -> None:
    with contextlib.ExitStack() as stack:
        paths, processes = [], []
        for place in ("a", "b"):
            path = here / place / "runs" / "tiny" / NUMBER
            path.mkdir(parents=True)
            command = [sys.executable, "-c", HOLD, str(path)]
            processes.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)))
            stack.callback(processes[-1].kill)
            assert processes[-1].stdout and processes[-1].stdout.readline()
            paths.append(make_mine(here / place, pid=processes[-1].pid))
        launch("cancel", *map(str, paths), "yes=true", "torchrun.shutdown_timeout=1")
        assert [process.wait(PATIENCE) for process in processes] == [-15, -15]


def make_mine(here: Path, name: str = "tiny", pid: int = 0, **more: str) -> Path:
    """A run whose `launch` is this process, by its manifest, or another."""
    return make_run(
        here / "runs", name, state="running", process=identify_process(pid or os.getpid()), **more
    )


def test_mistakes_and_what_cannot_be_reached(here: Path, launch: Launch) -> None:
    launch("cancel").assert_error(2, "launch cancel NAME/ID")
    launch("cancel", "tiny").assert_error(2, "no run 'tiny'")
    far = {**identify_process(os.getpid()), "host": "far"}
    for name, more, part in (
        ("far", {"process": far}, f"is process {os.getpid()} on far"),
        ("none", {}, "names no process"),
    ):
        path = make_run(here / "runs", name, NUMBER, "running", **more)
        launch("cancel", name, "yes=true").assert_error(3, part)
        assert read_manifest(path)["outcome"]["state"] == "running"
    (make_run(here / "runs") / "manifest.json").write_text("{")
    launch("cancel", "tiny", "yes=true").assert_error(3, "left alone")


# What somebody else has planted: nothing of the user's is ended by it


@pytest.fixture
def victim() -> Iterator[int]:
    """A process of this user's that is no business of `launch`."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process.pid
    alive = process.poll() is None
    process.kill()
    process.wait()
    assert alive, "it was killed"


def test_a_manifest_of_another_user_ends_nothing(
    here: Path, launch: Launch, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = give_away(make_mine(here, pid=victim))
    told = launch("cancel", "tiny", "yes=true")
    told.assert_error(3, f"tiny/{NUMBER} is left alone", "it belongs to", "65534")
    os.lchown(path, os.geteuid(), os.getegid())
    launch("cancel", "tiny", "yes=true").assert_error(3, "manifest.json: it belongs to")
    (here / "scancel").write_text("#!/bin/sh\ntouch called\n")
    (here / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    give_away(make_run(here / "runs", "job", state="submitted", slurm={"job_id": "12"}))
    launch("cancel", "job", "yes=true").assert_error(3, "is left alone", "it belongs to")
    assert not (here / "called").exists()


@pytest.mark.parametrize("link", ["runs/tiny", f"runs/tiny/{NUMBER}"])
def test_a_link_of_another_user_does_not_lead_to_a_run(here: Path, launch: Launch, link: str) -> None:
    away = make_run(here / "away", state="running", process=identify_process(os.getpid()))
    os.open(away, os.O_RDONLY)
    (here / link).parent.mkdir(parents=True)
    (here / link).symlink_to(away if link.endswith("0") else away.parent)
    give_away(here / link)
    told = launch("cancel", f"tiny/{NUMBER}", "yes=true")
    told.assert_error(3, "is left alone", "a symbolic link of", "65534")
    launch("status", "tiny").assert_error(2, "no run 'tiny'")


def test_links_of_ones_own(here: Path, launch: Launch) -> None:
    """One in a run directory is not read; one that leads to where the runs are is followed."""
    path = make_mine(here)
    os.open(path, os.O_RDONLY)
    other = make_run(here / "runs", "other")
    (other / "manifest.json").unlink()
    (other / "manifest.json").symlink_to(path / "manifest.json")
    launch("cancel", "other", "yes=true").assert_error(3, "cannot be read")
    make_run(here / "scratch", "far")
    (here / "led").symlink_to("scratch")
    assert f"far/{NUMBER} succeeded" in " ".join(launch("status", "far", "runs_dir=led").out.split())
    assert "has ended already" in launch("cancel", "far", "yes=true", "runs_dir=led").err


def test_the_process_is_a_launch_of_that_run(here: Path, launch: Launch, victim: int) -> None:
    """Files that came out of an archive are this user's own, whatever they say."""
    make_mine(here, pid=victim)
    told = launch("cancel", "tiny", "yes=true")
    told.assert_error(3, f"left alone: process {victim} is not the launch of this run")
    path = make_mine(here, "other")
    os.open(path, os.O_RDONLY)
    make_mine(here, "copy")
    launch("cancel", "copy", "yes=true").assert_error(3, "is not the launch of this run")
    assert read_manifest(path)["outcome"]["state"] == "running"
    make_run(here / "runs", "gone", state="running", process={**identify_process(victim), "start": 1})
    gone = launch("cancel", "gone", "yes=true")
    assert gone.code == 0 and "has ended already: lost" in gone.err  # another process has its number


def test_nothing_is_cancelled_where_one_of_several_is_left_alone(
    here: Path, launch: Launch, victim: int
) -> None:
    own = make_mine(here, "own")
    held = subprocess.Popen(["sleep", "1000"], stdin=os.open(own, os.O_RDONLY))
    text = (own / "manifest.json").read_text()
    manifest = {**json.loads(text), "process": identify_process(held.pid)}
    (own / "manifest.json").write_text(json.dumps(manifest))
    make_mine(here, "planted", victim)
    launch("cancel", "own", "planted", "yes=true").assert_error(3, f"planted/{NUMBER} is left alone")
    assert held.poll() is None
    result = launch("cancel", "own", "yes=true")
    assert (result.code, held.wait(PATIENCE)) == (0, -15), result.err
