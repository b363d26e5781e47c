"""What follows a hang under `launch`: a restart of the ranks, or the end of the job."""

import os
import signal
from pathlib import Path

import pytest

from tests.seam import QUICK_AGENT as AGENT
from tests.seam import run_to_end, start, wait_for, write_program

PROGRAM = """
import os, time
import launcher

for _ in range(5):
    time.sleep(0.05)
    launcher.step()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
"""
WORDS = ("nproc_per_node=2", "binding=none", "watch.hang_seconds=2", "watch.interval=1")


@pytest.mark.parametrize("agent", ["direct", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_restart_starts_the_ranks_anew(agent: str, tmp_path: Path) -> None:
    words = (*WORDS, f"agent={agent}", "watch.on_hang=restart")
    job = run_to_end(tmp_path, PROGRAM, *words, PYTHONPATH=AGENT)
    assert "launch: hang 1 after step 5, " in job.read()
    assert "so that all start again" in job.read()
    assert "the ranks were started again: attempt 1" in job.read()
    (hang,) = job.manifest()["hangs"]
    assert hang["action"] == "restart" and hang["step"] == 5
    assert (job.run_dir() / "hang-1/verdict.json").exists()


LEFT = """
import os, time
import launcher

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for _ in range(5):
    time.sleep(0.05)
    launcher.step()
if attempt == "0":
    time.sleep(600) if rank == "0" else os._exit(0)
"""


@pytest.mark.slow
def test_restart_when_the_others_have_left(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, LEFT, *WORDS, "watch.on_hang=restart", PYTHONPATH=AGENT)
    assert "the ranks were started again: attempt 1" in job.read()


@pytest.mark.slow
def test_stop_ends_the_job_with_a_code_of_its_own(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, PROGRAM, *WORDS, "watch.on_hang=stop", code=124, PYTHONPATH=AGENT)
    outcome = job.manifest()["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("failed", "hang", 124)
    assert outcome["reason"] in job.read()


JOIN = """
import os, sys

if os.environ["RANK"] == "1":
    sys.exit(0)
import torch.distributed

torch.distributed.init_process_group("gloo")
"""


def test_a_rank_that_asks_its_own_store_for_the_others_waits(tmp_path: Path) -> None:
    """It does so 100 times a second over TCP, which is no activity."""
    job = run_to_end(tmp_path, JOIN, *WORDS, "watch.on_hang=stop", code=124)
    sentence = "has ended with exit code 0, and 1 rank waits in init_process_group"
    assert f"rank 1 on {os.uname().nodename} {sentence}" in job.read()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_watcher_that_fails_is_no_harm_to_the_job(number: int, tmp_path: Path) -> None:
    program = write_program(tmp_path, "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n")
    with start(tmp_path, *WORDS, "--", program, PYTHONPATH=AGENT) as job:

        def find_watcher() -> list[int]:
            return [pid for pid, words in job.survivors_words().items() if "launcher.watch" in words]

        wait_for(find_watcher, "the watcher", tell=job.read)
        os.kill(find_watcher()[0], number)
        if number == signal.SIGKILL:
            wait_for(lambda: "no longer watched, and run on" in job.read(), "a warning", tell=job.read)
        (tmp_path / "go").touch()
        assert job.wait(60) == 0, job.read()
        assert "outlived" not in job.read() and job.survivors() == []
