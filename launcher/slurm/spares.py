"""Spare nodes: whether the nodes of a running step are there, and what replaces one that is lost."""

import errno
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from launcher.agent.coordinator import Coordinator
from launcher.agent.group_messages import ASK_ALIVE, NodeReport
from launcher.agent.liveness import Liveness, Loss
from launcher.errors import SchedulerError
from launcher.runs.manifest import stamp_time
from launcher.runs.node_records import read_nodes
from launcher.slurm.attempt import Attempt, try_write_manifest
from launcher.slurm.attempt_end import classify_kill
from launcher.slurm.commands import ask_config, ask_job, ask_node_fields
from launcher.slurm.node_step import NodeStep, StepGroup
from launcher.slurm.slurm_environ import clean_for_step
from launcher.slurm.srun import Step, render_step

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 2.0
"""Seconds for a connection within a cluster; the kernel's first repetition comes after one."""
STEP_TIMEOUT = 8.0
"""Seconds in which a node that is only slow starts a small process (0.1 s on an idle one)."""
SLURMD_PORT = "6818"
"""SLURM's default (slurm.conf, SlurmdPort)."""
UNREACHABLE = frozenset(
    (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
)
"""Errors that tell of the other node, rather than of this one or of its name's lookup."""
ANSWER = "launch-probe: here"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node's slurmd listens."""

    address: str
    port: int


def ask_addresses(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, NodeAddress]:
    """Ask SLURM where the nodes' daemons listen; raises SchedulerError."""
    nodes = ask_node_fields(hosts, environ)
    default = SLURMD_PORT
    if not all("Port" in fields for fields in nodes.values()):  # a node has none there with the default one
        default = ask_config(environ).get("SlurmdPort", SLURMD_PORT)
    return {
        host: NodeAddress(fields["NodeAddr"], int(fields.get("Port", default)))
        for host, fields in nodes.items()
        if "NodeAddr" in fields
    }


def try_connection(where: NodeAddress, timeout: float = CONNECT_TIMEOUT) -> bool | None:
    """Tell whether a node takes a connection to its slurmd; None if that says nothing about the node."""
    try:
        with socket.create_connection((where.address, where.port), timeout):
            return True
    except TimeoutError:
        return False
    except OSError as error:
        return False if error.errno in UNREACHABLE else None


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
    step = Step(1, (host,), elastic=True, directory="/", command=("echo", ANSWER), options={"input": "none"})
    try:
        process = subprocess.Popen(
            render_step(step),
            env=clean_for_step(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    with process:
        try:
            return ANSWER.encode() in process.communicate(timeout=STEP_TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return False


TICK = 1.0
"""Seconds between two looks, and so between two connections to a node."""
LONGEST_HOLD = 25.0
"""Seconds after which a failure counts, whatever is known of the nodes."""
MAX_CONNECTIONS = 16
"""Connections that are tried at the same time."""


@dataclass(slots=True)
class NodeWatch:
    """Hears the tasks, tries nodes that fall silent, and holds failures back."""

    hosts: tuple[str, ...]
    own_host: str
    """The node of this process, which is never lost: the process would not run."""
    environ: Mapping[str, str]
    send: Callable[[Iterable[str]], None]
    """Writes lines to all tasks."""
    deliver: Callable[[NodeReport], None]
    """Takes a failure that was held back."""
    report_losses: Callable[[list[Loss]], None]
    count_spares: Callable[[], int]
    """Gives the nodes that could take the place of another."""
    liveness: Liveness = field(init=False)
    held: list[tuple[float, NodeReport]] = field(default_factory=list)
    """Failures, and when they came."""
    addresses: dict[str, NodeAddress] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    """Suspects that were asked to run a step in this silence."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    wakeup: threading.Event = field(default_factory=threading.Event)
    stopped: bool = False
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Begin to watch."""
        self.liveness = Liveness(self.hosts, time.monotonic())
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def note_report(self, report: NodeReport) -> bool:
        """Take a report; true if it is held back."""
        with self.lock:
            now = time.monotonic()
            self.liveness.note_heard(report.host, now)
            is_held = report.kind == "failed" and len(self.hosts) > 1
            if is_held:
                self.held.append((now, report))
                self.liveness.note_failure(now)
        if self.held:
            if is_held:
                self.send((ASK_ALIVE,))
            self.wakeup.set()
        return is_held

    def stop(self) -> None:
        """End the watch."""
        self.stopped = True
        self.wakeup.set()

    def watch(self) -> None:
        """Look again and again: the thread's body."""
        last = 0.0
        while not self.stopped:
            self.wakeup.wait(TICK)
            self.wakeup.clear()
            if time.monotonic() - last >= TICK:
                last = time.monotonic()
                self.look()
            self.release_failures()

    def look(self) -> None:
        """Try the nodes that are silent, and report those that are lost."""
        with self.lock:
            self.liveness.note_look(time.monotonic())
            suspects = [host for host in self.liveness.list_suspects() if host != self.own_host]
        self.tried &= {*suspects}
        if suspects:
            self.try_suspects(suspects)
        with self.lock:
            losses = self.liveness.take_losses()
        if losses:
            self.report_losses(losses)

    def try_suspects(self, suspects: list[str]) -> None:
        """Connect to suspects, and have those that take it run a step; nothing if this node is cut off."""
        witness = next((host for host in self.hosts if host not in suspects), self.own_host)
        missing = [host for host in (*suspects, witness) if host not in self.addresses]
        try:
            self.addresses |= ask_addresses(missing, self.environ) if missing else {}
        except SchedulerError as error:
            logger.debug(f"no addresses ({error})")
        known = [host for host in (witness, *suspects) if host in self.addresses]
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            found = dict(
                zip(known, pool.map(lambda host: try_connection(self.addresses[host]), known), strict=True)
            )
        if not found.get(witness):
            return
        with self.lock:
            for host in suspects:
                is_open = found.get(host)
                if is_open is not None:
                    self.liveness.note_connection(host, is_open=is_open)
        self.ask_for_steps([host for host in suspects if found.get(host)], witness)

    def ask_for_steps(self, suspects: list[str], witness: str) -> None:
        """Have suspects that take connections run a step, if they are no more than can be replaced."""
        silent = [host for host in suspects if self.liveness.is_silent(host) and host not in self.tried]
        if len(silent) <= self.count_spares():
            for host in silent:
                self.tried.add(host)
                threading.Thread(target=self.try_step_on, args=(host, witness), daemon=True).start()

    def try_step_on(self, host: str, witness: str) -> None:
        """Have a suspect run a step, again later if that tells nothing: a thread's body."""
        frozen = is_frozen(host, witness, self.environ)
        with self.lock:
            if frozen is None:
                self.tried.discard(host)
            elif self.liveness.is_silent(host):
                self.liveness.note_step(host, has_run=not frozen)

    def release_failures(self) -> None:
        """Pass on the failures after which each node was heard of."""
        with self.lock:
            now = time.monotonic()
            ready = [
                item
                for item in self.held
                if now - item[0] > LONGEST_HOLD or self.liveness.has_heard_all(self.hosts, item[0])
            ]
            self.held = [item for item in self.held if item not in ready]
        for _, report in ready:
            self.deliver(report)


END_GRACE = 3.0
"""Seconds that srun has once every task that it still has is over."""
TOLD_BY_SLURM = "SLURM gave it up"


@dataclass(slots=True)
class NodeReplacement:
    """Watches a step's nodes; `attend` is called again and again by the process that writes the manifest."""

    attempt: Attempt
    step: NodeStep
    group: StepGroup
    watch: NodeWatch = field(init=False)
    losses: dict[str, Loss] = field(default_factory=dict)
    """Nodes that fell silent."""
    sick: dict[str, str] = field(default_factory=dict)
    """Spare nodes that are not used, and why."""
    ended_at: float | None = None
    """Monotonic time at which all tasks that are left were over."""

    def __post_init__(self) -> None:
        """Begin to watch."""
        attempt, group = self.attempt, self.group
        self.watch = NodeWatch(
            attempt.step_hosts,
            attempt.environ.get("SLURMD_NODENAME", ""),
            attempt.environ,
            group.send,
            group.pass_report_on,
            self.take_losses,
            lambda: len(self.coordinator.spares),
        )
        group.holds_back = self.watch.note_report
        names = ", ".join(attempt.spares)
        logger.info(f"spare node{'s' if len(attempt.spares) > 1 else ''} {names}: idle until a node is lost")
        if "preflight" not in attempt.manifest and attempt.request.config.preflight.kind != "off":
            threading.Thread(target=self.check_spares, daemon=True).start()

    @property
    def coordinator(self) -> Coordinator:
        """What decides about starts."""
        return self.group.coordinator

    def take_losses(self, losses: list[Loss]) -> None:
        """Have the coordinator do without nodes: on the watch's thread."""
        self.losses |= {loss.host: loss for loss in losses}
        for loss in losses:
            logger.info(
                f"node {loss.host} is lost: {loss.evidence}, and nothing was heard of it for"
                f" {loss.silence:.0f} s"
            )
        self.group.take_losses([loss.host for loss in losses])

    def check_spares(self) -> None:
        """Check the spare nodes, and do without those that are sick: a thread's body."""
        from launcher.preflight.checks import CheckedNodes
        from launcher.slurm.preflight import check_nodes

        try:
            checked = check_nodes(self.attempt, self.attempt.spares, "light")
        except Exception as error:  # a mistake of the checks' own ends no job
            checked = CheckedNodes(None, f"{type(error).__name__}: {error}")
        if (checked.report is None or checked.report.sick) and self.is_job_ending():
            return  # SLURM has ended the checks, too
        if checked.report is None:
            logger.warning(f"the spare nodes were not checked: {checked.problem}")
            return
        findings = [one for one in checked.report.findings if one.level == "error"]
        for host in checked.report.sick:
            words = next((one.what for one in findings if one.host == host), "it does not answer")
            logger.warning(f"spare node {host} is sick, and is not used: {words}")
            self.sick[host] = words
            self.group.drop_spare(host)

    def is_job_ending(self) -> bool:
        """Tell whether SLURM ends the job, or puts it back into the queue."""
        try:
            return bool(
                classify_kill(ask_job(self.attempt.job_id, self.attempt.environ), self.attempt.restarts)
            )
        except SchedulerError:
            return False

    def attend(self) -> None:
        """Keep the account, and end an srun that waits for lost nodes."""
        start = self.coordinator.start
        hosts = tuple(node.host for node in start.nodes) if start else self.attempt.hosts
        left = (host for host in self.attempt.spares if host not in hosts)
        spares = tuple(host for host in left if host not in self.coordinator.lost)
        if hosts != self.attempt.hosts:
            self.record_replacements(hosts)
        if spares != self.attempt.spares:
            self.attempt.spares = spares
            self.write_manifest()
        if (self.losses or self.step.lost) and self.is_over():
            self.ended_at = self.ended_at or time.monotonic()
            if time.monotonic() > self.ended_at + END_GRACE:
                self.step.process.kill()

    def is_over(self) -> bool:
        """Tell whether every node that takes part, and is not lost, has left its record."""
        attempt = self.attempt
        if not self.coordinator.is_over:
            return False
        records = {record.host for record in read_nodes(attempt.run.path, attempt.run.first_attempt)}
        return all(host in records or host in self.coordinator.lost for host in attempt.hosts)

    def record_replacements(self, hosts: tuple[str, ...]) -> None:
        """Write down which nodes have taken others' places, and go on with these hosts."""
        attempt = self.attempt
        pairs = [(old, new) for old, new in zip(attempt.hosts, hosts, strict=True) if old != new]
        account = [self.describe_replacement(old, new) for old, new in pairs]
        for old, new in pairs:
            logger.info(f"spare node {new} takes the place of {old}")
        attempt.hosts = hosts
        attempt.manifest["hosts"] = list(hosts)
        attempt.manifest["replacements"] = [*attempt.manifest.get("replacements", ()), *account]

    def describe_replacement(self, lost: str, spare: str) -> dict[str, object]:
        """Return what the manifest says of a replacement."""
        loss = self.losses.get(lost)
        evidence = loss.evidence if loss else TOLD_BY_SLURM
        silence = round(loss.silence, 1) if loss else None
        return {"lost": lost, "spare": spare, "time": stamp_time(), "evidence": evidence, "silence": silence}

    def write_manifest(self) -> None:
        """Have the manifest tell of the spare nodes while the job runs, too."""
        self.attempt.manifest["spares"] = list(self.attempt.spares)
        if self.sick:
            self.attempt.manifest["sick_spares"] = dict(self.sick)
        try_write_manifest(self.attempt.run, self.attempt.manifest)

    def close(self) -> None:
        """End the watch, and complete the account."""
        self.watch.stop()
        self.attend()
