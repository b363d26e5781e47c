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
from launcher.files import open_append, open_below, open_directory, read_file, remove, write_whole
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.model import PHASES, NodeReport, Rank, WatcherSettings
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


def _load() -> tuple[Metric, ...]:
    rows = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())["metric"]
    return convert(tuple[Metric, ...], rows)


METRICS = _load()


# Prometheus

_NO_CLIENT = "metrics for Prometheus need its client: pip install 'launch-ranks[metrics]'"
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
        warn(_NO_CLIENT)
        return None


# `RUN_DIR/watch/metrics-HOST.jsonl`: what a node's ranks did over time, and what happened to them. A line is
# either a sample or an event:
#
#     {"host": "n1", "node_rank": 0, …, "ranks": [{"rank": 0, "step": 120, "p50": 0.41, …}, …], …}
#     {"event": "hang", "time": 1767225600.25, "sentence": "rank 5 on n2 has not joined …", "step": 120, …}
#
# A sample is model.NodeReport without the fields that have their default value, and without notes and
# neighbours; numbers have five digits. The node that judges writes the events into its own file.


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
_LEFT_OUT = ("notes", "neighbours", "step_ends")
_EPOCH = 1e8
"""Numbers from here on are times, of which milliseconds count."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MetricsEvent:
    """Something that happened to the job."""

    event: str
    """`start`, `hang`, `recovered`, `straggler`, `restart`, `end`."""
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


def choose_sample_interval(age: float, longest: float) -> float:
    """Return the seconds from one sample to the next; `age` is that of the attempt, in seconds."""
    return max(min(max(_SHORTEST, age / _GROWTH), longest), age / _KEPT)


class MetricsLog:
    """Writes samples and events in a thread of its own: a stuck filesystem stops nothing else."""

    def __init__(self, run_path: Path, host: str, interval: float, warn: Callable[[str], None]) -> None:
        """`interval` is watch.metrics_interval, 0 for no file; `warn` is told of the first failure."""
        self._run_path = run_path
        self._name = f"{_BEGINNING}{host}{_ENDING}"
        self._interval = interval
        self._start = time.monotonic()
        self.next_time = self._start
        self._is_broken = True
        """The file may end within a line: what another process has left, or a failure."""
        text = f"{self._name} could not be written ({{}}): metrics are missing in it"
        self.worker = (
            Worker("metrics", self._write, WAITING, lambda error: warn(text.format(error)))
            if interval > 0
            else None
        )

    def add_report(self, report: NodeReport) -> bool:
        """Write a sample if one is due; return whether it was."""
        now = time.monotonic()
        if now < self.next_time:
            return False
        # Half a second of grace: reports come at intervals of their own.
        self.next_time = now + choose_sample_interval(now - self._start, self._interval) - 0.5
        return self._put(report)

    def add_event(self, event: MetricsEvent) -> bool:
        """Write an event; return False if it had to be dropped."""
        return self._put(event)

    def _put(self, value: object) -> bool:
        if self.worker is None:
            return False
        return self.worker.put(json.dumps(_compact(value), separators=(",", ":")).encode() + b"\n")

    def close(self, timeout: float) -> None:
        """Write what waits, for this many seconds at most."""
        if self.worker:
            self.worker.close(timeout)

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
        rows = [_decode(NodeReport, line) for line in thin_out(samples, most_rows, number / len(paths))]
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


def thin_out(lines: Sequence[bytes], most: int | None, shift: float = 0.0) -> Sequence[bytes]:
    """Return at most so many of the lines, evenly, with the last one; a `shift` of 0 to 1 takes others."""
    if most is None or len(lines) <= most:
        return lines
    places = (int((number + 1 - shift) * len(lines) / most) - 1 for number in range(most - 1))
    return [*(lines[max(0, place)] for place in places), lines[-1]]


def _decode(kind: type[T], line: bytes) -> T | None:
    """Return a line's value; None for one that is cut or damaged."""
    try:
        return load(kind, line)
    except DecodeError:
        return None
