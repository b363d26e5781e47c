"""Lost nodes: which of a job's nodes are there, and the spare one that takes a lost one's place.

Two signs together make a node a lost one: its task is silent, and the node does not answer from outside
either. A task that is silent alone may be slow, or its node short of memory. `Liveness` has no clock and no
network: times are seconds of one monotonic clock, which the caller reads.
"""

import contextlib
import errno
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from launcher.errors import SchedulerError
from launcher.runs.manifest import stamp_time
from launcher.runs.records import read_nodes
from launcher.slurm.attempt import Attempt
from launcher.slurm.attempt_end import classify_kill
from launcher.slurm.commands import ask_config, ask_job, ask_node_fields
from launcher.slurm.node_channel import ALIVE_PERIOD, ASK_ALIVE, OWN_GAP, NodeReport, StepGroup
from launcher.slurm.step import NodeStep, Step

logger = logging.getLogger(__name__)

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
TICK = 1.0
"""Seconds between two looks, and so between two connections to a node."""
LONGEST_HOLD = 25.0
"""Seconds after which a failure counts, whatever is known of the nodes."""
MAX_CONNECTIONS = 16
"""Connections that are tried at the same time."""
END_GRACE = 3.0
"""Seconds that srun has once every task that it still has is over."""


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
        """Take that the caller looks again; if it has slept, as its machine may have, all begins again."""
        if now - self.now > OWN_GAP:
            for signs in self.signs.values():
                signs.heard = max(signs.heard, now - ALIVE_PERIOD)
                signs.unreachable, signs.is_frozen = 0, False
            self.doubted = None if self.doubted is None else now
        self.now = now

    def list_suspects(self) -> list[str]:
        """Return the nodes that have been silent for longer than a sound one is, and are to be tried."""
        suspects = []
        for host, signs in self.signs.items():
            silence = self.now - signs.heard
            is_late = silence > (SILENCE if signs.has_spoken else BEGINNING)
            if signs.has_spoken and self.doubted is not None:
                is_late = is_late or signs.heard < self.doubted < self.now - DOUBT
            if is_late and host not in self.lost:
                suspects.append(host)
        return suspects

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
        """Return the suspects that are lost by now, as there is enough evidence for it, each of them once."""
        losses = []
        for host in self.list_suspects():
            signs, silence = self.signs[host], self.now - self.signs[host].heard
            if signs.unreachable >= MAX_UNREACHABLE:
                losses.append(Loss(host, UNREACHABLE, silence))
            elif signs.is_frozen and silence > SILENCE:
                losses.append(Loss(host, FROZEN, silence))
        self.lost |= {loss.host for loss in losses}
        return losses

    def has_heard_all(self, hosts: Iterable[str], since: float) -> bool:
        """Tell whether each of these nodes was heard of after a time, or is lost."""
        return all(host in self.lost or self.signs[host].heard > since for host in hosts)


