"""Ranks against cores: several on a GPU, more than cores, fewer than GPUs; threads, classes, reserves."""

from dataclasses import replace

from launcher.cpulist import parse_cpulist
from launcher.plan.model import Cpu, Machine, NumaNode, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe, load, masks, memory, workers


def test_isolated_cpus_are_left_alone() -> None:
    data = describe(["0-7"], [0], threads={"offset": 4}, isolated="2-3,6-7")
    made = plan(convert(data), Request())
    assert (masks(made), workers(made), made.warnings) == (["0-1,4-5"], ["0-1,4-5"], ())


def test_isolated_cpus_are_used_with_a_warning_when_nothing_else_is_allowed() -> None:
    made = plan(convert(describe(["0-3"], [0], isolated="2-3", allowed_cpus="2-3")), Request())
    assert masks(made) == ["2-3"]
    assert "isolated CPUs only (2-3)" in made.warnings[0]


def test_more_ranks_than_cores_split_siblings_first() -> None:
    data = describe(["0-3"], [0, 0, 0], threads={"offset": 2})
    made = plan(convert(data), Request())
    assert masks(made) == ["0,2", "1", "3"]
    assert "local rank 0-2 must share 2 cores (CPUs 0-3) of NUMA node 0" in made.warnings[0]


def test_siblings_are_split_as_little_as_can_be() -> None:
    data = describe(["0-7"], [], threads={"adjacent": 4}, allowed_cpus="3-6")
    assert masks(plan(convert(data), Request(3))) == ["3", "4-5", "6"]


def test_more_ranks_than_cpus_share_them() -> None:
    made = plan(convert(describe(["0-1"], [])), Request(5))
    assert masks(made) == ["0", "0", "0", "1", "1"]
    assert [rank.omp_num_threads for rank in made.ranks] == [1] * 5


def test_ranks_of_one_gpu_stay_together() -> None:
    made = plan(convert(describe(["0-3", "4-7"], [-1, -1])), Request(4))
    assert [rank.gpu.index for rank in made.ranks if rank.gpu] == [0, 1, 0, 1]
    assert masks(made) == ["0-1", "4-5", "2-3", "6-7"]
    assert "4 ranks for 2 GPUs" in made.warnings[0]


def test_fewer_ranks_than_gpus_share_the_whole_locality() -> None:
    made = plan(convert(load("dgx-h100")), Request(2))
    assert masks(made) == ["0-27,112-139", "28-55,140-167"]
    assert [rank.gpu.index for rank in made.ranks if rank.gpu] == [0, 1]
    assert frozenset().union(*(rank.worker_cpus for rank in made.ranks)) == made.machine.allowed_cpus


def test_reserved_cores_are_spread_over_the_nodes() -> None:
    data = describe(["0-3,8-11", "4-7,12-15"], [0, 1], threads={"offset": 8})
    made = plan(convert(data), Request(reserve_cores=3))
    assert workers(made) == ["2-3,10-11", "5-7,13-15"]
    assert made.warnings == ()


def test_every_node_keeps_a_core_of_those_to_be_reserved() -> None:
    made = plan(convert(describe(["0-3", "4-7"], [0, 1])), Request(reserve_cores=99))
    assert workers(made) == ["3", "7"]
    assert "reserve_cores=99, but only 6 of 8 cores can be kept back" in made.warnings[0]


def make_hybrid(big: int, small: int) -> Machine:
    """One package: big cores of two threads, then small ones, four under each cache; GPUs set by callers."""
    cpus = [Cpu(at, at // 2 * 2, 0, 0, 0, 1024 - at) for at in range(2 * big)]
    cpus += [Cpu(2 * big + at, 2 * big + at, 0, 0, 0, 600) for at in range(small)]
    everything = frozenset(cpu.id for cpu in cpus)
    node = NumaNode(0, 2**25, True, ((0, 10),))
    return Machine(tuple(cpus), (node,), (), everything, frozenset({0}))


def test_hybrid_ranks_run_on_big_cores_and_workers_on_small_ones_too() -> None:
    made = plan(make_hybrid(8, 16), Request(2))
    assert masks(made) == ["0-7", "8-15"]
    assert workers(made) == ["0-7,16-23", "8-15,24-31"]


def test_hybrid_with_too_few_big_cores_deals_each_class_evenly() -> None:
    made = plan(make_hybrid(2, 8), Request(4))
    assert masks(made) == ["0-1,4-5", "2-3,6-7", "8-9", "10-11"]


def test_siblings_partly_outside_the_cpuset() -> None:
    data = describe(["0-7"], [0, 0], threads={"offset": 4}, allowed_cpus="0-3,5")
    made = plan(convert(data), Request())
    assert masks(made) == ["0-1,5", "2-3"]
    assert parse_cpulist(masks(made)[0]) <= made.machine.allowed_cpus


def test_eight_threads_a_core_stay_together() -> None:
    data = describe(["0-31", "32-63"], [0, 0, 1], threads={"adjacent": 8})
    made = plan(convert(data), Request())
    assert masks(made) == ["0-15", "16-31", "32-63"]
    assert [(rank.num_workers, rank.omp_num_threads) for rank in made.ranks] == [(1, 1), (1, 1), (1, 3)]


def test_four_threads_a_core_part_when_ranks_outnumber_cores() -> None:
    data = describe(["0-7"], [0, 0, 0, 0], threads={"adjacent": 4})
    assert masks(plan(convert(data), Request())) == ["0-1", "2-3", "4-5", "6-7"]


def test_mig_instances_share_out_the_cores_next_to_their_gpus() -> None:
    machine = convert(describe(["0-7", "8-15"], [0, 1]))
    gpus = (replace(machine.gpus[0], mig=("MIG-a", "MIG-b", "MIG-c")), machine.gpus[1])
    made = plan(replace(machine, gpus=gpus), Request(devices="own"))
    assert masks(made) == ["0-2", "3-5", "6-7", "8-11"]


def test_three_gpus_on_two_nodes() -> None:
    made = plan(convert(describe(["0-5", "6-11"], [0, 1, 1])), Request())
    assert (masks(made), workers(made)) == (["0-3", "6-8", "9-11"], ["0-3", "5-8", "4,9-11"])


def test_gpus_that_no_rank_uses_do_not_count() -> None:
    made = plan(convert(load("dgx-a100")), Request(5))
    assert memory(made) == list("33117")
    assert masks(made)[4] == "112-127,240-255"
    assert workers(made)[4] == "64-127,192-255"
    assert masks(made)[0] == "48-55,176-183"


def test_hybrid_cores_with_several_threads_and_caches() -> None:
    machine = make_hybrid(4, 8)
    cpus = tuple(replace(cpu, l3=8 + (cpu.id - 8) // 4 * 4) if cpu.id >= 8 else cpu for cpu in machine.cpus)
    made = plan(replace(machine, cpus=cpus), Request(2))
    assert (masks(made), workers(made)) == (["0-3", "4-7"], ["0-3,8-11", "4-7,12-15"])
