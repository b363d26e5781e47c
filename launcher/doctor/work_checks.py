"""Judges the measured work of a job's nodes: what failed, computed other bits, or is slow beside the others.

What a device should reach is what the median of the job's other devices of the same kind reaches; published
figures only make a note. CPUs are judged more generously than GPUs: other processes use them for moments.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import NodeFacts, NodeFinding, WorkResult
from launcher.text import count_things, escape_text

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
"""The same for the matrix product of a node's CPUs, which others may use for moments."""
SHARED_SLOW, SHARED_SICK = 0.6, 0.4
"""The same for the memory of a node's CPUs, and for the network between two nodes without GPUs."""
ONE_MACHINE = 0.5
"""By which the shares are multiplied for nodes that are one machine: they disturb each other."""
LISTED = 4
"""Devices of a finding that are named."""
EXPECTED = {
    ("NVIDIA H100 80GB HBM3", "copy_to"): 48.0,
    ("NVIDIA H100 80GB HBM3", "copy_from"): 48.0,
    ("NVIDIA H100 80GB HBM3", "peer_copy"): 335.0,
    ("NVIDIA H100 80GB HBM3", "all_reduce"): 460.0,
}
"""GB/s of a kind of GPU in a node of eight with NVSwitch; all_reduce with messages of 16 GB."""
FAR = 0.6
"""Share of EXPECTED below which that is noted; our messages are smaller."""


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
    one_machine = find_shared_machines(work)
    groups: defaultdict[tuple[str, str], list[Work]] = defaultdict(list)
    for one in work:
        if one.result.value is not None:
            groups[one.kind].append(one)
    for group in groups.values():
        values = sorted(one.result.value or 0.0 for one in group)
        for one in group if len(group) > 1 else ():
            typical = find_median_of_others(values, one.result.value or 0.0)
            share = (one.result.value or 0.0) / typical if typical > 0 else 1.0
            factor = ONE_MACHINE if one.node.boot_id in one_machine else 1.0
            slow, sick = (factor * bound for bound in choose_shares(one, tolerance))
            if share < slow:
                yield SlowWork(one, share, typical, "error" if share < sick else "warning")


