"""Which nodes of a job are lost, by what is heard of them: events in, verdicts out.

Two signs together make a node a lost one: its task is silent, and the node does not answer from outside
either. A task that is silent alone may be slow, or its node short of memory. There is no clock and no
network here: times are seconds of one monotonic clock, which the caller reads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

ALIVE_PERIOD = 2.0
"""Seconds from one word of a task to the next."""
SILENCE = 8.0
"""Seconds without a word after which a node is looked at: four words are missing."""
DOUBT = 1.5
"""The same once a rank has failed: a lost node may be why, and all tasks are asked to answer at once."""
BEGINNING = 60.0
"""The same for a task that has not said a word: srun takes its time with many nodes."""
MAX_UNREACHABLE = 2
"""Connections in a row that fail before a silent node is lost, a second apart at least."""
OWN_GAP = 4.0
"""Seconds between two looks of the caller's after which it has slept itself, and knows nothing."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that is lost."""

    host: str
    evidence: str
    """What tells, for people."""
    silence: float
    """Seconds since its last word."""


@dataclass(slots=True)
class NodeSigns:
    """What is known of one node."""

    heard: float
    """When its task was last heard of; the beginning, if it never was."""
    has_spoken: bool = False
    unreachable: int = 0
    """Connections in a row that have failed."""
    is_frozen: bool = False
    """It takes connections, but starts no process."""


@dataclass(slots=True)
class Liveness:
    """The signs of all nodes of a job."""

    hosts: tuple[str, ...]
    now: float
    """The last look, and at first the beginning."""
    doubted: float | None = None
    """When a rank failed, so that each node is to be heard from again."""
    lost: set[str] = field(default_factory=set)
    signs: dict[str, NodeSigns] = field(init=False)

    def __post_init__(self) -> None:
        """Count from the beginning."""
        self.signs = {host: NodeSigns(self.now) for host in self.hosts}

    def note_heard(self, host: str, now: float) -> None:
        """Take a word of a node's task."""
        if host in self.signs:
            self.signs[host] = NodeSigns(now, has_spoken=True)

    def note_failure(self, now: float) -> None:
        """Take that a rank has failed: a node that is silent from now on may be why."""
        self.doubted = now

    def note_look(self, now: float) -> None:
        """Take that the caller looks again; if it has slept, as its machine may have, all begins anew."""
        if now - self.now > OWN_GAP:
            for signs in self.signs.values():
                signs.heard = max(signs.heard, now - ALIVE_PERIOD)
                signs.unreachable, signs.is_frozen = 0, False
            self.doubted = None if self.doubted is None else now
        self.now = now

    def list_suspects(self) -> list[str]:
        """Return the nodes that have been silent for too long, and whose answer is to be tried."""
        return [
            host for host, signs in self.signs.items() if host not in self.lost and self.is_suspect(signs)
        ]

    def is_suspect(self, signs: NodeSigns) -> bool:
        """Tell whether a node has been silent for longer than a sound one is."""
        silence = self.now - signs.heard
        if not signs.has_spoken:
            return silence > BEGINNING
        is_doubted = self.doubted is not None and signs.heard < self.doubted < self.now - DOUBT
        return is_doubted or silence > SILENCE

    def is_silent(self, host: str) -> bool:
        """Tell whether a suspect has been silent for long without a failure's doubt, too."""
        return self.now - self.signs[host].heard > SILENCE

    def note_connection(self, host: str, *, is_open: bool) -> None:
        """Take how an attempt to connect to a suspect's daemon went."""
        signs = self.signs[host]
        signs.unreachable = 0 if is_open else signs.unreachable + 1

    def note_step(self, host: str, *, has_run: bool) -> None:
        """Take whether a suspect that takes connections has run a short step in time."""
        self.signs[host].is_frozen = not has_run

    def take_losses(self) -> list[Loss]:
        """Return the suspects that are lost by now, each of them once."""
        found = [self.judge(host) for host in self.list_suspects()]
        losses = [loss for loss in found if loss]
        self.lost |= {loss.host for loss in losses}
        return losses

    def judge(self, host: str) -> Loss | None:
        """Return a suspect's loss; None if there is not enough evidence for it."""
        signs = self.signs[host]
        silence = self.now - signs.heard
        if signs.unreachable >= MAX_UNREACHABLE:
            return Loss(host, "its SLURM daemon cannot be reached", silence)
        if signs.is_frozen and silence > SILENCE:
            return Loss(host, "it takes connections, but starts no process", silence)
        return None

    def has_heard_all(self, hosts: Iterable[str], since: float) -> bool:
        """Tell whether each of these nodes was heard of after a time, or is lost."""
        return all(host in self.lost or self.signs[host].heard > since for host in hosts)
