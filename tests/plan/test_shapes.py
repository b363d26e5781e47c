"""Shapes that training jobs meet, each with the masks that are right for it."""

from dataclasses import replace

from launcher.plan.model import Memory, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe, masks, memory


def test_gpus_without_a_node_use_narrow_local_cpus() -> None:
    machine = convert(describe(["0-7", "8-15"], [-1, -1]))
    gpus = tuple(replace(gpu, local_cpus=frozenset(range(8, 16))) for gpu in machine.gpus)
    assert masks(plan(replace(machine, gpus=gpus), Request())) == ["8-11", "12-15"]


def test_a_node_that_the_firmware_does_not_list_is_like_none() -> None:
    machine = convert(describe(["0-7", "8-15"], [0, 1]))
    gpus = tuple(replace(gpu, node=9, local_cpus=frozenset()) for gpu in machine.gpus)
    assert masks(plan(replace(machine, gpus=gpus), Request())) == ["0-7", "8-15"]


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