def find_shared_machines(work: Iterable[Work]) -> set[str]:
    """Return the boot IDs that several nodes have."""
    hosts = {(one.node.boot_id, one.node.host) for one in work if one.node.boot_id}
    return {boot for boot, count in Counter(boot for boot, _ in hosts).items() if count > 1}


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
        yield NodeFinding(
            host,
            Finding(
                level,
                WORK,
                f"{places}: {NAMES[measure]} {'down to ' if len(own) > 1 else ''}"
                f"{show_measured(worst.work.result)}, {worst.share:.0%} of the median of the job's others"
                f" ({show_number(worst.typical)} {worst.work.result.unit})",
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


def judge_work(nodes: Sequence[NodeFacts], tolerance: float) -> tuple[NodeFinding, ...]:
    """Return what the measured work of a job's nodes says of them; pairs are `judge_pairs`'s.

    `tolerance` is the share of the others' median below which a GPU is slow, in (0, 1].
    """
    work = list_work(nodes)
    judged = [one for one in work if one.result.measure != "pair"]
    slow = tuple(find_slow_devices(judged, tolerance))
    found = (
        *report_failures(judged),
        *report_checksums(judged),
        *report_slow(slow),
        *report_far_from_expected(judged),
        *report_unmeasured(judged),
    )
    return (
        *found,
        *report_usual(
            judged,
            {one.result.measure for one in work if one.result.problem}
            | {one.work.result.measure for one in slow},
        ),
    )


def report_failures(work: Iterable[Work]) -> Iterator[NodeFinding]:
    """Report devices that failed or hung."""
    for one in work:
        if one.result.problem:
            yield NodeFinding(
                one.node.host,
                Finding(
                    "error",
                    WORK,
                    f"{describe_device_place(one)}: {NAMES[one.result.measure]} failed:"
                    f" {escape_text(one.result.problem, 300)}",
                    "the program would fail or hang there",
                    f"leave the node out (cluster.exclude={one.node.host}), and have it repaired",
                ),
            )


def report_checksums(work: Iterable[Work]) -> Iterator[NodeFinding]:
    """Report devices whose results have other bits than most of the others of their kind."""
    groups: defaultdict[tuple[str, ...], list[Work]] = defaultdict(list)
    for one in work:
        if one.result.checksum:
            size = one.result.checksum.partition(":")[0]
            groups[(*one.kind, one.node.torch, size)].append(one)
    for group in groups.values():
        counts = Counter(one.result.checksum for one in group)
        usual, number = counts.most_common(1)[0]
        different = [one for one in group if one.result.checksum != usual]
        if not different:
            continue
        if number * 2 <= len(group):
            yield NodeFinding("", report_disagreement(group))
            continue
        for host in dict.fromkeys(one.node.host for one in different):
            own = [one for one in different if one.node.host == host]
            yield NodeFinding(host, report_corruption(own, number))


def report_disagreement(group: Sequence[Work]) -> Finding:
    """Two devices, or two halves of them, have different results."""
    places = name_places(f"{one.node.host} {describe_device_place(one)}" for one in group)
    return Finding(
        "warning",
        WORK,
        f"{places} give different bits for the same {NAMES[group[0].result.measure]}",
        "some of them compute wrong, or their software differs; two of a kind do not tell which",
        "compare with a third node",
    )


def report_corruption(own: Sequence[Work], number: int) -> Finding:
    """A node's devices that compute other results than most."""
    places = name_places(describe_device_place(one) for one in own)
    return Finding(
        "error",
        WORK,
        f"{places}: the {NAMES[own[0].result.measure]} has other bits than that of"
        f" {count_things(number, 'equal device')}",
        "it computes wrong without an error (silent data corruption), or its libraries differ",
        f"leave the node out (cluster.exclude={own[0].node.host}), and have it repaired",
    )


def report_far_from_expected(work: Iterable[Work]) -> Iterator[NodeFinding]:
    """Note what is far below what the kind of GPU is known for, which the job's median does not show."""
    groups: defaultdict[tuple[str, str, float], list[float]] = defaultdict(list)
    for one in work:
        name = one.result.device.partition(",")[0]
        expected = EXPECTED.get((name, one.result.measure))
        if expected and one.result.value is not None and "by main memory" not in one.result.device:
            groups[name, one.result.measure, expected].append(one.result.value)
    for (name, measure, expected), values in groups.items():
        if (typical := median(values)) < FAR * expected:
            yield NodeFinding(
                "",
                Finding(
                    "note",
                    WORK,
                    f"{NAMES[measure]}: {show_number(typical)} GB/s at the median; {expected:.0f} GB/s are"
                    f" known for {escape_text(name, 80)}",
                    "all nodes may have the same fault, such as a link of half the width",
                    "compare with `nvidia-smi topo -m` and `launch doctor`",
                ),
            )


def report_unmeasured(work: Iterable[Work]) -> Iterator[NodeFinding]:
    """Say what was not measured, one finding for each node and reason."""
    groups: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for one in work:
        if one.result.reason:
            groups[one.node.host, one.result.reason][NAMES[one.result.measure]] = None
    for (host, reason), names in groups.items():
        what = f"{', '.join(names)} not measured: {escape_text(reason, 200)}"
        yield NodeFinding(host, Finding("unknown", WORK, what))


def report_usual(work: Iterable[Work], left_out: set[str]) -> Iterator[NodeFinding]:
    """Say what the job's devices reach, for each kind that has no finding."""
    groups: defaultdict[tuple[str, str], list[WorkResult]] = defaultdict(list)
    for one in work:
        if one.result.value is not None and one.result.measure not in left_out:
            groups[one.kind].append(one.result)
    for (measure, device), results in groups.items():
        values = [one.value or 0.0 for one in results]
        low, high = show_number(min(values)), show_number(max(values))
        span = low if low == high else f"{low} to {high}"
        what = f"{NAMES[measure]}: {span} {results[0].unit} on {len(values)} of {escape_text(device, 80)}"
        yield NodeFinding("", Finding("ok", WORK, what))
