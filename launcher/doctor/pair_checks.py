"""Which nodes are measured together, and what that says of each.

Each node meets its two neighbours in a ring, one in each round. A bad pair does not tell which of its nodes
is at fault; the other pairs of both do: a node is sick if all of its pairs are bad and one of its partners
was good with somebody else. This is DLRover's second round, in which suspects meet good nodes, without the
wait for the first round's results. Source: DLRover,
NetworkCheckRendezvousManager in dlrover/python/master/elastic_training/rdzv_manager.py.
"""

from collections.abc import Collection, Mapping, Sequence

from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import NodeFacts, NodeFinding, WorkResult
from launcher.doctor.work_checks import (
    SHARED_SICK,
    SHARED_SLOW,
    SICK,
    WORK,
    find_shared_machines,
    list_work,
    name_places,
    show_number,
)
from launcher.text import escape_text

Pair = tuple[str, str]


def plan_pairs(hosts: Sequence[str]) -> tuple[tuple[Pair, ...], ...]:
    """Return the pairs of each round: one round for two nodes, three for an odd number, else two.

    In each pair the first node is where both meet. No node is in two pairs of a round.
    """
    count = len(hosts)
    if count < 3:
        return (((hosts[0], hosts[1]),),) if count == 2 else ()
    rounds = [tuple((hosts[at], hosts[at + 1]) for at in range(first, count - 1, 2)) for first in (0, 1)]
    last = (hosts[-1], hosts[0])
    return (*rounds, (last,)) if count % 2 else (rounds[0], (*rounds[1], last))


def name_pair(pair: Pair) -> str:
    """Return `WorkResult.where` of a pair: `n1-n2`."""
    return f"{pair[0]}-{pair[1]}"


def judge_meetings(
    hosts: Sequence[str], nodes: Sequence[NodeFacts], tolerance: float
) -> tuple[NodeFinding, ...]:
    """Return what was found between nodes; `hosts` are all of the job, `nodes` those that answered."""
    results = [one for node in nodes for one in node.work]
    with_gpus = any(one.where.startswith("GPU") for one in results)
    shared = set() if with_gpus else find_shared_machines(list_work(nodes))
    incomparable = {node.host for node in nodes if node.boot_id in shared}
    found = judge_pairs(hosts, results, tolerance, with_gpus=with_gpus, incomparable=incomparable)
    return tuple(one for one in found if one.finding.level != "ok")


def judge_pairs(
    hosts: Sequence[str],
    results: Sequence[WorkResult],
    tolerance: float,
    *,
    with_gpus: bool = False,
    incomparable: Collection[str] = (),
) -> tuple[NodeFinding, ...]:
    """Return what the pairs of `plan_pairs` say of the nodes; both nodes of a pair report it.

    A pair is bad if it failed, or is slow beside the upper quartile of all pairs: a bad node has two of them,
    half of what four nodes have. A pair of which nobody reported
    anything says nothing; those of `incomparable` hosts are not compared.
    """
    measured = group_results([pair for one in plan_pairs(hosts) for pair in one], results)
    slow, sick = (tolerance, SICK) if with_gpus else (SHARED_SLOW, SHARED_SICK)
    compared = [one for pair, one in measured.items() if not {*pair} & {*incomparable}]
    values = [value for one in compared if (value := read_pair_value(one)) is not None]
    typical = find_upper_quartile(values) if len(values) > 1 else 0.0
    levels = {
        pair: rate_pair(one, 0.0 if {*pair} & {*incomparable} else typical, slow, min(sick, slow))
        for pair, one in measured.items()
    }
    good = {host for pair, level in levels.items() if level == "ok" for host in pair}
    found, explained = [], set()
    for host in hosts:
        own = [pair for pair in levels if host in pair]
        is_bad = bool(own) and host not in good
        if is_bad and any(partner in good for pair in own for partner in pair):
            explained.update(own)
            level = "error" if any(levels[pair] == "error" for pair in own) else "warning"
            found.append(NodeFinding(host, report_node(host, own, measured, typical, level)))
    unclear = [pair for pair, level in levels.items() if level != "ok" and pair not in explained]
    found += [NodeFinding("", report_pair(pair, measured[pair], typical, levels[pair])) for pair in unclear]
    if values and not found:
        span = f"{show_number(min(values))} to {show_number(max(values))} GB/s"
        found = [NodeFinding("", Finding("ok", WORK, f"{len(values)} pairs of nodes: {span}"))]
    return tuple(found)


def find_upper_quartile(values: Sequence[float]) -> float:
    """Return a value that a quarter of them reach, rounded up."""
    return sorted(values)[min(len(values) - 1, len(values) * 3 // 4)]


def group_results(
    pairs: Sequence[Pair], results: Sequence[WorkResult]
) -> Mapping[Pair, tuple[WorkResult, ...]]:
    """Return the results of each pair that has some which say something."""
    by_name: dict[str, list[WorkResult]] = {}
    for one in results:
        if one.measure == "pair" and (one.problem or one.value is not None):
            by_name.setdefault(one.where, []).append(one)
    silent = {one.where for one in results if one.measure == "pair" and one.reason}
    names = {pair: name_pair(pair) for pair in pairs}
    return {pair: tuple(by_name[name]) for pair, name in names.items() if name in {*by_name} - silent}


def read_pair_value(results: Sequence[WorkResult]) -> float | None:
    """Return a pair's bandwidth; None if it failed."""
    values = [one.value for one in results if one.value is not None]
    return None if any(one.problem for one in results) or not values else min(values)


def rate_pair(results: Sequence[WorkResult], typical: float, slow: float, sick: float) -> str:
    """Return a pair's level: `error`, `warning` or `ok`."""
    value = read_pair_value(results)
    if value is None or value < sick * typical:
        return "error"
    return "warning" if value < slow * typical else "ok"


def describe_pair(results: Sequence[WorkResult], typical: float) -> str:
    """Say how a pair was."""
    value = read_pair_value(results)
    if value is not None:
        return f"{show_number(value)} GB/s beside {show_number(typical)} in the better pairs"
    problem = next(one.problem for one in results if one.problem)
    return f"failed ({escape_text(problem, 200)})"


def report_node(
    host: str, own: Sequence[Pair], measured: Mapping[Pair, Sequence[WorkResult]], typical: float, level: str
) -> Finding:
    """A node all of whose pairs are bad, with partners that were good with others."""
    partners = name_places(partner for pair in own for partner in pair if partner != host)
    return Finding(
        level,
        WORK,
        f"all_reduce with {partners}: {describe_pair(measured[own[0]], typical)}; they do well with others",
        "every step waits for the slowest link",
        f"look at the node's network (links, cables, switch port); leave it out by cluster.exclude={host}",
    )


def report_pair(pair: Pair, results: Sequence[WorkResult], typical: float, level: str) -> Finding:
    """A bad pair of which it is not known which node is at fault: nobody is left out for it."""
    return Finding(
        level,
        WORK,
        f"all_reduce between {pair[0]} and {pair[1]}: {describe_pair(results, typical)}",
        "the program's collectives would fail or be slow between them; which node is at fault is not known",
        "look at the network between them (firewall, routes, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)",
    )
