"""The end of an attempt in words, from values."""

import signal
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.attempt_progress import AttemptProgress
from launcher.runs.node_records import NodeRecord, RankFailure
from launcher.runs.progress import Progress
from launcher.runs.run_directory import RunDir
from launcher.slurm.attempt_end import AttemptEnd, StepReport
from launcher.slurm.end_messages import (
    describe_decision,
    describe_outcome,
    join_hosts,
    list_end_lines,
    list_failure_lines,
    list_reasons,
    name_state,
)
from launcher.slurm.requeue_policy import Decision

RUN = RunDir(Path("/runs/x"), 4)
STEPS = (Progress(1, 9, (("loss", "3.0"),)), Progress(7, 9, (("loss", "2.0"),)))
BOOM = RankFailure(5, 1, 2.0, -9, "was killed by SIGKILL (signal 9)", "rank-5.err", ("Traceback", "boom"))


def make_record(
    host: str, failure: RankFailure | None = None, srun_lines: str = "", restarts: int = 0
) -> NodeRecord:
    return NodeRecord(host, 0, "failed", 1, None, srun_lines, failure, restarts, 0.0, 1.0)


def make_step(
    *records: NodeRecord, missing: tuple[str, ...] = (), signals: tuple[int, ...] = ()
) -> StepReport:
    return StepReport(6, records, missing, tuple((number, 1.0) for number in signals), False)


def make_end(cause: str | None, step: StepReport | None = None, kill: str = "", **values: Any) -> AttemptEnd:
    known: dict[str, Any] = {"advance": AttemptProgress(STEPS, 8.0), **values}
    return AttemptEnd(step, kill, cause, **known)


@pytest.mark.parametrize(
    ("cause", "kill", "decision", "state"),
    [
        (None, "", Decision(False, None, ""), "succeeded"),
        ("crash", "", Decision(True, "crash", ""), "requeued"),
        ("crash", "", Decision(False, "crash", ""), "failed"),
        ("node_failure", "", Decision(False, "node_failure", ""), "failed"),
        ("preempted", "requeued", Decision(False, "preempted", ""), "requeued"),
        ("preempted", "requeued", Decision(False, "limit", ""), "requeued"),
        ("preempted", "preempted", Decision(False, "preempted", ""), "stopped"),
        ("timeout", "timeout", Decision(False, "timeout", ""), "stopped"),
        ("cancelled", "cancelled", Decision(False, "cancelled", ""), "stopped"),
        ("timeout", "timeout", Decision(False, "no_progress", ""), "failed"),
        ("timeout", "timeout", Decision(False, "limit", ""), "failed"),
    ],
)
def test_the_state(cause: str | None, kill: str, decision: Decision, state: str) -> None:
    assert name_state(make_end(cause, make_step(), kill), decision) == state
    why = describe_outcome(make_end(cause, make_step(), kill), decision, RUN)["cause"]
    assert why == (cause if state == "requeued" else decision.cause)


def test_the_outcome_of_a_crash() -> None:
    step = make_step(make_record("n1", BOOM, restarts=2), make_record("n0"), signals=(signal.SIGUSR2,))
    outcome = describe_outcome(make_end("crash", step), Decision(False, "crash", "not again"), RUN)
    first = {"rank": 5, "local_rank": 1, "host": "n1", "attempt": 6, "exit_code": 137}
    assert outcome.pop("first_failure") == {
        **first,
        "reason": BOOM.reason,
        "last_lines": ["Traceback", "boom"],
    }
    assert outcome == {
        **{"state": "failed", "cause": "crash", "exit_code": 137, "signal": None, "reason": "not again"},
        **{"events": [], "lost": [], "attempts": 7, "step": 7, "checkpoint": 8.0},
    }


def test_the_outcome_of_a_stop() -> None:
    step = make_step(make_record("n0"), signals=(signal.SIGUSR1, signal.SIGINT, signal.SIGTERM))
    outcome = describe_outcome(make_end("cancelled", step), Decision(False, "cancelled", "so"), RUN)
    assert (outcome["signal"], outcome["attempts"], outcome["reason"]) == ("SIGINT", 5, "so")
    assert describe_outcome(make_end(None, step), Decision(False, None, "well"), RUN)["reason"] is None


