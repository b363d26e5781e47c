"""Spare nodes: whether the nodes of a running step are there, and what replaces one that is lost."""

import contextlib
import errno
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import SchedulerError
from launcher.runs.manifest import stamp_time
from launcher.runs.node_records import read_nodes
from launcher.slurm.attempt import Attempt
from launcher.slurm.attempt_end import classify_kill
from launcher.slurm.commands import ask_config, ask_job, ask_node_fields
from launcher.slurm.liveness import Liveness, Loss
from launcher.slurm.node_channel import ASK_ALIVE, NodeReport
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


END_GRACE = 3.0
"""Seconds that srun has once every task that it still has is over."""


@dataclass(slots=True)
class NodeReplacement:
    """Hears a step's tasks, tries nodes that fall silent, and has spare ones take the place of those lost.

    A failure is held back until each node was heard of after it: a lost node may be why. `attend` is called
    again and again by the process that writes the manifest; the rest is done by a thread.
    """

    attempt: Attempt
    step: NodeStep
    group: StepGroup
    hosts: tuple[str, ...] = field(init=False)
    liveness: Liveness = field(init=False)
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
    lock: threading.Lock = field(default_factory=threading.Lock)
    wakeup: threading.Event = field(default_factory=threading.Event)
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
        with self.lock:
            now = time.monotonic()
            self.liveness.note_heard(report.host, now)
            is_held = report.kind == "failed" and len(self.hosts) > 1
            if is_held:
                self.held.append((now, report))
                self.liveness.note_failure(now)
        if self.held:
            if is_held:
                self.group.send(ASK_ALIVE)
            self.wakeup.set()
        return is_held

    def watch(self) -> None:
        """Try the nodes that are silent, and pass on the failures after which each node was heard of."""
        own, last = self.attempt.environ.get("SLURMD_NODENAME", ""), 0.0
        while not self.stopped:
            self.wakeup.wait(TICK)
            self.wakeup.clear()
            if time.monotonic() - last >= TICK:
                last = time.monotonic()
                with self.lock:
                    self.liveness.note_look(last)
                    # This node is never lost: this process would not run.
                    suspects = [host for host in self.liveness.list_suspects() if host != own]
                self.tried &= {*suspects}
                if suspects:
                    self.try_suspects(suspects, own)
                with self.lock:
                    losses = self.liveness.take_losses()
                self.losses |= {loss.host: loss for loss in losses}
                for loss in losses:
                    logger.info(
                        f"node {loss.host} is lost: {loss.evidence}, and nothing was heard of it for"
                        f" {loss.silence:.0f} s"
                    )
                self.group.take_losses([loss.host for loss in losses])
            with self.lock:
                now = time.monotonic()
                ready = [
                    item
                    for item in self.held
                    if now - item[0] > LONGEST_HOLD or self.liveness.has_heard_all(self.hosts, item[0])
                ]
                self.held = [item for item in self.held if item not in ready]
            for _, report in ready:
                self.group.pass_report_on(report)

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
        if not found.get(witness):
            return
        with self.lock:
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
        with self.lock:
            if frozen is None:
                self.tried.discard(host)
            elif self.liveness.is_silent(host):
                self.liveness.note_step(host, has_run=not frozen)

    def check_spares(self) -> None:
        """Check the spare nodes, and do without those that are sick: a thread's body."""
        from launcher.preflight.checks import CheckedNodes
        from launcher.slurm.preflight import check_allocation

        attempt = self.attempt
        try:
            checked = check_allocation(
                attempt.request.config,
                attempt.environ,
                attempt.spares,
                kind="light",
                directory=Path(attempt.request.directory),
                run_path=attempt.run.path,
            )
        except Exception as error:  # a mistake of the checks' own ends no job
            checked = CheckedNodes(None, f"{type(error).__name__}: {error}")
        if checked.report is None or checked.report.sick:
            with contextlib.suppress(SchedulerError):
                if classify_kill(ask_job(attempt.job_id, attempt.environ), attempt.restarts):
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

    def attend(self) -> None:
        """Keep the manifest's account, and end an srun that waits for lost nodes."""
        attempt, coordinator = self.attempt, self.group.coordinator
        start = coordinator.start
        hosts = tuple(node.host for node in start.nodes) if start else attempt.hosts
        left = (host for host in attempt.spares if host not in hosts)
        spares = tuple(host for host in left if host not in coordinator.lost)
        for old, new in zip(attempt.hosts, hosts, strict=True):
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
        attempt.hosts = hosts
        attempt.manifest["hosts"] = list(hosts)
        if spares != attempt.spares:
            attempt.spares = spares
            attempt.manifest["spares"] = list(spares)
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
        self.wakeup.set()
        self.attend()
