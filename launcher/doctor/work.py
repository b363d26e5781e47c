"""Judges the measured work of a job's nodes: what failed, computed other bits, or is slow beside the others.

What a device should reach is what the median of the job's other devices of the same kind reaches. CPUs are
judged more generously than GPUs: other processes use them for moments.

Each node also meets its two neighbours in a ring, one in each round. A bad pair does not tell which of its
nodes is at fault; the other pairs of both do: a node is sick if all of its pairs are bad and one of its
partners was good with somebody else. This is DLRover's second round, in which suspects meet good nodes,
without the wait for the first round's results. Source: DLRover, NetworkCheckRendezvousManager in
dlrover/python/master/elastic_training/rdzv_manager.py.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from launcher.doctor.model import Facts, Finding, found
from launcher.programs.measurement import Measurement

NAMES = {
    "matmul": "matrix product",
    "copy_to": "copies to the GPU",
    "copy_from": "copies from the GPU",
    "memory": "memory bandwidth",
    "all_reduce": "all_reduce in the node",
}
"""Measures of a node; others are left out."""
SICK = 0.8
"""Share of the others' median below which a GPU makes its node sick."""
CPU_SLOW, CPU_SICK = 0.75, 0.6
"""The same for the matrix product of a node's CPUs, which others may use for moments."""
SHARED_SLOW, SHARED_SICK = 0.6, 0.4
"""The same for the memory of a node's CPUs, and for the network between two nodes without GPUs."""
ONE_MACHINE = 0.5
"""By which the shares are multiplied for nodes that are one machine: they disturb each other."""
Pair = tuple[str, str]
Work = tuple[Facts, Measurement]
"""A result and its node."""


def judge_work(nodes: Sequence[Facts], tolerance: float) -> Iterator[Finding]:
    """Give what the measured work of a job's nodes says of them.

    `tolerance` is the share of the others' median below which a GPU is slow, in (0, 1].
    """
    work = [(node, one) for node in nodes for one in node.work if one.measure in NAMES]
    for node, one in work:
        if one.problem:
            values = {"place": one.where, "work": NAMES[one.measure]}
            yield found("work.failed", "error", node.host, **values, problem=one.problem)
    yield from _compare_checksums(work)
    yield from _compare_speeds(work, find_shared_machines(nodes), tolerance)
    missed: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for node, one in work:
        if one.reason:
            missed[node.host, one.reason][NAMES[one.measure]] = None
    for (host, reason), names in missed.items():
        yield found("work.not_measured", "unknown", host, work=tuple(names), reason=reason)


def uses_gpus(nodes: Sequence[Facts]) -> bool:
    """Tell whether work was done by GPUs."""
    return any(one.where.startswith("GPU ") for node in nodes for one in node.work)


def find_shared_machines(nodes: Sequence[Facts]) -> set[str]:
    """Return the boot IDs that several nodes have: these are one machine."""
    hosts = {(node.boot_id, node.host) for node in nodes if node.boot_id and node.work}
    return {boot for boot, count in Counter(boot for boot, _ in hosts).items() if count > 1}


def _compare_checksums(work: Sequence[Work]) -> Iterator[Finding]:
    """Devices whose results have other bits than most of the others of their kind, size and torch."""
    groups: defaultdict[tuple[str, ...], list[Work]] = defaultdict(list)
    for node, one in work:
        if one.checksum:
            size = one.checksum.partition(":")[0]
            groups[one.measure, one.device, node.torch, size].append((node, one))
    for (measure, *_), group in groups.items():
        usual, count = Counter(one.checksum for _, one in group).most_common(1)[0]
        different = [(node.host, one.where) for node, one in group if one.checksum != usual]
        if different and count * 2 <= len(group):
            places = tuple(f"{node.host} {one.where}" for node, one in group)
            yield found("work.bits_differ", "warning", places=places, work=NAMES[measure])
            continue
        for host in dict.fromkeys(host for host, _ in different):
            places = tuple(dict.fromkeys(where for other, where in different if other == host))
            yield found("work.wrong_bits", "error", host, places=places, work=NAMES[measure], equal=count)


