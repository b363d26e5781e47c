"""What is known of each node over past runs, from their manifests: findings, losses, hangs, slow ranks.

Manifests may be another user's: their values are taken by type, and what is odd is left out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.runs.manifest import read_time, take_dict, take_earlier, take_list

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


@dataclass(slots=True)
class NodeTally:
    """A node's history while it is being collected."""

    runs: set[str] = field(default_factory=set)
    last: tuple[float, str] = (float("-inf"), "")
    events: list[NodeEvent] = field(default_factory=list)


def collect_history(manifests: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[NodeHistory, ...]:
    """Return all nodes of some runs, given as NAME/ID and manifest: those with the most trouble first."""
    tallies: dict[str, NodeTally] = {}
    for run, manifest in manifests:
        for attempt in (*take_earlier(manifest), manifest):
            add_attempt(tallies, run, attempt)
    nodes = [finish_tally(host, tally) for host, tally in tallies.items()]
    return tuple(sorted(nodes, key=rank_histories))


def rank_histories(node: NodeHistory) -> tuple[int, int, float, str]:
    """Order by trouble, then by warnings, then by the time of the newest event."""
    newest = max((event.time for event in node.events if event.time is not None), default=0.0)
    return -node.trouble, -node.warning, -newest, node.host


def add_attempt(tallies: dict[str, NodeTally], run: str, attempt: Mapping[str, Any]) -> None:
    """Add what an attempt tells of its nodes."""
    began = read_time(attempt.get("started"))
    found = list(dict.fromkeys(find_events(attempt)))
    hosts = [*take_hosts(attempt, "hosts"), *(host for host, _, _ in found)]
    for host in dict.fromkeys(hosts):
        tally = tallies.setdefault(host, NodeTally())
        tally.runs.add(run)
        if began is not None:
            tally.last = max(tally.last, (began, run))
    seen = set()
    for host, kind, text in found:
        if (host, kind) not in seen:
            seen.add((host, kind))
            tallies[host].events.append(NodeEvent(kind, began, run, text))


def find_events(attempt: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Give host, sort and text of each event of an attempt."""
    preflight, outcome = take_dict(attempt, "preflight"), take_dict(attempt, "outcome")
    for found in take_dicts(preflight, "findings"):
        kind = "sick" if found.get("level") == "error" else "warning"
        yield from name_event(found.get("host"), kind, f"{found.get('subject')}: {found.get('what')}")
    for host in take_hosts(preflight, "sick"):
        yield host, "sick", "preflight found it sick"
    for host in take_hosts(outcome, "lost"):
        yield host, "lost", "it was lost"
    for one in take_dicts(attempt, "replacements"):
        text = f"it was lost, and {one.get('spare')} took its place: {one.get('evidence')}"
        yield from name_event(one.get("lost"), "lost", text)
    for hang in take_dicts(attempt, "hangs"):
        verdict = take_dict(hang, "verdict")
        for host in take_hosts(verdict, "hosts"):
            yield host, "hang", str(verdict.get("sentence") or "")
    for slow in take_dicts(attempt, "stragglers"):
        yield from name_event(slow.get("host"), "slow", f"rank {slow.get('rank')}: {slow.get('detail')}")


def name_event(host: object, kind: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Give an event if its host is one."""
    if isinstance(host, str) and HOST.fullmatch(host):
        yield host, kind, text


def take_dicts(mapping: Mapping[str, object], key: str) -> list[dict[str, Any]]:
    """Return the dictionaries of a list."""
    return [entry for entry in take_list(mapping, key) if isinstance(entry, dict)]


def take_hosts(mapping: Mapping[str, object], key: str) -> list[str]:
    """Return the hosts of a list."""
    entries = take_list(mapping, key)[:MOST_HOSTS]
    return [entry for entry in entries if isinstance(entry, str) and HOST.fullmatch(entry)]


def finish_tally(host: str, tally: NodeTally) -> NodeHistory:
    """Return what a tally comes to."""
    counts = {kind: sum(event.kind == kind for event in tally.events) for kind in KINDS}
    newest = sorted(tally.events, key=lambda event: event.time or 0.0, reverse=True)[:MOST_EVENTS]
    time, run = tally.last
    return NodeHistory(
        host,
        len(tally.runs),
        run or max(tally.runs),
        time if run else None,
        events=tuple(newest),
        **counts,
    )
