"""The watcher's process as a supervisor sees it: nothing that befalls it stops its starter."""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.decode import decode
from launcher.launch import watch_folder, watcher_process
from launcher.launch.processes import Death, RankProcess
from launcher.launch.watch_folder import WatchFolder, make_watch_folder, open_watch_folder, remove_stale
from launcher.launch.watcher_process import WatcherProcess
from launcher.launch.watching import Watching
from launcher.watch.__main__ import gather_evidence, make_watcher, try_tick
from launcher.watch.evidence import WatchedRank
from launcher.watch.heartbeats import read_heartbeat
from launcher.watch.node_reports import read_job_state, read_report
from launcher.watch.rank_book import RankBook
from launcher.watch.watch_model import GpuSample
from launcher.watch.watcher_settings import WatcherSettings
from tests.seam import is_alive, wait_for

RANK = RankProcess(0, 0, 0, os.getpid())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchFolder]:
    monkeypatch.setattr(watcher_process, "DELAY", 0.0)
    made = make_watch_folder(str(tmp_path / "heartbeats"))
    yield made
    made.remove()


def make_settings(folder: WatchFolder, run_path: Path) -> dict[str, object]:
    watch = {"hang_seconds": "auto", "on_hang": "report", "interval": 0.5, "metrics_interval": 0.0}
    place = {"host": "n0", "node_rank": 0, "nodes": 1, "attempt": 0, "ranks": 1}
    run = {"run_dir": str(run_path), "run": "train/1", "folder": folder.path}
    return {**run, **place, "watch": watch, "notify": {"events": []}}


def start(folder: WatchFolder, run_path: Path) -> WatcherProcess:
    run_path.mkdir(exist_ok=True)
    watcher = WatcherProcess(folder, make_settings(folder, run_path))
    watcher.add_ranks([RANK])
    watcher.attend([])
    assert watcher.process
    return watcher


def attend_until(
    watcher: WatcherProcess, condition: Callable[[], object], what: str
) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []

    def check() -> object:
        messages.extend(watcher.attend([]))
        return condition()

    wait_for(check, what)
    return messages


def test_it_reports_and_ends_with_the_job(folder: WatchFolder, tmp_path: Path) -> None:
    run_path = tmp_path / "run"
    watcher = start(folder, run_path)
    attend_until(watcher, lambda: read_report(run_path, "n0"), "a report")
    report = read_report(run_path, "n0")
    assert report and [(one.rank, one.pid, one.phase) for one in report.ranks] == [(0, RANK.pid, "unwatched")]
    watcher.attend([Death(RANK, time.time(), 0)])
    (pid,) = watcher.pids
    watcher.close()
    assert not is_alive(pid) and not Path(folder.path).exists()
    state = read_job_state(run_path)
    assert state and state.state == "ended"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals_of_the_job_do_not_end_it(number: int, folder: WatchFolder, tmp_path: Path) -> None:
    watcher = start(folder, tmp_path / "run")
    attend_until(watcher, lambda: read_report(tmp_path / "run", "n0"), "a report")
    (pid,) = watcher.pids
    os.kill(pid, number)
    (tmp_path / "run/watch/node-n0.json").unlink()
    attend_until(watcher, lambda: read_report(tmp_path / "run", "n0"), "another report")
    assert not watcher.given_up
    watcher.close()


