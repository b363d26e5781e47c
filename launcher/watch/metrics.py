"""What is measured of a rank and of its GPU, as metrics.toml has it, and its ways out: Prometheus and a file.

Prometheus is served on a port, or by a file for node_exporter's textfile collector. prometheus_client is an
extra of this package's, so it is imported only if one of them is asked for. What fails is a warning: metrics
are never a reason to end a job. Names and units are by the library's conventions
(https://prometheus.io/docs/practices/naming/: base units, `_total`, `_ratio`).
"""

import json
import os
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from errno import ENOSPC
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from launcher.codec import DecodeError, convert, load
from launcher.files import open_append, open_below, read_file
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.model import PHASES, NodeReport, Rank, WatchSettings
from launcher.watch.run_files import FOLDER, watch_path
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


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())
METRICS = convert(tuple[Metric, ...], _TABLE["metric"])


# Prometheus: metrics of a rank, of its GPU and of the node, from the table and others of several values

_Values = float | None | Mapping[str, float | None]
"""A value, or one for each value of a further label."""


class _Row(NamedTuple):
    name: str
    help: str
    get: Callable[[Any], _Values]
    label: str = ""
    is_counter: bool = False


def _list_rows(*, is_gpu: bool) -> Iterator[_Row]:
    """Give the rows of the table's metrics, in base units."""
    for metric in METRICS:
        if metric.prometheus and metric.is_gpu == is_gpu:
            factor = 1e6 if metric.unit == "MHz" else 1

            def get(rank: Rank, metric: Metric = metric, factor: float = factor) -> float | None:
                value = metric.read(rank)
                return None if value is None else value * factor

            yield _Row(metric.prometheus, metric.meaning, get, is_counter=metric.is_counter)


_RANK_ROWS = (
    *_list_rows(is_gpu=False),
    _Row("launch_rank_step_seconds", "time of a step", lambda r: {"0.5": r.p50, "0.99": r.p99}, "quantile"),
    _Row(
        *("launch_rank_phase", "1 for what the rank does"),
        *(lambda r: {phase: float(phase == r.phase) for phase in (*PHASES, r.phase)}, "phase"),
    ),
)
_GPU_ROWS = (
    *_list_rows(is_gpu=True),
    _Row("launch_gpu_xid_errors", "XID errors so far", lambda r: Counter(map(str, r.gpu.xids)), "xid", True),
    _Row(
        *("launch_gpu_clock_event", "1 for why clocks are low"),
        *(lambda r: dict.fromkeys(r.gpu.event_reasons, 1), "reason"),
    ),
)
_NODE_ROWS = (
    _Row("launch_node_network_bytes_per_second", "received and sent", lambda n: dict(n.nic_rates), "device"),
    _Row(
        *("launch_node_pressure_ratio", "share of 10 s that some task waited (PSI)"),
        lambda n: {"memory": n.memory_pressure, "cpu": n.cpu_pressure, "io": n.io_pressure},
        "resource",
    ),
    _Row(
        *("launch_node_stalled_seconds", "time without progress once it is a hang, else 0"),
        lambda n: 0 if n.stalled_since is None else n.time - n.stalled_since,
    ),
    _Row("launch_node_report_timestamp_seconds", "when this was read", lambda n: n.time),
)


