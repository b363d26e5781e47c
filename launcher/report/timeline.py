"""What a run's directory tells of it over time: samples, events, series in bins, and where the time went.

Everything is read once for the page, and any part of it may be missing or damaged. Times are seconds since
the epoch, unless they say that they count from the start.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher import codec
from launcher.files import LARGEST, read_file
from launcher.runs.manifest import read_manifest, read_time
from launcher.runs.run_records import RunRecords, read_run
from launcher.runs.run_status import RunStatus, add_progress, read_status
from launcher.text import count_things, describe_time
from launcher.watch.metrics import MetricsEvent, read_metrics
from launcher.watch.model import Hang, JobState, NodeEvidence, NodeReport, Rank
from launcher.watch.run_files import hang_path, read_evidence, read_job_state, read_reports, watch_path

Series = NDArray[np.float64]

_MOST_STATES = 60_000
"""States of ranks that are read of all nodes' metrics: some seconds' work."""
_FEWEST_ROWS, _MOST_ROWS = 12, 2000
"""Samples of a node that are read."""
_MOST_HANGS = 20
"""Hangs whose evidence is read."""
_DAY = 86400.0
"""Seconds before a run's start, or after its end, from which on a report's time is damage."""
_MOST_BINS = 160
"""Bins of a chart: more than one for each six pixels of it are not told apart."""
_LARGEST_VALUE = 1e15
"""Numbers above this are damage: no bytes, seconds or watts of a rank."""
_LONGEST_GAP = 3.0
"""Intervals between two reports that count as time of the later one; what is longer is a gap."""

ACTIVITIES = ("compute", "waiting for others", "data", "saving", "evaluating", "starting", "hanging")
"""Where a rank's time goes, in the order in which the chart has it; waiting that is not known is compute."""
_PHASES = {
    **dict.fromkeys(("starting", "joining", "compiling"), "starting"),
    **dict.fromkeys(("ended", "exited", "unwatched"), ""),
    "saving": "saving",
    "evaluating": "evaluating",
}
"""Phases that take all of a rank's time, with the activity that they are; none for a rank that is gone."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    kind: str
    """`hang`, `straggler`, `restart`, `checkpoint` or `requeue`."""
    time: float
    text: str
    until: float | None = None
    """When it was over; None if it took no time worth showing."""


@dataclass(frozen=True, slots=True)
class RunAccount:
    """A run, as far as its directory tells."""

    status: RunStatus
    manifest: Mapping[str, Any]
    records: RunRecords
    reports: tuple[NodeReport, ...]
    """The last one of each node."""
    samples: tuple[NodeReport, ...]
    """What nodes reported over time, a selection of it if that is much; by time."""
    job: JobState | None
    hangs: tuple[tuple[Hang, tuple[NodeEvidence, ...]], ...]
    """Each with what the nodes gathered for it."""
    events: tuple[Event, ...]
    begin: float
    end: float
    """When it ended, or now."""
    notes: tuple[str, ...] = ()
    """What of the directory could not be read."""


def read_account(path: Path) -> RunAccount:
    """Read a run's directory; nothing raises."""
    now = time.time()
    status = add_progress(read_status(path))
    reports = read_reports(path)
    ranks = sum(len(report.ranks) for report in reports) or 8
    metrics = read_metrics(path, max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_STATES // ranks)))
    rows = {(row.host, row.time): row for node in metrics for row in node.rows}
    newest = {node.host: max((row.time for row in node.rows), default=0.0) for node in metrics}
    # A run that has ended early has the nodes' last reports alone.
    rows |= {(one.host, one.time): one for one in reports if one.time > newest.get(one.host, 0.0)}
    samples = sorted(rows.values(), key=lambda row: row.time)

    starts = [found for one in status.attempts if (found := read_time(one.started)) is not None]
    ended = None if status.is_live else read_time(status.ended)
    begin = min(starts, default=min((sample.time for sample in samples), default=now))
    last = max((sample.time for sample in samples if sample.time <= now), default=begin)
    end = max(ended or (now if status.is_live else last), begin)
    samples = [one for one in samples if begin - _DAY < one.time < end + _DAY]
    job = read_job_state(path)
    hangs = _list_hangs(path, job)
    told = [event for node in metrics for event in node.events]
    events = _list_events(status, job, told, hangs, end)
    return RunAccount(
        status=status,
        manifest=read_manifest(path),
        records=read_run(path),
        reports=reports,
        samples=tuple(samples),
        job=job,
        hangs=tuple((hang, _read(path, hang.number)) for hang in hangs[:_MOST_HANGS]),
        events=tuple(sorted(events, key=lambda event: event.time)),
        begin=begin,
        end=end,
        notes=tuple(
            f"metrics of {node.host}: {count_things(node.skipped, 'line')} could not be read"
            for node in metrics
            if node.skipped
        ),
    )


def _list_hangs(path: Path, job: JobState | None) -> list[Hang]:
    """Return the hangs of all attempts by number: those with a folder, and those that the job's state has."""
    found = {hang.number: hang for hang in (job.hangs if job else ())}
    for file in sorted(path.glob("hang-*/verdict.json")):
        try:
            hang = codec.load(Hang, read_file(file, LARGEST))
        except (OSError, ValueError):
            continue
        known = found.setdefault(hang.number, hang)
        if known.recovered is None and known.time == hang.time:
            found[hang.number] = hang
    return [found[number] for number in sorted(found) if 0 < number < 10**6]


def _read(path: Path, number: int) -> tuple[NodeEvidence, ...]:
    """Return what the nodes gathered for a hang."""
    return read_evidence(hang_path(path, number), number) or read_evidence(watch_path(path), number)


def _list_events(
    status: RunStatus,
    job: JobState | None,
    told: Sequence[MetricsEvent],
    hangs: Sequence[Hang],
    end: float,
) -> Iterator[Event]:
    """Give all that is known to have happened; `told` are the events of the nodes' metrics."""
    for before, attempt in pairwise(status.attempts):
        if (start := read_time(attempt.started)) is not None:
            requeued = before.state == "requeued"
            why = f" ({before.reason})" if before.reason else ""
            text = f"requeued{why}" if requeued else f"started again after it had {before.state}{why}"
            yield Event("requeue" if requeued else "restart", start, text)
    for one in told:  # hangs and stragglers are told where the files that say more are gone
        known = {"hang": bool(hangs), "straggler": bool(job), "restart": False, "checkpoint": False}
        if not known.get(one.event, True):
            yield Event(one.event, one.time, one.sentence)
    for hang in hangs:
        until = end if hang.recovered is None else hang.recovered
        lasted = describe_time(max(0.0, until - hang.stalled_since))
        text = f"hang {hang.number}, {lasted}: {hang.verdict.sentence}"
        yield Event("hang", hang.stalled_since, text, until)
    for found in job.stragglers if job else ():
        text = f"rank {found.rank} on {found.host}, {100 * found.excess:.0f}% slower: {found.detail}"
        yield Event("straggler", found.time, text)


@dataclass(frozen=True, slots=True)
class Bins:
    """Equal parts of a span of time."""

    begin: float
    width: float
    count: int

    def find(self, samples: Sequence[NodeReport]) -> NDArray[np.int_]:
        """Return each sample's bin; -1 outside."""
        places = np.floor((np.array([sample.time for sample in samples]) - self.begin) / self.width)
        inside = (places >= 0) & (places <= self.count)
        return np.where(inside, np.minimum(places, self.count - 1), -1).astype(int)

    def list_centers(self) -> list[float]:
        """Return the middle of each bin in seconds since the beginning."""
        return [(at + 0.5) * self.width for at in range(self.count)]


def choose_bins(account: RunAccount) -> Bins:
    """Choose bins as fine as the reports are dense, _MOST_BINS at most; there is one at least."""
    span = max(account.end - account.begin, 1.0)
    count = max(1, min(_MOST_BINS, int(span / _find_interval(account.samples))))
    return Bins(account.begin, span / count, count)


def _group_by_host(samples: Sequence[NodeReport]) -> dict[str, list[NodeReport]]:
    """Return the reports of each node by time."""
    found: dict[str, list[NodeReport]] = {}
    for sample in samples:
        found.setdefault(sample.host, []).append(sample)
    return found


def _find_interval(samples: Sequence[NodeReport]) -> float:
    """Return the usual seconds between two reports of a node: the median of all."""
    gaps = [
        later.time - earlier.time
        for reports in _group_by_host(samples).values()
        for earlier, later in pairwise(reports)
        if later.time > earlier.time
    ]
    return max(median(gaps), 0.1) if gaps else 5.0


def bin_values(
    account: RunAccount, bins: Bins, read: Callable[[Rank], float | None], factor: float = 1.0
) -> dict[int, Series]:
    """Return for each rank the mean of a quantity in each bin, by rank; NaN where it was not reported.

    Values that cannot be are left out.
    """
    totals: dict[int, Series] = {}
    counts: dict[int, Series] = {}
    for sample, at in zip(account.samples, bins.find(account.samples), strict=True):
        for state in sample.ranks if at >= 0 else ():
            value = read(state)
            if value is not None and isfinite(value) and 0 <= value * factor < _LARGEST_VALUE:
                totals.setdefault(state.rank, np.zeros(bins.count))[at] += value * factor
                counts.setdefault(state.rank, np.zeros(bins.count))[at] += 1
    with np.errstate(invalid="ignore"):
        return {rank: totals[rank] / counts[rank] for rank in sorted(totals)}


def find_spread(values: Mapping[int, Series], count: int) -> Series:
    """Return the 5th percentile, the median and the 95th over the ranks in each bin: three rows.

    Each is the value of one rank, the nearest; NaN where there is none.
    """
    spread = np.full((3, count), np.nan)
    if values:
        table = np.array(list(values.values()))
        known = ~np.isnan(table).all(axis=0)
        spread[:, known] = np.nanquantile(table[:, known], (0.05, 0.5, 0.95), axis=0, method="nearest")
    return spread


@dataclass(frozen=True, slots=True)
class RankTime:
    """Where the time of one rank went."""

    rank: int
    host: str
    seconds: Series
    """For each of ACTIVITIES."""


def share_time(account: RunAccount) -> list[RankTime]:
    """Return where each rank's time went, the slowest first: the one that others wait for waits least itself.

    The time from one report of a node to the next is counted by what the later one says: all of it for the
    phase that the rank is in, and while it trains by its shares of waiting.
    """
    hangs = [(event.time, event.until or event.time) for event in account.events if event.kind == "hang"]
    longest = _LONGEST_GAP * _find_interval(account.samples)
    found: dict[int, RankTime] = {}
    for host, reports in _group_by_host(account.samples).items():
        before = None
        for report in reports:
            past = report.interval if before is None else report.time - before
            seconds, before = min(max(past, 0.0), longest), report.time
            hanging = any(begin <= report.time <= end for begin, end in hangs)
            for state in report.ranks:
                known = found.setdefault(state.rank, RankTime(state.rank, host, np.zeros(len(ACTIVITIES))))
                known.seconds[:] += _share_activities(state, hanging) * seconds
    waits = ACTIVITIES.index("waiting for others")
    times = [one for one in found.values() if one.seconds.sum()]
    return sorted(times, key=lambda one: (one.seconds[waits] / one.seconds.sum(), one.rank))


def _share_activities(state: Rank, hanging: bool) -> Series:
    """Return the share of each of ACTIVITIES in what a rank does; all 0 for one that is gone."""
    shares = dict.fromkeys(ACTIVITIES, 0.0)
    if (whole := _PHASES.get(state.phase)) is not None or hanging:
        if name := ("hanging" if hanging and whole != "" else whole):
            shares[name] = 1.0
    else:
        waits = _limit_share(state.wait_share)
        data = min(_limit_share(1.0 if state.phase == "loading" else state.data_share), 1.0 - waits)
        shares |= {"compute": 1.0 - waits - data, "waiting for others": waits, "data": data}
    return np.array(list(shares.values()))


def _limit_share(value: float | None) -> float:
    """Return a share between 0 and 1; 0 for none."""
    return min(max(value, 0.0), 1.0) if value is not None and isfinite(value) else 0.0
