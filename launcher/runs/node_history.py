"""What is known of each node over past runs, from their manifests: findings, losses, hangs, slow ranks.

Manifests may be another user's: an attempt with a value of another type than ours has nothing to tell.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from launcher.runs.manifest import AttemptRecord, Run, read_time

HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
"""A host's name, and SLURM's for a node."""
KINDS = ("sick", "lost", "hang", "slow", "warning")
"""Sorts of events: preflight found an error; SLURM lost the node; it held others up in a hang; a rank there
was slow; preflight had a warning."""
MOST_HOSTS = 20_000
"""Nodes of an attempt that are looked at: more than any machine has."""
MOST_EVENTS = 20
"""Newest events of a node that are kept."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """Something that befell a node; of each sort, an attempt counts once."""

    kind: str
    """One of `KINDS`."""
    time: float | None
    """When the attempt began, in seconds since the epoch."""
    run: str
    text: str


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """A node over all runs."""

    host: str
    runs: int
    """Runs that were on it, or would have been, had preflight not left it out."""
    last_run: str
    last_seen: float | None
    """When the newest of its attempts began, in seconds since the epoch."""
    sick: int = 0
    lost: int = 0
    hang: int = 0
    slow: int = 0
    warning: int = 0
    events: tuple[NodeEvent, ...] = ()
    """Newest first."""

    @property
    def trouble(self) -> int:
        """How many attempts had trouble with it."""
        return self.sick + self.lost + self.hang + self.slow


def collect_history(manifests: Iterable[tuple[str, Run]]) -> tuple[NodeHistory, ...]:
    """Return all nodes of some runs, given with their NAME/ID: those with the most trouble first.

    Among nodes with the same trouble, those with more warnings, and with newer events, come first.
    """
    seen: dict[str, list[tuple[float, str]]] = defaultdict(list)
    events: dict[str, list[NodeEvent]] = defaultdict(list)
    for run, manifest in manifests:
        for attempt in manifest.attempts:
            began = read_time(attempt.started)
            try:
                found = [*find_events(attempt)][::-1]  # the first of each sort counts
                texts = {(host, kind): text for host, kind, text in found}
            except (AttributeError, KeyError, TypeError):
                continue
            hosts = (*attempt.hosts[:MOST_HOSTS], *(host for host, _ in texts))
            named = [host for host in hosts if isinstance(host, str)]
            for host in filter(HOST.fullmatch, dict.fromkeys(named)):
                seen[host].append((-math.inf if began is None else began, run))
                kinds = [kind for kind in KINDS if (host, kind) in texts]
                events[host] += (NodeEvent(kind, began, run, texts[host, kind]) for kind in kinds)
    nodes = []
    for host, starts in seen.items():
        time, last = max(starts)
        newest = sorted(events[host], key=lambda event: event.time or 0.0, reverse=True)
        counts = {kind: sum(event.kind == kind for event in newest) for kind in KINDS}
        runs, seen_last = len({run for _, run in starts}), None if time == -math.inf else time
        nodes.append(NodeHistory(host, runs, last, seen_last, events=tuple(newest[:MOST_EVENTS]), **counts))

    def rank(node: NodeHistory) -> tuple[int, int, float, str]:
        newest = node.events[0].time or 0.0 if node.events else 0.0
        return -node.trouble, -node.warning, -newest, node.host

    return tuple(sorted(nodes, key=rank))


def find_events(attempt: AttemptRecord) -> Iterator[tuple[Any, str, str]]:
    """Give host, sort and text of each event of an attempt; raises what a manifest that is not ours makes."""
    preflight = attempt.preflight or {}
    for found in preflight.get("findings", ()):
        kind = "sick" if found.get("level") == "error" else "warning"
        yield found.get("host"), kind, f"{found.get('subject')}: {found.get('what')}"
    for host in preflight.get("sick", ()):
        yield host, "sick", "preflight found it sick"
    for host in attempt.outcome.lost:
        yield host, "lost", "it was lost"
    for one in attempt.replacements:
        text = f"it was lost, and {one.get('spare')} took its place: {one.get('evidence')}"
        yield one.get("lost"), "lost", text
    for hang in attempt.hangs:
        for host in hang["verdict"]["hosts"]:
            yield host, "hang", str(hang["verdict"].get("sentence") or "")
    for slow in attempt.stragglers:
        yield slow.get("host"), "slow", f"rank {slow.get('rank')}: {slow.get('detail')}"
