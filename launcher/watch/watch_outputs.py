"""Where a node's watcher sends what it knows: its metrics file, Prometheus, and whom the job notifies.

All of them have threads of their own; nothing here waits, and nothing here raises.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.watch.metrics_log import MetricsEvent, MetricsLog
from launcher.watch.notify import JobIdentity, Notifier
from launcher.watch.prometheus import PrometheusExport, start_prometheus
from launcher.watch.stragglers import explain_straggler
from launcher.watch.watch_model import Hang, JobState, NodeReport, Straggler
from launcher.watch.watcher_settings import WatcherSettings


@dataclass(slots=True)
class WatchOutputs:
    """Gives out reports of this node, and events of the job if this node judges it."""

    log: MetricsLog
    notifier: Notifier
    prometheus: PrometheusExport | None = None
    attempt: int = 0
    step: int = 0
    """The last step that was pinged for."""
    told: set[tuple[int, int]] = field(default_factory=set)
    """Stragglers that were told of, by rank and first step."""

    def add_report(self, report: NodeReport) -> None:
        """Give out a report of this node's."""
        self.log.add_report(report)
        if self.prometheus:
            self.prometheus.update(report)

    def add_state(self, state: JobState) -> None:
        """Ping if the job has made steps, and tell of new stragglers."""
        if state.step > self.step:
            self.notifier.ping()
        self.step = state.step
        for straggler in state.stragglers:
            if (key := (straggler.rank, straggler.first_step)) not in self.told:
                self.told.add(key)
                self.tell_straggler(straggler, state)

    def tell_start(self, report: NodeReport, ranks: int) -> None:
        """Tell that the job has started; `ranks` are those of this node."""
        sentence = ("1 rank" if ranks == 1 else f"{ranks} ranks") + (
            f" on each of {report.nodes} nodes" if report.nodes > 1 else ""
        )
        self.log.add_event(MetricsEvent("start", report.time, sentence, attempt=self.attempt))
        self.notifier.tell("start", sentence, state="starting")

    def tell_hang(self, hang: Hang) -> None:
        """Tell of a hang, and of the restart that follows from it."""
        verdict = hang.verdict
        for event in ("hang", *(["restart"] if hang.action == "restart" else [])):
            self.log.add_event(
                MetricsEvent(
                    event, hang.time, verdict.sentence, hang.step, verdict.ranks, verdict.hosts, hang.number,
                    self.attempt,
                )
            )  # fmt: skip
        self.notifier.tell("hang", verdict.sentence, state="hanging", step=hang.step)

    def tell_recovery(self, hang: Hang) -> None:
        """Tell that steps go on."""
        time = hang.recovered or hang.time
        sentence = f"steps go on after {time - hang.stalled_since:.0f} s"
        self.log.add_event(
            MetricsEvent("recovered", time, sentence, hang.step, number=hang.number, attempt=self.attempt)
        )
        self.notifier.tell("recover", sentence, state="running", step=hang.step)

    def tell_straggler(self, straggler: Straggler, state: JobState) -> None:
        """Tell of a rank that others wait for."""
        sentence = explain_straggler(straggler)
        ranks, hosts = (straggler.rank,), (straggler.host,)
        self.log.add_event(
            MetricsEvent(
                "straggler", straggler.time, sentence, straggler.last_step, ranks, hosts, attempt=self.attempt
            )
        )
        self.notifier.tell("straggler", sentence, state=state.state, step=straggler.last_step)

    def close(self, timeout: float) -> None:
        """Write and send what waits, each for so many seconds at most."""
        self.log.close(timeout)
        if self.prometheus:
            self.prometheus.end_file(timeout)
        self.notifier.close(timeout)


def open_outputs(
    settings: WatcherSettings, warn: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> WatchOutputs:
    """Open what the settings ask for; what cannot be had is a warning."""
    watch, host = settings.watch, settings.host
    log = MetricsLog(Path(settings.run_dir), host, watch.metrics_interval, warn)
    job = JobIdentity(settings.run, settings.run_dir, host, environ.get("SLURM_JOB_ID"))
    prometheus = start_prometheus(
        settings.run,
        host,
        port=watch.prometheus_port,
        address=watch.prometheus_address,
        textfile=watch.textfile,
        warn=warn,
    )
    return WatchOutputs(log, Notifier(settings.notify, job, warn), prometheus, settings.attempt)
