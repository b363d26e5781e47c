"""What comes of the nodes' answers: the findings on all nodes of a job, and their account in the manifest."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import JudgeSettings, NodeFacts, NodeFinding, PreflightReport
from launcher.doctor.node_judgement import judge_nodes
from launcher.doctor.pair_checks import judge_meetings
from launcher.preflight.preflight_request import PreflightRequest

TOLD = ("error", "warning")
"""Levels of findings that people are told, and that the manifest keeps."""
MOST_FINDINGS = 200
"""That the manifest keeps: it is read for every `launch status`."""


def make_report(
    request: PreflightRequest,
    facts: Mapping[str, NodeFacts],
    silent: Collection[str],
    problems: Mapping[str, str],
    *,
    gpus: int | None,
    seconds: float,
) -> PreflightReport:
    """Judge what the nodes answered.

    `silent` did not answer in time, `problems` are hosts whose program ended without an answer, and why;
    `gpus` are those that the job needs on each node.
    """
    nodes = tuple(facts[host] for host in request.hosts if host in facts)
    unanswered = tuple(host for host in request.hosts if host in silent)
    # What SLURM counts as GPUs is not NVIDIA's if no node has the driver: NVML cannot find them.
    has_driver = any(node.driver or node.gpus or node.lost_gpus for node in nodes)
    settings = JudgeSettings(
        gpus if has_driver else None, int(request.min_free_gib * (1 << 20)), request.tolerance
    )
    findings = (
        *judge_answers(nodes, settings),
        *judge_meetings(request.hosts, nodes, settings.tolerance),
        *(NodeFinding(host, report_silence(host, request, seconds)) for host in unanswered),
        *(NodeFinding(host, report_problem(host, why)) for host, why in problems.items()),
    )
    return PreflightReport(request.kind, nodes, findings, unanswered, seconds)


def judge_answers(nodes: Sequence[NodeFacts], settings: JudgeSettings) -> tuple[NodeFinding, ...]:
    """Judge each node's facts, all of them beside each other, and their work."""
    return judge_nodes(nodes, settings)


def report_silence(host: str, request: PreflightRequest, seconds: float) -> Finding:
    """A node that did not answer in time."""
    return Finding(
        "error",
        "checks",
        f"no answer within {seconds:.0f} s, of which its checks take {request.seconds:.0f} s at most",
        "a filesystem, a GPU or the network of the node hangs, and the ranks there would hang too",
        f"look for stuck processes (state D) on {host}, and drain the node until it answers",
    )


def report_problem(host: str, why: str) -> Finding:
    """A node whose program ended without an answer."""
    return Finding(
        "unknown",
        "checks",
        f"{host} was not checked: {why}",
        fix="preflight=off starts jobs without checks",
    )


def explain_missing_answer(lines: Iterable[str]) -> str:
    """Say why a node's program gave no answer, by what it printed last on stderr."""
    return next(iter([*lines][::-1]), "its program printed no answer")


def describe_report(report: PreflightReport) -> dict[str, Any]:
    """Return the manifest's account: sick nodes, and what was found on all of them."""
    told = [one for one in report.findings if one.finding.level in TOLD]
    told.sort(key=lambda one: TOLD.index(one.finding.level))
    return {
        "kind": report.kind,
        "seconds": round(report.seconds, 2),
        "nodes": len({node.host for node in report.nodes} | {*report.silent}),
        "sick": list(report.sick),
        "silent": list(report.silent),
        "findings": [describe_node_finding(one) for one in told[:MOST_FINDINGS]],
    }


def describe_node_finding(one: NodeFinding) -> dict[str, str]:
    """Return a finding for the manifest."""
    found = one.finding
    return {
        "host": one.host,
        "level": found.level,
        "subject": found.subject,
        "what": found.what,
        "fix": found.fix,
    }
