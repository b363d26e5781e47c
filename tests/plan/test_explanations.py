"""The sentence that says why a rank runs where it does."""

from dataclasses import replace

import pytest

from launcher.cpulist import format_cpulist
from launcher.plan.model import Plan, Request
from launcher.plan.planner import plan
from launcher.plan.usable_cores import build_topology

from .lab_machines import NAMES, convert, describe, load
from .test_crowds import make_hybrid


def tell(made: Plan, rank: int = 0) -> list[str]:
    return made.ranks[rank].notes[0].split("; ")


def test_a_gpu_next_to_its_node() -> None:
    assert tell(plan(convert(load("dgx-a100")), Request())) == [
        "GPU 0 (0000:07:00.0) is on NUMA node 3",
        "it has 8 of the node's 16 usable cores, as one of 2 ranks there, "
        "with 2 last-level caches of its own",
        "its workers also have 8 cores of node 2 (distance 12), where no rank runs",
        "memory from node 3",
    ]


def test_a_rank_that_has_its_node_for_itself() -> None:
    cores = tell(plan(convert(load("gh200")), Request()))[1]
    assert cores == "it has all the node's 72 usable cores, with 1 last-level cache of its own"


def test_caches_that_are_split() -> None:
    assert tell(plan(convert(load("dgx-h100")), Request()), 5)[1].endswith(
        ", its last-level cache shared with ranks 4,6-7"
    )
    assert tell(plan(convert(load("a100-nosmt")), Request()), 2)[1].endswith(
        ", 1 of its 2 last-level caches shared with rank 3"
    )


@pytest.mark.parametrize(
    ("gpus", "more", "expected"),
    [
        (
            [-1, -1],
            {},
            "the firmware names no NUMA node for GPU 0 (0000:00:00.0), "
            "so ranks are spread over the NUMA nodes by their cores, this one on node 0",
        ),
        (
            [-1],
            {"allowed_cpus": "0-3"},
            "the firmware names no NUMA node for GPU 0 (0000:00:00.0), "
            "and all CPUs for this job are on node 0",
        ),
        (
            [2],
            {"packages": [0, 1, 1]},
            "GPU 0 (0000:00:00.0) is on NUMA node 2, which has no CPUs: nearest is node 1 (distance 12)",
        ),
        (
            [1],
            {"allowed_cpus": "0-3"},
            "GPU 0 (0000:00:00.0) is on NUMA node 1, whose CPUs are not for this job: nearest is node 0 "
            "(distance 32)",
        ),
        (
            [2, 2],
            {"packages": [0, 0, 1]},
            "GPU 0 (0000:00:00.0) is on NUMA node 2, which has no CPUs: nearest are nodes 0-1 (distance 32), "
            "this rank on node 0",
        ),
        ([], {}, "no GPU, so ranks are spread over the NUMA nodes by their cores, this one on node 0"),
    ],
)
def test_why_this_node(gpus: list[int], more: dict[str, object], expected: str) -> None:
    data = describe(["0-3", "4-7", ""], gpus, **{"distance": [12, 32], **more})
    assert tell(plan(convert(data), Request()))[0] == expected


def test_local_cpus_that_know_better() -> None:
    machine = convert(describe(["0-3", "4-7"], [-1]))
    gpus = (replace(machine.gpus[0], local_cpus=frozenset({4, 5})),)
    assert tell(plan(replace(machine, gpus=gpus), Request()))[0] == (
        "the firmware names no NUMA node for GPU 0 (0000:00:00.0), but its local CPUs are on node 1"
    )


def test_a_hybrid_machine() -> None:
    made = plan(make_hybrid(8, 16), Request(2))
    assert tell(made)[1:3] == [
        "it has 4 of the node's 24 usable cores, as one of 2 ranks there, "
        "its last-level cache shared with rank 1",
        "its workers also have 8 less capable cores of the node",
    ]
    assert tell(plan(make_hybrid(8, 16), Request(1)))[1].startswith(
        "it has the 8 most capable of the node's 24 usable cores, "
    )


def test_more_ranks_than_cores() -> None:
    made = plan(convert(describe(["0-3"], [0, 0, 0], threads={"offset": 2})), Request())
    assert tell(made)[1].startswith("the node has 2 usable cores for 3 ranks, of which it has CPUs 0,2, ")


