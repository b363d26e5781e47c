"""`RUN_DIR/watch/metrics-HOST.jsonl`: what each node's ranks did over time, and what happened to them.

A line is either a sample or an event:

    {"host": "n1", "node_rank": 0, …, "ranks": [{"rank": 0, "step": 120, "p50": 0.41, …}, …], …}
    {"event": "hang", "time": 1767225600.25, "sentence": "rank 5 on n2 has not joined …", "step": 120, …}

A sample is model.NodeReport without the fields that have their default value, and without notes and
neighbours; numbers have five digits. The node that judges writes the events into its own file.
"""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from errno import ENOSPC
from math import isfinite
from pathlib import Path
from typing import TypeVar

from launcher.codec import DecodeError, convert, parse_json
from launcher.files import open_append, open_below, read_file
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.node_reports import FOLDER, watch_path
from launcher.watch.watch_model import NodeReport

BEGINNING, ENDING = "metrics-", ".jsonl"
SHORTEST = 5.0
"""Seconds between samples in the first two minutes, unless watch.metrics_interval is less."""
GROWTH = 24
"""After two minutes the interval grows with the age of the attempt: 5 s at 120 s, 30 s at 720 s."""
KEPT = 2000
"""The interval is at least the attempt's age by this: 43 s after a day, 5 min after a week."""
LARGEST = 32 << 20
"""Bytes of a file at most: from there on only events are added, as many as fit twice this."""
WAITING = 256
"""Lines that wait for a slow filesystem, at most; more are dropped."""
LEFT_OUT = ("notes", "neighbours", "step_ends")
EPOCH = 1e8
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
    return max(min(max(SHORTEST, age / GROWTH), longest), age / KEPT)


class MetricsLog:
    """Writes samples and events in a thread of its own: a stuck filesystem stops nothing else."""

    def __init__(self, run_path: Path, host: str, interval: float, warn: Callable[[str], None]) -> None:
        """`interval` is watch.metrics_interval, 0 for no file; `warn` is told of the first failure."""
        self.run_path = run_path
        self.name = f"{BEGINNING}{host}{ENDING}"
        self.interval = interval
        self.warn = warn
        self.start = time.monotonic()
        self.next_time = self.start
        self.lines: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self.is_broken = True
        """The file may end within a line: what another process has left, or a failure."""
        self.has_warned = False
        self.thread = threading.Thread(target=self.write_lines, name="metrics", daemon=True)
        if interval > 0:
            self.thread.start()

    def add_report(self, report: NodeReport) -> bool:
        """Write a sample if one is due; return whether it was."""
        now = time.monotonic()
        if self.interval <= 0 or now < self.next_time:
            return False
        # Half a second of grace: reports come at intervals of their own.
        self.next_time = now + choose_sample_interval(now - self.start, self.interval) - 0.5
        return self.put(json.dumps(compact(report), separators=(",", ":")))

    def add_event(self, event: MetricsEvent) -> bool:
        """Write an event; return False if it had to be dropped."""
        return self.interval > 0 and self.put(json.dumps(compact(event), separators=(",", ":")))

    def put(self, line: str) -> bool:
        """Leave a line to the thread."""
        try:
            self.lines.put_nowait(f"{line}\n".encode())
        except queue.Full:
            return False
        return True

    def close(self, timeout: float) -> None:
        """Write what waits, for this many seconds at most."""
        if self.interval > 0:
            with contextlib.suppress(queue.Full):
                self.lines.put(None, timeout=timeout)
                self.thread.join(timeout)

    def write_lines(self) -> None:
        """Write lines until the end; those that cannot be written are lost."""
        while (line := self.lines.get()) is not None:
            try:
                self.write(line)
            except OSError as error:
                self.is_broken = True
                if not self.has_warned:
                    self.has_warned = True
                    self.warn(f"{self.name} could not be written ({error}): metrics are missing in it")

    def write(self, line: bytes) -> None:
        """Append a line to the file, which is opened each time: it may have been moved away."""
        with (
            closing_descriptor(open_below(self.run_path, FOLDER)) as at,
            closing_descriptor(open_append(at, self.name)) as descriptor,
        ):
            size = os.fstat(descriptor).st_size
            if size > LARGEST * (2 if line.startswith(b'{"event"') else 1):
                return
            data = b"\n" + line if self.is_broken and size else line
            if os.write(descriptor, data) < len(data):
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        self.is_broken = False


def compact(value: object) -> object:
    """Return a value's JSON form without what is default, not finite, or left out."""
    if is_dataclass(value):
        return {
            item.name: compact(inner)
            for item in fields(value)
            if item.name not in LEFT_OUT
            and ((inner := getattr(value, item.name)) != item.default or item.default is MISSING)
        }
    if isinstance(value, tuple):
        return [compact(item) for item in value]
    if isinstance(value, float):
        return round_number(value)
    return value


def round_number(number: float) -> float | None:
    """Return a number with five digits, a time with three after the point; None for what is not finite."""
    if not isfinite(number):
        return None
    return round(number, 3) if number > EPOCH else float(f"{number:.5g}")


def read_metrics(run_path: Path, most_rows: int | None = None) -> tuple[NodeMetrics, ...]:
    """Read what all nodes have written, by host; files that cannot be read count as missing.

    With `most_rows`, samples are left out evenly over time until each node has that many at most; they are
    not decoded, so that it pays on large jobs. The last one is kept, and so is every event.
    """
    try:
        names = sorted(os.listdir(watch_path(run_path)))  # noqa: PTH208 - names alone
    except OSError:
        return ()
    names = [name for name in names if name.startswith(BEGINNING) and name.endswith(ENDING)]
    found = (
        read_node_metrics(watch_path(run_path) / name, most_rows, number / len(names))
        for number, name in enumerate(names)
    )
    return tuple(metrics for metrics in found if metrics)


def read_node_metrics(path: Path, most_rows: int | None = None, shift: float = 0.0) -> NodeMetrics | None:
    """Read what one node has written, as `read_metrics` does; None if there is no file to be read.

    With a `shift` of 0 to 1, other samples are kept: those of many nodes together leave no time out.
    """
    try:
        lines = [line for line in read_file(path, 3 * LARGEST).split(b"\n") if line]
    except OSError:
        return None
    is_event = [line.startswith(b'{"event"') for line in lines]
    samples = [line for line, is_one in zip(lines, is_event, strict=True) if not is_one]
    rows = [decode_row(NodeReport, line) for line in thin_out(samples, most_rows, shift)]
    events = [decode_row(MetricsEvent, line) for line, is_one in zip(lines, is_event, strict=True) if is_one]
    return NodeMetrics(
        path.name.removeprefix(BEGINNING).removesuffix(ENDING),
        tuple(row for row in rows if row),
        tuple(event for event in events if event),
        rows.count(None) + events.count(None),
    )


def thin_out(lines: Sequence[bytes], most: int | None, shift: float = 0.0) -> Sequence[bytes]:
    """Return at most so many of the lines, evenly, with the last one; a `shift` of 0 to 1 takes others."""
    if most is None or len(lines) <= most:
        return lines
    places = (int((number + 1 - shift) * len(lines) / most) - 1 for number in range(most - 1))
    return [*(lines[max(0, place)] for place in places), lines[-1]]


def decode_row(kind: type[T], line: bytes) -> T | None:
    """Return a line's value; None for one that is cut or damaged."""
    try:
        return convert(kind, parse_json(line))
    except DecodeError:
        return None
