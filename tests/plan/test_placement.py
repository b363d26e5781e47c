"""What plans have on machines of all shapes: cases in TOML, the lab's score, all ways to assign ranks."""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.plan.model import Gpu, Plan, plan_to_json
from launcher.plan.planner import plan
from launcher.plan.topology import Core, Topology, assign_ranks

from .lab_machines import (
    NAMES,
    Data,
    ask,
    convert,
    describe_machine,
    describe_overlap,
    load,
    make_machine,
    masks,
    memory,
    score,
    workers,
)

FOLDER = Path(__file__).parent
NUMBER = re.compile(r"\d[\d,.-]*(?<=\d)")


def read_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = tomllib.loads((FOLDER / name).read_text())["case"]
    return cases


def list_rows() -> Iterator[Any]:
    for case in read_cases("settings.toml"):
        for number, (request, expected) in enumerate(case["rows"]):
            yield pytest.param(case["machine"], request, expected, id=f"{case['name']} {number}")


@pytest.mark.parametrize("case", read_cases("placements.toml"), ids=lambda case: case["name"])
def test_placement(case: dict[str, Any]) -> None:
    made = plan(make_machine(case["machine"]), ask(**case.get("request", {})))
    assert masks(made) == case["cpus"]
    assert workers(made) == case.get("workers", case["cpus"])
    assert memory(made) == case["memory"]
    assert [rank.num_workers for rank in made.ranks] == case["num_workers"]
    assert [rank.omp_num_threads for rank in made.ranks] == case["threads"]
    gpus = [rank.gpu.index for rank in made.ranks if rank.gpu]
    assert gpus == case.get("gpus", list(range(len(gpus))))
    assert [NUMBER.findall(str(warning)) for warning in made.warnings] == case.get("warnings", [])


@pytest.mark.parametrize(("machine", "request_", "expected"), [*list_rows()])
def test_settings(machine: Any, request_: dict[str, Any], expected: dict[str, Any]) -> None:
    try:
        made = plan(make_machine(machine), ask(**request_))
    except LaunchError as error:
        assert expected["error"] in str(error)
        return
    found = read_plan(made, expected.get("rank", 0))
    for key, value in expected.items():
        match key:
            case "rank":
                continue
            case "env" | "variables":
                assert {name: found[key].get(name) for name in value} == value
            case "unset":
                assert not found["env"].keys() & set(value)
            case "says":
                assert [text for text in value if text not in found["notes"]] == []
            case "silent":
                assert [text for text in value if text in found["notes"]] == []
            case "warned":
                assert len(found["warnings"]) == len(value), found["warnings"]
                for text, warning in zip(value, found["warnings"], strict=True):
                    assert text in warning
            case _:
                assert found[key] == value, key


def read_plan(made: Plan, number: int) -> dict[str, Any]:
    """What cases may hold of a plan: of all ranks, and of one."""
    rank = made.ranks[number]
    gpus = [rank.gpu for rank in made.ranks if rank.gpu]
    return {
        "cpus": masks(made),
        "workers": workers(made),
        "memory": memory(made),
        "policy": rank.memory.policy,
        "num_workers": [rank.num_workers for rank in made.ranks],
        "threads": [rank.omp_num_threads for rank in made.ranks],
        "gpus": [gpu.index for gpu in gpus],
        "uuids": [gpu.uuid for gpu in gpus],
        "nics": [rank.nic or "" for rank in made.ranks],
        "env": dict(rank.env),
        "all_env": dict(rank.env),
        "variables": {item.name: [item.value, item.source, item.why] for item in rank.variables},
        "why": rank.notes[0].split("; "),
        "notes": "\n".join(rank.notes),
        "warnings": list(map(str, made.warnings)),
    }


def find_shorts(data: Data, made: Plan) -> set[str]:
    """Measures that miss their bound."""
    result = score.score(data, plan_to_json(made))
    return {name for name, pair in result.items() if not score.holds({name: pair})}


@pytest.mark.parametrize("name", NAMES)
def test_every_measure_of_the_lab_holds(name: str) -> None:
    data = load(name)
    made = plan(convert(data), ask(len(data.get("gpus", [])) or 4))
    assert find_shorts(data, made) == set()


def test_the_score_sees_a_bad_plan() -> None:
    data = load("dgx-a100")
    made = plan(convert(data), ask(8, binding="numa"))
    assert {"EXC", "SMT", "BAL", "L3", "IDLE"} >= find_shorts(data, made) >= {"EXC", "IDLE"}


@pytest.mark.parametrize("describe", [describe_machine, describe_overlap])
@pytest.mark.parametrize("seed", range(200))
def test_random_machines_reach_every_bound(seed: int, describe: Callable[[Random], Data]) -> None:
    random = Random(seed)
    data = describe(random)
    machine = convert(data)
    ranks = (
        random.randint(1, 20) if random.random() < 0.3 else len(machine.gpus) or random.choice([1, 2, 4, 8])
    )
    assert find_shorts(data, plan(machine, ask(ranks))) == set()


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


def test_who_leaves_home() -> None:
    topology, gpus = make_topology([1, 8], [[0], [0], [0]])
    assert assign_ranks(topology, gpus, each=0).nodes == (0, 0, 0), "ranks share cores"
    assert assign_ranks(topology, gpus, each=4).nodes == (0, 1, 1)
    topology, gpus = make_topology([1, 2, 8], [[0], [0]])
    assert assign_ranks(topology, gpus, each=4).nodes == (0, 2), "cores enough count before the order"
    # Ranks near nodes 0 and 1 fill node 0 first, and ranks near 1 and 2 node 1: one moves on to make room.
    topology, gpus = make_topology([1, 1, 2], [[0, 1], [1, 2], [1, 2], [0, 1]])
    nodes = assign_ranks(topology, gpus, each=1).nodes
    assert sorted(nodes[at] for at in (0, 3)) == [0, 1] and [nodes[1], nodes[2]] == [2, 2]
