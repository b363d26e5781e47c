"""Who holds the others up, from the evidence of all nodes: pure, without files or clock."""

from collections.abc import Sequence

from launcher.watch.model import NodeEvidence, NodeReport, Verdict


def judge(nodes: Sequence[NodeEvidence], reports: Sequence[NodeReport], *, patient: bool = True) -> Verdict:
    """Return who holds the others up, as far as the evidence says.

    `reports` are the last reports of all nodes: whose evidence is missing counts as not heard of. With
    `patient`, a rank that compiles, saves, evaluates, loads or starts and works at it is no hang.
    """
    ranks = [rank for node in nodes for rank in node.ranks]
    heard = {node.host for node in nodes}
    silent = tuple(report.host for report in reports if report.host not in heard)
    if silent:
        return Verdict("silent", f"nothing is heard of {', '.join(silent)}", hosts=silent)
    return Verdict("standstill", f"all {len(ranks)} ranks stand still", tuple(rank.rank for rank in ranks))