@dataclass(slots=True)
class NodeReplacement:
    """Hears a step's tasks, tries nodes that fall silent, and has spare ones take the place of those lost.

    A failure is held back until each node was heard of after it: a lost node may be why. A thread of its own
    has all that is known of the nodes; others put what they have found into its queue. `attend` is called
    again and again by the process that writes the manifest.
    """

    attempt: Attempt
    step: NodeStep
    group: StepGroup
    hosts: tuple[str, ...] = field(init=False)
    liveness: Liveness = field(init=False)
    events: SimpleQueue[Callable[[], object]] = field(default_factory=SimpleQueue)
    """What the thread is to note."""
    held: list[tuple[float, NodeReport]] = field(default_factory=list)
    """Failures, and when they came."""
    addresses: dict[str, tuple[str, int]] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    """Suspects that were asked to run a step in this silence."""
    losses: dict[str, Loss] = field(default_factory=dict)
    """Nodes that fell silent."""
    sick: dict[str, str] = field(default_factory=dict)
    """Spare nodes that are not used, and why."""
    ended_at: float | None = None
    """Monotonic time at which all tasks that are left were over."""
    stopped: bool = False

    def __post_init__(self) -> None:
        """Begin to watch."""
        attempt = self.attempt
        self.hosts = attempt.step_hosts
        self.liveness = Liveness(self.hosts, time.monotonic())
        self.group.holds_back = self.note_report
        threading.Thread(target=self.watch, daemon=True).start()
        names = ", ".join(attempt.spares)
        logger.info(f"spare node{'s' if len(attempt.spares) > 1 else ''} {names}: idle until a node is lost")
        if "preflight" not in attempt.manifest and attempt.request.config.preflight.kind != "off":
            threading.Thread(target=self.check_spares, daemon=True).start()

    def note_report(self, report: NodeReport) -> bool:
        """Take a report; true if it is held back."""
        is_held = report.kind == "failed" and len(self.hosts) > 1
        self.events.put(partial(self.hear, report, time.monotonic(), is_held=is_held))
        return is_held

    def hear(self, report: NodeReport, now: float, *, is_held: bool) -> None:
        """Note that a node was heard of; of a failure, all tasks are asked to answer."""
        self.liveness.note_heard(report.host, now)
        if is_held:
            self.held.append((now, report))
            self.liveness.note_failure(now)
            self.group.send(ASK_ALIVE)

    def watch(self) -> None:
        """Try the nodes that are silent, and pass on the failures after which each node was heard of."""
        last = 0.0
        while not self.stopped:
            self.take_events(TICK)
            if time.monotonic() - last >= TICK:
                last = time.monotonic()
                self.look(last)
            now = time.monotonic()
            for item in [*self.held]:
                when, report = item
                if now - when > LONGEST_HOLD or self.liveness.has_heard_all(self.hosts, when):
                    self.held.remove(item)
                    self.group.pass_report_on(report)

    def take_events(self, seconds: float = 0.0) -> None:
        """Note what has come, or comes within so many seconds."""
        with contextlib.suppress(Empty):
            while True:
                self.events.get(timeout=seconds)()
                seconds = 0.0

    def look(self, now: float) -> None:
        """Try the nodes that are silent, and give up those that are lost."""
        # This node is never lost: this process would not run.
        own = self.attempt.environ.get("SLURMD_NODENAME", "")
        self.liveness.note_look(now)
        suspects = [host for host in self.liveness.list_suspects() if host != own]
        self.tried &= {*suspects}
        if suspects:
            self.try_suspects(suspects, own)
        losses = self.liveness.take_losses()
        self.losses |= {loss.host: loss for loss in losses}
        for loss in losses:
            silence = f"nothing was heard of it for {loss.silence:.0f} s"
            logger.info(f"node {loss.host} is lost: {loss.evidence}, and {silence}")
        self.group.take_losses([loss.host for loss in losses])

    def try_suspects(self, suspects: list[str], own: str) -> None:
        """Connect to suspects; nothing if this node is cut off.

        Those that take it are to run a step, if they are no more than can be replaced.
        """
        witness = next((host for host in self.hosts if host not in suspects), own)
        missing = [host for host in (*suspects, witness) if host not in self.addresses]
        try:
            self.addresses |= ask_addresses(missing, self.attempt.environ) if missing else {}
        except SchedulerError as error:
            logger.debug(f"no addresses ({error})")
        known = [host for host in (witness, *suspects) if host in self.addresses]
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            answers = pool.map(lambda host: try_connection(self.addresses[host]), known)
            found = dict(zip(known, answers, strict=True))
        self.take_events()
        if not found.get(witness):
            return
        for host in suspects:
            is_open = found.get(host)
            if is_open is not None:
                self.liveness.note_connection(host, is_open=is_open)
        open_ones = [host for host in suspects if found.get(host)]
        silent = [host for host in open_ones if self.liveness.is_silent(host) and host not in self.tried]
        if len(silent) <= len(self.group.coordinator.spares):
            for host in silent:
                self.tried.add(host)
                threading.Thread(target=self.try_step_on, args=(host, witness), daemon=True).start()

    def try_step_on(self, host: str, witness: str) -> None:
        """Have a suspect run a step, again later if that tells nothing: a thread's body."""
        frozen = is_frozen(host, witness, self.attempt.environ)
        if frozen is None:
            self.events.put(partial(self.tried.discard, host))
        else:
            self.events.put(partial(self.liveness.note_step, host, has_run=not frozen))

    def check_spares(self) -> None:
        """Check the spare nodes, and do without those that are sick: a thread's body."""
        from launcher.slurm.preflight import check_allocation

        attempt = self.attempt
        try:
            report = check_allocation(
                attempt.request.config,
                attempt.environ,
                attempt.spares,
                kind="light",
                directory=Path(attempt.request.directory),
                run_path=attempt.run.path,
            )
        except Exception as error:  # a mistake of the checks' own ends no job
            report = f"{type(error).__name__}: {error}"
        if isinstance(report, str) or report.sick:
            with contextlib.suppress(SchedulerError):
                if classify_kill(ask_job(attempt.job_id, attempt.environ), attempt.restarts):
                    return  # SLURM has ended the checks, too
        if isinstance(report, str):
            logger.warning(f"the spare nodes were not checked: {report}")
            return
        findings = [one for one in report.findings if one.level == "error"]
        for host in report.sick:
            words = next((one.what for one in findings if one.host == host), "it does not answer")
            logger.warning(f"spare node {host} is sick, and is not used: {words}")
            self.sick[host] = words
            self.group.drop_spare(host)

    def attend(self) -> None:
        """Keep the manifest's account, and end an srun that waits for lost nodes."""
        attempt, coordinator = self.attempt, self.group.coordinator
        before, start = attempt.hosts, coordinator.start
        hosts = tuple(node.host for node in start.nodes) if start else before
        spares = [host for host in attempt.spares if host not in coordinator.lost and host not in hosts]
        for old, new in zip(before, hosts, strict=True):
            if old != new:
                logger.info(f"spare node {new} takes the place of {old}")
                loss = self.losses.get(old)
                account = {
                    "lost": old,
                    "spare": new,
                    "time": stamp_time(),
                    "evidence": loss.evidence if loss else "SLURM gave it up",
                    "silence": round(loss.silence, 1) if loss else None,
                }
                attempt.manifest.setdefault("replacements", []).append(account)
        attempt.manifest["hosts"] = list(hosts)
        if spares != [*attempt.spares]:
            attempt.manifest["spares"] = spares
            if self.sick:
                attempt.manifest["sick_spares"] = dict(self.sick)
            attempt.write()
        if not (self.losses or self.step.lost) or not coordinator.is_over:
            return
        # Every node that takes part, and is not lost, has left its record.
        records = {record.host for record in read_nodes(attempt.run.path, attempt.run.first_attempt)}
        if {*attempt.hosts} <= records | coordinator.lost:
            self.ended_at = self.ended_at or time.monotonic()
            if time.monotonic() > self.ended_at + END_GRACE:
                self.step.process.kill()

    def close(self) -> None:
        """End the watch, and complete the account."""
        self.stopped = True
        self.events.put(bool)
        self.attend()
