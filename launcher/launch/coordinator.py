"""Decides when all ranks of a job start, start again and end: events in, orders out.

It has no clock, files or processes. It runs on the job's first node: the nodes report by `note`, and what
it returns is for all nodes of the job.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

LOSS_PATIENCE = 10.0
"""Seconds that ranks have to end if a node is replaced: those that wait for lost ones hear no signal."""
PORT_TRIALS = 5
"""Starts with another port in a row because the port of the one before was taken."""


@dataclass(frozen=True, slots=True)
class GroupNode:
    """A node that takes part in a start."""

    host: str
    local_size: int
    """Its ranks."""


@dataclass(frozen=True, slots=True)
class GroupStart:
    """One start of all ranks: the first, or a restart. The same value on every node."""

    restart: int
    """How many starts were before this one in the attempt (`TORCHELASTIC_RESTART_COUNT`)."""
    nodes: tuple[GroupNode, ...]
    """In the order of their ranks: local rank 0 of the first node is rank 0."""
    master_addr: str
    master_port: int
    """Another one for each restart: peers of an earlier start must not meet this one."""
    patience: float | None = None
    """Seconds that the ranks of the start before have to end; None is the job's own."""

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return sum(node.local_size for node in self.nodes)

    def find_group_rank(self, host: str) -> int | None:
        """Return a node's number (`GROUP_RANK`); None if it is a spare one, which does not take part."""
        return next((number for number, node in enumerate(self.nodes) if node.host == host), None)

    def count_ranks_before(self, group_rank: int) -> int:
        """Return the global rank of a node's local rank 0."""
        return sum(node.local_size for node in self.nodes[:group_rank])


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Every node ends its part: there is no further start."""

    failed: bool
    """Ranks have failed, or a node was lost; else all ranks have ended with 0."""


Order = GroupStart | JobEnd


@dataclass(slots=True)
class Coordinator:
    """Where one job stands."""

    hosts: tuple[str, ...]
    """All nodes, in the order of their ranks; spare nodes come last."""
    nodes: int
    """How many of them take part in a start."""
    max_restarts: int
    """How often failures may be answered by another start."""
    find_endpoint: Callable[[str, int], tuple[str, int]]
    """Gives MASTER_ADDR and MASTER_PORT for a start: by its first host, and its number."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Ranks of the nodes that are ready, by host."""
    lost: set[str] = field(default_factory=set)
    start: GroupStart | None = None
    """The newest one."""
    end: JobEnd | None = None
    restarts: int = 0
    """Those that answered a failure."""
    taken: int = 0
    """Starts in a row that answered a taken port."""
    ended: set[str] = field(default_factory=set)
    """Nodes of the newest start whose ranks have ended with 0."""
    stopped: bool = False
    """The end was asked for: nothing starts any more."""

    def note(self, kind: str, host: str, restart: int = 0, local_size: int = 0) -> Order | None:
        """Take a node's report, and return the order that follows from it.

        `ready`: it can start `local_size` ranks; the last node that was waited for gives a start. `failed`: a
        rank has failed; `ended`: all of its ranks have ended with 0, and the last node's report ends the job;
        `taken`: another process has the port of a start, which is none of the restarts that are counted.
        `lost`: if the node takes part, its ranks go to a spare node, or the job ends; `gone`: its task has
        ended by itself, which ends the job, or makes a spare node none. What an earlier start has left is no
        news.
        """
        start = self.start
        takes_part = start is not None and start.find_group_rank(host) is not None
        if host not in self.hosts or host in self.lost:
            return None
        if kind == "lost" or (kind == "gone" and start and not takes_part and not self.is_over):
            self.lost.add(host)
            if self.is_over or not self.is_waiting:
                return None
            is_hopeless = len(self.hosts) - len(self.lost) < self.nodes
            return self.finish(failed=True) if is_hopeless else self.begin()
        if self.is_over:
            return None
        if kind == "gone":
            return self.finish(failed=True)
        if kind == "ready" and local_size > 0:
            self.sizes[host] = local_size
            return self.begin() if self.is_waiting else None
        is_news = start is not None and restart == start.restart and takes_part and not self.is_waiting
        if not is_news or kind not in ("failed", "ended", "taken"):
            return None
        if kind == "ended":
            self.ended.add(host)
            return self.finish(failed=False) if len(self.ended) == self.nodes else None
        if kind == "taken":
            self.taken += 1
            goes_on = self.taken <= PORT_TRIALS
        elif goes_on := self.restarts < self.max_restarts:
            self.restarts += 1
            self.taken = 0
        return (self.begin() if goes_on else None) or self.finish(failed=True)

    @property
    def is_waiting(self) -> bool:
        """Whether nodes are missing for a start: for the first, or since one that takes part was lost."""
        return self.start is None or any(node.host in self.lost for node in self.start.nodes)

    @property
    def is_over(self) -> bool:
        """Whether nothing starts any more."""
        return self.stopped or self.end is not None

    def begin(self) -> GroupStart | None:
        """Make the next start the newest one, and return it; None if nodes are missing.

        A node that takes part keeps its place, and a spare one takes the place of the one that was lost: so
        most ranks stay on their nodes.
        """
        if len(self.sizes) < self.nodes:  # else the reports of n nodes would be looked through n times
            return None
        places = [node.host for node in self.start.nodes] if self.start else list(self.hosts[: self.nodes])
        ready = [host for host in self.hosts if host in self.sizes and host not in self.lost]
        taken = {*places}
        spares = iter([host for host in ready if host not in taken])
        hosts = [next(spares, host) if host in self.lost else host for host in places]
        if not {*hosts} <= {*ready}:
            return None
        number = self.start.restart + 1 if self.start else 0
        patience = LOSS_PATIENCE if self.start and hosts != places else None
        address, port = self.find_endpoint(hosts[0], number)
        nodes = tuple(GroupNode(host, self.sizes[host]) for host in hosts)
        self.start, self.ended = GroupStart(number, nodes, address, port, patience), set()
        return self.start

    def finish(self, *, failed: bool) -> JobEnd:
        """End the job."""
        self.end = JobEnd(failed)
        return self.end
