"""`devices=spread`: fewer ranks than GPUs use those that are far apart."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.plan.json_form import parse_machine
from launcher.plan.model import Machine, Plan, Request
from launcher.plan.planner import plan
from launcher.plan.usable_cores import find_usable
from launcher.plan.visible_devices import resolve_visible

from .lab_machines import convert, describe, load
from .test_nics import build, make_gpu, make_nics, port, under
from .test_properties import MACHINES

SHIPPED = Path(__file__).parents[2] / "conf" / "machine"


def read(name: str) -> Machine:
    """A shipped machine."""
    return parse_machine((SHIPPED / f"{name}.json").read_text())


def numbers(made: Plan) -> list[int]:
    """Each rank's GPU."""
    return [rank.gpu.index for rank in made.ranks if rank.gpu]


def spread(machine: Machine, ranks: int, **environ: str) -> Plan:
    """Plan with devices=spread."""
    return plan(machine, Request(ranks, devices="spread", environ=tuple(environ.items())))


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("dgx_h100", 2, [0, 4]),
        ("dgx_h100", 4, [0, 1, 4, 5]),
        ("dgx_a100", 4, [0, 2, 4, 6]),
        ("aws_p4d_24xlarge", 4, [0, 2, 4, 6]),
        ("gb200_nvl4", 2, [0, 2]),
        ("workstation_1plus4", 2, [0, 1]),
    ],
)
def test_packages_then_nodes_then_nics(name: str, ranks: int, expected: list[int]) -> None:
    made = spread(read(name), ranks)
    assert numbers(made) == expected
    assert {dict(rank.env)["CUDA_VISIBLE_DEVICES"] for rank in made.ranks} == {",".join(map(str, expected))}
    assert made.ranks[0].nic is None or len({rank.nic for rank in made.ranks}) == ranks
    assert numbers(plan(read(name), Request(ranks))) == list(range(ranks))


def test_cores_enough_come_before_distance() -> None:
    machine = convert(load("slurm-30plus2"))
    assert numbers(spread(machine, 2)) == [0, 1]
    assert numbers(spread(convert(describe(["0-15", "16-31"], [0, 0, 1, 1])), 2)) == [0, 2]


def test_switches_are_spread_over_where_all_else_is_alike() -> None:
    gpus = tuple(make_gpu(at, 0, *under(at // 2 + 1), port(at % 2, at // 2 + 1)) for at in range(4))
    assert numbers(spread(build(1, gpus, ()), 2)) == [0, 2]
    nics = make_nics((0, (*under(1), port(8, 1))), (0, (*under(1), port(9, 1))))
    one_switch = tuple(make_gpu(at, 0, *under(1), port(at, 1)) for at in range(4))
    assert numbers(spread(build(1, one_switch, nics), 2)) == [0, 2]


def test_the_list_is_of_uuids_in_the_order_that_the_user_gave() -> None:
    machine = convert(load("dgx-h100"))
    made = spread(machine, 2, CUDA_VISIBLE_DEVICES="6,2,5")
    assert numbers(made) == [6, 2]
    uuids = [machine.gpus[6].uuid, machine.gpus[2].uuid]
    assert dict(made.ranks[1].env)["CUDA_VISIBLE_DEVICES"] == ",".join(uuids)
    (variable,) = [item for item in made.ranks[0].variables if item.name == "CUDA_VISIBLE_DEVICES"]
    assert variable.why == "devices=spread, in place of the user's 6,2,5"
    half_named = replace(machine, gpus=(replace(machine.gpus[0], uuid=""), *machine.gpus[1:]))
    assert dict(spread(half_named, 2).ranks[0].env)["CUDA_VISIBLE_DEVICES"] == "0,4"


def test_amd_gpus_are_shown_by_hip() -> None:
    machine = read("oci_mi300x_8")
    made = spread(machine, 2)
    assert numbers(made) == [0, 4]
    assert dict(made.ranks[0].env)["HIP_VISIBLE_DEVICES"] == "0,4"
    filtered = spread(machine, 2, ROCR_VISIBLE_DEVICES="2,3,6,7")
    assert (numbers(filtered), dict(filtered.ranks[0].env)["HIP_VISIBLE_DEVICES"]) == ([2, 6], "0,2")


def test_as_many_ranks_as_gpus_leave_no_choice() -> None:
    machine = convert(load("dgx-a100"))
    chosen, usual = spread(machine, 8), plan(machine, Request(8))
    assert numbers(chosen) == numbers(usual)
    assert [rank.cpus for rank in chosen.ranks] == [rank.cpus for rank in usual.ranks]
    assert numbers(plan(machine, Request(devices="spread"))) == list(range(8))


def test_mig_instances_of_different_gpus_are_taken_first_and_warned_of() -> None:
    machine = convert(describe(["0-7", "8-15"], [0, 1]))
    gpus = tuple(replace(gpu, mig=(f"MIG-{gpu.index}a", f"MIG-{gpu.index}b")) for gpu in machine.gpus)
    made = spread(replace(machine, gpus=gpus), 2)
    assert [rank.gpu.uuid for rank in made.ranks if rank.gpu] == ["MIG-0a", "MIG-1a"]
    assert "set devices=own" in made.warnings[0]


def name_as_real_ones(machine: Machine) -> Machine:
    """The machine without MIG instances, its GPUs' UUIDs of one length each, so that none begins another."""
    uuids = [f"GPU-{at:04}" if gpu.uuid else "" for at, gpu in enumerate(machine.gpus)]
    uuids = uuids if all(uuids) else [""] * len(uuids)
    return replace(
        machine,
        gpus=tuple(replace(gpu, uuid=uuid, mig=()) for gpu, uuid in zip(machine.gpus, uuids, strict=True)),
    )


@given(MACHINES.map(name_as_real_ones).filter(find_usable), st.integers(1, 6))
def test_what_ranks_are_shown_is_what_the_plan_says_they_have(machine: Machine, ranks: int) -> None:
    made = spread(machine, ranks)
    for rank in made.ranks:
        if rank.gpu:
            shown = resolve_visible(machine.gpus, dict(rank.env))
            assert not shown.warnings
            assert shown.devices[rank.local_rank % len(shown.devices)] == rank.gpu
            assert len(shown.devices) == min(ranks, len(machine.gpus)) or rank.gpu.vendor == "amd"


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="devices=far is unknown: use one of all, own, spread"):
        plan(convert(load("gh200")), Request(devices="far"))
