"""The nodes of a job beside each other: what one has, and the others do not.

What more than half of the nodes have is taken as right; without such a majority differences are a warning of
the job as a whole, since nothing tells which of the nodes is wrong.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median, median_low

from launcher.doctor.model import Facts, Finding, GpuFacts, Wanted, found
from launcher.doctor.node import CHECKS, rate_path
from launcher.doctor.work import judge_pairs, judge_work

DOWNED = 20
"""Times that a link has gone down since the boot that are many, if it is ten times the others' median too:
starting the switches and the node takes a few."""
SKEW_WARNED = 1.0
"""Seconds of skew that no synchronized clock has (chrony and NTP hold milliseconds)."""
SKEW_FATAL = 15.0
"""Seconds of skew with which torchrun's c10d rendezvous takes a node for dead: it holds another node's last
heartbeat against its own clock, and gives it `keep_alive_interval` times `keep_alive_max_attempt`, 5 s times
3 (torch.distributed.elastic.rendezvous.dynamic_rendezvous, `_sanitize`)."""
MEMORY_SHARE = 0.5
"""Share of the median of the nodes' free memory below which a node has little."""


def judge_nodes(
    nodes: Sequence[Facts], wanted: Wanted | None = None, hosts: Sequence[str] = ()
) -> tuple[Finding, ...]:
    """Judge the facts of all nodes of a job: each by itself, then beside each other, then their work.

    `hosts` are those that were asked, by their ranks, if not all have answered. What is as it should be is
    left out. A finding without a host is about the job; what could not be checked on any node is told once.
    """
    wanted = wanted or Wanted()
    machines = Counter(node.boot_id for node in nodes if node.boot_id)
    findings: list[Finding] = []
    for node in nodes:
        # Nodes that are one machine, as on the sandbox, are each the load of the others.
        alone = replace(node, load=None) if machines[node.boot_id] > 1 else node
        findings += [replace(finding, host=node.host) for check in CHECKS for finding in check(alone, wanted)]
    for compare in COMPARISONS:
        findings += compare(nodes, wanted)
    findings += judge_work(nodes, wanted.tolerance)
    findings += judge_pairs(hosts or tuple(node.host for node in nodes), nodes, wanted.tolerance)
    unknown = Counter(replace(finding, host="") for finding in findings if finding.level == "unknown")
    everywhere = {finding for finding, times in unknown.items() if 1 < times == len(nodes)}
    told = (finding for finding in findings if finding.level != "ok")
    merged = [one if (job := replace(one, host="")) not in everywhere else job for one in told]
    return tuple(dict.fromkeys(merged))


