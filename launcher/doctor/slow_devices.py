"""A job's measured work: which devices are slow beside the others of their kind.

What a device should reach is what the median of the job's other devices of the same kind reaches. CPUs are
judged more generously than GPUs: other processes share them for moments.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import NodeFacts, NodeFinding, WorkResult
from launcher.text import escape_text

WORK = "measured work"
NAMES = {
    "matmul": "matrix product",
    "copy_to": "copies to the GPU",
    "copy_from": "copies from the GPU",
    "memory": "memory bandwidth",
    "peer_copy": "copies between GPUs",
    "all_reduce": "all_reduce in the node",
    "pair": "all_reduce between two nodes",
}
SICK = 0.8
"""Share of the others' median below which a GPU makes its node sick."""
CPU_SLOW, CPU_SICK = 0.75, 0.6
"""The same for a core's matrix product: a process that is always on the core leaves half of it."""
SHARED_SLOW, SHARED_SICK = 0.6, 0.4
"""For what a whole node shares with others: memory, gloo, and the network."""
ONE_MACHINE = 0.5
"""By which the shares are multiplied for nodes that are one machine: they disturb each other."""
LISTED = 4
"""Devices of a finding that are named."""
UNDISTURBED = 0.8
"""Share of a CPU's time with which its speed by the clock on the wall is the CPU's own."""


@dataclass(frozen=True, slots=True)
class Work:
    """A result and its node."""

    node: NodeFacts
    result: WorkResult
    is_gpu: bool
    """A GPU has done it, or the node's GPUs together."""

    @property
    def kind(self) -> tuple[str, str]:
        """Only results of the same kind are compared."""
        return self.result.measure, self.result.device


@dataclass(frozen=True, slots=True)
class SlowWork:
    """A device that is slow beside others."""

    work: Work
    share: float
    """Of the median."""
    typical: float
    """The median of the others."""
    level: str


def list_work(nodes: Iterable[NodeFacts]) -> list[Work]:
    """Return the results of all nodes; unknown measures are left out."""
    found = []
    for node in nodes:
        is_gpu = any(one.where.startswith("GPU") for one in node.work)
        found += [Work(node, one, is_gpu) for one in node.work if one.measure in NAMES]
    return found


def find_slow_devices(work: Sequence[Work], tolerance: float) -> Iterator[SlowWork]:
    """Give the devices that are slow beside the others of their kind."""
    one_machine, busy = find_shared_machines(work), find_busy_hosts(work)
    groups: defaultdict[tuple[str, str], list[Work]] = defaultdict(list)
    for one in work:
        is_comparable = one.is_gpu or one.result.measure == "matmul" or one.node.host not in busy
        if one.result.value is not None and is_comparable:
            groups[one.kind].append(one)
    for group in groups.values():
        for one, value, typical in compare_with_others(group) if len(group) > 1 else ():
            share = value / typical if typical > 0 else 1.0
            slow, sick = choose_shares(one, tolerance)
            factor = ONE_MACHINE if one.node.boot_id in one_machine else 1.0
            if share < slow * factor and (share < sick * factor or not is_passing(one, share)):
                yield SlowWork(one, share, typical, "error" if share < sick * factor else "warning")


def is_passing(one: Work, share: float) -> bool:
    """Whether a core is only somewhat slow, by many small processes: as fast as others while it ran.

    `share` is that of the others' median. A process that stays on the core is named in `detail`.
    """
    own = one.result.share
    return own is not None and not one.result.detail and share / max(own, 0.01) >= CPU_SLOW


def find_shared_machines(work: Iterable[Work]) -> set[str]:
    """Return the boot IDs that several nodes have."""
    hosts = {(one.node.boot_id, one.node.host) for one in work if one.node.boot_id}
    return {boot for boot, count in Counter(boot for boot, _ in hosts).items() if count > 1}


