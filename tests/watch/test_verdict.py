"""The judge, by tables of made-up evidence: each hang of the matrix, circles, and what is no hang."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from launcher.watch.verdict import judge
from launcher.watch.watch_model import Call, Frame, GpuSample, NodeReport, ProcessState, RankEvidence, Verdict
from tests.watch.made_evidence import (
    BARRIER,
    COMPUTING,
    FETCH,
    GET_ITEM,
    IN_COLLECTIVE,
    INIT,
    LIBRARY,
    NEXT_DATA,
    QUEUE_GET,
    READ_SHARD,
    RECV,
    SLEEPING,
    TRAIN,
    WORKER_LOOP,
    WRAPPER,
    make_group,
    make_nodes,
    make_process,
    make_rank,
    make_reports,
)

WAITING = make_group(1042, 1041)
BEHIND = make_group(1041, 1041)
STOPPED = ProcessState(100, "T")
PAIR = make_group(7, 6, name="pair-1", key="2")
PAIR_DONE = make_group(6, 6, name="pair-1", key="2")
NOT_JOINED = "has not joined all_reduce #1042 of the default group, in which 7 ranks wait"


def with_others(*culprits: RankEvidence, size: int = 8) -> list[RankEvidence]:
    """A job in which all others wait in all_reduce #1042."""
    named = {rank.rank: rank for rank in culprits}
    return [named.get(number, make_rank(number, IN_COLLECTIVE, WAITING)) for number in range(size)]


def make_culprit(process: ProcessState, **more: Any) -> list[RankEvidence]:
    """A job in which rank 5 on n2 has not joined."""
    return with_others(make_rank(5, process, BEHIND, host="n2", **more))


def in_worker(worker: ProcessState, **more: Any) -> list[RankEvidence]:
    """A job in which rank 5 waits for a DataLoader worker; another worker is idle."""
    idle = make_process(QUEUE_GET, WORKER_LOOP, TRAIN, pid=4710)
    process = make_process(NEXT_DATA, TRAIN, call="poll")
    return make_culprit(process, children=(idle, worker), **more)


def say(ranks: list[RankEvidence], reports: list[NodeReport] | None = None) -> Verdict:
    """Judge, and check what holds of all verdicts."""
    verdict = judge(make_nodes(ranks), reports or [])
    assert verdict.sentence and verdict.sentence.isprintable()
    return verdict


@dataclass(frozen=True)
class Case:
    """Evidence, and the verdict on it."""

    name: str
    ranks: list[RankEvidence]
    kind: str
    sentence: str
    culprits: tuple[int, ...] = (5,)
    reports: list[NodeReport] | None = None


