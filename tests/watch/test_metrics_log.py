"""What nodes did over time: written by a real thread to real files, and read from damaged ones."""

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.files import open_below
from launcher.watch import metrics_log
from launcher.watch.metrics_log import (
    MetricsEvent,
    MetricsLog,
    choose_sample_interval,
    read_metrics,
    thin_out,
)
from launcher.watch.model import GpuSample, NodeReport, Rank

TIME = 1767225600.25
STATE = Rank(
    rank=3, local_rank=1, pid=77, attempt=0, phase="training", step=120, step_age=0.25, p50=0.412, p99=0.5,
    wait_share=0.25, cpu=1.5, rss=123456789, gpu=GpuSample(1, power=650.5, xids=(79,)),
)  # fmt: skip
REPORT = NodeReport("n2", 1, 4, 0, TIME, 9, 5.0, (STATE,), nic_rates=(("mlx5_0", 25e9),), io_pressure=0.03)
EVENT = MetricsEvent("hang", TIME, "rank 5 on n2 has not joined all_reduce #1042", 120, (5,), ("n2",), 1)


def make_log(run: Path, interval: float = 30.0, host: str = "n2") -> tuple[MetricsLog, list[str]]:
    warnings: list[str] = []
    return MetricsLog(run, host, interval, warnings.append), warnings


def test_numbers_are_short_and_never_nan(tmp_path: Path) -> None:
    log, _ = make_log(tmp_path)
    log.add_report(replace(REPORT, ranks=(replace(STATE, p50=1 / 3, cpu=float("nan"), notes=("x",)),)))
    log.close(10)
    (line,) = (tmp_path / "watch/metrics-n2.jsonl").read_text().splitlines()
    (rank,) = json.loads(line)["ranks"]
    assert (rank["p50"], rank["cpu"]) == (0.33333, None) and "notes" not in rank and "exit_code" not in rank
    assert read_metrics(tmp_path)[0].rows[0].ranks[0].cpu is None


def test_no_folder_and_no_interval_give_no_metrics(tmp_path: Path) -> None:
    log, _ = make_log(tmp_path, interval=0)
    assert not log.add_report(REPORT) and not log.add_event(EVENT)
    log.close(10)
    assert read_metrics(tmp_path) == () and list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_warning_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel writes of a line before the disk is full is half a line."""
    log, warnings = make_log(tmp_path)
    full, real = threading.Event(), os.write
    full.set()
    monkeypatch.setattr(os, "write", lambda at, data: real(at, data[:20] if full.is_set() else data))
    for _ in range(2):
        log.add_event(EVENT)
    path, end = tmp_path / "watch/metrics-n2.jsonl", time.monotonic() + 30
    while not path.exists() or path.stat().st_size < 40:
        assert time.monotonic() < end
        time.sleep(0.01)
    full.clear()
    log.add_report(REPORT)
    log.close(10)
    (found,) = read_metrics(tmp_path)
    assert (found.rows, found.skipped, len(warnings)) == ((REPORT,), 2, 1)
    assert "metrics-n2.jsonl could not be written" in warnings[0]


def test_a_stuck_filesystem_stops_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(metrics_log, "open_below", lambda *where: stuck.wait(60) and open_below(*where))
    log, _ = make_log(tmp_path)
    results = [log.add_event(EVENT) for _ in range(metrics_log.WAITING + 9)]
    log.close(0.01)
    assert results[0] and not results[-1] and log.worker and log.worker.thread.is_alive()
    monkeypatch.undo()
    stuck.set()
    log.close(30)
    assert (
        log.worker
        and not log.worker.thread.is_alive()
        and len(read_metrics(tmp_path)[0].events) >= metrics_log.WAITING
    )


def test_a_file_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "LARGEST", 400)
    log, _ = make_log(tmp_path)
    for _ in range(9):
        log.next_time = 0
        log.add_report(REPORT)
        log.add_event(EVENT)
    log.close(10)
    (found,) = read_metrics(tmp_path)
    assert len(found.rows) == 1 and 1 < len(found.events) < 9


def test_others_files_and_links_are_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "watch").mkdir()
    (tmp_path / "elsewhere").touch()
    (tmp_path / "watch/metrics-n2.jsonl").symlink_to(tmp_path / "elsewhere")
    log, warnings = make_log(tmp_path)
    log.add_report(REPORT)
    log.close(10)
    assert len(warnings) == 1 and (tmp_path / "elsewhere").read_bytes() == b""
    assert read_metrics(tmp_path) == ()


@pytest.mark.parametrize(
    ("age", "longest", "expected"),
    [(0, 30, 5), (100, 30, 5), (240, 30, 10), (720, 30, 30), (7200, 30, 30), (86400, 30, 43.2), (9, 2, 2)],
)
def test_intervals_grow(age: float, longest: float, expected: float) -> None:
    assert choose_sample_interval(age, longest) == pytest.approx(expected)


def test_samples_are_left_out_evenly() -> None:
    lines = [str(number).encode() for number in range(10)]
    assert thin_out(lines, None) == thin_out(lines, 10) == lines
    assert thin_out(lines, 3) == [b"2", b"5", b"9"]
