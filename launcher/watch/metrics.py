"""What is measured of a rank and of its GPU, as metrics.toml has it, and its way to Prometheus.

There it is served on a port, or in a file for node_exporter's textfile collector. prometheus_client is an
extra of this package's, so it is imported only if one of them is asked for. What fails is a warning: metrics
are never a reason to end a job. Names and units are by the library's conventions
(https://prometheus.io/docs/practices/naming/: base units, `_total`, `_ratio`).
"""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.codec import convert
from launcher.files import open_directory, remove, write_whole
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.model import PHASES, NodeReport, Rank, WatcherSettings
from launcher.watch.worker import Worker

if TYPE_CHECKING:
    from prometheus_client import metrics_core


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a rank; the table's head says what its fields are."""

    field: str
    meaning: str
    unit: str = ""
    prometheus: str = ""
    is_counter: bool = False
    title: str = ""
    letter: str = ""
    width: int = 4
    warn: float = inf
    alarm: float = inf
    is_least: bool = False
    chart: str = ""

    def read(self, rank: Rank) -> float | None:
        """Return a rank's value; None if it is not known, or there is no GPU."""
        owner: object = rank.gpu if self.is_gpu else rank
        found = getattr(owner, self.field.removeprefix("gpu."), None)
        return found if isinstance(found, int | float) else None

    @property
    def is_gpu(self) -> bool:
        """It is of the rank's GPU."""
        return self.field.startswith("gpu.")


def _load() -> tuple[Metric, ...]:
    rows = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())["metric"]
    return convert(tuple[Metric, ...], rows)


METRICS = _load()


# Prometheus

MISSING = "metrics for Prometheus need its client: pip install 'launch-ranks[metrics]'"
_PLAIN = re.compile(r"[^A-Za-z0-9_.-]+")
_NODE = ("run", "host")
_RANK = (*_NODE, "rank", "local_rank")
_GPU = (*_RANK, "gpu")
Value = float | None


class _Row(NamedTuple):
    """A metric: a value of a node or of a rank, or one for each value of a further label."""

    name: str
    help: str
    get: Callable[[Any], Value | Mapping[str, Value]]
    label: str = ""
    is_counter: bool = False


def _mark_phase(rank: Rank) -> Mapping[str, Value]:
    return {phase: float(phase == rank.phase) for phase in (*PHASES, rank.phase)}


def _count_xids(rank: Rank) -> Mapping[str, Value]:
    return Counter(map(str, sorted(rank.gpu.xids))) if rank.gpu else {}


def _list_reasons(rank: Rank) -> Mapping[str, Value]:
    return dict.fromkeys(rank.gpu.event_reasons, 1) if rank.gpu else {}


_FACTORS = {"MHz": 1e6}
"""What a value is multiplied by for Prometheus' base unit."""


def _make_row(metric: Metric) -> _Row:
    def read(rank: Rank) -> Value:
        value = metric.read(rank)
        return None if value is None else value * _FACTORS.get(metric.unit, 1)

    text = f"{metric.meaning[0].upper()}{metric.meaning[1:]}."
    return _Row(metric.prometheus, text, read, is_counter=metric.is_counter)


_RANK_ROWS = (
    *(_make_row(metric) for metric in METRICS if metric.prometheus and not metric.is_gpu),
    _Row("launch_rank_step_seconds", "Time of a step.", lambda r: {"0.5": r.p50, "0.99": r.p99}, "quantile"),
    _Row("launch_rank_phase", "1 for what the rank does.", _mark_phase, "phase"),
)
_GPU_ROWS = (
    *(_make_row(metric) for metric in METRICS if metric.prometheus and metric.is_gpu),
    _Row("launch_gpu_xid_errors", "XID errors so far.", _count_xids, "xid", is_counter=True),
    _Row("launch_gpu_clock_event", "1 for why clocks are low.", _list_reasons, "reason"),
)
_NODE_ROWS = (
    _Row("launch_node_network_bytes_per_second", "Received and sent.", lambda n: dict(n.nic_rates), "device"),
    _Row(
        *("launch_node_pressure_ratio", "Share of 10 s that some task waited (PSI)."),
        lambda n: {"memory": n.memory_pressure, "cpu": n.cpu_pressure, "io": n.io_pressure},
        "resource",
    ),
    _Row("launch_node_throttled_ratio", "Seconds per second, by a CPU quota.", lambda n: n.throttled),
    _Row(
        *("launch_node_stalled_seconds", "Time without progress once it is a hang; else 0."),
        lambda n: 0 if n.stalled_since is None else n.time - n.stalled_since,
    ),
    _Row("launch_node_report_timestamp_seconds", "When this was read.", lambda n: n.time),
)


