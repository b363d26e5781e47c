"""The nodes of a job beside each other: what one has, and the others do not."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median, median_low

from launcher.doctor.device_comparison import (
    compare_gpu_count,
    compare_kinds,
    compare_links,
    compare_nics,
)
from launcher.doctor.finding import Finding
from launcher.doctor.memory_checks import MEMORY
from launcher.doctor.node_checks import NEEDED, PATHS, VERSIONS
from launcher.doctor.node_comparison import compare_nodes_by, name_nodes
from launcher.doctor.node_facts import JudgeSettings, NodeFacts, NodeFinding
from launcher.text import format_size

CLOCK = "clock"
SKEW_WARNED = 1.0
"""Seconds of skew that no synchronized clock has (chrony and NTP hold milliseconds)."""
SKEW_FATAL = 15.0
"""Seconds of skew with which torchrun's c10d rendezvous takes a node for dead: it holds another node's last
heartbeat against its own clock, and gives it `keep_alive_interval` times `keep_alive_max_attempt`, 5 s times
3 (torch.distributed.elastic.rendezvous.dynamic_rendezvous, `_sanitize`)."""
MEMORY_SHARE = 0.5
"""Share of the median of the nodes' free memory below which a node has little."""


def compare_software(nodes: Sequence[NodeFacts], _: JudgeSettings) -> Iterator[NodeFinding]:
    """Versions that differ."""
    why = "nodes that run different code can give different results, or disagree on what they send"
    image = "update the node, or give all nodes one image or environment"
    fields: tuple[tuple[str, Callable[[NodeFacts], str]], ...] = (
        ("the NVIDIA driver", lambda node: node.driver),
        ("the driver's CUDA", lambda node: node.cuda_driver),
        ("torch", lambda node: node.torch),
    )
    for label, read in fields:
        yield from compare_nodes_by(nodes, read, label, Finding("warning", VERSIONS, "", why, image))


def compare_clocks(nodes: Sequence[NodeFacts], _: JudgeSettings) -> Iterator[NodeFinding]:
    """Clocks that differ from those of the other nodes by more than asking and answering can explain."""
    offsets = [bound_skew(node) for node in nodes]
    usual = median_low(offsets) if len(offsets) > 2 else 0.0
    for node, offset in zip(nodes, offsets, strict=True):
        skew = offset - usual
        if abs(skew) <= SKEW_WARNED:
            continue
        others = [other.host for other in nodes if other is not node][:1]
        against = "the other nodes'" if len(nodes) > 2 or not others else f"{others[0]}'s"
        said = f"its clock is at least {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} {against}"
        if abs(skew) > SKEW_FATAL:
            level, why = (
                "error",
                "torchrun's rendezvous takes a node with such a clock for dead and removes it",
            )
        else:
            level = "warning"
            why = "the order of logs, checkpoints and records of several nodes cannot be told by their times"
        fix = "sudo chronyc makestep, and see that chronyd (or ntpd) runs on every node (`timedatectl`)"
        yield NodeFinding(node.host, Finding(level, CLOCK, said, why, fix))


def bound_skew(node: NodeFacts) -> float:
    """Seconds that a node's clock is ahead of the first's, at the least; negative: behind; 0: perhaps not.

    The node read its clock after the first one had asked, and before the first one had the answer.
    """
    ahead = node.time - node.answered if node.answered is not None else 0.0
    behind = node.time - node.asked if node.asked is not None else 0.0
    if math.isfinite(ahead) and ahead > 0:
        return ahead
    return behind if math.isfinite(behind) and behind < 0 else 0.0


def compare_paths(nodes: Sequence[NodeFacts], _: JudgeSettings) -> Iterator[NodeFinding]:
    """Paths that are missing: on some nodes, or on all."""
    paths = {(path.path, path.purpose): None for node in nodes for path in node.paths}
    for name, purpose in paths:
        without, having = [], []
        for node in nodes:
            states = [path.state for path in node.paths if (path.path, path.purpose) == (name, purpose)]
            without += [node] if "missing" in states else []
            having += [node] if states and states[0] not in ("missing", "stuck", "failed") else []
        level = "error" if purpose in NEEDED else "warning"
        if without and having:
            what = f"{name} ({purpose}) is missing, and is there on {name_nodes(having)}"
            why = "the program fails on this node alone, and the others wait for it"
            fix = "mount the file system on this node, or use a directory that all nodes share"
            for node in without:
                yield NodeFinding(node.host, Finding(level, PATHS, what, why, fix))
        elif without:
            what = f"{name} ({purpose}) is missing on {'the node' if len(nodes) == 1 else 'all nodes'}"
            why = "a program that needs it fails when it first uses it"
            host = without[0].host if len(nodes) == 1 else ""
            yield NodeFinding(host, Finding(level, PATHS, what, why, "correct the path, or make it"))


def compare_memory(nodes: Sequence[NodeFacts], _: JudgeSettings) -> Iterator[NodeFinding]:
    """Nodes whose free memory is far less than the others'."""
    known = [node for node in nodes if node.free_memory_kib is not None]
    usual = median(node.free_memory_kib or 0 for node in known) if len(known) > 1 else 0
    for node in known:
        free = node.free_memory_kib or 0
        if free < MEMORY_SHARE * usual:
            yield NodeFinding(
                node.host,
                Finding(
                    "warning",
                    MEMORY,
                    f"{format_size(free)} are free, and {format_size(usual)} on the others (median)",
                    "what fits on the other nodes may not fit on this one",
                    "end what earlier jobs have left (`ps --sort=-rss -eo rss,user,pid,comm | head`)",
                ),
            )


JOB_CHECKS = (
    *(compare_gpu_count, compare_kinds, compare_links, compare_nics),
    *(compare_software, compare_clocks, compare_paths, compare_memory),
)
"""All, in the order of the report."""
