"""The table of planners has something in it: each is really asked, and really judged."""

from collections.abc import Iterator, Sequence

import pytest

from tests.benchmarks.peers import Ask
from tests.benchmarks.planners import MEASURES, SHOWN, Row, judge, judge_machine, start_planners
from tests.plan.lab_machines import load

TORCHRUN = [name for name in SHOWN if name.startswith("torchrun")]


@pytest.fixture(scope="module")
def asks() -> Iterator[Sequence[Ask]]:
    with start_planners() as found:
        yield found


@pytest.fixture(scope="module")
def dgx(asks: Sequence[Ask]) -> Row:
    return judge_machine(asks, load("dgx-a100"))


def test_every_planner_of_the_table_is_judged(dgx: Row) -> None:
    assert set(SHOWN) <= set(dgx)
    assert dgx["launch exclusive"].holds


def test_torchrun_places_a_dgx_a100_and_leaves_half_of_it_idle(asks: Sequence[Ask], dgx: Row) -> None:
    """Half of its NUMA nodes have no GPU, and torchrun gives their cores to nobody."""
    for planner in TORCHRUN:
        assert not dgx[planner].error, planner
        assert "IDLE" in dgx[planner].shorts or planner == "torchrun socket", planner
    assert "EXC" in dgx["torchrun node"].shorts
    assert not {"ROB", "LOC", "EXC", "SMT", "MEM"} & set(dgx["torchrun exclusive"].shorts)


def test_torchrun_fails_without_a_gpu_and_holds_where_nodes_divide(asks: Sequence[Ask]) -> None:
    assert "No CUDA GPUs" in judge_machine(asks, load("cpu-only-2s"))["torchrun exclusive"].error
    assert judge_machine(asks, load("gh200"))["torchrun exclusive"].holds


def test_numactl_takes_no_unknown_node(asks: Sequence[Ask]) -> None:
    assert "<-1> is invalid" in judge_machine(asks, load("aws-p3.16xlarge"))["numa-set.sh"].error


def test_a_plan_outside_the_job_has_no_measure_at_its_bound() -> None:
    data = load("a100-slurm-32of112")
    plan = {"ranks": [{"local_rank": 0, "gpu": {"pci": data["gpus"][0]["bdf"]}, "cpus": "16"}]}
    assert judge(data, plan).shorts == MEASURES
