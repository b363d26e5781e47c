"""Metrics for Prometheus: served on a port of the node, or written for node_exporter's textfile collector.

prometheus_client is an extra of this package's, so it is imported only if one of them is asked for. What
fails is a warning: metrics are never a reason to end a job.
"""

import contextlib
import queue
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.files import open_directory, remove, write_whole
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.watch_model import NodeReport

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry

    from launcher.watch.prometheus_metrics import NodeCollector

MISSING = "metrics for Prometheus need its client: pip install 'launch-ranks[metrics]'"
PLAIN = re.compile(r"[^A-Za-z0-9_.-]+")


class PrometheusExport:
    """Gives out the last report of this node."""

    def __init__(
        self, collector: "NodeCollector", registry: "CollectorRegistry", warn: Callable[[str], None]
    ) -> None:
        self.collector = collector
        self.registry = registry
        self.warn = warn
        self.server: WSGIServer | None = None
        self.port = 0
        """On which it is served; 0 if it is not."""
        self.folder = ""
        run, host = collector.labels
        self.name = PLAIN.sub("_", f"launch-{run}-{host}.prom")
        self.reports: queue.Queue[bool] = queue.Queue(1)
        self.writer: threading.Thread | None = None

    def serve(self, port: int, address: str) -> None:
        """Answer Prometheus on a port, in threads; 0 chooses a free one."""
        from prometheus_client import start_http_server

        try:
            self.server, _ = start_http_server(port, address, self.registry)
            self.port = self.server.server_port
        except (OSError, OverflowError) as error:
            self.warn(f"metrics are not served on {address}:{port} ({error}): choose watch.prometheus_port")

    def write_into(self, folder: str) -> None:
        """Write each report into a folder from now on, in a thread: it may be on a slow filesystem."""
        self.folder = folder
        self.writer = threading.Thread(target=self.write_files, name="textfile", daemon=True)
        self.writer.start()

    def update(self, report: NodeReport) -> None:
        """Give out this report from now on."""
        self.collector.report = report
        with contextlib.suppress(queue.Full):  # the thread is still busy with the one before
            self.reports.put_nowait(True)

    def write_files(self) -> None:
        """Write a file for each report, whole or not at all, and remove it in the end."""
        from prometheus_client import generate_latest

        has_warned = False
        while self.reports.get():
            try:
                with closing_descriptor(open_directory(self.folder)) as at:
                    write_whole(at, self.name, generate_latest(self.registry), private=False)
            except OSError as error:
                if not has_warned:
                    self.warn(
                        f"metrics could not be written into {self.folder} ({error}): see watch.textfile"
                    )
                has_warned = True
        with contextlib.suppress(OSError), closing_descriptor(open_directory(self.folder)) as at:
            remove(at, self.name)

    def end_file(self, timeout: float) -> None:
        """Remove the file: Prometheus takes metrics that are gone as ended."""
        if self.writer:
            with contextlib.suppress(queue.Full):
                self.reports.put(False, timeout=timeout)
                self.writer.join(timeout)

    def close(self, timeout: float) -> None:
        """Remove the file, and stop serving."""
        self.end_file(timeout)
        if self.server:
            self.server.shutdown()
            self.server.server_close()


def start_prometheus(
    run: str, host: str, *, port: int | None, address: str, textfile: str | None, warn: Callable[[str], None]
) -> PrometheusExport | None:
    """Start what the settings of `watch` ask for; None if that is nothing or cannot be.

    `run` is the run's name and identifier, a label of each metric.
    """
    if port is None and not textfile:
        return None
    try:
        from prometheus_client import CollectorRegistry

        from launcher.watch.prometheus_metrics import NodeCollector
    except ImportError:
        warn(MISSING)
        return None
    collector, registry = NodeCollector(run, host), CollectorRegistry()
    registry.register(collector)
    export = PrometheusExport(collector, registry, warn)
    if port is not None:
        export.serve(port, address)
    if textfile:
        export.write_into(textfile)
    return export
