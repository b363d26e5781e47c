"""The files of watching in a run directory: written whole, read with caution."""

import json
import os
from pathlib import Path

import pytest

from launcher.watch.node_reports import (
    count_hangs,
    hang_path,
    read_evidence,
    read_job_state,
    read_report,
    read_reports,
    watch_path,
    write_evidence,
    write_hang_file,
    write_job_state,
    write_report,
)
from launcher.watch.watch_model import (
    Frame,
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    ProcessState,
    RankEvidence,
    RankState,
    Stack,
    Verdict,
)

RANK = RankState(1, 1, 4711, 0, "training", 10, 21.5, p50=1.0)
REPORT = NodeReport("n1", 0, 2, 0, 100.0, 1, 5.0, (RANK,), nic_rates=(("eth0", 1.5),))
STACK = Stack("MainThread", (Frame("data.py", 88, "read_shard"),), is_current=True)
EVIDENCE = RankEvidence(
    1, 1, "n1", 4711, "training", 10, 21.5, 21.5, ProcessState(4711, "S", stacks=(STACK,))
)
HANG = Hang(1, 5.0, 1.0, 10, Verdict("absent", "rank 1 has not joined", (1,), frame=STACK.frames[0]))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    second = NodeReport("a", 1, 2, 0, 101.0, 1, 5.0, ())
    state = JobState(100.0, "n1", 0, "hanging", 10, 21.5, 1.0, 2, ("n2",), (HANG,))
    evidence = NodeEvidence("n1", 0, 1, 100.0, 0.5, (EVIDENCE,))
    written = write_report(tmp_path, REPORT)
    write_report(tmp_path, second)
    write_job_state(tmp_path, state)
    write_evidence(tmp_path, evidence)
    assert [one.report for one in read_reports(tmp_path)] == [REPORT, second]
    assert read_reports(tmp_path)[0].written == written
    assert read_report(tmp_path, "n1", own=True) == REPORT
    assert read_job_state(tmp_path) == state
    assert read_evidence(tmp_path, 1, own=True) == (evidence,)
    assert read_evidence(tmp_path, 2) == ()
    assert watch_path(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"host": 3}', b"\xff", b'{"time": NaN}'])
def test_what_is_damaged_counts_as_missing(text: bytes, tmp_path: Path) -> None:
    write_report(tmp_path, REPORT)
    for name in ("node-x.json", "evidence-x.json", "job.json"):
        (watch_path(tmp_path) / name).write_bytes(text)
    assert [one.report for one in read_reports(tmp_path)] == [REPORT]
    assert read_evidence(tmp_path, 1) == ()
    assert read_job_state(tmp_path) is None


def test_a_later_versions_fields_are_ignored(tmp_path: Path) -> None:
    write_report(tmp_path, REPORT)
    path = watch_path(tmp_path) / "node-n1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "new": 1}))
    assert read_report(tmp_path, "n1") == REPORT


def test_pipes_and_links_are_not_read(tmp_path: Path) -> None:
    write_report(tmp_path, REPORT)
    os.mkfifo(watch_path(tmp_path) / "node-x.json")
    (watch_path(tmp_path) / "job.json").symlink_to(tmp_path / "other")
    assert len(read_reports(tmp_path)) == 1
    assert read_job_state(tmp_path) is None


def test_no_folder_is_no_report(tmp_path: Path) -> None:
    assert read_reports(tmp_path) == ()
    assert read_job_state(tmp_path / "no") is None


def test_hangs_are_numbered_by_their_folders(tmp_path: Path) -> None:
    assert count_hangs(tmp_path) == 0
    write_hang_file(tmp_path, 2, "verdict.json", b"{}")
    write_hang_file(tmp_path, 10, "verdict.json", b"{}")
    (tmp_path / "hang-x").mkdir()
    assert count_hangs(tmp_path) == 10
    assert hang_path(tmp_path, 10).stat().st_mode & 0o777 == 0o700