@pytest.mark.parametrize(
    ("more", "kind", "expected"),
    [
        ({"allowed_mems": "1"}, "normal", "memory from node 1, since that of node 0 is not for this job"),
        ({}, "gpu", "memory from node 1, since node 0 has none"),
        (
            {"allowed_mems": ""},
            "normal",
            "memory wherever the kernel finds it, since that of node 0 is not for this job",
        ),
    ],
)
def test_memory_from_elsewhere(more: dict[str, str], kind: str, expected: str) -> None:
    data = describe(["0-3", "4-7"], [0], **more)
    data["numa"][0]["kind"] = kind
    assert tell(plan(convert(data), Request()))[-1] == expected


@pytest.mark.parametrize(
    ("binding", "cores", "memory"),
    [
        ("numa", "it has all of NUMA node 0, shared by 4 ranks", "memory from node 0"),
        ("socket", "it has all of package 0, shared by 4 ranks", "memory from node 0"),
        (
            "l3",
            "it has the last-level cache of NUMA node 0, shared by 4 ranks",
            "memory from node 0",
        ),
        (
            "none",
            "it has all CPUs for this job, since no binding was asked for, shared by 8 ranks",
            "no memory policy",
        ),
    ],
)
def test_bindings_that_share(binding: str, cores: str, memory: str) -> None:
    made = plan(convert(load("dgx-h100")), Request(binding=binding))
    assert tell(made)[0] == "GPU 0 (0000:1b:00.0) is on NUMA node 0"
    assert tell(made)[1:] == [cores, memory]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_cores_is_so(name: str) -> None:
    machine = convert(load(name))
    made = plan(machine, Request(len(machine.gpus) or 4))
    cpus = {cpu.id: cpu for cpu in machine.cpus}
    caches = [{cpus[pu].l3 for pu in rank.cpus} for rank in made.ranks]
    for rank, own in zip(made.ranks, caches, strict=True):
        sentence = rank.notes[0]
        (node,) = {cpus[pu].node for pu in rank.cpus}
        peers = [other for other in made.ranks if {cpus[pu].node for pu in other.cpus} == {node}]
        assert f"NUMA node {node}" in sentence or f"node {node};" in sentence or f"node {node} (" in sentence
        assert (f"one of {len(peers)} ranks there" in sentence) == (len(peers) > 1)
        shared = any(own & other for at, other in enumerate(caches) if at != rank.local_rank)
        assert ("shared with rank" in sentence) == shared
        lent = {cpus[pu].node for pu in rank.worker_cpus - rank.cpus}
        assert ("its workers also have" in sentence) == bool(lent)
        assert all(f"of node {other} (distance" in sentence for other in lent)
        busy = {other for other in lent if any(cpus[pu].node == other for r in made.ranks for pu in r.cpus)}
        assert ("which ranks there can spare" in sentence) == bool(busy)
        assert ("where no rank runs" in sentence) == bool(lent - busy)
        guests = {
            other.local_rank
            for other in made.ranks
            if other not in peers and any(cpus[pu].node == node for pu in other.worker_cpus)
        }
        assert (f"workers of ranks {format_cpulist(guests)} have" in sentence) == bool(guests)
        (target,) = rank.memory.nodes
        assert f"memory from node {target}" in sentence
        home = build_topology(machine).find_local_nodes(rank.gpu)
        assert target in home and (target == node or node not in home)


def test_a_rank_that_has_no_core_next_to_its_gpu() -> None:
    made = plan(convert(load("slurm-30plus2")), Request())
    assert tell(made, 6) == [
        "GPU 6 (0000:67:00.0) is nearest to node 1, whose 2 usable cores other ranks have: this one is on "
        "node 0 (distance 21)",
        "it has 4 of the node's 30 usable cores, as one of 6 ranks there, "
        "its last-level cache shared with ranks 0-3,7",
        "workers of ranks 4-5 have 6 cores of the node",
        "memory from node 1, next to its GPU",
    ]
    assert tell(made, 5)[1:] == [
        "it has 1 of the node's 2 usable cores, as one of 2 ranks there, "
        "its last-level cache shared with rank 4",
        "its workers also have 3 cores of node 0 (distance 21), which ranks there can spare",
        "memory from node 1",
    ]


def test_a_rank_that_gives_cores_away() -> None:
    assert tell(plan(convert(load("workstation-1plus4")), Request()))[1:3] == [
        "it has 4 of the node's 8 usable cores, with 1 last-level cache of its own",
        "workers of ranks 1-4 have 4 cores of the node",
    ]
