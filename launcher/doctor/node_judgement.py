"""Judges the nodes of a job: each by itself, then beside each other."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.doctor.finding import Case, Finding
from launcher.doctor.job_checks import JOB_CHECKS, compare_paths
from launcher.doctor.node_checks import BUSY_CHECKS, GPU_CHECKS, SETTING_CHECKS, check_node
from launcher.doctor.node_facts import JudgeSettings, NodeFacts, NodeFinding
from launcher.doctor.work_checks import judge_work


def judge_nodes(nodes: Sequence[NodeFacts], settings: JudgeSettings | None = None) -> tuple[NodeFinding, ...]:
    """Judge the facts of all nodes of a job, in the order of their ranks.

    Levels: an `error` makes a node sick, since the program would fail there or be held up; `warning`; `note`;
    `unknown` is what could not be checked. What is as it should be is left out. A finding without a host is
    about the job; what could not be checked on any node is told once.
    """
    settings = settings or JudgeSettings()
    alone = hide_shared_load(nodes)
    single = [NodeFinding(node.host, finding) for node in alone for finding in check_node(node, settings)]
    beside = [finding for check in JOB_CHECKS for finding in check(nodes, settings)]
    worked = judge_work(nodes, settings.tolerance)
    found = [one for one in (*single, *beside, *worked) if one.finding.level != "ok"]
    return tuple(dict.fromkeys(gather_unknown(found, len(nodes))))


def hide_shared_load(nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """Forget the load of nodes that are one machine, as on the sandbox: each is the load of the others."""
    machines = Counter(node.boot_id for node in nodes if node.boot_id)
    return [replace(node, load=None) if machines[node.boot_id] > 1 else node for node in nodes]


def gather_unknown(found: Sequence[NodeFinding], count: int) -> list[NodeFinding]:
    """Make one of what could not be checked on any of several nodes."""
    unknown = Counter(one.finding for one in found if one.finding.level == "unknown")
    everywhere = {finding for finding, times in unknown.items() if 1 < times == count}
    return [NodeFinding("", one.finding) if one.finding in everywhere else one for one in found]


def judge_node_facts(case: Case) -> Iterator[Finding]:
    """What preflight checks of a node before a job, but for what the doctor checks by itself.

    What others do at this moment is a note: it is another matter when a job begins.
    """
    if case.node is None:
        return
    settings = JudgeSettings(min_free_kib=case.min_free_kib)
    for check in (*GPU_CHECKS, *SETTING_CHECKS):
        yield from check(case.node, settings)
    yield from (one.finding for one in compare_paths((case.node,), settings))
    for busy in BUSY_CHECKS:
        for finding in busy(case.node, settings):
            yield finding if finding.level == "ok" else replace(finding, level="note")
