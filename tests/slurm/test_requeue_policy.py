"""The policy: why an attempt ended, whether the job is requeued, and when ranks are stopped, as tables."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.settings import RequeueConfig
from launcher.slurm.attempt_end import EndFacts, classify_end, classify_kill
from launcher.slurm.job_control import JobStatus
from launcher.slurm.requeue_policy import (
    DESCRIPTIONS,
    LIMITED,
    PastAttempt,
    choose_stop_time,
    decide_requeue,
    is_near_limit,
)

RUNNING = JobStatus("RUNNING", "", 0, 1000.0, preempted=False)
ENDING = replace(RUNNING, state="COMPLETING")
PLAIN = EndFacts(
    succeeded=False, finished=None, failed=False, lost=False, stop_requested=False, near_limit=False
)
POLICY = RequeueConfig(
    preempted=100, timeout=100, node_failure=10, stopped=10, requested=100, crash=0, no_progress=3, limit=200
)


@pytest.mark.parametrize(
    ("word", "restarts", "kill"),
    [
        (None, 0, ""),
        (RUNNING, 0, ""),
        (replace(RUNNING, restarts=3), 3, ""),
        (replace(RUNNING, state="SUSPENDED"), 0, ""),
        (ENDING, 0, "cancelled"),
        (replace(ENDING, state="CANCELLED"), 0, "cancelled"),
        (replace(ENDING, reason="DeadLine"), 0, "cancelled"),
        (replace(ENDING, restarts=1), 0, "requeued"),
        (replace(ENDING, restarts=4), 3, "requeued"),
        (replace(ENDING, restarts=3), 3, "cancelled"),
        # Of a requeue that came after the time limit nothing is left to do.
        (replace(ENDING, reason="TimeLimit", restarts=1), 0, "requeued"),
        (replace(ENDING, reason="TimeLimit"), 0, "timeout"),
        (replace(ENDING, state="TIMEOUT"), 0, "timeout"),
        # Within GraceTime the job runs on, and its steps have SIGTERM.
        (replace(RUNNING, preempted=True), 0, "preempted"),
        (replace(ENDING, preempted=True), 0, "preempted"),
    ],
)
def test_what_slurm_does_to_the_job(word: JobStatus | None, restarts: int, kill: str) -> None:
    assert classify_kill(word, restarts) == kill


@pytest.mark.parametrize(
    ("changes", "kill", "cause"),
    [
        ({"succeeded": True}, "", None),
        ({"succeeded": True, "finished": False}, "", None),
        ({"succeeded": True, "stop_requested": True}, "", None),
        # All ranks ended with 0: a success, whatever else there is.
        ({"succeeded": True, "near_limit": True}, "", None),
        ({"succeeded": True, "near_limit": True, "finished": False}, "", None),
        ({"succeeded": True, "near_limit": True, "finished": True}, "", None),
        ({"succeeded": True, "stopped_from_outside": True, "restart_requested": True}, "", None),
        ({"succeeded": True, "finished": True}, "timeout", None),
        ({"succeeded": True, "finished": False}, "timeout", None),
        ({"succeeded": True, "finished": False}, "preempted", None),
        # But a user who cancels a job in the middle has not let it finish.
        ({"succeeded": True, "finished": True}, "cancelled", None),
        ({"succeeded": True}, "cancelled", "cancelled"),
        ({"succeeded": True, "stop_requested": True, "cancelled_by_user": True}, "", "cancelled"),
        ({"succeeded": True, "stop_requested": True, "cancelled_by_user": True, "finished": True}, "", None),
        ({"succeeded": True, "stop_requested": True, "cancelled_by_user": True}, "timeout", None),
        ({"succeeded": True, "finished": False}, "cancelled", "cancelled"),
        # SLURM starts it again in any case; what has ended with 0 is not run again, if nobody asked for that.
        ({"succeeded": True, "finished": True}, "requeued", None),
        ({"succeeded": True}, "requeued", "requeued"),
        ({"succeeded": True, "preempted": True}, "requeued", None),
        ({"succeeded": True, "preempted": True, "finished": False}, "requeued", None),
        ({"succeeded": True, "preempted": True, "lost": True}, "requeued", "node_failure"),
        ({}, "requeued", "requeued"),
        ({"preempted": True}, "requeued", "preempted"),
        ({"lost": True}, "requeued", "node_failure"),
        ({"failed": True}, "requeued", "requeued"),
        ({}, "preempted", "preempted"),
        ({"failed": True, "lost": True}, "timeout", "timeout"),
        ({"failed": True}, "cancelled", "cancelled"),
        ({}, "", "crash"),
        ({"failed": True}, "", "crash"),
        ({"failed": True, "lost": True}, "", "node_failure"),
        ({"failed": True, "stop_requested": True}, "", "crash"),
        ({"failed": True, "near_limit": True}, "", "crash"),
        ({"near_limit": True}, "", "timeout"),
        ({"near_limit": True, "stop_requested": True}, "", "timeout"),
        ({"stop_requested": True}, "", "cancelled"),
        ({"cancelled_by_user": True}, "", "cancelled"),
        ({"lost": True, "stop_requested": True}, "", "node_failure"),
        ({"stopped_from_outside": True}, "", "stopped"),
        ({"stopped_from_outside": True, "failed": True, "restart_requested": True}, "", "stopped"),
        ({"stopped_from_outside": True, "lost": True}, "", "node_failure"),
        ({"stopped_from_outside": True}, "timeout", "timeout"),
        ({"restart_requested": True, "failed": True}, "", "requested"),
        ({"restart_requested": True, "failed": True, "near_limit": True}, "", "timeout"),
        ({"restart_requested": True, "failed": True, "lost": True}, "", "node_failure"),
        ({"restart_requested": True, "failed": True}, "cancelled", "cancelled"),
    ],
)
def test_the_class_of_an_end(changes: dict[str, bool], kill: str, cause: str | None) -> None:
    assert classify_end(replace(PLAIN, **changes), kill) == cause


ON, OFF = True, False
IDLE = PastAttempt("timeout", OFF)
"""An attempt that came to its time limit and made no progress."""


@pytest.mark.parametrize(
    ("cause", "past", "advanced", "requeue", "expected"),
    [
        (None, [], ON, False, (None, "succeeded")),
        ("cancelled", [], ON, False, ("cancelled", "cancelled")),
        ("timeout", [], ON, True, ("timeout", "time limit: requeued (attempt 2 of at most 200)")),
        ("preempted", [], None, True, ("preempted", "preempted: requeued (attempt 2 of at most 200)")),
        ("crash", [], ON, False, ("crash", "the program failed: not requeued (cluster.requeue.crash=0)")),
        (
            "node_failure",
            [PastAttempt("node_failure", ON)] * 10,
            ON,
            False,
            ("node_failure", "node failure: not requeued after 10 of them (cluster.requeue.node_failure=10)"),
        ),
        (
            "node_failure",
            [PastAttempt("node_failure", ON)] * 9 + [PastAttempt("timeout", ON)] * 9,
            ON,
            True,
            ("node_failure", "node failure: requeued (attempt 20 of at most 200)"),
        ),
        ("timeout", [IDLE], OFF, True, ("timeout", None)),
        ("stopped", [], ON, True, ("stopped", "stopped from outside: requeued (attempt 2 of at most 200)")),
        (
            "stopped",
            [PastAttempt("stopped", ON)] * 10,
            ON,
            False,
            ("stopped", "stopped from outside: not requeued after 10 of them (cluster.requeue.stopped=10)"),
        ),
        (
            "requested",
            [],
            ON,
            True,
            ("requested", "the program asks for another start: requeued (attempt 2 of at most 200)"),
        ),
        ("requested", [PastAttempt("requested", OFF)] * 2, OFF, False, ("no_progress", None)),
        ("requeued", [], OFF, True, ("requeued", "requeued from outside (attempt 2 of at most 200)")),
        ("requeued", [PastAttempt("requeued", OFF)] * 150, OFF, True, ("requeued", None)),
        (
            "requeued",
            [PastAttempt("requeued", ON)] * 199,
            ON,
            False,
            ("limit", "requeued from outside: not requeued (cluster.requeue.limit=200)"),
        ),
        ("timeout", [IDLE, PastAttempt("requeued", OFF), IDLE], OFF, False, ("no_progress", None)),
        (
            "timeout",
            [IDLE] * 2,
            OFF,
            False,
            ("no_progress", "no progress in 3 attempts in a row (cluster.requeue.no_progress=3)"),
        ),
        ("timeout", [IDLE, PastAttempt("timeout", ON), IDLE], OFF, True, ("timeout", None)),
        ("timeout", [PastAttempt("timeout", None)] * 50, None, True, ("timeout", None)),
        ("timeout", [IDLE, PastAttempt("node_failure", OFF)], OFF, False, ("no_progress", None)),
        ("preempted", [PastAttempt("preempted", OFF)] * 9, OFF, True, ("preempted", None)),
        ("timeout", [IDLE, *[PastAttempt("preempted", OFF)] * 9, IDLE], OFF, False, ("no_progress", None)),
        ("timeout", [IDLE, PastAttempt("preempted", ON), IDLE], OFF, True, ("timeout", None)),
        (
            "preempted",
            [PastAttempt("timeout", ON)] * 99 + [PastAttempt("preempted", ON)] * 100,
            ON,
            False,
            ("preempted", "preempted: not requeued after 100 of them (cluster.requeue.preempted=100)"),
        ),
        (
            "preempted",
            [PastAttempt("timeout", ON)] * 100 + [PastAttempt("preempted", ON)] * 99,
            ON,
            False,
            ("limit", "preempted: not requeued (cluster.requeue.limit=200)"),
        ),
    ],
)
def test_what_becomes_of_the_job(
    cause: str | None,
    past: list[PastAttempt],
    advanced: bool | None,
    requeue: bool,
    expected: tuple[str | None, str | None],
) -> None:
    decision = decide_requeue(cause, POLICY, past, advanced)
    assert (decision.requeue, decision.cause) == (requeue, expected[0])
    assert expected[1] in (None, decision.reason)


def test_progress_is_not_looked_at_where_that_is_said() -> None:
    policy = replace(POLICY, no_progress=0)
    assert decide_requeue("timeout", policy, [PastAttempt("timeout", False)] * 50, False).requeue


@given(
    st.lists(
        st.builds(PastAttempt, st.sampled_from(sorted(DESCRIPTIONS)), st.sampled_from([True, False, None])),
        max_size=12,
    ),
    st.builds(
        RequeueConfig,
        no_progress=st.integers(-1, 4),
        limit=st.integers(-1, 10),
        **{name: st.integers(-1, 5) for name in LIMITED},
    ),
)
def test_no_policy_requeues_for_ever(ends: list[PastAttempt], policy: RequeueConfig) -> None:
    """However attempts end, what is requeued stays within the limit and within each reason's own."""
    past: list[PastAttempt] = []
    for end in ends:
        if not decide_requeue(end.cause, policy, past, end.advanced).requeue:
            break
        past.append(end)
    assert len(past) <= max(policy.limit - 1, 0)
    for reason in LIMITED:
        assert sum(attempt.cause == reason for attempt in past) <= max(getattr(policy, reason), 0)


