"""Where a node's reports and the job's events go beside the run's files, and what is read seldom for them.

metrics-HOST.jsonl, Prometheus, notify.url; the ranks' collectives, and from them the stragglers.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.watch.collective_times import CollectiveReader
from launcher.watch.metrics_log import MetricsEvent, MetricsLog
from launcher.watch.model import CollectiveTimes, Hang, Heartbeat, NodeReport, Straggler
from launcher.watch.prometheus import start_prometheus
from launcher.watch.stragglers import StragglerFinder, count_stragglers, describe_straggler
from launcher.watch.watcher_settings import WatcherSettings

if TYPE_CHECKING:
    from launcher.watch.notify import Notifier

CLOSING = 0.1
"""Seconds for each of them at the end: the supervisor waits for this process."""
NOTIFICATIONS = {"recovered": "recover"}
"""Names of events that `notify.events` has other words for."""


class Outlets:
    """Passes reports and events on; a failure of one is a warning."""

    def __init__(self, settings: WatcherSettings, warn: Callable[[str], None]) -> None:
        watch, run_path = settings.watch, Path(settings.run_dir)
        self.settings = settings
        self.log = MetricsLog(run_path, settings.host, watch.metrics_interval, warn)
        self.export = start_prometheus(
            settings.run,
            settings.host,
            port=watch.prometheus_port,
            address=watch.prometheus_address,
            textfile=watch.textfile,
            warn=warn,
        )
        self.notifier = start_notifier(settings, warn)
        self.reader = CollectiveReader(Path(settings.folder), settings.ranks * settings.nodes)
        self.finder = StragglerFinder()
        self.step = 0
        """The last step that was told of by a ping."""
        self.has_started = settings.node_rank > 0
        """The job's start was told, or is another node's to tell."""

    def read_collectives(self, beats: Sequence[Heartbeat]) -> tuple[CollectiveTimes, ...]:
        """Return when the ranks of this node came to their last collectives, as of the last reading."""
        return self.reader.read(beats, time.time())

    def take_report(self, report: NodeReport) -> None:
        """Pass on this node's report."""
        self.log.add_report(report)
        if self.export:
            self.export.update(report)

    def take_job(self, reports: Sequence[NodeReport]) -> list[str]:
        """Take all nodes' reports, at the node that judges; return what is to be said of new stragglers."""
        step = max((rank.step for report in reports for rank in report.ranks), default=0)
        if not self.has_started:
            self.has_started = True
            self.tell(MetricsEvent("start", time.time(), "the ranks have started"))
        if step != self.step and self.notifier:
            self.notifier.ping()
        self.step = step
        lines = []
        for straggler in self.finder.update(reports):
            lines.append(describe_straggler(straggler))
            self.tell_straggler(straggler, lines[-1])
        return lines

    def tell_straggler(self, straggler: Straggler, sentence: str) -> None:
        """Tell of a straggler."""
        ranks, hosts = (straggler.rank,), (straggler.host,)
        self.tell(
            MetricsEvent("straggler", straggler.time, sentence, straggler.last_step, ranks=ranks, hosts=hosts)
        )

    def tell_hang(self, event: str, hang: Hang) -> None:
        """Tell of a hang, or that it is over."""
        verdict = hang.verdict
        self.tell(
            MetricsEvent(
                event,
                hang.recovered or hang.time,
                verdict.sentence,
                hang.step,
                ranks=verdict.ranks,
                hosts=verdict.hosts,
                number=hang.number,
            )
        )

    def tell(self, event: MetricsEvent) -> None:
        """Write an event, and post it if it is one of `notify.events`."""
        self.log.add_event(event)
        if self.notifier:
            name = NOTIFICATIONS.get(event.event, event.event)
            state = "hanging" if name == "hang" else "running"
            self.notifier.tell(name, event.sentence, state=state, step=event.step)

    def find_wait_share(self, rank: int) -> float | None:
        """Return the share of the time that a rank waits for others, where this node knows it."""
        return self.finder.waits.get(rank)

    def close(self) -> str:
        """End them all; return what is to be said of the job's stragglers."""
        self.log.close(CLOSING)
        if self.export:
            self.export.close(CLOSING)
        if self.notifier:
            self.notifier.close(CLOSING)
        return count_stragglers(self.finder.told)


def start_notifier(settings: WatcherSettings, warn: Callable[[str], None]) -> "Notifier | None":
    """Return what posts to `notify.url` and `notify.ping_url`; None if neither is set."""
    if settings.notify.url is None and settings.notify.ping_url is None:
        return None
    from launcher.watch.notify import JobIdentity, Notifier, NotifySettings

    job = JobIdentity(settings.run, settings.run_dir, settings.host, os.environ.get("SLURM_JOB_ID"))
    return Notifier(NotifySettings(**asdict(settings.notify)), job, warn)
