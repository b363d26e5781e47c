"""`RUN_DIR/watch/metrics-HOST.jsonl`: what each node's ranks did over time, and what happened to them.

A line is either a sample or an event:

    {"host": "n1", "node_rank": 0, …, "ranks": [{"rank": 0, "step": 120, "p50": 0.41, …}, …], …}
    {"event": "hang", "time": 1767225600.25, "sentence": "rank 5 on n2 has not joined …", "step": 120, …}

A sample is model.NodeReport without the fields that have their default value, and without notes and
neighbours; numbers have five digits. The node that judges writes the events into its own file.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from errno import ENOSPC
from math import isfinite
from pathlib import Path
from typing import TypeVar

from launcher.codec import DecodeError, load
from launcher.files import open_append, open_below, read_file
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.model import NodeReport
from launcher.watch.run_files import FOLDER, watch_path
from launcher.watch.worker import Worker

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
