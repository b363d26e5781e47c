"""What preflight found, in lines: sick nodes with the fix, warnings, or one line if all is well."""

from collections.abc import Mapping, Sequence

from launcher.doctor.finding import Finding
from launcher.doctor.node_facts import NodeFinding, PreflightReport
from launcher.text import describe_time

MOST_LINES = 12
"""Findings that are told; the rest is in the run directory."""
MOST_HOSTS = 6
"""Nodes that are named for one finding."""


def list_preflight_lines(report: PreflightReport) -> tuple[str, ...]:
    """Say what was found, the worst first; nodes with the same finding share a line."""
    told = [
        (level, finding, hosts)
        for level in ("error", "warning")
        for finding, hosts in group_findings(report.findings, level)
    ]
    lines = [describe_grouped(level, finding, hosts) for level, finding, hosts in told[:MOST_LINES]]
    if len(told) > MOST_LINES:
        lines.append(f"and {len(told) - MOST_LINES} more findings: see preflight/ in the run directory")
    return (*lines, summarise_preflight(report))


def describe_preflight(account: Mapping[str, object]) -> str:
    """Return a manifest's account in a line; what is odd in it is left out."""
    if problem := account.get("problem"):
        return f"{account.get('kind')}: the nodes were not checked: {problem}"
    seconds, findings = account.get("seconds"), account.get("findings")
    took = f" in {describe_time(seconds)}" if isinstance(seconds, int | float) else ""
    listed = [each for each in findings if isinstance(each, dict)] if isinstance(findings, list) else []
    shown = "; ".join(f"{each.get('host')}: {each.get('subject')}: {each.get('what')}" for each in listed[:3])
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    sick = account.get("sick")
    state = f"{len(sick)} sick" if isinstance(sick, list) and sick else "none sick"
    what = f": {shown}{more}" if shown else ""
    nodes = account.get("nodes")
    return f"{account.get('kind')} checks of {nodes} {'node' if nodes == 1 else 'nodes'}{took}: {state}{what}"


def group_findings(findings: Sequence[NodeFinding], level: str) -> list[tuple[Finding, list[str]]]:
    """Return the findings of a level with the hosts that have each, in their order."""
    grouped: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    for one in findings:
        if one.finding.level == level:
            key = (one.finding.subject, one.finding.what)
            grouped.setdefault(key, (one.finding, []))[1].append(one.host)
    return list(grouped.values())


def describe_grouped(level: str, finding: Finding, hosts: Sequence[str]) -> str:
    """Say which nodes have a finding, and the fix."""
    word = "sick" if level == "error" else "warning"
    names = [host for host in hosts if host]
    more = f" and {len(names) - MOST_HOSTS} more" if len(names) > MOST_HOSTS else ""
    where = f"{', '.join(names[:MOST_HOSTS])}{more}: " if names else ""
    fix = f"; fix: {finding.fix}" if finding.fix else ""
    return f"{word}: {where}{finding.subject}: {finding.what}{fix}"


def summarise_preflight(report: PreflightReport) -> str:
    """The last line: kind, nodes, seconds, and how it stands."""
    hosts = {node.host for node in report.nodes} | {*report.silent}
    sick = report.sick
    found = {one.host for one in report.findings if one.finding.level == "unknown"} - {*sick}
    warned = any(one.finding.level == "warning" for one in report.findings)
    state = "all well"
    if sick:
        more = f" and {len(sick) - MOST_HOSTS} more" if len(sick) > MOST_HOSTS else ""
        state = f"{len(sick)} sick ({', '.join(sick[:MOST_HOSTS])}{more})"
    elif any(one.finding.level == "error" for one in report.findings):
        state = "a fault that no single node has"
    elif warned:
        state = "no node sick"
    nodes = "1 node" if len(hosts) == 1 else f"{len(hosts)} nodes"
    missing = found - hosts
    unchecked = f", {len(missing)} not checked" if missing else ""
    return f"{report.kind} checks of {nodes} in {describe_time(report.seconds)}: {state}{unchecked}"
