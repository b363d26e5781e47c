"""How an attempt's end is judged: signals from outside, ranks that ask for another start, early ends.

There is no SLURM to ask here; tests/slurm/cluster/test_ends.py has the same with one.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.schema import RequeueConfig
from launcher.runs.attempt_progress import AttemptProgress
from launcher.runs.manifest import read_manifest, write_manifest
from launcher.runs.node_records import NodeRecord, read_nodes, write_node
from launcher.runs.run_directory import RunDir, open_run_dir
from launcher.slurm.attempt_end import AttemptEnd, StepReport
from launcher.slurm.attempt_lifecycle import AttemptRefusedError, end_attempt, find_final_decision
from launcher.slurm.diagnosis import complete_diagnosis, diagnose_end
from launcher.slurm.node_step import NodeStep
from tests.slurm.test_attempt_lifecycle import (
    LOST,
    TERM,
    WELL,
    begin,
    end,
    fail,
    make_request,
    print_steps,
    read,
    record,
    submit_run,
)

STOPPED = record("n1", "stopped", 143)
BROKEN = record("n0", "failed", 1, fail(0, 2.0, 1, LOST))
"""A node whose rank has lost its connection to another one."""


def clean(host: str, *ends: tuple[int, float], state: str = "succeeded") -> NodeRecord:
    """The record of a node with four ranks, of which some have ended with 0."""
    return replace(record(host, state, 0 if state == "succeeded" else 143), ranks=4, clean=ends)


def diagnose(path: Path, seen: StepReport, nodes: tuple[int, int] = (2, 2)) -> AttemptEnd:
    submit_run(path)
    return diagnose_end(begin(path, make_request(nodes)), seen)


SIGNALLED_N1 = (("n1", 15),)


@pytest.mark.parametrize(
    ("records", "slurm", "nodes", "cause"),
    [
        # One node's task got SIGTERM, and whatever became of the ranks is a consequence.
        ([BROKEN, STOPPED], (SIGNALLED_N1, False), (2, 2), "stopped"),
        ([record("n0", "failed", 1, fail(0, 1.0, 1)), STOPPED], (SIGNALLED_N1, False), (2, 2), "stopped"),
        ([record("n0", "failed", 75, fail(0, 1.0, 75)), STOPPED], (SIGNALLED_N1, False), (2, 2), "stopped"),
        ([record("n0", "stopped", 143), WELL[1]], (SIGNALLED_N1, False), (2, 2), "stopped"),
        ([record("n0", "stopped", 143), STOPPED], (SIGNALLED_N1, True), (2, 2), "stopped"),
        # By SLURM, to all of them: somebody has cancelled the step.
        ([record("n0", "stopped", 143), STOPPED], ((("n0", 15), ("n1", 15)), True), (2, 2), "cancelled"),
        ([record("n0", "stopped", 143), STOPPED], ((), True), (2, 2), "cancelled"),
        # All ended with 0 all the same.
        ([*WELL], (SIGNALLED_N1, False), (2, 2), None),
        # An elastic job goes on without that node, and is done, or fails by itself.
        ([WELL[0], STOPPED], (SIGNALLED_N1, False), (1, 2), None),
        ([record("n0", "failed", 7, fail(0, 1.0, 7)), STOPPED], (SIGNALLED_N1, False), (1, 2), "crash"),
        ([BROKEN, STOPPED], (SIGNALLED_N1, False), (1, 2), "stopped"),
        # A rank that dies of SIGTERM before the others.
        ([BROKEN, record("n1", "failed", 143, fail(2, 1.0, TERM))],
         ((), False), (2, 2), "stopped"),
        ([WELL[0], record("n1", "failed", 143, fail(2, 1.0, 143))], ((), False), (2, 2), "stopped"),
        ([record("n0", "failed", 7, fail(0, 2.0, 7)), record("n1", "failed", 143, fail(2, 1.0, TERM))],
         ((), False), (2, 2), "crash"),
        # One that asks for another start.
        ([BROKEN, record("n1", "failed", 75, fail(2, 1.0, 75))],
         ((), False), (2, 2), "requested"),
        ([record("n0", "failed", 75, fail(0, 2.0, 75)), record("n1", "failed", 9, fail(2, 1.0, 9))],
         ((), False), (2, 2), "crash"),
    ],
)  # fmt: skip
def test_the_class_of_an_end_by_what_the_nodes_tell(
    tmp_path: Path,
    records: list[NodeRecord],
    slurm: tuple[tuple[tuple[str, int], ...], bool],
    nodes: tuple[int, int],
    cause: str | None,
) -> None:
    """`slurm` is which tasks got a signal, and whether SLURM says that the step was cancelled."""
    signalled, cancelled = slurm
    code = 0 if cause is None and nodes == (2, 2) else 1
    seen = replace(end(*records, code=code), signalled=signalled, cancelled=cancelled)
    assert diagnose(tmp_path, seen, nodes).cause == cause


def test_a_step_that_is_cancelled_outright(tmp_path: Path) -> None:
    """By SIGKILL no task leaves a record, and srun tells how each has ended."""
    srun_lines = tuple(f"srun: error: n{n}: task {n}: Killed" for n in range(2))
    found = diagnose(tmp_path, replace(end(srun_lines=srun_lines, code=137), cancelled=True))
    assert (found.cause, found.killed_tasks, found.lost) == ("cancelled", (), ())


def test_a_signal_from_outside_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path, make_request(stopped=0))
    records = (clean("n1", (2, 5.0), (3, 5.0)), record("n0", "failed", 1, fail(0, 6.0, 1, LOST)))
    assert end_attempt(attempt, replace(end(*records), signalled=SIGNALLED_N1)) == 143
    message = "n1 got SIGTERM from outside: neither launch nor SLURM's queue sent it"
    why = "stopped from outside: not requeued (cluster.requeue.stopped=0)"
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"launch: {message}\nlaunch: attempt 1 ended: {why}\n") and "rank" not in stderr
    outcome = read(tmp_path)["outcome"]
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("failed", "stopped", 143)
    assert outcome["reason"] == f"{message}; {why}" and outcome["first_failure"] is None


def test_a_rank_that_asks_for_another_start_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path, make_request(requested=0))
    assert end_attempt(attempt, end(record("n0", "failed", 75, fail(0, 6.0, 75)), WELL[1])) == 75
    stderr = capsys.readouterr().err
    assert stderr.startswith("launch: rank 0 on n0 ended with 75, and asks for another start\n")
    assert "failed first" not in stderr
    assert "the program asks for another start: not requeued (cluster.requeue.requested=0)" in stderr


def test_the_codes_that_ask_for_another_start_are_the_configurations(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path, make_request(exit_codes=[3]))
    cause = {
        code: diagnose_end(attempt, end(record("n0", "failed", code, fail(0, 1.0, code)), WELL[1])).cause
        for code in (3, 75)
    }
    assert cause == {3: "requested", 75: "crash"}


EARLY = "rank 3 on n1 ended with 0 while 7 ranks went on (rank 0 came to step 4)"


def test_a_rank_that_ended_early_is_the_first_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    print_steps(attempt, "step 4/10 loss 3.0")
    failed = replace(record("n0", "failed", 1, fail(0, 8.0, 1, LOST)), ranks=4)
    assert end_attempt(attempt, end(failed, clean("n1", (3, 7.5), (2, 8.5), state="stopped"))) == 1
    stderr = capsys.readouterr().err.splitlines()
    assert stderr[0] == f"launch: {EARLY}"
    assert stderr[1] == "launch: rank 0 on n0 (local rank 0) failed after that: it exited with code 1"
    outcome = read(tmp_path)["outcome"]
    assert outcome["events"] == [EARLY] and outcome["first_failure"]["rank"] == 0


def test_a_rank_that_ended_long_before_the_others_were_stopped(tmp_path: Path) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    print_steps(attempt, "step 4/10 loss 3.0")
    others = replace(record("n0", "stopped", 143), ranks=4)
    for moment, found in ((5.0, True), (95.0, False)):
        seen = end(others, clean("n1", (3, moment), state="stopped"), signals=(15,))
        early = diagnose_end(attempt, replace(seen, signals=((15, 100.0),))).early
        assert (early is not None and early.describe() == EARLY) is found


def test_all_that_ends_with_0_is_no_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit_run(tmp_path)
    ends = [clean("n0", *((rank, 5.0 + rank) for rank in range(4)))]
    ends.append(clean("n1", *((rank, 5.0 + rank) for rank in range(4, 8))))
    assert end_attempt(begin(tmp_path), end(*ends, code=0)) == 0
    assert "ended with 0" not in capsys.readouterr().err


def test_a_success_after_a_signal_with_steps_left_is_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_run(tmp_path)
    attempt = begin(tmp_path)
    print_steps(attempt, "step 4/10 loss 3.0")
    assert end_attempt(attempt, end(*WELL, code=0, signals=(12,))) == 0
    assert read(tmp_path)["outcome"]["state"] == "succeeded"
    stderr = capsys.readouterr().err
    assert (
        "warning: all ranks ended with 0, which is a success, but after a signal and at step 4 of 10"
        in stderr
    )
    assert "cluster.requeue.exit_codes" in stderr


def test_a_success_whose_run_directory_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit_run(tmp_path / "run")
    attempt = begin(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert end_attempt(attempt, end(*WELL, code=0)) == 0
    stderr = capsys.readouterr().err
    assert f"launch: warning: the run directory was removed during the run ({tmp_path / 'run'})\n" in stderr


def complete(path: Path, kill: str, *, finished: bool, code: int = 0) -> str | None:
    """The cause of an end that SLURM had begun before the step ended."""
    submit_run(path)
    attempt = begin(path)
    print_steps(attempt, "step 10/10 loss 1.0" if finished else "step 4/10 loss 1.0")
    seen = "requeued" if kill == "preempted" else kill
    before = AttemptEnd(None, seen, kill, AttemptProgress((), None))
    records = WELL if code == 0 else (record("n0", "stopped", 143), STOPPED)
    return complete_diagnosis(attempt, before, end(*records, code=code), "").cause


@pytest.mark.parametrize(
    ("kill", "finished", "code", "cause"),
    [
        ("timeout", False, 0, None),
        ("timeout", False, 143, "timeout"),
        ("cancelled", False, 0, "cancelled"),
        ("cancelled", True, 0, None),
        ("requeued", False, 0, "requeued"),
        ("requeued", True, 0, None),
        ("requeued", True, 143, "requeued"),
        ("preempted", False, 0, None),
        ("preempted", True, 143, "preempted"),
    ],
)
def test_an_end_that_was_foreseen_is_looked_at_again(
    tmp_path: Path, kill: str, finished: bool, code: int, cause: str | None
) -> None:
    assert complete(tmp_path, kill, finished=finished, code=code) == cause


def test_what_is_finished_is_not_run_again_where_slurm_has_requeued_it(tmp_path: Path) -> None:
    submit_run(tmp_path)
    begin(tmp_path)
    manifest = read(tmp_path)
    outcome = {"state": "requeued", "cause": None, "exit_code": 0, "step": 10, "advanced": True}
    write_manifest(RunDir(tmp_path), {**manifest, "outcome": outcome})
    with pytest.raises(
        AttemptRefusedError, match="attempt 2 does not begin: attempt 1 ended: all ranks ended"
    ) as caught:
        begin(tmp_path, SLURM_RESTART_COUNT="1")
    assert caught.value.exit_code == 0
    assert read_manifest(tmp_path)["outcome"]["state"] == "succeeded"
    assert find_final_decision([{"outcome": {**outcome, "exit_code": 143}}], RequeueConfig()) is None


def make_step(lines: list[str], *, elastic: bool = False) -> NodeStep:
    """A step of torchrun's whose srun has printed these lines on stderr."""
    text = "".join(f"{line}\n" for line in lines)
    print_lines = f"import sys; sys.stderr.write({text!r})"
    with subprocess.Popen([sys.executable, "-c", print_lines], stderr=subprocess.PIPE) as process:
        step = NodeStep(process, 1, {"PATH": "/nonexistent"}, elastic)
        step.reader.join()
        step.kill_wait_sender.join()
    return step


