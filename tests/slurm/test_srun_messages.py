"""srun's lines on stderr."""

import pytest

from launcher.slurm.srun_messages import (
    drop_prefix,
    has_begun,
    is_cpu_bind_complaint,
    is_in_node_records,
    is_slurm_line,
    is_task_end,
    is_temporary,
    is_verbose,
    parse_node_failure,
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


@pytest.mark.parametrize(
    ("line", "verbose"),
    [
        ("srun: launch/slurm: launch_p_step_launch: CpuBindType=(null type)", True),
        ("srun: defined options", True),
        ("srun: error: n1: task 1: Exited with exit code 3", False),
        ("srun: fatal: no", False),
        ("srun: Warning: can't run 1 processes on 2 nodes", False),
        ("srun: option '--mem' requires an argument", False),
        ("task 1: Completed", False),
        ("slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED AT 2026-01-01T00:00:00 ***", False),
    ],
)
def test_what_srun_says_only_where_it_is_verbose(line: str, verbose: bool) -> None:
    assert is_verbose(line) is verbose


def test_nodes_that_were_lost_and_lines_that_say_nothing() -> None:
    assert parse_node_failure("srun: error: Node failure on n[1-2]") == "n[1-2]"
    assert parse_node_failure("srun: error: n1: task 2: Killed") == ""
    assert is_task_end("srun: error: n1: task 2: Killed") and not is_task_end("n1: task 2: Killed")
    assert is_cpu_bind_complaint("srun: cluster configuration lacks support for cpu binding")
    assert not is_cpu_bind_complaint("srun: error: Node failure on n1")


def test_lines_that_the_nodes_records_make_needless() -> None:
    exited = "srun: error: n[0-1]: tasks 0-1: Exited with exit code 1"
    cancelled = "slurmstepd-n0: error: *** STEP 2.0 ON n0 CANCELLED AT 2026-01-01T00:00:00 ***"
    assert is_in_node_records(exited, ()) and is_in_node_records("srun: error: n1: task 1: Terminated", ())
    assert is_in_node_records(cancelled, (exited,)) and not is_in_node_records(cancelled, ())
    for news in ("n1: task 1: Killed", "n1: task 1: Out Of Memory", "Node failure on n1"):
        assert not is_in_node_records(f"srun: error: {news}", (exited,))
