"""Ranks on NUMA nodes against every other way to assign them; what ranks with few cores get from others."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from random import Random

import pytest

from launcher.errors import MachineError
from launcher.plan.model import Gpu, Plan, Request
from launcher.plan.numa_assignment import assign_ranks
from launcher.plan.planner import plan
from launcher.plan.usable_cores import Core, Topology

from .lab_machines import convert, describe, load, masks, memory, workers


def make_topology(sizes: Sequence[int], homes: Sequence[Sequence[int]]) -> tuple[Topology, list[Gpu]]:
    """Nodes with these numbers of cores, and a GPU whose nearest nodes are as given for each of `homes`."""
    cores = {
        node: tuple(Core(100 * node + at, node, node, node, 1024, (100 * node + at,)) for at in range(size))
        for node, size in enumerate(sizes)
    }
    topology = Topology(cores, {core.id: core.id for found in cores.values() for core in found}, {})
    gpus = [Gpu(at, "", "", None, frozenset(100 * node for node in home)) for at, home in enumerate(homes)]
    return topology, gpus


def list_loads(sizes: Sequence[int], homes: Sequence[Sequence[int]]) -> Iterator[Counter[int]]:
    """Ranks on each node, in every way that gives each rank a core at home."""
    counts = Counter(tuple(home) for home in homes)
    ways = (combinations_with_replacement(home, ranks) for home, ranks in counts.items())
    for chosen in product(*ways):
        load = Counter(node for nodes in chosen for node in nodes)
        if all(ranks <= sizes[node] for node, ranks in load.items()):
            yield load


def find_least(sizes: Sequence[int], load: Counter[int]) -> int:
    """Cores of the rank that has fewest."""
    return min(sizes[node] // ranks for node, ranks in load.items())


@pytest.mark.parametrize("seed", range(150))
def test_no_other_assignment_leaves_the_poorest_rank_more_of_what_it_should_have(seed: int) -> None:
    random = Random(seed)
    sizes = [random.choice([1, 2, 3, 4, 6, 8, 12]) for _ in range(random.randint(2, 4))]
    nodes = range(len(sizes))
    kinds = [sorted(random.sample(nodes, random.randint(1, len(sizes)))) for _ in range(3)]
    # A locality that shares no node has to be even first, and is judged by the score.
    kinds += [sorted({*kinds[0][:1], *kinds[1]})]
    homes = [random.choice(kinds) for _ in range(random.randint(2, 8))]
    topology, gpus = make_topology(sizes, homes)
    made = assign_ranks(topology, gpus, each=4)
    loads = list(list_loads(sizes, homes))
    at_home = all(node in home for node, home in zip(made.nodes, homes, strict=True))
    assert at_home == (bool(loads) or sum(sizes) < len(homes))
    if loads and len({node for home in homes for node in home}) < sum(map(len, set(map(tuple, homes)))):
        best = max(find_least(sizes, load) for load in loads)
        assert min(made.goal, find_least(sizes, Counter(made.nodes))) == min(made.goal, best)


def test_ranks_that_share_cores_stay_at_home() -> None:
    topology, gpus = make_topology([1, 8], [[0], [0], [0]])
    assert assign_ranks(topology, gpus, each=0).nodes == (0, 0, 0)
    assert assign_ranks(topology, gpus, each=4).nodes == (0, 1, 1)


def test_a_rank_moves_on_to_make_room_for_one_that_has_no_choice() -> None:
    # Ranks near nodes 0 and 1 fill node 0 first, and ranks near 1 and 2 node 1.
    topology, gpus = make_topology([1, 1, 2], [[0, 1], [1, 2], [1, 2], [0, 1]])
    nodes = assign_ranks(topology, gpus, each=1).nodes
    assert sorted(nodes[at] for at in (0, 3)) == [0, 1]
    assert [nodes[1], nodes[2]] == [2, 2]


def count_cores(made: Plan) -> list[int]:
    """Cores of each rank and its workers."""
    core_of = {cpu.id: cpu.core for cpu in made.machine.cpus}
    return [len({core_of[cpu] for cpu in rank.worker_cpus}) for rank in made.ranks]


def test_a_job_with_two_cores_at_one_socket_has_four_for_each_of_eight_ranks() -> None:
    made = plan(convert(load("slurm-30plus2")), Request())
    assert masks(made) == ["0-3", "5-8", "10-13", "15-18", "56", "57", "20-23", "25-28"]
    assert workers(made)[4:6] == ["4,9,14,56", "19,24,29,57"]
    assert (count_cores(made), memory(made)) == ([4] * 8, list("00001111"))
    assert [(rank.num_workers, rank.omp_num_threads) for rank in made.ranks[3:6]] == [(2, 2), (2, 1), (2, 1)]
    assert made.warnings == (
        "local rank 4-7 has 2 usable cores next to its GPUs, on NUMA node 1, 0.5 for each where other ranks "
        "have 7.5 next to theirs, so local rank 6-7 runs on NUMA node 0, and workers of local rank 4-5 also "
        "run on NUMA node 0: ask for more CPUs of NUMA node 1 (cpus_per_task, or the whole node)",
    )


def test_a_rank_that_is_near_to_all_nodes_leaves_the_crowded_one() -> None:
    made = plan(convert(load("levelled-down")), Request())
    assert masks(made) == ["0-10", "16-17", "18"]
    assert workers(made) == ["0-10", "11-12,16-17", "13-15,18"]
    assert "workers of local rank 1-2 also run on NUMA node 0: ask for more CPUs" in made.warnings[0]


def test_a_workstation_with_four_gpus_at_one_socket_shares_the_others_cores() -> None:
    made = plan(convert(load("workstation-1plus4")), Request())
    assert count_cores(made) == [4, 3, 3, 3, 3]
    assert "local rank 1-4 has 8 usable cores next to its GPUs, on NUMA node 0" in made.warnings[0]
    assert made.warnings[0].endswith(
        ": start fewer ranks (nproc_per_node, with devices=spread), or spread the GPUs' slots over the nodes"
    )


def test_what_workers_ask_for_is_what_ranks_are_levelled_to() -> None:
    machine = convert(describe(["0-15", "16-31"], [0, 1, 1]))
    assert count_cores(plan(machine, Request(num_workers=2))) == [16, 8, 8]
    assert count_cores(plan(machine, Request(num_workers=8))) == [12, 10, 10]
    environ = (("LAUNCH_NUM_WORKERS", "7"),)
    assert count_cores(plan(machine, Request(environ=environ))) == [14, 9, 9]
    made = plan(machine, Request(num_workers=8))
    assert [rank.num_workers for rank in made.ranks] == [8, 8, 8]


def test_bindings_that_share_are_left_as_they_are_asked_for() -> None:
    made = plan(convert(load("slurm-30plus2")), Request(binding="numa"))
    assert masks(made) == ["0-29"] * 4 + ["56-57"] * 4
    assert made.warnings == ()


def test_idle_cores_are_taken_before_those_that_ranks_run_on() -> None:
    # Node 2 is idle and lends to node 3, as near as it: two for each of its ranks.
    data = describe(["0-1", "2-9", "10-13", "14-17"], [0, 0, 1, 3, 3], packages=[0, 0, 1, 1])
    made = plan(convert(data), Request(5))
    assert masks(made)[2:] == ["2-7", "14-15", "16-17"]
    assert count_cores(made) == [3, 3, 6, 3, 3]


def test_strict_refuses_uneven_cores() -> None:
    with pytest.raises(MachineError, match="has 2 usable cores next to its GPUs"):
        plan(convert(load("slurm-30plus2")), Request(strict=True))


def test_ranks_with_cores_enough_are_not_warned_of() -> None:
    assert plan(convert(describe(["0-15", "16-31"], [0, 1, 1, 1, 1])), Request()).warnings == ()
    assert plan(convert(describe(["0-4", "5-11"], [0, 1, 1])), Request()).warnings == ()
