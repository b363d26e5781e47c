"""Who failed first, with which exit code, and in which words."""

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

REPORT = """
Root Cause (first observed failure):
[0]:
  time      : 2031-02-03_04:05:06
  host      : h
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 103)
  error_file: <N/A>
"""
CLOSING = "W1122 api.py:1029] Sending process 101 closing signal SIGTERM"
WORDS = """
   1   1 exited with code 1
   3   3 exited with code 3
 127 127 exited with code 127 (the program was not found)
 126 126 exited with code 126 (the program cannot be executed)
  75  75 exited with code 75 (EX_TEMPFAIL: it asks for another start)
 137 137 exited with code 137 (128+9, as of a child killed by SIGKILL, probably out of memory: see `dmesg`
 139 139 exited with code 139 (128+11, as of a child killed by SIGSEGV, a crash in native code
 143 143 exited with code 143 (128+15, as of a child killed by SIGTERM, from outside)
 255 255 exited with code 255
  -9 137 was killed by SIGKILL (signal 9), probably out of memory
 -11 139 was killed by SIGSEGV (signal 11), a crash in native code
  -7 135 was killed by SIGBUS (signal 7)
  -6 134 was killed by SIGABRT (signal 6)
  -2 130 was killed by SIGINT (signal 2)
 -40 168 was killed by signal 40
"""
KERNEL = "out of memory: the kernel …"
LIMITED = "at the limit of the job's cgroup, 1024 MiB"


def death(rank: int, exitcode: int | None, attempt: int = 0, pid: int = 0) -> Death:
    return Death(RankProcess(rank, rank % 2, attempt, pid or 100 + rank), 0.0, exitcode)


def test_ends_in_words() -> None:
    for line in WORDS.strip("\n").splitlines():
        code, status, words = line.split(maxsplit=2)
        assert death(0, int(code)).status == int(status)
        assert describe_exit(int(code)).startswith(words)
    # What the kernel counts is no guess.
    assert describe_exit(1, KERNEL) == f"exited with code 1 ({KERNEL})"
    assert describe_exit(137, KERNEL) == f"exited with code 137 ({KERNEL})"
    assert describe_exit(-9, KERNEL) == f"was killed by SIGKILL (signal 9), {KERNEL}"


@pytest.mark.parametrize(
    ("killed", "limit", "kind", "words"),
    [
        (0, 1 << 20, "slurm", ""),
        (1, 1 << 20, "slurm", f"a process {LIMITED}: ask for more with cluster.mem"),
        (2, 1 << 20, "local", f"2 processes {LIMITED}"),
        (2, None, "slurm", "2 processes of the job"),
    ],
)
def test_what_the_kernel_has_killed_meanwhile(killed: int, limit: int | None, kind: str, words: str) -> None:
    machine = SimpleNamespace(limits=Limits(memory_kib=limit))
    job = SimpleNamespace(plan=SimpleNamespace(machine=machine), cluster=SimpleNamespace(kind=kind))
    end = judge_end(NodeEnd(1, (death(1, -9),), None, math.inf, ()), ())
    end = add_oom_kills(end, cast("Job", job), killed)
    assert end.failure is not None
    assert (end.memory, end.status) == (f"out of memory: the kernel killed {words}" if words else "", 137)


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
    end = NodeEnd(code, (), number, 0.0 if number else math.inf, (), hang)
    assert judge_end(end, ()).status == status


@pytest.mark.parametrize(
    ("deaths", "log", "failed"),
    [
        ([death(1, 3), death(0, -15)], "", (1, 3)),
        ([death(0, 0), death(1, 5)], "", (1, 5)),
        ([death(1, 3), death(0, 7, 1)], "", (0, 7)),
        ([death(3, None), death(2, -15)], REPORT, (3, -9)),
        ([death(2, None), death(3, None)], REPORT, (3, -9)),
        ([], REPORT, (3, -9)),
        ([], "nothing of note", None),
        ([death(0, 0)], "nothing of note", None),
        ([death(0, None)], "nothing of note", None),
        ([death(1, 3), death(0, 0, 1)], "nothing of note", None),
        # What the agent itself has ended did not fail.
        ([death(1, -15)], CLOSING, None),
        ([death(0, -15), death(1, -15)], CLOSING, (0, -15)),
        ([death(1, -9)], CLOSING, (1, -9)),
        # Nor did those whose place others have taken within an attempt.
        ([death(1, -15, 0, 101), death(0, -15), death(1, 7, 0, 201), death(0, -15, 0, 200)], "", (1, 7)),
    ],
)
def test_the_first_failure_of_the_last_start(
    deaths: list[Death], log: str, failed: tuple[int, int] | None
) -> None:
    found = find_failure(deaths, log)
    assert (found and (found.process.rank, found.exitcode)) == failed


def test_the_ranks_that_ended_with_0() -> None:
    for deaths, pids in (
        ([death(0, 0, 0, 100), death(1, 1, 0, 101), death(0, 0, 1, 200)], [200]),
        ([death(0, None), death(1, 0, 0, 7)], [7]),
        ([], []),
    ):
        assert [d.process.pid for d in NodeEnd(0, tuple(deaths), None, math.inf, ()).clean] == pids
