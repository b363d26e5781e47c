"""How values of a job's nodes are held against each other.

What more than half of the nodes have is taken as right; without such a majority differences are a warning of
the job as a whole, since nothing tells which of the nodes is wrong.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import NodeFacts, NodeFinding

T = TypeVar("T", bound=Hashable)


def find_majority(values: Sequence[T]) -> T | None:
    """Return the value that more than half have; None if there is none."""
    if not values:
        return None
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None


def name_nodes(nodes: Sequence[NodeFacts]) -> str:
    """Name nodes for people, a few of them."""
    names = [node.host for node in nodes]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")


def compare_nodes_by(
    nodes: Sequence[NodeFacts], read: Callable[[NodeFacts], str], label: str, alike: Finding
) -> Iterator[NodeFinding]:
    """Warn of nodes whose value differs from most others'; nodes without a value are left out.

    `alike` has the subject, the reason and the fix.
    """
    known = [node for node in nodes if read(node)]
    values = [read(node) for node in known]
    if len(set(values)) < 2:
        return
    usual = find_majority(values)
    if usual is None:
        groups = {value: name_nodes([node for node in known if read(node) == value]) for value in values}
        said = "; ".join(f"{value} on {hosts}" for value, hosts in list(groups.items())[:6])
        yield NodeFinding("", replace(alike, what=f"{label} differs: {said}"))
        return
    share = f"{values.count(usual)} of {len(known)} nodes"
    for node in known:
        if read(node) != usual:
            what = f"{label} is {read(node)}, and {usual} on {share}"
            yield NodeFinding(node.host, replace(alike, what=what))
