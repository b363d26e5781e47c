"""Judges the measured work of a job's nodes: what failed, computed other bits, or is slow beside the others.

Published figures only make a note.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from statistics import median

from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import NodeFacts, NodeFinding, WorkResult
from launcher.doctor.slow_devices import (
    NAMES,
    WORK,
    Work,
    describe_device_place,
    find_busy_hosts,
    find_shared_machines,
    find_slow_devices,
    list_work,
    name_places,
    report_slow,
    show_number,
)
from launcher.text import count_things, escape_text

EXPECTED = {
    ("NVIDIA H100 80GB HBM3", "copy_to"): 48.0,
    ("NVIDIA H100 80GB HBM3", "copy_from"): 48.0,
    ("NVIDIA H100 80GB HBM3", "peer_copy"): 335.0,
    ("NVIDIA H100 80GB HBM3", "all_reduce"): 460.0,
}
"""GB/s of a kind of GPU in a node of eight with NVSwitch; all_reduce with messages of 16 GB."""
FAR = 0.6
"""Share of EXPECTED below which that is noted; our messages are smaller."""


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
        *report_busy(judged, {one.work.node.host for one in slow}),
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


def find_incomparable_hosts(nodes: Sequence[NodeFacts]) -> frozenset[str]:
    """Return nodes whose memory and network say little of them: others use their CPUs, or their machine."""
    work = list_work(nodes)
    shared = find_shared_machines(work)
    return frozenset({node.host for node in nodes if node.boot_id in shared} | {*find_busy_hosts(work)})


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


def report_busy(work: Sequence[Work], told: Collection[str]) -> Iterator[NodeFinding]:
    """Note the nodes whose CPUs were busy with something else while they were measured.

    Those that were `told` of have slow cores for it.
    """
    details = {one.node.host: one.result.detail for one in reversed(work) if one.result.detail}
    for host, share in find_busy_hosts(work).items():
        if host in told:
            continue
        who = f"; {escape_text(details[host], 200)}" if host in details else ""
        what = f"others had {1 - share:.0%} of the CPUs' time while they were measured{who}"
        yield NodeFinding(host, Finding("note", WORK, what, "its memory and all_reduce are not compared"))


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
