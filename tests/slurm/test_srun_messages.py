"""srun's lines on stderr; tests/slurm/test_rank_step.py has those on the ends of tasks."""

import pytest

from launcher.slurm.srun_messages import (
    drop_prefix,
    has_begun,
    is_slurm_line,
    is_temporary,
    is_verbose,
    parse_completed,
    parse_task_ends,
)

BUSY = "srun: error: Unable to create step for job 7: Requested nodes are busy"


@pytest.mark.parametrize(
    ("line", "own", "begun"),
    [
        ("srun: error: n1: task 1: Killed", True, True),
        ("srun: error: n[0-1]: tasks 0-1: Exited with exit code 3", True, True),
        ("srun: error: Node failure on n1", True, True),
        ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.", True, True),
        ("slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED AT 2026-01-01T00:00:00 ***", True, True),
        (BUSY, True, False),
        ("srun: error: Memory required by task is not available", True, False),
        ("srun: unrecognized option '--bogus'", True, False),
        ("error: what a rank prints of its tasks 1 and 2", False, True),
    ],
)
def test_lines_of_srun_and_of_a_step_that_has_begun(line: str, own: bool, begun: bool) -> None:
    assert (is_slurm_line(line), has_begun(["srun: something else", line])) == (own, begun)


@pytest.mark.parametrize(
    ("line", "verbose", "tasks"),
    [
        ("srun: launch/slurm: _task_finish: n1: task 1: Completed", True, (1,)),
        ("srun: n[0-1]: tasks 0,2-3: Completed", True, (0, 2, 3)),
        ("srun: launch/slurm: launch_p_step_launch: CpuBindType=(null type)", True, ()),
        ("srun: defined options", True, ()),
        ("srun: error: n1: task 1: Exited with exit code 3", False, ()),
        ("srun: fatal: no", False, ()),
        ("srun: Warning: can't run 1 processes on 2 nodes", False, ()),
        ("srun: unrecognized option '--bogus'", False, ()),
        ("srun: option '--mem' requires an argument", False, ()),
        ("task 1: Completed", False, ()),
        ("slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED AT 2026-01-01T00:00:00 ***", False, ()),
    ],
)
def test_what_srun_says_only_where_it_is_verbose(line: str, verbose: bool, tasks: tuple[int, ...]) -> None:
    assert (is_verbose(line), parse_completed(line)) == (verbose, tasks)


@pytest.mark.parametrize(
    ("said", "passing"),
    [
        (BUSY, True),
        ("Unable to contact slurm controller (connect failure)", True),
        ("Unable to create step for job 7: Socket timed out on send/recv operation", True),
        ("Unable to confirm allocation for job 7: Zero Bytes were transmitted or received", True),
        ("Unable to create step for job 7: Resource temporarily unavailable", True),
        ("Memory required by task is not available", False),
        ("it printed nothing", False),
    ],
)
def test_refusals_that_pass(said: str, passing: bool) -> None:
    assert is_temporary(said) is passing


def test_the_words_on_the_ends_of_tasks() -> None:
    lines = [
        "srun: error: n[0-1]: tasks 0-1: Terminated",
        "srun: error: n1: task 1: Killed ",
        "srun: error: Node failure on n2",
        "a line of a rank",
    ]
    assert parse_task_ends(lines) == {"n0": "Terminated", "n1": "Killed"}


def test_what_a_line_says() -> None:
    assert (
        drop_prefix(BUSY).startswith("Unable to create") and drop_prefix("srun: x: error: y") == "x: error: y"
    )