class PrometheusExport:
    """Gives out the last report of this node; a collector of prometheus_client."""

    def __init__(self, settings: WatcherSettings, warn: Callable[[str], None]) -> None:
        """Serve on the port that is asked for, and write the file; raises ImportError."""
        from prometheus_client import CollectorRegistry

        self._labels = settings.run, settings.host
        self._report: NodeReport | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        watch = settings.watch
        if watch.prometheus_port is not None:
            self._serve(watch.prometheus_port, watch.prometheus_address, warn)
        self._worker = self._start_writer(watch.textfile, warn) if watch.textfile else None

    def collect(self) -> "Iterator[metrics_core.Metric]":
        """Give all metrics that have a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if (report := self._report) is None:
            return
        ranks = [((*self._labels, str(one.rank), str(one.local_rank)), one) for one in report.ranks]
        gpus = [((*labels, str(one.gpu.index)), one) for labels, one in ranks if one.gpu]
        tables: Sequence[tuple[Sequence[_Row], Sequence[str], Sequence[tuple[Sequence[str], object]]]] = (
            (_RANK_ROWS, _RANK, ranks),
            (_GPU_ROWS, _GPU, gpus),
            (_NODE_ROWS, _NODE, [(self._labels, report)]),
        )
        for rows, names, subjects in tables:
            for row in rows:
                family = CounterMetricFamily if row.is_counter else GaugeMetricFamily
                metric = family(row.name, row.help, labels=[*names, row.label] if row.label else names)
                for labels, subject in subjects:
                    found = row.get(subject)
                    for more, value in found.items() if isinstance(found, Mapping) else [("", found)]:
                        if value is not None:
                            metric.add_metric([*labels, more] if row.label else [*labels], value)
                if metric.samples:
                    yield metric

    def _serve(self, port: int, address: str, warn: Callable[[str], None]) -> None:
        """Answer Prometheus on a port, in threads; 0 chooses a free one."""
        from prometheus_client import start_http_server

        try:
            start_http_server(port, address, self._registry)
        except (OSError, OverflowError) as error:
            warn(f"metrics are not served on {address}:{port} ({error}): choose watch.prometheus_port")

    def _start_writer(self, folder: str, warn: Callable[[str], None]) -> Worker[None]:
        """Start what writes each report into a folder, in a thread: it may be on a slow filesystem.

        The file is removed in the end: Prometheus takes metrics that are gone as ended.
        """
        from prometheus_client import generate_latest

        run, host = self._labels
        name = _PLAIN.sub("_", f"launch-{run}-{host}.prom")

        def write(_: None) -> None:
            with closing_descriptor(open_directory(folder)) as at:
                write_whole(at, name, generate_latest(self._registry), private=False)

        def end() -> None:
            with closing_descriptor(open_directory(folder)) as at:
                remove(at, name)

        text = f"metrics could not be written into {folder} ({{}}): see watch.textfile"
        return Worker("textfile", write, 1, lambda error: warn(text.format(error)), end)

    def update(self, report: NodeReport) -> None:
        """Give out this report from now on."""
        self._report = report
        if self._worker:
            self._worker.put(None)

    def end_file(self, timeout: float) -> None:
        """Remove the file, within so many seconds."""
        if self._worker:
            self._worker.close(timeout)


def start_prometheus(settings: WatcherSettings, warn: Callable[[str], None]) -> PrometheusExport | None:
    """Start what the settings of `watch` ask for; None if that is nothing or cannot be."""
    if settings.watch.prometheus_port is None and not settings.watch.textfile:
        return None
    try:
        return PrometheusExport(settings, warn)
    except ImportError:
        warn(MISSING)
        return None
