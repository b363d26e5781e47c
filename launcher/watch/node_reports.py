"""The files of watching in a run directory: each node's report and evidence, and what is known of the job.

    watch/node-HOST.json       model.NodeReport, every watch.interval
    watch/evidence-HOST.json   model.NodeEvidence, once for each hang
    watch/job.json             model.JobState, by the node that judges
    hang-N/                    what was gathered for hang N

Each is written whole or not at all. Those who read them may be on another node than those who write: how old
a report is follows from the times of files on the filesystem that they share, not from the nodes' clocks.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from launcher.codec import load
from launcher.files import LARGEST, open_below, read_file, write_whole
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.watch_model import Hang, JobState, NodeEvidence, NodeReport

FOLDER = "watch"
REPORT, EVIDENCE = "node-", "evidence-"
JOB_STATE = "job.json"
HANG = re.compile(r"hang-([1-9]\d{0,5})")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A node's report as it was found."""

    report: NodeReport
    written: float
    """When its file was written, in seconds since the epoch on the filesystem's clock."""


def watch_path(run_path: Path) -> Path:
    """Return the folder of reports in a run directory."""
    return run_path / FOLDER


def hang_path(run_path: Path, number: int) -> Path:
    """Return the folder of a hang in a run directory."""
    return run_path / f"hang-{number}"


def count_hangs(run_path: Path) -> int:
    """Return the highest number of a hang that has a folder; 0 if there is none. Raises OSError."""
    found = (HANG.fullmatch(name) for name in os.listdir(run_path))  # noqa: PTH208 - names alone
    return max((int(match[1]) for match in found if match), default=0)


def write_report(run_path: Path, report: NodeReport) -> float:
    """Write a node's report; return the time of its file. Raises OSError."""
    name = f"{REPORT}{report.host}.json"
    with closing_descriptor(open_below(run_path, FOLDER)) as at:
        write_whole(at, name, encode_value(report))
        return os.stat(name, dir_fd=at).st_mtime


def write_evidence(run_path: Path, evidence: NodeEvidence) -> None:
    """Write what a node has gathered for a hang; raises OSError."""
    write_watch_file(run_path, f"{EVIDENCE}{evidence.host}.json", encode_value(evidence))


def write_job_state(run_path: Path, state: JobState) -> None:
    """Write what is known of the job; raises OSError."""
    write_watch_file(run_path, JOB_STATE, encode_value(state))


def write_watch_file(run_path: Path, name: str, data: bytes) -> None:
    """Write a file in the folder of reports; raises OSError."""
    with closing_descriptor(open_below(run_path, FOLDER)) as at:
        write_whole(at, name, data)


def write_hang_file(run_path: Path, number: int, name: str, data: bytes) -> None:
    """Write a file in the folder of a hang, which is made if it is missing; raises OSError."""
    with closing_descriptor(open_below(run_path, hang_path(run_path, number).name)) as at:
        write_whole(at, name, data)


def encode_value(value: NodeReport | NodeEvidence | JobState | Hang) -> bytes:
    """Return the JSON form of one of model.py's values; raises ValueError for NaN and infinite numbers."""
    return (json.dumps(asdict(value), allow_nan=False) + "\n").encode()


def read_reports(run_path: Path, *, own: bool = False) -> tuple[StoredReport, ...]:
    """Read all nodes' reports, by node rank; those that cannot be read count as missing.

    With `own`, which is for what acts upon them, those of other users count as missing too.
    """
    found = []
    for path in list_watch_files(run_path, REPORT):
        report = read_value(NodeReport, path, own=own)
        try:
            written = path.stat().st_mtime
        except OSError:
            continue
        if report is not None:
            found.append(StoredReport(report, written))
    return tuple(sorted(found, key=lambda one: (one.report.node_rank, one.report.host)))


def read_report(run_path: Path, host: str, *, own: bool = False) -> NodeReport | None:
    """Read one node's report; None if there is none that can be read."""
    return read_value(NodeReport, watch_path(run_path) / f"{REPORT}{host}.json", own=own)


def read_evidence(run_path: Path, number: int, *, own: bool = False) -> tuple[NodeEvidence, ...]:
    """Read what nodes have gathered for a hang, by node rank."""
    values = (read_value(NodeEvidence, path, own=own) for path in list_watch_files(run_path, EVIDENCE))
    found = [value for value in values if value is not None and value.number == number]
    return tuple(sorted(found, key=lambda one: (one.node_rank, one.host)))


def read_job_state(run_path: Path, *, own: bool = False) -> JobState | None:
    """Read what is known of a job; None if nothing is, or it cannot be read."""
    return read_value(JobState, watch_path(run_path) / JOB_STATE, own=own)


def read_value(kind: type[T], path: Path, *, own: bool) -> T | None:
    """Read one of model.py's values; None for what is not there, damaged, or another user's."""
    try:
        return load(kind, read_file(path, LARGEST, own=own))
    except (OSError, ValueError):
        return None


def list_watch_files(run_path: Path, beginning: str) -> Iterator[Path]:
    """Give the files of reports whose names begin so; none if the folder cannot be read."""
    folder = watch_path(run_path)
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names alone
    except OSError:
        return
    for name in names:
        if name.startswith(beginning) and name.endswith(".json"):
            yield folder / name