@pytest.mark.parametrize(
    ("now", "end_time", "near"),
    [
        (880.0, 1000.0, True),  # 120 s before
        (820.0, 1000.0, True),  # a minute early, as SLURM may be
        (700.0, 1000.0, False),  # a user's own
        (1100.0, 1000.0, True),
        (0.0, None, True),  # SLURM does not tell
        (0.0, math.inf, False),  # there is no limit: a user's own
    ],
)
def test_whose_checkpoint_signal_it_is(now: float, end_time: float | None, near: bool) -> None:
    assert is_near_limit(now, end_time, 120) is near


@pytest.mark.parametrize(
    ("now", "end_time", "seconds", "grace", "stop"),
    [
        (880.0, 1000.0, 120, 30, 955.0),  # 30 s for SIGTERM, 15 s for the batch script
        (830.0, 1000.0, 120, 30, 955.0),  # SLURM was early: more time for the checkpoint
        (970.0, 1000.0, 30, 30, 985.0),  # too short for all: half of it for the checkpoint
        (880.0, None, 120, 30, 955.0),
        (100.0, 1000.0, 120, 30, None),  # a user's own
        (1010.0, 1000.0, 120, 30, 1010.0),  # past the limit: at once
        (100.0, math.inf, 120, 30, None),
    ],
)
def test_when_the_ranks_are_stopped(
    now: float, end_time: float | None, seconds: float, grace: float, stop: float | None
) -> None:
    assert choose_stop_time(now, end_time, seconds, grace) == stop
