"""Where a node's watcher sends what it knows: its metrics file, Prometheus, and whom the job notifies.

All of them have threads of their own; nothing here waits, and nothing here raises.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.text import count_things
from launcher.watch.metrics import start_prometheus
from launcher.watch.metrics_log import MetricsEvent, MetricsLog
from launcher.watch.model import Hang, JobState, NodeReport, WatcherSettings
from launcher.watch.notify import Notifier
from launcher.watch.stragglers import explain_straggler


class WatchOutputs:
    """Gives out reports of this node, and events of the job if this node judges it."""

    def __init__(self, settings: WatcherSettings, warn: Callable[[str], None]) -> None:
        """Open what the settings ask for; what cannot be had is a warning."""
        watch, host = settings.watch, settings.host
        self._log = MetricsLog(Path(settings.run_dir), host, watch.metrics_interval, warn)
        self._notifier = Notifier(
            settings.notify,
            warn,
            run=settings.run,
            run_dir=settings.run_dir,
            host=host,
            job_id=os.environ.get("SLURM_JOB_ID"),
        )
        self._prometheus = start_prometheus(
            settings.run,
            host,
            port=watch.prometheus_port,
            address=watch.prometheus_address,
            textfile=watch.textfile,
            warn=warn,
        )
        self._attempt = settings.attempt
        self._step = 0
        """The last step that was pinged for."""
        self._told: set[tuple[int, int]] = set()
        """Stragglers that were told of, by rank and first step."""

    def add_report(self, report: NodeReport) -> None:
        """Give out a report of this node's."""
        self._log.add_report(report)
        if self._prometheus:
            self._prometheus.update(report)

    def add_state(self, state: JobState) -> None:
        """Ping if the job has made steps, and tell of new stragglers."""
        if state.step > self._step:
            self._notifier.ping()
        self._step = state.step
        for one in state.stragglers:
            if (key := (one.rank, one.first_step)) not in self._told:
                self._told.add(key)
                event = MetricsEvent("straggler", one.time, explain_straggler(one), one.last_step)
                self._tell(replace(event, ranks=(one.rank,), hosts=(one.host,)), state.state)

    def tell_start(self, report: NodeReport, ranks: int) -> None:
        """Tell that the job has started; `ranks` are those of this node."""
        nodes = f" on each of {report.nodes} nodes" if report.nodes > 1 else ""
        self._tell(MetricsEvent("start", report.time, f"{count_things(ranks, 'rank')}{nodes}"), "starting")

    def tell_hang(self, hang: Hang) -> None:
        """Tell of a hang, and of the restart that follows from it."""
        verdict = hang.verdict
        event = MetricsEvent(
            "hang", hang.time, verdict.sentence, hang.step, verdict.ranks, verdict.hosts, hang.number
        )
        self._tell(event, "hanging")
        if hang.action == "restart":
            self._log.add_event(replace(event, event="restart", attempt=self._attempt))

    def tell_recovery(self, hang: Hang) -> None:
        """Tell that steps go on."""
        time = hang.recovered or hang.time
        sentence = f"steps go on after {time - hang.stalled_since:.0f} s"
        event = MetricsEvent("recovered", time, sentence, hang.step, number=hang.number)
        self._tell(event, "running", "recover")

    def _tell(self, event: MetricsEvent, state: str, name: str = "") -> None:
        """Write an event, and notify of it, as `name` if it has another one there."""
        self._log.add_event(replace(event, attempt=self._attempt))
        self._notifier.tell(name or event.event, event.sentence, state=state, step=event.step)

    def close(self, timeout: float) -> None:
        """Write and send what waits, each for so many seconds at most."""
        self._log.close(timeout)
        if self._prometheus:
            self._prometheus.end_file(timeout)
        self._notifier.close(timeout)
