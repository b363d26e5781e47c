"""Whether a job's nodes are there: what is heard of them, and what they answer from outside.

Two signs together make a node a lost one: its task is silent, and the node does not answer from outside
either. A task that is silent alone may be slow, or its node short of memory. `Liveness` has no clock and no
network: times are seconds of one monotonic clock, which the caller reads.
"""

import errno
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.slurm.commands import ask_config, ask_node_fields
from launcher.slurm.node_channel import ALIVE_PERIOD, OWN_GAP
from launcher.slurm.step import Step

SILENCE = 8.0
"""Seconds without a word after which a node is looked at: four words are missing."""
DOUBT = 1.5
"""The same once a rank has failed: a lost node may be why, and all tasks are asked to answer at once."""
BEGINNING = 60.0
"""The same for a task that has not said a word: srun takes its time with many nodes."""
MAX_UNREACHABLE = 2
"""Connections in a row that fail before a silent node is lost, a second apart at least."""
UNREACHABLE, FROZEN = "its SLURM daemon cannot be reached", "it takes connections, but starts no process"
"""What a node's loss is told by."""
CONNECT_TIMEOUT = 2.0
"""Seconds for a connection within a cluster; the kernel's first repetition comes after one."""
STEP_TIMEOUT = 8.0
"""Seconds in which a node that is only slow starts a small process (0.1 s on an idle one)."""
SLURMD_PORT = "6818"
"""SLURM's default (slurm.conf, SlurmdPort)."""
UNREACHABLE_ERRORS = frozenset(
    (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
)
"""Errors that tell of the other node, rather than of this one or of its name's lookup."""
ANSWER = "launch-probe: here"


def ask_addresses(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Ask SLURM where the nodes' daemons listen, by address and port; raises SchedulerError."""
    nodes = ask_node_fields(hosts, environ)
    default = SLURMD_PORT
    if not all("Port" in fields for fields in nodes.values()):  # a node has none there with the default one
        default = ask_config(environ).get("SlurmdPort", SLURMD_PORT)
    return {
        host: (fields["NodeAddr"], int(fields.get("Port", default)))
        for host, fields in nodes.items()
        if "NodeAddr" in fields
    }


def try_connection(where: tuple[str, int]) -> bool | None:
    """Tell whether a node takes a connection to its slurmd; None if that says nothing about the node."""
    try:
        with socket.create_connection(where, CONNECT_TIMEOUT):
            return True
    except TimeoutError:
        return False
    except OSError as error:
        return False if error.errno in UNREACHABLE_ERRORS else None


def is_frozen(host: str, witness: str, environ: Mapping[str, str]) -> bool | None:
    """Tell whether a node starts no process, while another one does; None if that one starts none either.

    slurmctld may be away, without which SLURM starts nothing anywhere.
    """
    if (has_run := try_step(host, environ)) is not False:
        return False if has_run else None
    return True if try_step(witness, environ) else None


def try_step(host: str, environ: Mapping[str, str]) -> bool | None:
    """Tell whether a node starts a process in time; None if there is no srun.

    The exit code says nothing: srun 22.05 ends with 0 if a node did not take its part.
    """
    null, step = subprocess.DEVNULL, Step((host,), ("echo", ANSWER), {"input": "none"})
    try:
        process = step.start(environ, stdin=null, stdout=subprocess.PIPE, stderr=null)
    except OSError:
        return None
    with process:
        try:
            return ANSWER.encode() in process.communicate(timeout=STEP_TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return False


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
        self.signs[host].is_frozen = not has_run and self.is_silent(host)

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
            return Loss(host, UNREACHABLE, silence)
        if signs.is_frozen and silence > SILENCE:
            return Loss(host, FROZEN, silence)
        return None

    def has_heard_all(self, hosts: Iterable[str], since: float) -> bool:
        """Tell whether each of these nodes was heard of after a time, or is lost."""
        return all(host in self.lost or self.signs[host].heard > since for host in hosts)
