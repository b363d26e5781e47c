"""What a run's directory tells of it over time: samples, events, series in bins, and where the time went.

Everything is read once for the page, and any part of it may be missing or damaged. Times are seconds since
the epoch, unless they say that they count from the start.
"""

import itertools
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
from launcher.runs.progress import read_mtime
from launcher.runs.rank_logs import list_attempts
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
_MOST_CHECKPOINTS = 1000
_DAY = 86400.0
"""Seconds before a run's start, or after its end, from which on a report's time is damage."""
_SAME_START = 5.0
"""Seconds that the filesystem's clock and the nodes' may differ."""
_MOST_BINS = 160
"""Bins of a chart: more than one for each six pixels of it are not told apart."""
_FEW_HOSTS = 8
"""Nodes up to which each has to report in each bin."""
_LARGEST_VALUE = 1e15
"""Numbers above this are damage: no bytes, seconds or watts of a rank."""
_LONGEST_GAP = 3.0
"""Intervals between two reports that count as time of the later one; what is longer is a gap."""

EVENT_KINDS = ("hang", "straggler", "restart", "requeue", "checkpoint")
"""In the order in which they are shown."""
ACTIVITIES = ("compute", "waiting for others", "data", "saving", "evaluating", "starting", "hanging")
"""Where a rank's time goes, in the order in which charts and tables have it."""
_WHOLE_PHASES = {
    **dict.fromkeys(("starting", "joining", "compiling"), "starting"),
    "saving": "saving",
    "evaluating": "evaluating",
}
"""Phases that take all of a rank's time, with the activity that they are."""
_GONE = ("ended", "exited", "unwatched")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    kind: str
    """One of EVENT_KINDS."""
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
    events = _list_events(path, status, samples, job, told, hangs, end)
    return RunAccount(
        status=status,
        manifest=read_manifest(path),
        records=read_run(path),
        reports=reports,
        samples=tuple(samples),
        job=job,
        hangs=tuple((hang, _read_hang_evidence(path, hang.number)) for hang in hangs[:_MOST_HANGS]),
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


def _read_hang_evidence(path: Path, number: int) -> tuple[NodeEvidence, ...]:
    """Return what the nodes gathered for a hang."""
    return read_evidence(hang_path(path, number), number) or read_evidence(watch_path(path), number)


def _list_events(
    path: Path,
    status: RunStatus,
    samples: Sequence[NodeReport],
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
    for one in told:  # where the files that say more are gone
        if (one.event == "hang" and not hangs) or (one.event == "straggler" and not job):
            yield Event(one.event, one.time, one.sentence)
    for hang in hangs:
        until = end if hang.recovered is None else hang.recovered
        lasted = describe_time(max(0.0, until - hang.stalled_since))
        text = f"hang {hang.number}, {lasted}: {hang.verdict.sentence}"
        yield Event("hang", hang.stalled_since, text, until)
    for found in job.stragglers if job else ():
        text = f"rank {found.rank} on {found.host}, {100 * found.excess:.0f}% slower: {found.detail}"
        yield Event("straggler", found.time, text)
    yield from _list_restarts(path, samples, [read_time(one.started) for one in status.attempts])
    yield from _list_checkpoints(path, samples)


def _list_restarts(
    path: Path, samples: Sequence[NodeReport], starts: Sequence[float | None]
) -> Iterator[Event]:
    """Give the restarts of the ranks within an attempt of the job; `starts` are those of the attempts."""
    first: dict[int, float] = {}
    for sample in samples:
        first[sample.attempt] = min(first.get(sample.attempt, sample.time), sample.time)
    found = []
    for number in sorted(list_attempts(path)):
        begun = first.get(number) or read_mtime(path / "logs" / str(number))
        if number and begun is not None:
            found.append(Event("restart", begun, f"the ranks were started again (restart {number})"))
    for start in starts[1:]:
        # The first ranks after a start of the job are part of it.
        same = next((one for one in found if start is not None and one.time >= start - _SAME_START), None)
        found = [one for one in found if one is not same]
    yield from found


def _list_checkpoints(path: Path, samples: Sequence[NodeReport]) -> Iterator[Event]:
    """Give when checkpoints were written into the run directory, or else when ranks were saving."""
    times: list[float] = []
    try:
        entries = itertools.islice((path / "checkpoints").iterdir(), _MOST_CHECKPOINTS)
        times = [written for entry in entries if (written := read_mtime(entry)) is not None]
    except OSError:
        pass
    if not times:
        saving = False
        for sample in samples:
            now = any(state.phase == "saving" for state in sample.ranks)
            if now and not saving:
                times.append(sample.time)
            saving = now
    yield from (Event("checkpoint", when, "") for when in times)


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
    """Choose bins as fine as the reports are dense, _MOST_BINS at most; there is one at least.

    Of many nodes, of which each is read for other times, they are as fine as all nodes' reports together.
    """
    samples, begin = account.samples, account.begin
    span = max(account.end - begin, 1.0)
    plain = max(1, min(_MOST_BINS, int(span / _find_interval(samples))))
    counts = [plain]
    if len({sample.host for sample in samples}) > _FEW_HOSTS:
        counts = [plain * factor for factor in range(16, 0, -1) if plain * factor <= _MOST_BINS] or [plain]

    def measure_fill(bins: Bins) -> float:
        return len({*bins.find(samples).tolist()} - {-1}) / bins.count

    coarse = Bins(begin, span / plain, plain)
    full = 0.9 * measure_fill(coarse)
    finer = (Bins(begin, span / count, count) for count in counts)
    return next((bins for bins in finer if measure_fill(bins) >= full), coarse)


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
    knows_waits: bool = True
    """Its waiting for others was measured; else that is in `compute`."""

    @property
    def shares(self) -> Series:
        """The same as shares of its whole time."""
        shares: Series = self.seconds / self.seconds.sum()
        return shares


def share_time(account: RunAccount) -> list[RankTime]:
    """Return where each rank's time went, by rank.

    The time from one report of a node to the next is counted by what the later one says: all of it for the
    phase that the rank is in, and while it trains by its shares of waiting.
    """
    hangs = [(event.time, event.until or event.time) for event in account.events if event.kind == "hang"]
    longest = _LONGEST_GAP * _find_interval(account.samples)
    found: dict[int, Series] = {}
    hosts: dict[int, str] = {}
    blind: set[int] = set()
    for host, reports in _group_by_host(account.samples).items():
        before = None
        for report in reports:
            past = report.interval if before is None else report.time - before
            seconds, before = min(max(past, 0.0), longest), report.time
            hanging = any(begin <= report.time <= end for begin, end in hangs)
            for state in report.ranks:
                hosts[state.rank] = host
                shares = _share_activities(state, hanging)
                found[state.rank] = found.get(state.rank, np.zeros(len(ACTIVITIES))) + shares * seconds
                if state.phase in ("training", "loading") and state.wait_share is None:
                    blind.add(state.rank)
    return [
        RankTime(rank, hosts[rank], found[rank], rank not in blind)
        for rank in sorted(found)
        if found[rank].sum()
    ]


def _share_activities(state: Rank, hanging: bool) -> Series:
    """Return the share of each of ACTIVITIES in what a rank does; all 0 for one that is gone."""
    shares = dict.fromkeys(ACTIVITIES, 0.0)
    whole = "hanging" if hanging else _WHOLE_PHASES.get(state.phase)
    if state.phase in _GONE:
        pass
    elif whole:
        shares[whole] = 1.0
    else:
        waits = _limit_share(state.wait_share)
        data = min(_limit_share(1.0 if state.phase == "loading" else state.data_share), 1.0 - waits)
        shares |= {"compute": 1.0 - waits - data, "waiting for others": waits, "data": data}
    return np.array(list(shares.values()))


def _limit_share(value: float | None) -> float:
    """Return a share between 0 and 1; 0 for none."""
    return min(max(value, 0.0), 1.0) if value is not None and isfinite(value) else 0.0


def order_slowest(times: Sequence[RankTime]) -> list[RankTime]:
    """Sort ranks, the slowest first: the one that others wait for is the one that waits least itself.

    Where waits are not known, it is the one that has trained longest.
    """
    if all(one.knows_waits for one in times):
        waits = ACTIVITIES.index("waiting for others")
        return sorted(times, key=lambda one: (one.shares[waits], one.rank))
    return sorted(times, key=lambda one: (-one.seconds[0] - one.seconds[2], one.rank))
