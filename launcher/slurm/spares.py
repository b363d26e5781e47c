"""Spare nodes: one takes the place of a node of a running step that is lost."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
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
from launcher.slurm.commands import ask_job
from launcher.slurm.liveness import Liveness, Loss, ask_addresses, is_frozen, try_connection
from launcher.slurm.node_channel import ASK_ALIVE, NodeReport, StepGroup
from launcher.slurm.step import NodeStep

logger = logging.getLogger(__name__)

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