def test_the_outcome_that_is_written_before_the_end() -> None:
    decision = Decision(True, "node_failure", "again")
    end = make_end("node_failure", None, "requeued", lost=("n1",), node_states=(("n1", "down*"),))
    outcome = describe_outcome(end, decision, RUN)
    assert (outcome["signal"], outcome["attempts"], outcome["lost"]) == ("SIGTERM", None, ["n1"])
    assert outcome["reason"] == "n1 was lost: it left no record, and is down*, says SLURM; again"
    assert outcome["first_failure"] is None


@pytest.mark.parametrize(
    ("kill", "requeue", "expected"),
    [
        ("requeued", False, "no; SLURM requeues it, and the next attempt ends at once"),
        ("requeued", True, "no"),
        ("preempted", False, "no"),
    ],
)
def test_what_comes_next(kill: str, requeue: bool, expected: str) -> None:
    assert (
        describe_decision(make_end("preempted", None, kill), Decision(requeue, "preempted", "no")) == expected
    )


FIRST = [
    "rank 5 on n1 (local rank 1) failed first: it was killed by SIGKILL (signal 9)",
    "the end of rank-5.err:",
    "  | Traceback",
    "  | boom",
]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (make_end("crash", make_step(make_record("n1", BOOM))), FIRST),
        (make_end("cancelled", make_step(make_record("n1", srun_lines="gone"))), []),
        (make_end(None, make_step(make_record("n1", srun_lines="gone"))), []),
        (make_end("crash"), []),
        (
            make_end(
                "node_failure",
                make_step(make_record("n1", BOOM)),
                lost=("n0", "n2"),
                node_states=(("n0", "d"),),
            ),
            ["n0 was lost: it left no record, and is d, says SLURM", "n2 was lost: it left no record"],
        ),
        (
            make_end(
                "crash",
                make_step(make_record("n1", BOOM)),
                killed_tasks=(("n3", "Killed"), ("n4", "Aborted")),
            ),
            [
                "n3 is there, but its task left no record, and ended: Killed, probably out of memory",
                "n4 is there, but its task left no record, and ended: Aborted",
            ],
        ),
        (
            make_end("node_failure", make_step(), lost=("n3",), killed_tasks=(("n3", "Killed"),)),
            ["n3 was lost: it left no record"],
        ),
        (
            make_end(
                "crash",
                make_step(*(make_record(f"n{n}", srun_lines="bad") for n in (1, 2)), missing=("n3", "n4")),
            ),
            ["n1, n2: bad", "no record came from n3, n4: is the disk full?"],
        ),
        (make_end("crash", make_step(make_record("n1"))), ["no rank failed, but srun ended with 6"]),
    ],
)
def test_what_was_in_the_way(end: AttemptEnd, expected: list[str]) -> None:
    assert list_failure_lines(end) == expected
    assert list_reasons(end) == ([] if expected == FIRST else expected)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, ["n0: 0", "n1: 1", "n2: 2"]),
        (4, ["n0: 0", "n1: 1", "n2: 2 (and 1 more)"]),
        (9, ["n0: 0", "n1: 1", "n2: 2 (and 6 more)"]),
    ],
)
def test_of_many_nodes_the_first_are_told(count: int, expected: list[str]) -> None:
    step = make_step(*(make_record(f"n{n}", srun_lines=str(n)) for n in range(count)))
    assert list_reasons(make_end("crash", step)) == expected
    assert len(list_failure_lines(make_end("crash", step))) == count


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, "n0"), (3, "n0, n1, n2"), (4, "n0, n1, n2 and 1 more"), (5, "n0, n1, n2 and 2 more")],
)
def test_a_list_of_nodes(count: int, expected: str) -> None:
    assert join_hosts([f"n{n}" for n in range(count)]) == expected


def test_the_last_lines() -> None:
    end, decision = make_end(None, make_step()), Decision(False, None, "succeeded")
    progress = "loss 3.0 to 2.0 over 7 steps"
    assert list_end_lines(end, decision, RUN, 61) == [
        f"succeeded after 1 min 1 s: {progress}",
        "run directory /runs/x",
    ]
    silent = make_end("crash", make_step(), advance=AttemptProgress((), None))
    assert list_end_lines(silent, Decision(True, "crash", ""), RUN, 2)[0] == "requeued after 2.0 s"
