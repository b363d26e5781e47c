"""One start of all ranks of a job, as values: who takes part, where they meet, and each node's share."""

from dataclasses import dataclass


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
class RankStart:
    """What a rank's process is started with, before the shim has applied the plan."""

    local_rank: int
    argv: tuple[str, ...]
    """The program's argv, without the shim."""
    environ: dict[str, str]
    """All variables: the agent's, and those that torchrun would set."""
