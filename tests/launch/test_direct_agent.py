"""Jobs whose ranks `launch` starts itself: failures, restarts, signals in every phase, and nothing left."""

import signal
from pathlib import Path

import pytest

from tests.seam import Started, run_to_end, start, wait_for, write_program

WORDS = ("agent=direct", "start.warm=off", "nproc_per_node=2", "watch.enabled=false", "logs.console=none")
FLAKY = """
import os, sys, time
print(os.environ["MASTER_PORT"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(300)
"""


def test_all_ranks_start_anew_after_a_failure_and_meet_elsewhere(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, FLAKY, *WORDS, "restarts=1")
    assert "rank 1 failed (code 3); the other ranks are ended" in job.read()
    assert "the ranks were started again: attempt 1" in job.read()
    assert job.log(attempt=0) != job.log(attempt=1)
    assert job.manifest()["outcome"]["attempts"] == 2


def test_without_restarts_left_the_first_failure_ends_the_job(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, FLAKY.replace('== "0"', '!= ""'), *WORDS, "restarts=1", code=3)
    failure = job.manifest()["outcome"]["first_failure"]
    assert (failure["rank"], failure["attempt"]) == (1, 1)


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("no data\\x1b[2J")

main()
"""


@pytest.mark.slow
def test_the_reason_that_record_has_left_is_told(tmp_path: Path) -> None:
    job = run_to_end(tmp_path, RECORDED, *WORDS, "nproc_per_node=1", code=1)
    assert "it exited with code 1: ValueError: no data\\x1b[2J" in job.read()


HELPED = """
import multiprocessing

if __name__ == "__main__":
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        pool.map(abs, [1])
"""


def test_helpers_that_end_with_their_rank_are_no_leftovers(tmp_path: Path) -> None:
    assert "outlived" not in run_to_end(tmp_path, HELPED, *WORDS, "nproc_per_node=1").read()


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
if os.environ["RANK"] == "1":
    while not os.path.exists("go"):
        time.sleep(0.02)
    sys.exit(9)
time.sleep(300)
"""


def enter_stage(job: Started, number: int) -> None:
    """Send `launch` a signal, and wait until it has told of the next stage of the end."""
    stages = job.read().count(" to the ranks")
    job.process.send_signal(number)
    wait_for(lambda: job.read().count(" to the ranks") > stages, "a stage", tell=job.read)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_restart_ends_the_job(number: int, tmp_path: Path) -> None:
    """Rank 0 keeps the restart waiting, since it does not end by SIGTERM."""
    words = ("restarts=5", "torchrun.shutdown_timeout=20", "--", write_program(tmp_path, STUBBORN))
    with start(tmp_path, *WORDS, *words) as job:
        wait_for(lambda: job.count_said("ready") == 2, "both ranks")
        (tmp_path / "go").touch()
        wait_for(lambda: "rank 1 failed (code 9)" in job.read(), "the failure", tell=job.read)
        while "SIGKILL to the ranks" not in job.read():
            enter_stage(job, number)
        assert job.wait() == 9, job.read()  # a stop after a failure does not hide it
        assert job.survivors() == []
        assert not (job.run_dir() / "logs/1").exists()


def test_a_rank_has_no_descriptor_of_the_launchers(tmp_path: Path) -> None:
    text = "import os\nprint(sorted(os.listdir('/proc/self/fd'))[:-1])"
    assert run_to_end(tmp_path, text, *WORDS, "nproc_per_node=1").log() == "['0', '1', '2']\n"


@pytest.mark.parametrize("agent", ["direct", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_arguments_arrive_as_typed(tmp_path: Path, agent: str) -> None:
    program = write_program(tmp_path, "import sys\nprint(sys.argv[1:])")
    words = ["${local_rank}", "$HOME", "a$$b", "x=${run_dir}", '{"a": {num_workers}}']
    with start(tmp_path, f"agent={agent}", "nproc_per_node=1", "--", program, *words) as job:
        assert job.wait() == 0
        assert job.log() == f"{words}\n"
