"""The bindings that give ranks a part of the machine as it is, which they may share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.assign import Assignment
from launcher.plan.usable_cores import Core, Topology, gather_pus


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank and its DataLoader workers run."""

    node: int | None
    """NUMA node whose memory the rank should have; None for no preference."""
    cpus: frozenset[int]
    worker_cpus: frozenset[int]
    why: str = ""
    """What they are, for people; `exclusive` tells more than a place knows."""


def place_numa(topology: Topology, assignment: Assignment) -> dict[int, Placement]:
    """All usable CPUs of each rank's NUMA node."""
    groups = group_pus(topology, lambda core: core.node)
    return {
        rank: Placement(node, groups[node], groups[node], f"all of NUMA node {node}")
        for rank, node in enumerate(assignment.nodes)
    }


def place_socket(topology: Topology, assignment: Assignment) -> dict[int, Placement]:
    """All usable CPUs of the package that each rank's NUMA node is in."""
    groups = group_pus(topology, lambda core: core.package)
    places = {}
    for rank, node in enumerate(assignment.nodes):
        package = topology.cores[node][0].package
        places[rank] = Placement(node, groups[package], groups[package], f"all of package {package}")
    return places


def place_l3(topology: Topology, assignment: Assignment) -> dict[int, Placement]:
    """One last-level cache for each rank; a node's ranks take its caches in turn, the largest first.

    A cache that spans NUMA nodes counts as one for each of them.
    """
    caches = {node: list_caches(cores) for node, cores in topology.cores.items()}
    turns = dict.fromkeys(caches, 0)
    places = {}
    for rank in assignment.order:
        node = assignment.nodes[rank]
        mask = caches[node][turns[node] % len(caches[node])]
        turns[node] += 1
        what = (
            f"one of the {len(caches[node])} last-level caches"
            if caches[node][1:]
            else "the last-level cache"
        )
        why = f"{what} of NUMA node {node}"
        places[rank] = Placement(node, mask, mask, why)
    return places


def list_caches(cores: Sequence[Core]) -> list[frozenset[int]]:
    """Usable PUs under each last-level cache, the largest group first."""
    groups: dict[int, list[Core]] = {}
    for core in cores:
        groups.setdefault(core.l3, []).append(core)
    return [gather_pus(group) for group in sorted(groups.values(), key=len, reverse=True)]


def place_none(topology: Topology, assignment: Assignment) -> dict[int, Placement]:
    """Every usable CPU, and no memory policy."""
    every = frozenset(topology.core_of)
    why = "all CPUs for this job, since no binding was asked for"
    return {rank: Placement(None, every, every, why) for rank in assignment.order}


def group_pus(topology: Topology, key_of: Callable[[Core], int]) -> Mapping[int, frozenset[int]]:
    """Usable PUs by a property of their cores."""
    groups: dict[int, list[Core]] = {}
    for cores in topology.cores.values():
        for core in cores:
            groups.setdefault(key_of(core), []).append(core)
    return {key: gather_pus(cores) for key, cores in groups.items()}
