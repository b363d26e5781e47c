"""Ranks on NUMA nodes against every other way to assign them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from random import Random

import pytest

from launcher.plan.model import Gpu
from launcher.plan.topology import Core, Topology, assign_ranks


def make_topology(sizes: Sequence[int], homes: Sequence[Sequence[int]]) -> tuple[Topology, list[Gpu]]:
    """Nodes with these numbers of cores, and a GPU whose nearest nodes are as given for each of `homes`."""
    cores = {
        node: tuple(Core(100 * node + at, node, node, node, 1024, (100 * node + at,)) for at in range(size))
        for node, size in enumerate(sizes)
    }
    topology = Topology(cores, {core.id: core for found in cores.values() for core in found}, {})
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