def test_one_that_is_killed_is_told_of_once(
    folder: WatchFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = start(folder, tmp_path / "run")
    os.kill(watcher.pids[0], signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        attend_until(watcher, lambda: watcher.given_up, "its end")
        watcher.add_ranks([RANK])
        watcher.attend([Death(RANK, time.time(), 0)])
        watcher.close()
    (line,) = [record.message for record in caplog.records]
    assert "no longer watched" in line and "-9" in line


def test_one_that_is_stopped_holds_nothing_up(folder: WatchFolder, tmp_path: Path) -> None:
    watcher = start(folder, tmp_path / "run")
    (pid,) = watcher.pids
    os.kill(pid, signal.SIGSTOP)
    watcher.attend([])
    watcher.close()
    assert not is_alive(pid)


def test_what_a_stopped_one_has_not_read_is_no_trouble_at_the_end(
    folder: WatchFolder, tmp_path: Path
) -> None:
    watcher = start(folder, tmp_path / "run")
    os.kill(watcher.pids[0], signal.SIGSTOP)
    watcher.add_ranks([RANK] * 4000)  # more than a pipe takes
    assert watcher.outbox
    assert Watching(watcher).watcher.close() == []


def test_a_defect_of_watching_is_told_of_once_and_the_job_goes_on(
    folder: WatchFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = Watching(start(folder, tmp_path / "run"))
    (pid,) = watching.pids
    watching.watcher.told_deaths = "none"  # type: ignore[assignment]  # the defect
    for _ in range(2):
        assert watching.attend([]) == []
    watching.close()
    assert not is_alive(pid) and not Path(folder.path).exists()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("the ranks are no longer watched, and run on: TypeError(")


def test_one_that_cannot_be_imported_says_why(
    folder: WatchFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    watcher = start(folder, tmp_path / "run")
    attend_until(watcher, lambda: watcher.given_up, "its end")
    watcher.close()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    second = WatcherProcess(folder, {})
    second.add_ranks([RANK])
    second.attend([])
    assert second.given_up and "could not be started" in caplog.text


def test_a_run_directory_that_cannot_be_written_is_a_warning(folder: WatchFolder, tmp_path: Path) -> None:
    run_path = tmp_path / "run"
    run_path.mkdir()
    (run_path / "watch").write_text("a file in the folder's place")
    watcher = start(folder, run_path)
    told: list[dict[str, object]] = []

    def listen() -> bool:
        told.extend(watcher.attend([]))
        return bool(told)

    wait_for(listen, "a warning")
    assert "cannot be written" in str(told[0]["lines"]) and told[0]["event"] == "warning"
    watcher.close()


def test_folders_of_launchers_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_folder, "FRESH", -1.0)
    held, dead = (make_watch_folder(str(tmp_path / f"launch-watch-{name}")) for name in ("held", "dead"))
    os.close(dead.lock)
    (tmp_path / "launch-watch-dead/rank-0.beat").touch()
    (tmp_path / "launch-watch-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    remove_stale(str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"launch-watch-held", "launch-watch-link", "other"}
    held.remove()
    held.remove()


def test_a_folder_is_made_where_there_is_room_and_is_private(tmp_path: Path) -> None:
    made = open_watch_folder({"TMPDIR": str(tmp_path)})
    assert made and Path(made.path).stat().st_mode & 0o777 == 0o700 and len(made.path) < 80
    made.remove()
    assert not Path(made.path).exists()


def test_a_defect_is_told_of_once(
    folder: WatchFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its log is in memory, and the ranks are looked at once a second for days."""
    settings = decode(WatcherSettings, json.dumps(make_settings(folder, tmp_path)))
    watcher, sent = make_watcher(settings, os.getpid()), list[dict[str, object]]()

    def fail() -> bool:
        raise KeyError("one place")

    def fail_too() -> bool:
        raise KeyError("another place")

    watcher.send = sent.append
    for function in (fail, fail, fail_too, fail, fail_too):
        watcher.is_suspended = function
        try_tick(watcher)
    assert capfd.readouterr().err.count("Traceback") == len(sent) == 2


def test_evidence_has_the_last_reading_of_the_gpus(folder: WatchFolder, tmp_path: Path) -> None:
    settings = decode(WatcherSettings, json.dumps(make_settings(folder, tmp_path)))
    ranks, book = [WatchedRank(0, 3, 0, os.getpid(), "n0")], RankBook(tmp_path, read_heartbeat)
    sample = GpuSample(5, xids=(79,))
    assert gather_evidence(settings, lambda: {3: sample}, ranks, book, 1).ranks[0].gpu == sample
