"""Who failed first, and in which words."""

import math
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from launcher.launch.ending import NodeEnd, add_oom_kills, describe_exit, find_failure, judge_end
from launcher.launch.processes import Death, RankProcess
from launcher.plan.model import Limits

if TYPE_CHECKING:
    from launcher.launch.job import Job

LIMITED = "at the limit of the job's cgroup, 1024 MiB"
REPORT = """
Root Cause (first observed failure):
[0]:
  time      : 2031-02-03_04:05:06
  host      : h
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 103)
  error_file: <N/A>
"""


def death(rank: int, exitcode: int | None, *, attempt: int = 0, pid: int = 0) -> Death:
    return Death(RankProcess(rank, rank % 2, attempt, pid or 100 + rank), 0.0, exitcode)


@pytest.mark.parametrize(
    ("exitcode", "status", "words"),
    [
        (1, 1, "exited with code 1"),
        (3, 3, "exited with code 3"),
        (127, 127, "exited with code 127 (the program was not found)"),
        (126, 126, "the program cannot be executed"),
        (75, 75, "exited with code 75 (EX_TEMPFAIL: it asks for another start)"),
        (137, 137, "code 137 (128+9, as of a child killed by SIGKILL, probably out of memory: see `dmesg`"),
        (139, 139, "code 139 (128+11, as of a child killed by SIGSEGV, a crash in native code"),
        (143, 143, "code 143 (128+15, as of a child killed by SIGTERM, from outside)"),
        (255, 255, "exited with code 255"),
        (-9, 137, "was killed by SIGKILL (signal 9), probably out of memory"),
        (-11, 139, "was killed by SIGSEGV (signal 11), a crash in native code"),
        (-7, 135, "was killed by SIGBUS (signal 7)"),
        (-6, 134, "was killed by SIGABRT (signal 6)"),
        (-2, 130, "was killed by SIGINT (signal 2)"),
        (-40, 168, "was killed by signal 40"),
    ],
)
def test_ends_in_words(exitcode: int, status: int, words: str) -> None:
    assert death(0, exitcode).status == status
    assert words in describe_exit(exitcode)


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (1, "exited with code 1 (out of memory: the kernel …)"),
        (137, "exited with code 137 (out of memory: the kernel …)"),
        (-9, "was killed by SIGKILL (signal 9), out of memory: the kernel …"),
    ],
)
def test_what_the_kernel_counts_is_no_guess(exitcode: int, words: str) -> None:
    assert describe_exit(exitcode, "out of memory: the kernel …") == words


@pytest.mark.parametrize(
    ("before", "limit", "kind", "words"),
    [
        (5, 1 << 20, "slurm", ""),
        (
            4,
            1 << 20,
            "slurm",
            "a process at the limit of the job's cgroup, 1024 MiB: ask for more with cluster.mem",
        ),
        (3, 1 << 20, "local", "2 processes at the limit of the job's cgroup, 1024 MiB"),
        (3, None, "slurm", "2 processes of the job"),
    ],
)
def test_what_the_kernel_has_killed_meanwhile(before: int, limit: int | None, kind: str, words: str) -> None:
    machine = SimpleNamespace(limits=Limits(memory_kib=limit))
    job = SimpleNamespace(plan=SimpleNamespace(machine=machine), cluster=SimpleNamespace(kind=kind))
    ending = judge_end(NodeEnd(1, (death(1, -9),), None, math.inf, ()), ())
    noted = add_oom_kills(ending, cast("Job", job), 5 - before)
    memory = f"out of memory: the kernel killed {words}" if words else ""
    assert noted.failure is not None
    assert (noted.memory, noted.status) == (memory, 137)


@pytest.mark.parametrize(
    ("code", "number", "hang", "status"),
    [
        (1, signal.SIGTERM, "rank 1 …", 124),
        (0, signal.SIGTERM, "rank 1 …", 124),  # watch.on_hang=stop, and ranks that end with 0 then
        (1, None, "rank 1 …", 124),  # a restart that torchrun did not make
        (0, None, "rank 1 …", 0),  # the job ended by itself before the order came
        (1, signal.SIGINT, "", 130),
    ],
)
def test_what_was_ended_for_a_hang_has_its_code(
    code: int, number: int | None, hang: str, status: int
) -> None:
    agent_exit = NodeEnd(code, (), number, 0.0 if number else math.inf, (), hang)
    assert judge_end(agent_exit, ()).status == status


@pytest.mark.parametrize(
    ("deaths", "report", "rank", "exitcode"),
    [
        ([death(1, 3), death(0, -15)], "", 1, 3),
        ([death(0, 0), death(1, 5)], "", 1, 5),
        ([death(1, 3), death(0, 7, attempt=1)], "", 0, 7),
        ([death(3, None), death(2, -15)], REPORT, 3, -9),
        ([death(2, None), death(3, None)], REPORT, 3, -9),
        ([], REPORT, 3, -9),
    ],
)
def test_the_first_of_the_last_attempt(deaths: list[Death], report: str, rank: int, exitcode: int) -> None:
    found = find_failure(deaths, report)
    assert found is not None
    assert (found.process.rank, found.exitcode) == (rank, exitcode)


@pytest.mark.parametrize(
    "deaths", [[], [death(0, 0)], [death(0, None)], [death(1, 3), death(0, 0, attempt=1)]]
)
def test_no_rank_failed(deaths: list[Death]) -> None:
    assert find_failure(deaths, "nothing of note") is None


def test_a_rank_that_the_agent_has_ended_did_not_fail() -> None:
    log = "W1122 api.py:1029] Sending process 101 closing signal SIGTERM"
    assert find_failure([death(1, -15)], log) is None
    assert find_failure([death(0, -15), death(1, -15)], log) is not None, "nobody has ended that one"
    found = find_failure([death(1, -9)], log)
    assert found is not None and found.exitcode == -9


def test_the_ranks_that_ended_with_0() -> None:
    for deaths, pids in (
        ([death(0, 0, pid=100), death(1, 1, pid=101), death(0, 0, attempt=1, pid=200)], [200]),
        ([death(0, None), death(1, 0, pid=7)], [7]),
        ([], []),
    ):
        assert [d.process.pid for d in NodeEnd(0, tuple(deaths), None, math.inf, ()).clean] == pids


def test_ranks_that_were_started_anew_within_an_attempt_do_not_count() -> None:
    deaths = [death(0, -15, pid=100), death(1, -15, pid=101), death(1, 7, pid=201), death(0, -15, pid=200)]
    found = find_failure(deaths, "")
    assert found is not None
    assert (found.process.rank, found.process.pid, found.exitcode) == (1, 201, 7)