def find_busy_hosts(work: Iterable[Work]) -> dict[str, float]:
    """Return the nodes without GPUs on which others have part of the CPUs' time, and what share was left."""
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for one in work:
        if one.result.share is not None and not one.is_gpu:
            shares[one.node.host].append(one.result.share)
    return {host: median(found) for host, found in shares.items() if median(found) < UNDISTURBED}


def compare_with_others(group: Sequence[Work]) -> Iterator[tuple[Work, float, float]]:
    """Give each result with its value and the median of the others.

    Where the others' CPUs are busy with something else, the clock on the wall tells of that alone: speeds by
    CPU time are compared then.
    """
    values = sorted(one.result.value or 0.0 for one in group)
    shares = sorted(one.result.share for one in group if one.result.share is not None)
    speeds = sorted(read_speed(one) for one in group)
    for one in group:
        value, share = one.result.value or 0.0, one.result.share
        others = find_median_of_others(shares, share) if share is not None and len(shares) > 1 else 1.0
        if others < UNDISTURBED:
            yield one, read_speed(one), find_median_of_others(speeds, read_speed(one))
        else:
            yield one, value, find_median_of_others(values, value)


def read_speed(one: Work) -> float:
    """Return a result for each second of CPU time."""
    return (one.result.value or 0.0) / max(one.result.share or 1.0, 0.01)


def find_median_of_others(values: Sequence[float], value: float) -> float:
    """Return the median of sorted values, one of which is left out; there are two at least."""
    left_out, count = bisect_left(values, value), len(values) - 1
    middle = ((count - 1) // 2, count // 2)
    low, high = (values[at + (at >= left_out)] for at in middle)
    return (low + high) / 2


def choose_shares(one: Work, tolerance: float) -> tuple[float, float]:
    """Return the shares of the median below which a device is slow, and below which it is sick."""
    if one.is_gpu:
        return tolerance, min(SICK, tolerance)
    slow, sick = (CPU_SLOW, CPU_SICK) if one.result.measure == "matmul" else (SHARED_SLOW, SHARED_SICK)
    return min(slow, tolerance), min(sick, tolerance)


def report_slow(slow: Sequence[SlowWork]) -> Iterator[NodeFinding]:
    """Report each node's slow devices, one finding for each measure and level."""
    groups: defaultdict[tuple[str, str, str], list[SlowWork]] = defaultdict(list)
    for one in slow:
        groups[one.work.node.host, one.work.result.measure, one.level].append(one)
    for (host, measure, level), own in groups.items():
        worst = min(own, key=lambda one: one.share)
        places = name_places(describe_device_place(one.work) for one in own)
        detail = escape_text(worst.work.result.detail, 200)
        yield NodeFinding(
            host,
            Finding(
                level,
                WORK,
                f"{places}: {NAMES[measure]} {'down to ' if len(own) > 1 else ''}"
                f"{show_measured(worst.work.result)}, {worst.share:.0%} of the median of the job's others"
                f" ({show_number(worst.typical)} {worst.work.result.unit}){f'; {detail}' if detail else ''}",
                "every step waits for the slowest rank",
                explain_slow(worst.work, host),
            ),
        )


def explain_slow(one: Work, host: str) -> str:
    """Return the fix for a slow device."""
    if one.is_gpu:
        return (
            "look at its clocks, temperature and links (`launch doctor` on the node); leave the node out by"
            f" cluster.exclude={host}"
        )
    if one.result.detail:
        return f"end that process, or leave the node out (cluster.exclude={host})"
    return f"look for other processes and throttled clocks on it; leave it out by cluster.exclude={host}"


def describe_device_place(one: Work) -> str:
    """Return where a result is from, for people."""
    return "the node" if one.result.where == "node" else escape_text(one.result.where, 80)


def name_places(places: Iterable[str]) -> str:
    """Name some places, and say how many more there are."""
    names = list(dict.fromkeys(places))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def show_measured(result: WorkResult) -> str:
    """Return a value with its unit."""
    return f"{show_number(result.value or 0.0)} {escape_text(result.unit, 20)}"


def show_number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
