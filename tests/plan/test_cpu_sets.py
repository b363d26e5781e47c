"""The bindings that share: numa, socket, l3, none."""

import pytest

from launcher.cpulist import format_cpulist
from launcher.plan.model import Plan, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe, load


def masks(made: Plan) -> list[str]:
    return [format_cpulist(rank.cpus) for rank in made.ranks]


@pytest.mark.parametrize(
    ("binding", "first", "last"),
    [
        ("numa", "48-63,176-191", "80-95,208-223"),
        ("socket", "0-63,128-191", "64-127,192-255"),
        ("l3", "48-51,176-179", "84-87,212-215"),
        ("none", "0-255", "0-255"),
    ],
)
def test_on_a_dgx_a100(binding: str, first: str, last: str) -> None:
    made = plan(convert(load("dgx-a100")), Request(binding=binding))
    assert (masks(made)[0], masks(made)[-1]) == (first, last)
    assert all(rank.worker_cpus == rank.cpus for rank in made.ranks)
    assert made.warnings == ()


def test_memory_follows_the_gpu_unless_nothing_is_bound() -> None:
    machine = convert(load("dgx-a100"))
    for binding in ("numa", "socket", "l3"):
        made = plan(machine, Request(binding=binding))
        assert [format_cpulist(rank.memory.nodes) for rank in made.ranks] == list("33117755")
    assert {rank.memory.policy for rank in plan(machine, Request(binding="none")).ranks} == {"default"}


def test_unknown_nodes_do_not_all_fall_on_node_0() -> None:
    made = plan(convert(describe(["0-3", "4-7"], [-1] * 4)), Request(binding="numa"))
    assert masks(made) == ["0-3", "0-3", "4-7", "4-7"]


def test_a_cpuset_narrower_than_the_node_is_kept_to() -> None:
    machine = convert(describe(["0-7", "8-15"], [0, 1], allowed_cpus="2-3,8-11", l3_cores=4))
    assert masks(plan(machine, Request(binding="numa"))) == ["2-3", "8-11"]
    assert masks(plan(machine, Request(binding="l3"))) == ["2-3", "8-11"]
    assert masks(plan(machine, Request(binding="none"))) == ["2-3,8-11"] * 2


def test_ranks_take_caches_in_turn_the_largest_first() -> None:
    machine = convert(describe(["0-7"], [0, 0, 0], allowed_cpus="2-7", l3_cores=4))
    assert masks(plan(machine, Request(binding="l3"))) == ["4-7", "2-3", "4-7"]


def test_reserved_cores_stay_free_unless_nothing_is_bound() -> None:
    machine = convert(describe(["0-3"], [0]))
    assert masks(plan(machine, Request(binding="numa", reserve_cores=1))) == ["1-3"]
    assert masks(plan(machine, Request(binding="none", reserve_cores=1))) == ["0-3"]


def test_none_has_nothing_to_warn_of() -> None:
    machine = convert(describe(["0-3", "4-7"], [1], allowed_cpus="0-3", allowed_mems="1"))
    assert plan(machine, Request(8, binding="none")).warnings[1:] == ()