class _Collector:
    """Gives out the last report of this node; a collector of prometheus_client."""

    def __init__(self, run: str, host: str) -> None:
        self.labels = run, host
        self.report: NodeReport | None = None

    def collect(self) -> "Iterator[metrics_core.Metric]":
        """Give all metrics that have a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if (report := self.report) is None:
            return
        ranks = [((*self.labels, str(one.rank), str(one.local_rank)), one) for one in report.ranks]
        gpus = [((*labels, str(one.gpu.index)), one) for labels, one in ranks if one.gpu]
        names = ("run", "host", "rank", "local_rank", "gpu")
        tables: Sequence[tuple[Sequence[_Row], int, Sequence[tuple[Sequence[str], object]]]] = (
            (_RANK_ROWS, 4, ranks),
            (_GPU_ROWS, 5, gpus),
            (_NODE_ROWS, 2, [(self.labels, report)]),
        )
        for rows, count, subjects in tables:
            for row in rows:
                family = CounterMetricFamily if row.is_counter else GaugeMetricFamily
                metric = family(row.name, row.help, labels=[*names[:count], *filter(None, [row.label])])
                for labels, subject in subjects:
                    found = row.get(subject)
                    for more, value in found.items() if isinstance(found, Mapping) else [("", found)]:
                        if value is not None:
                            metric.add_metric([*labels, *([more] if row.label else [])], value)
                if metric.samples:
                    yield metric


class Prometheus:
    """Gives out the last report of a node: on a port, and in a file for node_exporter."""

    def __init__(self, run: str, host: str, settings: WatchSettings, warn: Callable[[str], None]) -> None:
        """Begin with what the settings ask for, in threads; what cannot be is a warning."""
        self._collector = _Collector(run, host)
        self._writer: Worker[None] | None = None
        port, address, folder = settings.prometheus_port, settings.prometheus_address, settings.textfile
        if port is None and not folder:
            return
        try:
            from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
        except ImportError:
            warn("metrics for Prometheus need its client: pip install 'launch-ranks[metrics]'")
            return
        registry = CollectorRegistry()
        registry.register(self._collector)
        if port is not None:
            try:
                start_http_server(port, address, registry)
            except (OSError, OverflowError) as error:
                warn(f"metrics are not served on {address}:{port} ({error}): choose watch.prometheus_port")
        if folder:
            path = Path(folder, re.sub(r"[^A-Za-z0-9_.-]+", "_", f"launch-{run}-{host}.prom"))

            def tell(error: OSError) -> None:
                warn(f"metrics could not be written into {folder} ({error}): see watch.textfile")

            # In the end it is removed: Prometheus takes metrics that are gone as ended.
            self._writer = Worker(
                "textfile", lambda _: write_to_textfile(str(path), registry), 1, tell, path.unlink
            )

    def take(self, report: NodeReport) -> None:
        """Give out this report from now on."""
        self._collector.report = report
        if self._writer:
            self._writer.put(None)

    def close(self, timeout: float) -> None:
        """Remove the file, within so many seconds."""
        if self._writer:
            self._writer.close(timeout)


# `RUN_DIR/watch/metrics-HOST.jsonl`: what a node's ranks did over time, and what happened to them. A line is
# either a sample or an event:
#
#     {"host": "n1", "node_rank": 0, …, "ranks": [{"rank": 0, "step": 120, "p50": 0.41, …}, …], …}
#     {"event": "hang", "time": 1767225600.25, "sentence": "rank 5 on n2 has not joined …", "step": 120, …}
#
# A sample is model.NodeReport without the fields that have their default value, and without notes,
# neighbours and collectives; numbers have five digits. The node that judges writes the events into its file.

_BEGINNING, _ENDING = "metrics-", ".jsonl"
_EVENT = b'{"event"'
"""How the line of an event begins."""
_SHORTEST = 5.0
"""Seconds between samples in the first two minutes, unless watch.metrics_interval is less."""
_GROWTH = 24
"""After two minutes the interval grows with the age of the attempt: 5 s at 120 s, 30 s at 720 s."""
_KEPT = 2000
"""The interval is at least the attempt's age by this: 43 s after a day, 5 min after a week."""
LARGEST = 32 << 20
"""Bytes of a file at most: from there on only events are added, as many as fit twice this."""
WAITING = 256
"""Lines that wait for a slow filesystem, at most; more are dropped."""
_LEFT_OUT = ("notes", "neighbours", "collectives")
_EPOCH = 1e8
"""Numbers from here on are times, of which milliseconds count."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MetricsEvent:
    """Something that happened to the job."""

    event: str
    """`start`, `hang`, `recovered`, `straggler`, `restart`, `checkpoint`, `end`."""
    time: float
    sentence: str = ""
    step: int | None = None
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    number: int = 0
    """Of a hang."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """What one node has written, in its order."""

    host: str
    rows: tuple[NodeReport, ...]
    events: tuple[MetricsEvent, ...]
    skipped: int = 0
    """Lines that could not be read, as the last one of a node that died."""


class MetricsLog:
    """Writes samples and events in a thread of its own: a stuck filesystem stops nothing else."""

    def __init__(self, run_path: Path, host: str, interval: float, warn: Callable[[str], None]) -> None:
        """`interval` is watch.metrics_interval, 0 for no file; `warn` is told of the first failure."""
        self._run_path = run_path
        self._name = f"{_BEGINNING}{host}{_ENDING}"
        self._interval = interval
        self._start = self._next_time = time.monotonic()
        self._is_broken = True
        """The file may end within a line: what another process has left, or a failure."""

        def tell(error: OSError) -> None:
            warn(f"{self._name} could not be written ({error}): metrics are missing in it")

        self._worker = Worker("metrics", self._write, WAITING, tell) if interval > 0 else None

    def add_report(self, report: NodeReport) -> None:
        """Write a sample if one is due: often at first, then less and less often."""
        now = time.monotonic()
        if now >= self._next_time:
            age = now - self._start
            seconds = max(min(max(_SHORTEST, age / _GROWTH), self._interval), age / _KEPT)
            self._next_time = now + seconds - 0.5  # of grace: reports come at intervals of their own
            self._put(report)

    def add_event(self, event: MetricsEvent) -> None:
        """Write an event."""
        self._put(event)

    def _put(self, value: object) -> None:
        if self._worker:
            self._worker.put(json.dumps(_compact(value), separators=(",", ":")).encode() + b"\n")

    def close(self, timeout: float) -> None:
        """Write what waits, for this many seconds at most."""
        if self._worker:
            self._worker.close(timeout)

    def _write(self, line: bytes) -> None:
        """Append a line to the file, opened each time, since it may be moved away; raises OSError."""
        is_broken, self._is_broken = self._is_broken, True
        with (
            closing_descriptor(open_below(self._run_path, FOLDER)) as at,
            closing_descriptor(open_append(at, self._name)) as descriptor,
        ):
            size = os.fstat(descriptor).st_size
            if size <= LARGEST * (2 if line.startswith(_EVENT) else 1):
                data = b"\n" + line if is_broken and size else line
                if os.write(descriptor, data) < len(data):
                    raise OSError(ENOSPC, os.strerror(ENOSPC))
                is_broken = False
        self._is_broken = is_broken


def _compact(value: object) -> object:
    """Return a value's JSON form without what is default, not finite, or left out.

    Numbers have five digits, times three after the point.
    """
    if is_dataclass(value):
        return {
            item.name: _compact(inner)
            for item in fields(value)
            if item.name not in _LEFT_OUT
            and ((inner := getattr(value, item.name)) != item.default or item.default is MISSING)
        }
    if isinstance(value, tuple):
        return [_compact(item) for item in value]
    if not isinstance(value, float):
        return value
    if not isfinite(value):
        return None
    return round(value, 3) if value > _EPOCH else float(f"{value:.5g}")


def read_metrics(run_path: Path, most_rows: int | None = None) -> tuple[NodeMetrics, ...]:
    """Read what all nodes have written, by host; files that cannot be read count as missing.

    With `most_rows`, samples are left out evenly over time until each node has that many at most; they are
    not decoded, so that it pays on large jobs. Those of many nodes together leave no time out. The last one
    is kept, and so is every event.
    """
    paths = sorted(watch_path(run_path).glob(f"{_BEGINNING}*{_ENDING}"))
    found = []
    for number, path in enumerate(paths):
        try:
            lines = [line for line in read_file(path, 3 * LARGEST).split(b"\n") if line]
        except OSError:
            continue
        samples = [line for line in lines if not line.startswith(_EVENT)]
        if most_rows is not None and len(samples) > most_rows:
            shift = number / len(paths)
            places = [int((at + 1 - shift) * len(samples) / most_rows) - 1 for at in range(most_rows - 1)]
            samples = [*(samples[max(0, place)] for place in places), samples[-1]]
        rows = [_decode(NodeReport, line) for line in samples]
        events = [_decode(MetricsEvent, line) for line in lines if line.startswith(_EVENT)]
        found.append(
            NodeMetrics(
                path.name.removeprefix(_BEGINNING).removesuffix(_ENDING),
                tuple(row for row in rows if row),
                tuple(event for event in events if event),
                rows.count(None) + events.count(None),
            )
        )
    return tuple(found)


def _decode(kind: type[T], line: bytes) -> T | None:
    """Return a line's value; None for one that is cut or damaged."""
    try:
        return load(kind, line)
    except DecodeError:
        return None