def _compare_speeds(work: Sequence[Work], shared: set[str], tolerance: float) -> Iterator[Finding]:
    """Devices that are slow beside the others of their kind, those of a node, measure and level together."""
    groups: defaultdict[tuple[str, str], list[tuple[float, Facts, Measurement]]] = defaultdict(list)
    for node, one in work:
        if one.value is not None:
            groups[one.measure, one.device].append((one.value, node, one))
    slow: defaultdict[tuple[str, str, str], list[tuple[float, float, Measurement]]] = defaultdict(list)
    for (measure, _), group in groups.items():
        speeds = sorted(value for value, _, _ in group)
        for value, node, one in group if len(group) > 1 else ():
            typical = _find_median_of_others(speeds, value)
            share = value / typical if typical > 0 else 1.0
            warned, sick = tolerance, SICK
            if one.where == "CPU":
                warned, sick = (CPU_SLOW, CPU_SICK) if measure == "matmul" else (SHARED_SLOW, SHARED_SICK)
            factor = ONE_MACHINE if node.boot_id in shared else 1.0
            if share < factor * min(warned, tolerance):
                level = "error" if share < factor * min(sick, tolerance) else "warning"
                slow[node.host, measure, level].append((share, typical, one))
    for (host, measure, level), own in slow.items():
        share, typical, worst = min(own, key=lambda entry: entry[0])
        rule = "work.slow_cpu" if worst.where == "CPU" else "work.slow_gpu"
        places = tuple(dict.fromkeys(one.where for _, _, one in own))
        values = {"value": worst.value, "unit": worst.unit, "share": share, "typical": typical}
        yield found(rule, level, host, places=places, work=NAMES[measure], **values)


def _find_median_of_others(values: Sequence[float], value: float) -> float:
    """Return the median of sorted values, one of which is left out; there are two at least."""
    left_out, count = bisect_left(values, value), len(values) - 1
    middle = ((count - 1) // 2, count // 2)
    low, high = (values[at + (at >= left_out)] for at in middle)
    return (low + high) / 2


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
    """Return `Measurement.where` of a pair: `n1-n2`."""
    return f"{pair[0]}-{pair[1]}"


def judge_pairs(hosts: Sequence[str], nodes: Sequence[Facts], tolerance: float) -> Iterator[Finding]:
    """Give what the pairs of `plan_pairs` say of the nodes; both nodes of a pair report it.

    `hosts` are all of the job, `nodes` those that answered. A pair is bad if it failed, or is slow beside the
    upper quartile of all pairs: a bad node has two of them, half of what four nodes have. A pair of which
    nobody reported anything says nothing. Nodes without GPUs that are one machine are not compared.
    """
    slow, sick = (tolerance, min(SICK, tolerance)) if uses_gpus(nodes) else (SHARED_SLOW, SHARED_SICK)
    shared = set() if uses_gpus(nodes) else find_shared_machines(nodes)
    incomparable = {node.host for node in nodes if node.boot_id in shared}
    results = [one for node in nodes for one in node.work if one.measure == "pair"]
    measured: dict[Pair, tuple[float, str]] = {}
    for pair in chain.from_iterable(plan_pairs(hosts)):
        own = [one for one in results if one.where == name_pair(pair)]
        problem = next((one.problem for one in own if one.problem), "")
        values = [one.value for one in own if one.value is not None]
        if (problem or values) and not any(one.reason for one in own):
            measured[pair] = 0.0 if problem else min(values), problem
    compared = sorted(
        value for pair, (value, problem) in measured.items() if not problem and incomparable.isdisjoint(pair)
    )
    typical = compared[min(len(compared) - 1, len(compared) * 3 // 4)] if len(compared) > 1 else 0.0
    levels, states = {}, {}
    for pair, (value, problem) in measured.items():
        is_compared = not problem and typical and incomparable.isdisjoint(pair)
        share = value / typical if is_compared else float(not problem)
        levels[pair] = "error" if share < sick else "warning" if share < slow else "ok"
        speed = f"{value:.3g} GB/s beside {typical:.3g} in the better pairs"
        states[pair] = f"failed ({problem})" if problem else speed
    good = {host for pair, level in levels.items() if level == "ok" for host in pair}
    explained: set[Pair] = set()
    for host in hosts:
        own_pairs = [pair for pair in levels if host in pair]
        partners = tuple(partner for pair in own_pairs for partner in pair if partner != host)
        if host not in good and not good.isdisjoint(partners):
            explained.update(own_pairs)
            level = "error" if any(levels[pair] == "error" for pair in own_pairs) else "warning"
            state = states[own_pairs[0]]
            yield found("pairs.bad_node", level, host, partners=partners, state=state)
    for pair, level in levels.items():
        if level != "ok" and pair not in explained:
            yield found("pairs.bad_pair", level, first=pair[0], second=pair[1], state=states[pair])