LOCK = Frame(f"{LIBRARY}/threading.py", 320, "wait")
CASES = [
    Case(
        "sleeps before a collective",
        make_culprit(SLEEPING),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it sleeps at data.py:88, read_shard",
    ),
    Case(
        "never joins at start",
        [
            *(
                make_rank(number, make_process(INIT, WRAPPER, TRAIN), store_wait=True, phase="joining")
                for number in range(3)
            ),
            make_rank(3, SLEEPING, answered=False, phase="starting"),
        ],
        "absent",
        "rank 3 on n1 has not joined init_process_group, in which 3 ranks wait:"
        " it sleeps at data.py:88, read_shard",
        (3,),
    ),
    Case(
        "C code holds the GIL: the server has no stacks, the recorder answers",
        make_culprit(make_process(READ_SHARD, call="clock_nanosleep")),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it sleeps at data.py:88, read_shard",
    ),
    Case(
        "a lock between two threads",
        make_culprit(make_process(LOCK, READ_SHARD, TRAIN)),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it waits for a lock at data.py:88, read_shard",
    ),
    Case(
        "a stuck DataLoader worker",
        in_worker(make_process(GET_ITEM, FETCH, WORKER_LOOP, pid=4711, call="read", channel="pipe_read")),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it waits for DataLoader worker 4711,"
        " which reads from a pipe at data.py:9, __getitem__",
    ),
    Case(
        "a DataLoader worker that was killed",
        in_worker(ProcessState(4711, "Z")),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it waits for DataLoader worker 4711, which has ended",
    ),
    Case(
        "a DataLoader worker that is stopped",
        in_worker(ProcessState(4711, "T")),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it waits for DataLoader worker 4711, which is stopped (SIGSTOP)",
    ),
    Case(
        "an endless loop",
        make_culprit(replace(COMPUTING, stack_changes=True)),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it computes at train.py:40, train",
    ),
    Case(
        "a read of a FIFO",
        make_culprit(make_process(READ_SHARD, call="read", channel="anon_pipe_read")),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it reads from a pipe at data.py:88, read_shard",
    ),
    Case(
        "a dead network disk",
        make_culprit(make_process(state="D", call="read", channel="nfs_wait_bit_killable"), answered=False),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it reads a file (state D, nfs_wait_bit_killable)",
    ),
    Case(
        "SIGSTOP",
        with_others(make_rank(5, STOPPED, host="n2", answered=False)),
        "stopped",
        "rank 5 on n2 is stopped (SIGSTOP), and 7 ranks wait in all_reduce #1042 of the default group",
    ),
    Case(
        "mismatched shapes",
        with_others(make_rank(5, IN_COLLECTIVE, make_group(1042, 1041, sizes="[7] Float"), host="n2")),
        "mismatch",
        "rank 5 on n2 has given [7] Float to all_reduce #1042 of the default group,"
        " and 7 ranks [100] Float: it waits at train.py:40, train",
    ),
    Case(
        "another operation under the same number",
        with_others(
            make_rank(
                5,
                make_process(BARRIER, WRAPPER, TRAIN),
                make_group(1042, 1041, operation="barrier", sizes=""),
                host="n2",
            )
        ),
        "mismatch",
        "rank 5 on n2 has called barrier as #1042 of the default group,"
        " and 7 ranks all_reduce of [100] Float: it waits in barrier at train.py:40, train",
    ),
    Case(
        "one rank left with 0",
        with_others(make_rank(5, ProcessState(100, "X"), host="n2", answered=False, exit_code=0)),
        "exited",
        "rank 5 on n2 has ended with exit code 0, and 7 ranks wait in all_reduce #1042 of the default group",
    ),
    Case(
        "a whole node stopped",
        [make_rank(number, IN_COLLECTIVE, WAITING) for number in range(4)],
        "silent",
        "nothing is heard of node n2 (ranks 4-7), and 4 ranks wait in all_reduce #1042 of the default group",
        (4, 5, 6, 7),
        make_reports({"n1": range(4), "n2": range(4, 8)}),
    ),
    Case(
        "a node that never reported",
        [make_rank(number, IN_COLLECTIVE, WAITING) for number in range(4)],
        "silent",
        "nothing is heard of 1 node that never reported,"
        " and 4 ranks wait in all_reduce #1042 of the default group",
        (),
        make_reports({"n1": range(4)}, nodes=2),
    ),
    Case(
        "all have joined",
        [make_rank(number, IN_COLLECTIVE, WAITING) for number in range(8)],
        "network",
        "all 8 ranks have joined all_reduce #1042 of the default group, and none completes it:"
        " look at the network and the GPUs",
        tuple(range(8)),
    ),
    Case(
        "all have joined, and a GPU has an error",
        [
            make_rank(number, IN_COLLECTIVE, WAITING, gpu=GpuSample(0, xids=(79,) if number == 3 else ()))
            for number in range(8)
        ],
        "network",
        "all 8 ranks have joined all_reduce #1042 of the default group, and none completes it:"
        " the GPU of rank 3 on n1 reported XID 79",
        tuple(range(8)),
    ),
    Case(
        "several at the same place",
        with_others(*(make_rank(number, SLEEPING, BEHIND, host="n2") for number in (4, 5))),
        "absent",
        "ranks 4-5 on n2 have not joined all_reduce #1042 of the default group, in which 6 ranks wait:"
        " rank 4 sleeps at data.py:88, read_shard",
        (4, 5),
    ),
    Case(
        "two groups: follow to the end",
        [
            make_rank(0, IN_COLLECTIVE, WAITING),
            make_rank(1, IN_COLLECTIVE, WAITING),
            make_rank(2, SLEEPING, BEHIND, PAIR_DONE),
            make_rank(3, IN_COLLECTIVE, BEHIND, PAIR),
        ],
        "absent",
        "rank 2 on n1 has not joined all_reduce #1042 of the default group, in which 2 ranks wait (3 in all):"
        " it sleeps at data.py:88, read_shard",
        (2,),
    ),
    Case(
        "a pipeline whose operations are not recorded",
        [
            make_rank(0, SLEEPING, BEHIND),
            *(make_rank(number, make_process(RECV, WRAPPER, TRAIN), BEHIND) for number in (1, 2)),
        ],
        "absent",
        "rank 0 on n1 holds others up: 2 ranks wait in recv, and it sleeps at data.py:88, read_shard",
        (0,),
    ),
    Case(
        "NCCL's point-to-point operations",
        [
            make_rank(0, SLEEPING, BEHIND),
            make_rank(1, IN_COLLECTIVE, replace(BEHIND, exchanges=(("recv", 0),))),
            make_rank(2, IN_COLLECTIVE, replace(BEHIND, exchanges=(("recv", 1),))),
        ],
        "absent",
        "rank 0 on n1 holds others up: 1 rank waits (2 in all) in recv,"
        " and it sleeps at data.py:88, read_shard",
        (0,),
    ),
    Case(
        "groups that wait for each other",
        [
            make_rank(0, IN_COLLECTIVE, WAITING, PAIR_DONE),
            make_rank(1, IN_COLLECTIVE, BEHIND, PAIR),
        ],
        "mismatch",
        "ranks wait for each other: rank 1 on n1 in all_reduce #7 of group pair-1 for rank 0"
        " and rank 0 on n1 in all_reduce #1042 of the default group for rank 1",
        (1,),
    ),
    Case(
        "a circle on GPUs: one of them is elsewhere in its program",
        [
            make_rank(0, SLEEPING, WAITING, PAIR_DONE),
            make_rank(1, IN_COLLECTIVE, BEHIND, PAIR),
        ],
        "absent",
        "rank 0 on n1 has not joined all_reduce #7 of group pair-1, in which 1 rank waits:"
        " it sleeps at data.py:88, read_shard",
        (0,),
    ),
    Case(
        "all read a dead disk",
        [make_rank(number, make_process(READ_SHARD, call="read"), BEHIND) for number in range(4)],
        "standstill",
        "ranks 0-3 on n1 make no step: rank 0 reads a file at data.py:88, read_shard",
        (0, 1, 2, 3),
    ),
    Case(
        "a single rank",
        [make_rank(0, SLEEPING, answered=False)],
        "standstill",
        "rank 0 on n1 makes no step: it sleeps at data.py:88, read_shard",
        (0,),
    ),
    Case(
        "torch without the server: stacks tell",
        [
            *(
                make_rank(number, make_process(BARRIER, WRAPPER, TRAIN), answered=False)
                for number in range(3)
            ),
            make_rank(3, SLEEPING, answered=False),
        ],
        "absent",
        "rank 3 on n1 holds others up: 3 ranks wait in barrier, and it sleeps at data.py:88, read_shard",
        (3,),
    ),
    Case(
        "a rank about to exit",
        make_culprit(make_process(LOCK, TRAIN), phase="ended"),
        "absent",
        f"rank 5 on n2 {NOT_JOINED}: it is about to exit and waits for a lock at train.py:40, train",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_who_holds_the_others_up(case: Case) -> None:
    verdict = say(case.ranks, case.reports)
    assert (verdict.kind, verdict.sentence) == (case.kind, case.sentence)
    assert verdict.ranks == case.culprits


def test_the_values_of_a_verdict() -> None:
    verdict = say(make_culprit(SLEEPING))
    assert (verdict.ranks, verdict.hosts, verdict.waiting) == ((5,), ("n2",), 7)
    assert (verdict.group, verdict.operation, verdict.sequence) == ("default group", "all_reduce", 1042)
    assert verdict.frame == READ_SHARD


def test_the_first_missing_collective_counts_with_several_pending() -> None:
    """DDP reduces its buckets one after the other without waiting."""
    pending = tuple(Call(number, "all_reduce", "[9] Float", is_complete=False) for number in (4, 5, 6))
    group = replace(make_group(6, 3), calls=pending)
    ranks = [make_rank(number, IN_COLLECTIVE, group) for number in range(3)]
    verdict = say([*ranks, make_rank(3, SLEEPING, make_group(4, 3, sizes="[9] Float"))])
    assert (verdict.kind, verdict.sequence) == ("network", 4)  # rank 3 has called it
    verdict = say([*ranks, make_rank(3, SLEEPING, make_group(3, 3))])
    assert (verdict.ranks, verdict.sequence) == ((3,), 4)


def test_uneven_sizes_where_they_are_right() -> None:
    first, second = (
        make_group(5, 4, operation="all_to_all", sizes=sizes) for sizes in ("[1] Float", "[2] Float")
    )
    assert say([make_rank(0, IN_COLLECTIVE, first), make_rank(1, IN_COLLECTIVE, second)]).kind == "network"


def test_members_that_the_recorder_names() -> None:
    """NCCL does: a member that has never called a collective of the group is missing."""
    group = make_group(1, -1, name="tp", key="5", ranks=(2, 3))
    verdict = say(
        [
            *(make_rank(number, SLEEPING) for number in (0, 1)),
            make_rank(2, IN_COLLECTIVE, group),
            make_rank(3, SLEEPING),
        ]
    )
    assert (verdict.kind, verdict.ranks, verdict.group) == ("absent", (3,), "tp")


def test_a_stopped_rank_comes_first_and_of_several_each_is_named() -> None:
    sleeping, computing = make_rank(1, SLEEPING, BEHIND), make_rank(2, COMPUTING, BEHIND)
    both = say(with_others(sleeping, computing))
    assert both.ranks == (1, 2) and "rank 1 sleeps at data.py:88" in both.sentence
    assert "rank 2 computes at train.py:40" in both.sentence
    assert say(with_others(sleeping, computing, make_rank(3, STOPPED, answered=False))).ranks == (3,)


def test_a_rank_whose_watcher_is_silent_is_not_taken_for_the_one_that_is_absent() -> None:
    reports = make_reports({"n1": range(8), "n3": (8, 9)})
    verdict = say(with_others(make_rank(5, SLEEPING, BEHIND)), reports)
    assert (verdict.kind, verdict.ranks) == ("absent", (5,))


def test_a_program_that_is_installed_and_one_that_has_no_line_of_its_own() -> None:
    installed = Frame(f"{LIBRARY}/site-packages/trainer/loop.py", 3, "run")
    verdict = say(make_culprit(make_process(LOCK, installed)))
    assert verdict.sentence.endswith("it waits for a lock at loop.py:3, run")
    assert say(make_culprit(make_process(LOCK))).frame == LOCK
    assert say(make_culprit(make_process())).sentence.endswith("it waits for a lock")


def test_control_characters_are_shown() -> None:
    frame = replace(READ_SHARD, function="\x1b[31mred")
    assert r"\x1b[31mred" in say(make_culprit(make_process(frame))).sentence


def test_no_evidence_at_all() -> None:
    verdict = judge([], make_reports({"n1": (0, 1)}))
    assert (verdict.kind, verdict.sentence) == ("silent", "nothing is heard of node n1 (ranks 0-1)")
    assert judge([], []).sentence == "nothing is heard of any rank"
