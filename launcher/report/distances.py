"""The distances between NUMA nodes, as a matrix with a row for those that are alike."""

from collections.abc import Mapping, Sequence

from launcher.cpulist import format_cpulist
from launcher.plan.model import NumaNode

Distances = Mapping[tuple[int, int], int]
MOST_GROUPS = 16
"""Rows of the largest matrix that fits 80 columns."""


def describe_distances(nodes: Sequence[NumaNode]) -> list[str]:
    """The lines of the matrix; a sentence where all nodes are as far from each other, none for one node.

    Nodes are alike when each is as far from any third one as the others, as those of a package often are;
    where a row meets its own column, the distance is that within the group.
    """
    far = {(node.id, other.id): node.distance(other.id) for node in nodes for other in nodes}
    if len(nodes) < 2:
        return []
    groups = group_nodes([node.id for node in nodes], far)
    if len(groups) == 1:
        first, second, *_ = groups[0]
        return [f"{far[first, first]} within a NUMA node, {far[first, second]} between nodes"]
    if len(groups) > MOST_GROUPS:
        return [f"{min_max(far)}, without order: format=json has them all"]
    names = [format_cpulist(frozenset(group)) for group in groups]
    rows = [["nodes", *names]]
    for name, group in zip(names, groups, strict=True):
        rows.append([name, *(str(far[group[0], other[-1]]) for other in groups)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def min_max(far: Distances) -> str:
    """The range of the distances between different nodes."""
    apart = [distance for (a, b), distance in far.items() if a != b]
    return f"{min(apart)} to {max(apart)} between nodes"


def group_nodes(ids: Sequence[int], far: Distances) -> list[list[int]]:
    """Put alike nodes together, in the order of the first of each group."""
    groups: list[list[int]] = []
    for node in ids:
        home = next((group for group in groups if all(alike(node, other, ids, far) for other in group)), None)
        if home is None:
            groups.append([node])
        else:
            home.append(node)
    return groups


def alike(a: int, b: int, ids: Sequence[int], far: Distances) -> bool:
    """Tell whether two nodes are as far from every third one, both ways, and from each other."""
    return (
        far[a, a] == far[b, b]
        and far[a, b] == far[b, a]
        and all(
            far[a, other] == far[b, other] and far[other, a] == far[other, b]
            for other in ids
            if other not in (a, b)
        )
    )