NOTICE = "launch-task: signalled n1 15"
EXITED = "srun: error: n0: task 0: Exited with exit code 1"
CANCELLED = "slurmstepd-n0: error: *** STEP 7.0 ON n0 CANCELLED AT 2026-01-01T00:00:00 ***"


@pytest.mark.parametrize(
    ("lines", "elastic", "signalled", "cancelled"),
    [
        ([NOTICE, EXITED, CANCELLED], False, 1, False),
        ([EXITED, CANCELLED, NOTICE], False, 0, False),
        ([CANCELLED, NOTICE, EXITED], False, 1, True),
        ([EXITED, NOTICE], True, 1, False),
        ([EXITED], False, 0, False),
        ([f"1: {NOTICE}", EXITED], False, 1, False),  # cluster.srun.label=true
        ([f"a line without its end{NOTICE}", EXITED], False, 1, False),
    ],
)
def test_a_tasks_word_counts_before_slurm_ends_the_others(
    lines: list[str], elastic: bool, signalled: int, cancelled: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    step = make_step(lines, elastic=elastic)
    assert (step.signalled, step.cancelled) == ([("n1", 15)] * signalled, cancelled)
    assert "launch-task" not in capfd.readouterr().err


def test_sruns_word_that_a_signal_ended_it(capfd: pytest.CaptureFixture[str]) -> None:
    """`scancel JOB.STEP` looks the same, but for this line, which people do not see."""
    killed = "srun: error: n0: task 0: Killed"
    step = make_step(["srun: forcing job termination", CANCELLED, killed])
    assert (step.signalled, step.cancelled) == ([("srun", 15)], False)
    assert "forcing" not in capfd.readouterr().err
    step = make_step([CANCELLED, killed])
    assert (step.signalled, step.cancelled) == ([], True)


def test_lost_nodes_are_known() -> None:
    assert make_step(["srun: error: Node failure on n[1,3]"]).lost == {"n1", "n3"}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path, None)
    (run.path / "logs/0").mkdir()
    written = clean("n1", (2, 5.5), (3, 6.25))
    write_node(run.path, 0, written)
    assert read_nodes(run.path, 0) == [written]
    path = run.path / "logs/0/node-n1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "clean": [5]}))
    assert read_nodes(run.path, 0) == [], "a damaged one counts as missing"
