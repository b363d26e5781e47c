"""Shapes that training jobs meet, each with the masks that are right for it."""

from dataclasses import replace

import pytest

from launcher.plan.model import Memory, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe, load, masks, memory, workers

NAMED = {
    "dgx-a100": (
        "48-55,176-183 56-63,184-191 16-23,144-151 24-31,152-159 "
        "112-119,240-247 120-127,248-255 80-87,208-215 88-95,216-223",
        list("33117755"),
    ),
    "dgx-h100": (
        "0-13,112-125 14-27,126-139 28-41,140-153 42-55,154-167 "
        "56-69,168-181 70-83,182-195 84-97,196-209 98-111,210-223",
        list("00001111"),
    ),
    "azure-ndv4": (
        "24-35 36-47 0-11 12-23 72-83 84-95 48-59 60-71",
        list("11003322"),
    ),
    "gb200-nvl4": ("0-35 36-71 72-107 108-143", list("0011")),
    "a100-slurm-32of112": (
        "0-1,56-57 2-3,58-59 4-5,60-61 6-7,62-63 8-9,64-65 10-11,66-67 12-13,68-69 14-15,70-71",
        list("00000000"),
    ),
    "workstation-1plus4": (
        "8-11,24-27 0-1,16-17 2-3,18-19 4-5,20-21 6-7,22-23",
        list("10000"),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_lab_machines_have_the_masks_that_were_worked_out_by_hand(name: str) -> None:
    made = plan(convert(load(name)), Request())
    assert (" ".join(masks(made)), memory(made)) == NAMED[name]


def test_cores_next_to_no_gpu_go_to_the_workers_of_the_nearest_ranks() -> None:
    made = plan(convert(load("dgx-a100")), Request())
    assert workers(made)[:2] == ["32-39,48-55,160-167,176-183", "40-47,56-63,168-175,184-191"]
    packages = [
        {cpu.package for cpu in made.machine.cpus if cpu.id in rank.worker_cpus} for rank in made.ranks
    ]
    assert packages == [{0}] * 4 + [{1}] * 4
    assert frozenset().union(*(rank.worker_cpus for rank in made.ranks)) == made.machine.allowed_cpus


def test_odd_and_even_sockets() -> None:
    data = describe(["0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15"], [1, 0], threads={"offset": 8})
    assert masks(plan(convert(data), Request())) == ["1,3,5,7,9,11,13,15", "0,2,4,6,8,10,12,14"]


def test_adjacent_siblings_and_one_that_is_absent() -> None:
    data = describe(["0-7"], [0, 0], threads={"adjacent": 2}, offline="7")
    assert masks(plan(convert(data), Request())) == ["0-3", "4-6"]


def test_cuts_fall_on_the_edges_of_caches() -> None:
    # Caches of 6, 6 and 1 cores (the cpuset ends there): 7 and 6 would split one, 6 and 7 none.
    data = describe(["0-17"], [0, 0], l3_cores=6, allowed_cpus="0-12")
    assert masks(plan(convert(data), Request())) == ["0-5", "6-12"]


def test_gpus_without_a_node_are_spread_over_all() -> None:
    made = plan(convert(describe(["0-7", "8-15"], [-1] * 4)), Request())
    assert masks(made) == ["0-3", "4-7", "8-11", "12-15"]
    assert memory(made) == list("0011")


def test_gpus_without_a_node_use_narrow_local_cpus() -> None:
    machine = convert(describe(["0-7", "8-15"], [-1, -1]))
    gpus = tuple(replace(gpu, local_cpus=frozenset(range(8, 16))) for gpu in machine.gpus)
    assert masks(plan(replace(machine, gpus=gpus), Request())) == ["8-11", "12-15"]


def test_a_node_that_the_firmware_does_not_list_is_like_none() -> None:
    machine = convert(describe(["0-7", "8-15"], [0, 1]))
    gpus = tuple(replace(gpu, node=9, local_cpus=frozenset()) for gpu in machine.gpus)
    assert masks(plan(replace(machine, gpus=gpus), Request())) == ["0-7", "8-15"]


def test_ranks_fewer_than_nodes_are_spread_over_packages() -> None:
    data = describe(["0-3", "4-7", "8-11", "12-15"], [], packages=[0, 0, 1, 1])
    made = plan(convert(data), Request(2))
    assert masks(made) == ["0-3", "8-11"]
    assert workers(made) == ["0-7", "8-15"]


def test_no_gpu_gives_ranks_in_proportion_to_cores() -> None:
    made = plan(convert(describe(["0-11", "12-15"], [])), Request(4))
    assert masks(made) == ["0-3", "4-7", "8-11", "12-15"]


def test_nproc_auto_without_gpus_is_one_for_each_usable_node() -> None:
    made = plan(convert(describe(["0-3", "4-7", ""], [], allowed_cpus="0-3,5-7")), Request())
    assert masks(made) == ["0-3", "5-7"]


def test_local_set_empty_takes_the_nearest_allowed_and_warns() -> None:
    data = describe(["0-3", "4-7", "8-11"], [1], packages=[1, 0, 0], allowed_cpus="0-3,8-11")
    made = plan(convert(data), Request())
    assert masks(made) == ["8-11"]
    assert workers(made) == ["0-3,8-11"]
    assert made.warnings == (
        "local rank 0 needs CPUs 4-7, next to its GPU, but this job may use 0-3,8-11, and runs elsewhere: "
        "ask for those CPUs (cpus_per_task, or the whole node), or set binding=none",
    )


def test_a_gpu_on_a_node_without_cpus_runs_on_the_nearest_without_a_warning() -> None:
    data = describe(["0-3", "4-7", ""], [2], packages=[0, 1, 1])
    made = plan(convert(data), Request())
    assert masks(made) == ["4-7"]
    assert made.warnings == ()


def test_overlapping_localities_leave_each_as_even_as_can_be() -> None:
    # GPU nodes 2 and 3 are outside the cpuset: their nearest is node 1, or either of 0 and 1.
    data = describe(["0-3", "4-7", "8-11", "12-15"], [1, 1, 2, 2], packages=[0, 0, 1, 1], allowed_cpus="0-7")
    assert masks(plan(convert(data), Request())) == ["4-5", "6-7", "0-1", "2-3"]


def test_overlapping_localities_have_two_cores_for_each_rank_of_twenty_for_eight() -> None:
    # Nodes 6 and 7 are outside the cpuset: their GPUs are as near to node 4 as to 5, and nodes 1 and 2 idle.
    cpus = [f"{at}-{at + 3}" for at in range(0, 32, 4)]
    gpus = [6, 6, 7, 7, 4, 4, 3, 3]
    data = describe(cpus, gpus, packages=[0] * 4 + [1] * 4, allowed_cpus="4-23")
    made = plan(convert(data), Request())
    assert masks(made) == ["19", "20-21", "22", "23", "16-17", "18", "12-13", "14-15"]
    assert [len(rank.worker_cpus) for rank in made.ranks] == [2, 2, 2, 2, 2, 2, 4, 4]


def test_idle_cores_go_to_near_ranks_even_where_those_are_few() -> None:
    data = describe(["0-3", "4-7", "8-11", "12-14"], [1, 2, 2, 2], packages=[0, 0, 1, 1])
    made = plan(convert(data), Request())
    assert (masks(made)[0], workers(made)[0]) == ("4-7", "0-1,4-7")
    assert workers(made)[1:] == ["8-9,12", "3,10,13", "2,11,14"]


def test_memory_as_near_to_the_gpu_comes_before_memory_near_the_rank() -> None:
    data = describe(["0-3", "4-7", "", ""], [3], packages=[0, 1, 0, 1], allowed_mems="1-2")
    data["numa"][3]["kind"] = "gpu"
    made = plan(convert(data), Request())
    assert (masks(made), memory(made)) == (["0-3"], ["1"])


def test_memory_only_and_gpu_memory_nodes_are_no_targets() -> None:
    data = describe(["0-3", "", ""], [0])
    data["numa"][1]["kind"] = "gpu"
    data["numa"][2]["kind"] = "memory"
    made = plan(convert(data), Request())
    assert made.ranks[0].memory == Memory("preferred", frozenset({0}))


def test_memory_comes_from_the_nearest_allowed_node_with_a_warning() -> None:
    data = describe(["0-3", "4-7", "8-11"], [0], packages=[0, 1, 0], allowed_mems="1-2")
    made = plan(convert(data), Request())
    assert memory(made) == ["2"]
    assert "local rank 0 runs on NUMA node 0" in made.warnings[0]


def test_memory_is_left_alone_where_no_node_may_be_asked() -> None:
    machine = replace(convert(describe(["0-3"], [0])), allowed_mems=frozenset())
    assert plan(machine, Request()).ranks[0].memory == Memory("default")


def test_a_node_whose_memory_is_absent_prefers_the_nearest_with_memory() -> None:
    machine = convert(describe(["0-3", "4-7"], [0]))
    nodes = (replace(machine.nodes[0], memory_kib=0), machine.nodes[1])
    assert memory(plan(replace(machine, nodes=nodes), Request())) == ["1"]


def test_unknown_memory_sizes_do_not_bar_a_node() -> None:
    machine = convert(describe(["0-3", "4-7"], [1]))
    nodes = tuple(replace(node, memory_kib=0) for node in machine.nodes)
    assert memory(plan(replace(machine, nodes=nodes), Request())) == ["1"]


def test_sparse_numbers_beyond_1024() -> None:
    made = plan(convert(describe(["1000-1003", "3000-3003"], [1])), Request())
    assert masks(made) == ["3000-3003"]


def test_nodes_of_unequal_sizes_share_ranks_by_their_cores() -> None:
    made = plan(convert(describe(["0-11", "12-15", "16-23"], [-1] * 6)), Request())
    assert masks(made) == ["0-3", "4-7", "8-11", "12-15", "16-19", "20-23"]


def test_a_cache_that_spans_nodes_does_not_bind_them_together() -> None:
    machine = convert(describe(["0-5", "6-11"], [0, 0, 1, 1], packages=[0, 0]))
    spanning = replace(machine, cpus=tuple(replace(cpu, l3=0) for cpu in machine.cpus))
    made = plan(spanning, Request())
    assert (masks(made), memory(made)) == (["0-2", "3-5", "6-8", "9-11"], list("0011"))
    assert masks(plan(spanning, Request(binding="l3"))) == ["0-5", "0-5", "6-11", "6-11"]
    assert made.ranks[0].notes[0].count("its last-level cache shared with ranks 1-3") == 1


def test_distances_count_from_the_gpu_where_they_are_not_the_same_both_ways() -> None:
    machine = convert(describe(["0-3", "4-7", ""], [2], packages=[0, 1, 1]))
    table = {0: (10, 20, 12), 1: (20, 10, 40), 2: (40, 12, 10)}
    nodes = tuple(replace(node, distances=tuple(enumerate(table[node.id]))) for node in machine.nodes)
    assert masks(plan(replace(machine, nodes=nodes), Request())) == ["4-7"]


def test_idle_cores_of_a_cpuset_that_cuts_siblings() -> None:
    data = describe(["0-3,8-11", "4-7,12-15"], [0], threads={"offset": 8}, allowed_cpus="0-2,9,5,13-14")
    made = plan(convert(data), Request())
    assert (masks(made), workers(made)) == (["0-2,9"], ["0-2,5,9,13-14"])


def test_overlapping_localities_are_not_even_at_the_cost_of_those_that_have_least() -> None:
    # Two GPUs are on a node without CPUs that is as near to both others: both on node 1 would be even.
    data = describe(["0-11", "12-19", ""], [2, 2, 0], packages=[0, 0, 0])
    made = plan(convert(data), Request())
    assert sorted(len(rank.cpus) for rank in made.ranks) == [6, 6, 8]