def compare_gpu_counts(nodes: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    """Nodes with fewer GPUs than the job needs, or than the others have."""
    counted = [(node, sum(not gpu.problem for gpu in node.gpus)) for node in nodes]
    most = max((count for _node, count in counted), default=0)
    fuller = tuple(node.host for node, count in counted if count == most)
    for node, count in counted:
        if node.gpu_problem or any(one.check == "gpus" for one in node.unchecked):
            continue
        if wanted.gpus is not None and count < wanted.gpus:
            yield found("gpu.too_few", "error", node.host, gpus=count, needed=wanted.gpus)
        elif wanted.gpus is None and count < most:
            yield found("gpu.fewer", "error", node.host, gpus=count, hosts=fuller, most=most)


def compare_values(nodes: Sequence[Facts], _: Wanted) -> Iterator[Finding]:
    """GPUs and software that most nodes have otherwise; nodes without a value are left out."""
    readers: dict[str, tuple[str, Callable[[Facts], str]]] = {
        "": ("gpu", _describe_gpu_kinds),
        "the NVIDIA driver": ("versions", lambda node: node.driver),
        "the driver's CUDA": ("versions", lambda node: node.cuda_driver),
        "torch": ("versions", lambda node: node.torch),
    }
    for software, (subject, read) in readers.items():
        hosts_by_value: dict[str, list[str]] = {}
        for node in nodes:
            hosts_by_value.setdefault(read(node), []).append(node.host)
        hosts_by_value.pop("", None)
        known = sum(map(len, hosts_by_value.values()))
        usual, having = max(hosts_by_value.items(), key=lambda item: len(item[1]), default=("", []))
        if 2 * len(having) <= known and known:
            groups = [f"{value} on {', '.join(hosts[:4])}" for value, hosts in hosts_by_value.items()]
            yield found(f"{subject}.differ", "warning", software=software, values="; ".join(groups[:6]))
            continue
        for value, hosts in hosts_by_value.items():
            values = {"own": value, "usual": usual, "having": len(having), "nodes": known}
            for host in hosts if value != usual else ():
                yield found(f"{subject}.node_differs", "warning", host, software=software, **values)
    for node in nodes if len({_describe_gpu_kinds(node) for node in nodes}) == 1 else ():  # else it is told
        if len({gpu.name for gpu in node.gpus if gpu.name}) > 1:
            yield found("gpu.mixed", "warning", node.host, kinds=_describe_gpu_kinds(node))


def _describe_gpu_kinds(node: Facts) -> str:
    """The kinds of a node's GPUs, with their memory in GiB."""
    return ", ".join(sorted({f"{gpu.name} ({gpu.memory_mib >> 10} GiB)" for gpu in node.gpus if gpu.name}))


def compare_links(nodes: Sequence[Facts], _: Wanted) -> Iterator[Finding]:
    """NVLinks that are down, peers that cannot be reached, and narrow PCI links.

    A GPU is held against the others of its kind in the whole job: a board without NVLink bridges has links
    that are all down. Among fewer than four GPUs nothing tells the usual from the defect: a warning. A narrow
    PCI link is a note if most of the kind have no more lanes either.
    """
    gpus = [(node, gpu, _measure_reach(node, gpu)) for node in nodes for gpu in node.gpus if not gpu.problem]
    active: defaultdict[str, Counter[int]] = defaultdict(Counter)
    widths: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for _node, gpu, _reach in gpus:
        active[gpu.name].update([] if gpu.nvlinks is None else [gpu.nvlinks])
        widths[gpu.name].update([gpu.pcie_width or 0])
    usual_reach = median_low([reach for _node, _gpu, reach in gpus if reach is not None] or [0.0])
    for node, gpu, reach in gpus:
        links = active[gpu.name]
        if gpu.nvlinks is not None and gpu.nvlinks < max(links):
            count, more = links.total(), sum(links[number] for number in links if number > gpu.nvlinks)
            level = "error" if count >= 4 and 4 * more >= 3 * count else "warning"
            values = {"gpu": gpu.label, "active": gpu.nvlinks, "links": gpu.max_nvlinks, "usual": max(links)}
            yield found("gpu.nvlinks", level, node.host, **values)
        if reach is not None and reach < usual_reach:
            near = (*(gpu.peers or ()), gpu.index)
            lost = tuple(other.index for other in node.gpus if other.index not in near)
            yield found("gpu.peers", "warning", node.host, gpu=gpu.label, lost=lost)
        width, full = gpu.pcie_width or 0, gpu.max_pcie_width or 0
        if 0 < width < full:
            lanes = widths[gpu.name]
            better = sum(count for number, count in lanes.items() if number > width)
            level = "warning" if 2 * better >= lanes.total() else "note"
            yield found("gpu.narrow_link", level, node.host, name=gpu.label, width=width, max_width=full)


def _measure_reach(node: Facts, gpu: GpuFacts) -> float | None:
    """Return the share of the node's other GPUs that a GPU reaches directly; None if that is not known."""
    return len(gpu.peers) / (len(node.gpus) - 1) if gpu.peers is not None and len(node.gpus) > 1 else None


def compare_nics(nodes: Sequence[Facts], _: Wanted) -> Iterator[Finding]:
    """Ports that are missing, down or slower than the port of the same name on other nodes.

    It is an error if most nodes have it otherwise, and a warning if only some have.
    """
    counted = [nic.link_downed for node in nodes for nic in node.nics if nic.link_downed is not None]
    many = max(DOWNED, 10 * median(counted)) if counted else DOWNED
    for name in dict.fromkeys(nic.name for node in nodes for nic in node.nics):
        ports = {node.host: nic for node in nodes for nic in node.nics if nic.name == name}
        for node in nodes if 2 * len(ports) > len(nodes) else ():
            if node.host not in ports:
                yield found("nics.missing", "error", node.host, port=name, nodes=len(ports))
        rates = [nic.rate_gbps for nic in ports.values() if nic.state == "ACTIVE"]
        rate, count = Counter(rates).most_common(1)[0] if rates else (0.0, 0)
        has_majority = rate > 0 and 2 * count > len(rates)
        usual = rate if has_majority else max(rates, default=0.0)
        level = "error" if 2 * len(rates) > len(ports) else "warning"
        for host, nic in ports.items():
            if nic.state not in ("", "ACTIVE") and (rates or nic.state == "INIT"):
                rule = "nics.init" if nic.state == "INIT" else "nics.down"
                yield found(rule, level, host, port=name, state=nic.state, nodes=len(rates))
            elif nic.state == "ACTIVE" and 0 < nic.rate_gbps < usual:
                slow = "error" if has_majority and 2 * nic.rate_gbps <= usual else "warning"
                yield found("nics.slow", slow, host, port=name, rate=nic.rate_gbps, usual=usual)
            if nic.link_downed is not None and nic.link_downed >= many:
                yield found("nics.flapping", "warning", host, port=name, times=nic.link_downed)


def compare_clocks(nodes: Sequence[Facts], _: Wanted) -> Iterator[Finding]:
    """Clocks that differ from those of the other nodes by more than asking and answering can explain."""
    # Seconds that a node's clock is ahead of the first's, at the least; negative: behind; 0: perhaps not. The
    # node read its clock after the first one had asked, and before the first one had the answer.
    offsets = []
    for node in nodes:
        ahead, behind = (
            0.0 if when is None or not math.isfinite(node.time - when) else node.time - when
            for when in (node.answered, node.asked)
        )
        offsets.append(ahead if ahead > 0 else min(behind, 0.0))
    usual = median_low(offsets) if len(offsets) > 2 else 0.0
    for node, offset in zip(nodes, offsets, strict=True):
        skew = offset - usual
        direction = "ahead of" if skew > 0 else "behind"
        if abs(skew) > SKEW_FATAL:
            yield found("clock.dead", "error", node.host, seconds=abs(skew), direction=direction)
        elif abs(skew) > SKEW_WARNED:
            yield found("clock.skewed", "warning", node.host, seconds=abs(skew), direction=direction)


def compare_paths(nodes: Sequence[Facts], _: Wanted) -> Iterator[Finding]:
    """Paths that are missing: on some nodes, or on all."""
    states_of: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for node in nodes:
        for path in node.paths:
            states_of[path.path, path.purpose][node.host] = path.state
    for (name, purpose), states in states_of.items():
        without = [host for host, state in states.items() if state == "missing"]
        having = tuple(host for host, state in states.items() if state not in ("missing", "stuck", "failed"))
        level, label = rate_path(purpose), f"{name} ({purpose})"
        for host in without if having else ():
            yield found("paths.missing", level, host, name=label, hosts=having)
        if without and not having:
            host, where = (without[0], "the node") if len(nodes) == 1 else ("", "all nodes")
            yield found("paths.missing_everywhere", level, host, name=label, where=where)


def compare_memory(nodes: Sequence[Facts], _: Wanted) -> Iterator[Finding]:
    """Nodes whose free memory is far less than the others'."""
    known = [(node.host, node.free_memory_kib) for node in nodes if node.free_memory_kib is not None]
    usual = median(free for _host, free in known) if len(known) > 1 else 0.0
    for host, free in known:
        if free < MEMORY_SHARE * usual:
            yield found("memory.less_than_others", "warning", host, free=free, usual=usual)


COMPARISONS = (
    *(compare_gpu_counts, compare_values, compare_links, compare_nics),
    *(compare_clocks, compare_paths, compare_memory),
)
"""All, in the order of the report."""
