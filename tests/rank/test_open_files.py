"""A rank may open as many files as its hard limit allows."""

import resource
from functools import partial
from pathlib import Path

import pytest

from launcher.rank.shim import raise_open_files
from tests.rank.seccomp_filter import KNOWN, forbid
from tests.rank.start_shim import ALLOWED, ECHO, assert_ran, run_shim, write_plan

ASK = ("/bin/sh", "-c", "echo $(ulimit -Sn) $(ulimit -Hn)")
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def limit(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("soft", "hard"), [(256, 300), (256, HARD), (300, 300)])
def test_a_rank_has_the_hard_limit(tmp_path: Path, soft: int, hard: int) -> None:
    plan = write_plan(tmp_path, str(ALLOWED[0]))
    done = run_shim(*ASK, preexec=partial(limit, soft, hard), LAUNCH_PLAN=str(plan))
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    assert done.stdout.split() == [shown, shown], done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_rank_without_a_place_has_it_too(tmp_path: Path) -> None:
    done = run_shim(*ASK, preexec=partial(limit, 256, 300), LAUNCH_PLAN=str(tmp_path / "none.json"))
    assert done.stdout.split() == ["300", "300"]


@pytest.mark.skipif(not KNOWN, reason="the filter knows x86_64 and aarch64 alone")
def test_where_limits_cannot_be_read_the_program_runs(tmp_path: Path) -> None:
    plan = str(write_plan(tmp_path, str(ALLOWED[0])))
    done = run_shim(*ECHO, preexec=partial(forbid, "prlimit64"), LAUNCH_PLAN=plan, LAUNCH_STRICT="1")
    assert_ran(done, "launch-rank: rank 0, cpus")


@pytest.mark.parametrize(("soft", "told"), [(1024, True), (65536, False)])
def test_a_refusal_is_told_where_there_are_few(
    monkeypatch: pytest.MonkeyPatch, soft: int, told: bool
) -> None:
    """The kernel refuses a hard limit above fs.nr_open, which root may lower below what a job has."""

    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 1 << 30))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    problem = raise_open_files()
    assert problem.startswith("it may open 1024 files, and raising that to 1073741824 was refused") == told
    assert bool(problem) == told
