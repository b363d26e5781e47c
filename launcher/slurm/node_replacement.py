"""Spare nodes of a running step: nodes that are lost, what takes their place, and the account of it."""

import logging
import threading
import time
from dataclasses import dataclass, field

from launcher.agent.coordinator import Coordinator
from launcher.agent.liveness import Loss
from launcher.errors import SchedulerError
from launcher.runs.manifest import stamp_time
from launcher.runs.node_records import read_nodes
from launcher.slurm.attempt import Attempt, try_write_manifest
from launcher.slurm.attempt_end import classify_kill
from launcher.slurm.job_control import ask_job
from launcher.slurm.node_step import NodeStep
from launcher.slurm.node_watch import NodeWatch
from launcher.slurm.step_group import StepGroup

logger = logging.getLogger(__name__)

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
        from launcher.slurm.preflight_step import check_spare_nodes

        try:
            checked = check_spare_nodes(self.attempt)
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
