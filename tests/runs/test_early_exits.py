"""Ranks that ended with 0 while others went on, in words and by what their logs tell."""

from pathlib import Path

import pytest

from launcher.runs.progress import CleanEnd, EarlyEnd, find_early_exits
from launcher.runs.run_directory import RunDir, open_run_dir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return open_run_dir(tmp_path, None)


def print_step(run: RunDir, rank: int, text: str) -> None:
    log = run.rank_log(rank, 0, "out")
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"noise\n{text}\nrank {rank} leaves\n")


def end(rank: int, time: float, host: str = "n1") -> CleanEnd:
    return CleanEnd(rank, host, time, 0)


def describe(run: RunDir, ends: list[CleanEnd], before: float = 10.0, world: int = 8) -> str:
    found = find_early_exits(run, ends, before, world)
    return found.describe() if found else ""


def test_one_rank(run: RunDir) -> None:
    print_step(run, 3, "step 40/100 loss 2.5")
    assert describe(run, [end(3, 9.0)]) == "rank 3 on n1 ended with 0 at step 40 while 7 ranks went on"
    assert (
        describe(run, [end(3, 9.0)], world=2) == "rank 3 on n1 ended with 0 at step 40 while 1 rank went on"
    )
    assert (
        describe(run, [end(3, 9.0)], world=0) == "rank 3 on n1 ended with 0 at step 40 while others went on"
    )


def test_a_rank_that_prints_no_steps(run: RunDir) -> None:
    print_step(run, 0, "step 41/100 loss 2.5")
    told = "rank 3 on n1 ended with 0 while 7 ranks went on (rank 0 came to step 41)"
    assert describe(run, [end(3, 9.0)]) == told


def test_several(run: RunDir) -> None:
    ends = [end(rank, 9.0 - rank / 10, f"n{rank // 2}") for rank in range(6)]
    told = "ranks 0, 1, 2, 3 and 2 more on n0, n1, n2 ended with 0 while 2 ranks went on"
    assert describe(run, ends) == told


def test_what_ends_well_is_no_event(run: RunDir) -> None:
    assert describe(run, []) == ""
    assert describe(run, [end(3, 10.5)]) == "", "it came after the failure"
    assert describe(run, [end(rank, 9.0) for rank in range(8)]) == "", "all did"
    print_step(run, 3, "step 100/100 loss 2.5")
    assert describe(run, [end(3, 9.0)]) == "", "its steps were done"


def test_the_value(run: RunDir) -> None:
    print_step(run, 3, "step 40/100 loss 2.5")
    assert find_early_exits(run, [end(3, 9.0)], 10.0, 8) == EarlyEnd((3,), ("n1",), 7, 40, None)
