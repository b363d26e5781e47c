"""Threads of a rank's libraries, Inductor's processes, and variables that bind threads a second time."""

from dataclasses import replace

import pytest

from launcher.plan.model import Limits, Request
from launcher.plan.planner import plan
from launcher.plan.rules import BINDERS

from .lab_machines import convert, describe, load

EIGHT = convert(describe(["0-7"], [0]))
OTHERS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"


def read_env(*environ: tuple[str, str]) -> dict[str, str]:
    return dict(plan(EIGHT, Request(environ=environ)).ranks[0].env)


def test_a_rank_has_its_cores_less_its_workers_in_the_one_variable_that_torchrun_sets() -> None:
    assert read_env()["OMP_NUM_THREADS"] == "6"
    assert not set(OTHERS) & set(read_env())
    for name in OTHERS:
        assert read_env((name, "1"))["OMP_NUM_THREADS"] == "6"
        assert name not in read_env((name, "1"))


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", COMPILERS])
def test_a_variable_of_the_users_is_shown_as_kept_and_one_that_is_no_number_replaced(name: str) -> None:
    kept = plan(EIGHT, Request(environ=((name, "2"),)))
    assert f"{name}=2 kept, set by the user" in kept.ranks[0].notes
    assert kept.warnings == ()
    wrong = plan(EIGHT, Request(environ=((name, "two"),)))
    assert name in dict(wrong.ranks[0].env)
    assert f"{name}=two is no number" in wrong.warnings[0]
    assert name in read_env((name, ""))


def test_numexpr_gets_no_more_than_it_takes() -> None:
    large = convert(describe(["0-99"], [0]))
    assert dict(plan(large, Request()).ranks[0].env)["NUMEXPR_NUM_THREADS"] == "64"
    most = Request(environ=(("NUMEXPR_MAX_THREADS", "96"),))
    assert dict(plan(large, most).ranks[0].env)["NUMEXPR_NUM_THREADS"] == "96"


@pytest.mark.parametrize(
    ("machine", "binding", "ranks", "threads"),
    [
        ("dgx-h100", "exclusive", 8, 28),
        ("dgx-h100", "numa", 8, 28),
        ("dgx-h100", "none", 8, 28),
        ("dgx-h100", "none", 2, 32),
        ("dgx-h100", "exclusive", 2, 32),
        ("dgx-a100", "exclusive", 8, 16),
        ("gh200", "exclusive", 1, 32),
    ],
)
def test_inductor_compiles_within_the_ranks_share(
    machine: str, binding: str, ranks: int, threads: int
) -> None:
    made = plan(convert(load(machine)), Request(ranks, binding=binding))
    assert [dict(rank.env)[COMPILERS] for rank in made.ranks] == [str(threads)] * ranks


def test_inductor_compiles_within_a_quota_and_at_all() -> None:
    limited = replace(EIGHT, limits=Limits(cpus=3.5))
    assert dict(plan(limited, Request()).ranks[0].env)[COMPILERS] == "3"
    assert dict(plan(convert(describe(["0-1"], [])), Request(5)).ranks[4].env)[COMPILERS] == "1"
    assert COMPILERS not in read_env((COMPILERS, "0"))


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OMP_PROC_BIND": "true"}, ["OMP_PROC_BIND"]),
        ({"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}, ["OMP_PROC_BIND", "OMP_PLACES"]),
        ({"OMP_PLACES": "cores"}, ["OMP_PLACES"]),
        ({"OMP_PLACES": "cores", "OMP_PROC_BIND": "FALSE", "GOMP_CPU_AFFINITY": "0-3"}, []),
        ({"GOMP_CPU_AFFINITY": "0"}, ["GOMP_CPU_AFFINITY"]),
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, ["KMP_AFFINITY"]),
        ({"KMP_AFFINITY": "verbose,none"}, []),
        ({"KMP_AFFINITY": "granularity=fine"}, []),
        (dict.fromkeys(BINDERS, ""), []),
    ],
)
def test_variables_that_bind_threads_again_are_warned_of_by_name(
    environ: dict[str, str], named: list[str]
) -> None:
    made = plan(EIGHT, Request(environ=tuple(environ.items())))
    assert [warning.partition("=")[0] for warning in made.warnings] == named
    assert [warning.rpartition(": ")[2] for warning in made.warnings] == [f"unset {name}" for name in named]
    assert not any("kept" in note for note in made.ranks[0].notes)


def test_nothing_that_binds_threads_is_ever_set() -> None:
    assert not set(BINDERS) & set(read_env()) and not any("AFFINITY" in name for name in read_env())
