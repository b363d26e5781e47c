"""What is decided of attempts and of checked nodes, each decision through its function: `decisions.json`.

Times are in seconds; `infinite` is a job without a time limit, null one that SLURM does not tell.
"""

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launcher.config.settings import RequeueConfig
from launcher.runs.manifest import Outcome
from launcher.slurm.attempt import (
    choose_stop_time,
    classify_end,
    classify_kill,
    decide_requeue,
)
from launcher.slurm.commands import JobState
from launcher.slurm.first_node import choose_hosts

TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("decisions.json").read_text())
POLICY = RequeueConfig(
    preempted=100, timeout=100, node_failure=10, sick_node=3, stopped=10, requested=100, crash=0,
    no_progress=3, limit=200,
)  # fmt: skip
LIMITED = ("preempted", "timeout", "node_failure", "sick_node", "stopped", "requested", "hang", "crash")
ENDS = st.builds(
    Outcome,
    cause=st.sampled_from([*LIMITED, "requeued", "cancelled"]),
    advanced=st.sampled_from([True, False, None]),
)


def read_time(value: float | str | None) -> float | None:
    return math.inf if isinstance(value, str) else value


def test_what_slurm_does_to_the_job() -> None:
    usual = {"job_id": "7", "state": "RUNNING", "restarts": 0, "end_time": 1000.0}
    for changes, restarts, kill in TABLES["kills"]:
        word = None if changes is None else JobState(**{**usual, **changes})
        assert classify_kill(word, restarts) == kill, changes


def test_the_class_of_an_end() -> None:
    """Facts are names of those that hold."""
    for facts, kill, cause in TABLES["ends"]:
        assert classify_end(facts, kill) == cause, (facts, kill)


def test_what_becomes_of_the_job() -> None:
    """An earlier attempt is how often it was so, its class, and whether it advanced."""
    for cause, earlier, advanced, requeue, decided, reason in TABLES["requeues"]:
        past = [Outcome(cause=was, advanced=made) for count, was, made in earlier for _ in range(count)]
        decision = decide_requeue(cause, POLICY, past, advanced)
        assert (decision.requeue, decision.cause) == (requeue, decided), (cause, earlier)
        assert reason in (None, decision.reason)


@given(
    st.lists(ENDS, max_size=12),
    st.builds(
        RequeueConfig,
        no_progress=st.integers(-1, 4),
        limit=st.integers(-1, 10),
        **{name: st.integers(-1, 5) for name in LIMITED},
    ),
)
def test_no_policy_requeues_for_ever(ends: list[Outcome], policy: RequeueConfig) -> None:
    """However attempts end, what is requeued stays within the limit and within each reason's own."""
    past: list[Outcome] = []
    for end in ends:
        if not decide_requeue(end.cause, policy, past, end.advanced).requeue:
            break
        past.append(end)
    assert len(past) <= max(policy.limit - 1, 0)
    for reason in LIMITED:
        assert sum(attempt.cause == reason for attempt in past) <= max(getattr(policy, reason), 0)


def test_whose_the_checkpoint_signal_is_and_when_the_ranks_are_stopped() -> None:
    for now, end_time, seconds, grace, stop in TABLES["stop_times"]:
        assert choose_stop_time(now, read_time(end_time), seconds, grace) == stop, (now, end_time)


def test_the_nodes_that_a_job_goes_on_with() -> None:
    hosts = ("n0", "n1", "n2", "n3")
    for sick, on_failure, nodes, owned, reserved, action, chosen, words in TABLES["hosts"]:
        choice = choose_hosts(
            hosts, sick.split(), on_failure=on_failure, nodes=tuple(nodes), owned=owned, reserved=reserved
        )
        assert (choice.action, list(choice.hosts)) == (action, chosen.split()), (sick, on_failure)
        assert words in choice.text and bool(choice.text) == bool({*sick.split()} & {*hosts[: nodes[1]]})
