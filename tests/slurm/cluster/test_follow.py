"""`follow=true` on a real SLURM: the wait in the queue, a controller that goes away, Ctrl-C, exit codes."""

import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.launch.terminals import Terminal, launch_on_terminal
from tests.seam import find_run, wait_for
from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import Run

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]
SMALL = ("cluster=slurm", "nproc_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_task=1")
WORK = """
import pathlib, time
print("step 1/9 loss 5.5", flush=True)
while not pathlib.Path("stop").exists():
    time.sleep(0.05)
print("after", flush=True)
"""
MEET = """
import os, pathlib, time
print("rank", os.environ["RANK"], flush=True)
pathlib.Path("met-" + os.environ["RANK"]).touch()
while not all(pathlib.Path(name).exists() for name in ("met-0", "met-1")):
    time.sleep(0.05)
os._exit({code})
"""
"""No rank ends before both have printed: the first that fails ends the others."""


def follow(sandbox: Sandbox, folder: Path, *words: str) -> AbstractContextManager[Terminal]:
    """Submit a job on a terminal, and follow it there."""
    conf = sandbox.environ["SLURM_CONF"]
    return launch_on_terminal(folder, WORK, *SMALL, "follow=true", *words, SLURM_CONF=conf)


def test_the_controller_may_go_away_meanwhile(sandbox: Sandbox, tmp_path: Path) -> None:
    with follow(sandbox, tmp_path) as terminal:
        terminal.expect("step 1/9 loss 5.5")
        sandbox.break_it("restart-controller")
        (tmp_path / "stop").touch()
        terminal.expect("after", "succeeded after")
        assert terminal.finish() == 0, terminal.text()
    assert terminal.text().count("SLURM asked again") <= 1, terminal.text()


def test_ctrl_c_asks_and_detaches(sandbox: Sandbox, tmp_path: Path) -> None:
    with follow(sandbox, tmp_path, "cluster.additional.hold=true") as terminal:
        terminal.expect("waits: JobHeldUser (held: ")
        terminal.type("\x03")
        job = Run(find_run(tmp_path), sandbox).job_id
        terminal.expect(f"cancel job {job}, or detach? [c/d]")
        terminal.type("d\n")
        terminal.expect(f"detached: job {job} goes on; launch logs -f ")
        assert terminal.finish() == 0
    assert sandbox.list_states(job) == ["PENDING"]


def test_ctrl_c_asks_and_cancels_and_stays_to_the_end(sandbox: Sandbox, tmp_path: Path) -> None:
    with follow(sandbox, tmp_path) as terminal:
        terminal.expect("step 1/9 loss 5.5")
        terminal.type("\x03")
        terminal.expect("[c/d]")
        terminal.type("c\n")
        terminal.expect("cancelled; waiting for the end", "stopped after")
        assert terminal.finish() == 130, terminal.text()
    run = Run(find_run(tmp_path), sandbox)
    wait_for(lambda: sandbox.list_states(run.job_id) == ["CANCELLED"], "the end")
    assert (run.outcome["state"], run.outcome["cause"]) == ("stopped", "cancelled")


@pytest.mark.parametrize("code", [0, 3, 137])
def test_launch_follows_what_it_submits(sandbox: Sandbox, tmp_path: Path, code: int) -> None:
    words = (*SMALL, "nodes=2", "follow=true", "logs.console=all")
    done = sandbox.launch(*words, "--", sys.executable, "-c", MEET.format(code=code), cwd=tmp_path)
    assert done.code == code, done
    for rank in (0, 1):
        assert re.search(rf"^\[n\d:{rank}\] rank {rank}$", done.out, re.MULTILINE), done
    run = Run(find_run(tmp_path), sandbox)
    assert (run.outcome["state"], run.outcome["exit_code"]) == ("failed" if code else "succeeded", code)
    assert done.err.splitlines()[-1] == f"launch: run directory {run.path}", done
