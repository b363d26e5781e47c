"""Nodes' records, made from what srun tells of the ranks that it has started."""

import os
import signal
import time
from pathlib import Path

from launcher.rank import srun_task
from launcher.runs.node_records import NodeRecord, read_nodes
from launcher.runs.run_directory import RunDir, open_run_dir
from launcher.slurm.rendezvous import PORT_TAKEN
from launcher.slurm.srun_messages import SrunReport
from launcher.slurm.srun_records import RankStepEnd, record_nodes

CPU_BIND_COMPLAINT = "srun: cluster configuration lacks support for cpu binding"
REFUSED = "srun: error: Unable to create step for job 7: Requested node configuration is not available"


def make_run(tmp_path: Path, silent: dict[int, float]) -> RunDir:
    """A run whose ranks last wrote to their logs at these times."""
    run = open_run_dir(tmp_path, 0)
    for rank, moment in silent.items():
        for ending in ("out", "err"):
            log = run.rank_log(rank, 0, ending)
            log.parent.mkdir(exist_ok=True)
            log.write_text(f"{ending} of {rank}\n")
            os.utime(log, (moment, moment - (ending == "out")))
    return run


def record(
    run: RunDir, lines: list[str], code: int, stop: tuple[int, float] | None = None
) -> list[NodeRecord]:
    told = SrunReport()
    for line in lines:
        told.note_line(line)
    records = record_nodes(RankStepEnd(run, ("a", "b"), 2, 5, code, told, stop, 1.0))
    assert read_nodes(run.path, 0) == records
    return records


def list_states(records: list[NodeRecord]) -> list[tuple[str, str, int, str | None]]:
    return [(one.host, one.state, one.exit_code, one.signal) for one in records]


def test_a_step_that_went_well(tmp_path: Path) -> None:
    run = make_run(tmp_path, {})
    (run.path / "logs/0").mkdir()
    assert list_states(record(run, [CPU_BIND_COMPLAINT], 0)) == [
        ("a", "succeeded", 0, None),
        ("b", "succeeded", 0, None),
    ]


def test_the_first_line_tells_of_the_first_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path, dict.fromkeys(range(4), 50.0))
    lines = ["srun: error: b: task 3: Killed", "srun: error: a: tasks 0-1: Exited with exit code 1"]
    first, second = record(run, [*lines, "srun: error: b: task 2: Terminated"], 143)
    assert (second.state, second.exit_code) == ("failed", 137)
    assert first.failure and second.failure
    assert second.failure.time < first.failure.time
    assert (second.failure.rank, second.failure.local_rank, second.failure.exitcode) == (3, 1, -9)
    assert second.failure.lines == ("err of 3",)
    assert second.failure.log == str(run.rank_log(3, 0, "err"))


def test_of_several_in_one_line_the_one_that_fell_silent_first(tmp_path: Path) -> None:
    run = make_run(tmp_path, {0: 60.0, 1: 58.0, 2: 57.0, 3: 59.0})
    first, second = record(run, ["srun: error: a,b: tasks 0-3: Exited with exit code 1"], 1)
    assert first.failure and second.failure
    assert (first.failure.rank, second.failure.rank) == (1, 2)
    assert second.failure.time < first.failure.time


def test_ranks_that_others_have_pulled_down_are_no_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path, dict.fromkeys(range(4), 50.0))
    records = record(run, ["srun: error: b: task 2: Exited with exit code 3"], 143)
    assert list_states(records) == [("a", "stopped", 143, "SIGTERM"), ("b", "failed", 3, None)]
    assert records[0].failure is None


def test_out_of_memory_is_said_in_slurms_words(tmp_path: Path) -> None:
    run = make_run(tmp_path, {1: 50.0})
    (failed, _) = record(run, ["srun: error: a: task 1: Out Of Memory"], 125)
    assert failed.failure
    assert (failed.exit_code, failed.failure.exitcode) == (137, -9)
    assert "Out Of Memory" in failed.failure.reason
    assert "cluster.mem" in failed.failure.reason


def test_a_lost_node_has_no_record(tmp_path: Path) -> None:
    run = make_run(tmp_path, {0: 50.0})
    lines = ["srun: error: Node failure on b", "srun: error: a: tasks 0-1: Terminated"]
    assert list_states(record(run, lines, 143)) == [("a", "stopped", 143, "SIGTERM")]


def test_a_step_that_was_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path, {0: 50.0})
    interrupted = ["srun: error: a: tasks 0-1: Interrupt", "srun: error: b: task 2: Exited with exit code 1"]
    records = record(run, interrupted, 130, (signal.SIGINT, time.time() - 1))
    assert list_states(records) == [("a", "stopped", 130, "SIGINT"), ("b", "stopped", 130, "SIGINT")]
    records = record(run, interrupted, 130, (signal.SIGINT, time.time() + 60))
    assert [one.state for one in records] == ["failed", "failed"]
    cancelled = "slurmstepd: error: *** JOB 7 ON a CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
    assert {one.state for one in record(run, [cancelled], 143)} == {"stopped"}


def test_a_step_that_never_began(tmp_path: Path) -> None:
    run = make_run(tmp_path, {0: 50.0})
    records = record(run, [REFUSED], 1)
    assert [(one.state, one.exit_code) for one in records] == [("failed", 3), ("failed", 3)]
    assert REFUSED in records[0].agent_said


def test_an_option_that_srun_does_not_know_is_named(tmp_path: Path) -> None:
    lines = ["srun: unrecognized option '--foo=1'", 'Try "srun --help" for more information']
    first = record(make_run(tmp_path, {0: 1.0}), lines, 255)[0]
    assert "unrecognized option '--foo=1'" in first.agent_said and "Try" not in first.agent_said


def test_a_port_that_is_taken_is_no_failure_of_a_rank(tmp_path: Path) -> None:
    assert srun_task.PORT_TAKEN == PORT_TAKEN
    lines = [f"srun: error: a: task 0: Exited with exit code {PORT_TAKEN}"]
    run = open_run_dir(tmp_path, 0)
    (run.path / "logs/0").mkdir()
    first, second = record(run, lines, 143)
    assert (first.exit_code, first.failure, second.state) == (PORT_TAKEN, None, "stopped")
    run = make_run(tmp_path, {0: 50.0})  # here it has begun: the code is the program's own
    assert record(run, lines, 143)[0].failure


def test_lines_for_people() -> None:
    report = SrunReport()
    lines = {
        CPU_BIND_COMPLAINT: False,
        REFUSED: True,
        "srun: error: a: task 0: Killed": False,
        "slurmstepd-b: error: *** STEP 7.0 ON b CANCELLED AT 2026-01-01T00:00:00 ***": False,
        "python3: can't open file": True,
    }
    assert {line: report.note_line(line) for line in lines} == lines
    assert list(report.lines) == [line for line in lines if line != CPU_BIND_COMPLAINT]
