"""All that a run's directory tells of it, read once for the page; any part may be missing or damaged."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.codec import load
from launcher.files import LARGEST, read_file
from launcher.report.run_events import Event, list_events
from launcher.runs.manifest import read_manifest, read_time
from launcher.runs.run_records import RunRecords, read_run
from launcher.runs.run_status import RunStatus, add_progress, read_status
from launcher.text import count_things
from launcher.watch.metrics_log import MetricsEvent, read_metrics
from launcher.watch.node_reports import (
    EVIDENCE,
    hang_path,
    read_evidence,
    read_job_state,
    read_reports,
)
from launcher.watch.watch_model import Hang, JobState, NodeEvidence, NodeReport

MOST_STATES = 60_000
"""States of ranks that are read of all nodes' metrics: some seconds' work."""
FEWEST_ROWS, MOST_ROWS = 12, 2000
"""Samples of a node that are read."""
MOST_HANGS = 20
"""Hangs whose evidence is read."""
MOST_NUMBERS = 10**6
"""A hang of this number is damage."""
DAY = 86400.0
"""Seconds before a run's start, or after its end, from which on a report's time is damage."""


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
    events: tuple[Event, ...]
    begin: float
    end: float
    """When it ended, or now."""
    notes: tuple[str, ...] = ()
    """What of the directory could not be read."""


def read_account(path: Path, now: float | None = None) -> RunAccount:
    """Read a run's directory; nothing raises."""
    now = time.time() if now is None else now
    status = add_progress(read_status(path))
    reports = tuple(stored.report for stored in read_reports(path))
    samples, told, notes = read_samples(path, reports)
    starts = [found for one in status.attempts if (found := read_time(one.started)) is not None]
    ended = None if status.is_live else read_time(status.ended)
    begin = min(starts, default=min((sample.time for sample in samples), default=now))
    last = max((sample.time for sample in samples if sample.time <= now), default=begin)
    end = max(ended or (now if status.is_live else last), begin)
    samples = tuple(one for one in samples if begin - DAY < one.time < end + DAY)
    job = read_job_state(path)
    hangs = list_run_hangs(path, job)
    return RunAccount(
        status=status,
        manifest=read_manifest(path),
        records=read_run(path),
        reports=reports,
        samples=samples,
        job=job,
        hangs=tuple(read_run_hangs(path, hangs)),
        events=list_events(path, status.attempts, samples, job, told=told, hangs=hangs, end=end),
        begin=begin,
        end=end,
        notes=notes,
    )


def read_samples(
    path: Path, reports: Sequence[NodeReport]
) -> tuple[tuple[NodeReport, ...], tuple[MetricsEvent, ...], tuple[str, ...]]:
    """Return what nodes reported over time, their events, and what could not be read.

    `reports` are the nodes' last ones; a run that has ended early has no others.
    """
    ranks = sum(len(report.ranks) for report in reports) or 8
    metrics = read_metrics(path, max(FEWEST_ROWS, min(MOST_ROWS, MOST_STATES // ranks)))
    rows = {(row.host, row.time): row for one in metrics for row in one.rows}
    newest = {one.host: max((row.time for row in one.rows), default=0.0) for one in metrics}
    rows |= {(one.host, one.time): one for one in reports if one.time > newest.get(one.host, 0.0)}
    notes = tuple(
        f"metrics of {one.host}: {count_things(one.skipped, 'line')} could not be read"
        for one in metrics
        if one.skipped
    )
    events = tuple(event for one in metrics for event in one.events)
    return tuple(sorted(rows.values(), key=lambda row: row.time)), events, notes


def list_run_hangs(path: Path, job: JobState | None) -> list[Hang]:
    """Return the hangs of all attempts by number: those with a folder, and those that the job's state has."""
    found = {hang.number: hang for hang in (job.hangs if job else ())}
    for file in path.glob("hang-*/verdict.json"):
        try:
            hang = load(Hang, read_file(file, LARGEST))
        except (OSError, ValueError):
            continue
        known = found.setdefault(hang.number, hang)
        if known.recovered is None and known.time == hang.time:
            found[hang.number] = hang
    return [found[number] for number in sorted(found) if 0 < number < MOST_NUMBERS]


def read_run_hangs(path: Path, hangs: Sequence[Hang]) -> Iterator[tuple[Hang, tuple[NodeEvidence, ...]]]:
    """Give hangs, each with what the nodes gathered for it."""
    for hang in hangs[:MOST_HANGS]:
        found: list[NodeEvidence] = []
        for file in sorted(hang_path(path, hang.number).glob(f"{EVIDENCE}*.json")):
            try:
                found.append(load(NodeEvidence, read_file(file, LARGEST)))
            except (OSError, ValueError):
                continue
        yield hang, tuple(found) or read_evidence(path, hang.number)
