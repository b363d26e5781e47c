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
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from math import ceil, inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.codec import DecodeError, convert, load
from launcher.files import LARGEST, open_append, open_below, read_file
from launcher.watch.model import PHASES, NodeReport, Rank, WatchSettings
from launcher.watch.run_files import FOLDER, Worker, watch_path

if TYPE_CHECKING:
    from prometheus_client import metrics_core


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a rank; the table's head says what its fields are."""

    field: str
    meaning: str
    unit: str = ""
    prometheus: str = ""
    label: str = ""
    value: str = ""
    is_counter: bool = False
    title: str = ""
    width: int = 4
    warn: float = inf
    alarm: float = inf
    is_least: bool = False
    chart: str = ""

    @property
    def owner(self) -> str:
        """Whose it is: `rank`, `gpu` or `node`."""
        return self.field.partition(".")[0] if "." in self.field else "rank"

    def read(self, rank: Rank) -> float | None:
        """Return a rank's value; None if it is not known, or there is no GPU."""
        found = getattr(rank.gpu if self.owner == "gpu" else rank, self.field.rpartition(".")[2], None)
        return found if isinstance(found, int | float) else None

    def read_all(self, owner: object) -> Mapping[str, float | None]:
        """Return the values that Prometheus gets, in base units, by those of the metric's label."""
        found = getattr(owner, self.field.rpartition(".")[2])
        if isinstance(found, str):
            return {one: float(one == found) for one in (*PHASES, found)}
        if isinstance(found, tuple):
            return Counter(map(str, found))
        return {self.value: found * 1e6 if found is not None and self.unit == "MHz" else found}


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())
METRICS = convert(tuple[Metric, ...], _TABLE["metric"])


# Prometheus


class Prometheus:
    """Gives out the last report of a node: on a port, and in a file for node_exporter."""

    def __init__(self, run: str, host: str, settings: WatchSettings, warn: Callable[[str], None]) -> None:
        """Begin with what the settings ask for, in threads; what cannot be is a warning."""
        self._labels = run, host
        self._report: NodeReport | None = None
        self._writer: Worker[None] | None = None
        port, folder = settings.prometheus_port, settings.textfile
        if port is None and not folder:
            return
        try:
            from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
        except ImportError:
            warn("metrics for Prometheus need its client: pip install 'launch-ranks[metrics]'")
            return
        registry = CollectorRegistry()
        registry.register(self)
        if port is not None:
            try:
                start_http_server(port, settings.prometheus_address, registry)
            except (OSError, OverflowError) as error:
                where = f"{settings.prometheus_address}:{port}"
                warn(f"metrics are not served on {where} ({error}): choose watch.prometheus_port")
        if folder:
            path = Path(folder, re.sub(r"[^A-Za-z0-9_.-]+", "_", f"launch-{run}-{host}.prom"))
            # In the end it is removed: Prometheus takes metrics that are gone as ended.
            self._writer = Worker(
                "textfile",
                lambda _: write_to_textfile(str(path), registry),
                1,
                lambda error: warn(f"metrics could not be written ({error}): see watch.textfile"),
                path.unlink,
            )

    def collect(self) -> "Iterator[metrics_core.Metric]":
        """Give all metrics that have a value, to prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if (report := self._report) is None:
            return
        ranks = [((*self._labels, str(one.rank), str(one.local_rank)), one) for one in report.ranks]
        owners: Mapping[str, Sequence[tuple[Sequence[str], object]]] = {
            "rank": ranks,
            "gpu": [((*labels, str(one.gpu.index)), one.gpu) for labels, one in ranks if one.gpu],
            "node": [(self._labels, report)],
        }
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric in METRICS:
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            for known, owner in owners[metric.owner]:
                labels = ("run", "host", "rank", "local_rank", "gpu")[: len(known)]
                named = [*labels, *filter(None, [metric.label])]
                family = kind(metric.prometheus, metric.meaning.partition(",")[0], labels=named)
                for more, value in metric.read_all(owner).items():
                    if value is not None:
                        family = families.setdefault(metric.prometheus, family)
                        family.add_metric([*known, *([more] if metric.label else [])], value)
        yield from families.values()

    def take(self, report: NodeReport) -> None:
        """Give out this report from now on."""
        self._report = report
        if self._writer:
            self._writer.put(None)

    def close(self, timeout: float) -> None:
        """Have the file removed, and wait for that for so many seconds at most."""
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


class MetricsLog:
    """Writes samples and events."""

    def __init__(
        self,
        run_path: Path,
        host: str,
        interval: float,
        put: Callable[[Callable[[], object]], object],
        warn: Callable[[str], None],
    ) -> None:
        """`interval` is watch.metrics_interval, 0 for no file; `warn` is told of the first failure.

        `put` has the writing done, by a thread that may wait for the filesystem.
        """
        self._run_path, self._name, self._interval = run_path, f"{_BEGINNING}{host}{_ENDING}", interval
        self._put = put
        self._warn: Callable[[str], None] | None = warn
        self._start = self._next_time = time.monotonic()
        self._is_broken = True
        """The file may end within a line: what another process has left, or a failure."""

    def add_report(self, report: NodeReport) -> None:
        """Write a sample if one is due: often at first, then less and less often."""
        now = time.monotonic()
        if now >= self._next_time:
            age = now - self._start
            seconds = max(min(max(_SHORTEST, age / _GROWTH), self._interval), age / _KEPT)
            self._next_time = now + seconds - 0.5  # of grace: reports come at intervals of their own
            self.add(report)

    def add(self, value: NodeReport | MetricsEvent) -> None:
        """Write a sample or an event."""
        if self._interval > 0:
            self._put(
                partial(self._write, json.dumps(_compact(value), separators=(",", ":")).encode() + b"\n")
            )

    def _write(self, line: bytes) -> None:
        """Append a line to the file, opened each time, since it may be moved away."""
        try:
            with (
                open_below(self._run_path, FOLDER) as at,
                os.fdopen(open_append(at, self._name), "ab") as file,
            ):
                begin = b"\n" if self._is_broken and file.tell() else b""
                self._is_broken = True
                file.write(begin + line)
            self._is_broken = False
        except OSError as error:
            if self._warn:
                self._warn(f"{self._name} could not be written ({error}): metrics are missing in it")
                self._warn = None


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


def read_metrics(run_path: Path, most_rows: int | None = None) -> tuple[list[NodeReport], list[MetricsEvent]]:
    """Read all nodes' samples and events, by node; what cannot be read, as its last line, counts as missing.

    With `most_rows`, samples are left out evenly over time until each node has that many at most; they are
    not decoded, so that it pays on large jobs. The last one is kept, and so is every event.
    """
    rows: list[NodeReport] = []
    events: list[MetricsEvent] = []
    for path in sorted(watch_path(run_path).glob(f"{_BEGINNING}*{_ENDING}")):
        try:
            lines = [line for line in read_file(path, LARGEST).split(b"\n") if line]
        except OSError:
            continue
        samples = [line for line in lines if not line.startswith(_EVENT)]
        every = ceil(len(samples) / most_rows) if most_rows else 1
        rows += _decode(NodeReport, samples[:: -max(1, every)][::-1])
        events += _decode(MetricsEvent, [line for line in lines if line.startswith(_EVENT)])
    return rows, events


def _decode(kind: type[T], lines: Sequence[bytes]) -> Iterator[T]:
    """Give the values of lines, without those that are cut or damaged."""
    for line in lines:
        with suppress(DecodeError):
            yield load(kind, line)
