"""The watcher of a node: what it says of a hang, and that nothing that happens to it stops the job."""

import errno
import json
import os
import signal
import subprocess
import threading
import time
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from launcher.codec import convert
from launcher.launch.watching import Watching, keep_watch_folder
from launcher.watch.__main__ import NodeWatcher
from launcher.watch.metrics import MetricsEvent, MetricsLog, read_metrics
from launcher.watch.model import JobState, NodeEvidence, NodeReport, WatcherSettings
from launcher.watch.run_files import Found, SharedFiles, write_value
from tests.seam import (
    PATIENCE,
    QUICK_AGENT,
    Started,
    find_run,
    list_modules,
    start,
    wait_for,
    write_program,
)

PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())


def test_the_console_names_the_rank_the_collective_and_the_line(tmp_path: Path) -> None:
    program = write_program(tmp_path, PROGRAMS["hangs"])
    line = 1 + PROGRAMS["hangs"][: PROGRAMS["hangs"].index("# the hang")].count("\n")
    words = ("nproc_per_node=2", "watch.hang_seconds=6", "binding=none", "name=hang", "--", program)
    with start(tmp_path, *words) as job:
        wait_for(lambda: "has not joined" in job.read(), "the verdict", tell=job.read)
        (told,) = (text for text in job.read().splitlines() if "has not joined" in text)
        path = find_run(tmp_path)
        file = path / "watch/job.json"
        wait_for(lambda: file.exists() and '"hangs":[{' in file.read_text(), "the job's state")
        state = json.loads(file.read_text())
    assert state["state"] == "hanging"
    (hang,) = state["hangs"]
    verdict, place = hang["verdict"], {"file": program, "line": line, "function": "read_shard"}
    assert (verdict["kind"], verdict["ranks"], verdict["waiting"], hang["step"]) == ("absent", [1], 1, 3)
    assert (verdict["group"], verdict["operation"]) == ("default group", "all_reduce")
    assert verdict["frame"] == place
    assert verdict["sentence"] in told and f"it sleeps at program.py:{line}, read_shard" in told
    folder = path / "hang-1"
    assert json.loads((folder / "verdict.json").read_text())["verdict"]["ranks"] == [1]
    stacks = [file.read_text() for file in folder.iterdir() if file.suffix == ".txt"]
    assert any("read_shard" in text for text in stacks)


# What happens to it


def make_settings(folder: Path, node: int) -> dict[str, Any]:
    where = {"run_dir": str(folder), "run": "job/1", "folder": str(folder)}
    rest = {"nodes": 2, "attempt": 0, "ranks": 1, "watch": {"interval": 0.1}, "notify": {}}
    return {**where, **rest, "host": f"n{node}", "node_rank": node}


def test_numpy_is_not_loaded_before_collectives_come(tmp_path: Path) -> None:
    """Its import would be beside that of torch by the ranks; what they have called needs it."""
    script = f"""
import time
from launcher.codec import convert
from launcher.watch.__main__ import NodeWatcher
from launcher.watch.model import WatcherSettings
watcher = NodeWatcher(convert(WatcherSettings, {make_settings(tmp_path, 0)}))
watcher.tick(time.monotonic())
watcher.stragglers.thread.join()
assert watcher.is_judge"""
    ours = list_modules(script, tmp_path)
    assert "launcher.watch.stragglers" in ours and "numpy" not in ours


WORDS = ("nproc_per_node=1", "binding=none", "watch.interval=1")


def find_watcher(job: Started) -> int:
    def find() -> list[int]:
        return [pid for pid, words in job.survivors_words().items() if "launcher.watch" in words]

    wait_for(find, "the watcher", tell=job.read)
    return find()[0]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="heartbeats are elsewhere")
def test_neither_signals_nor_a_folder_that_takes_no_reports_ends_it(tmp_path: Path) -> None:
    """It also removes what killed launchers have left."""
    told = "reports of watching cannot be written"
    dead = Path(f"/dev/shm/launch-watch-dead-{os.getpid()}")
    dead.mkdir(mode=0o700)
    (dead / "owner").touch()
    program = write_program(tmp_path, PROGRAMS["waits"])
    with start(tmp_path, *WORDS, "--", program, PYTHONPATH=QUICK_AGENT) as job:
        watcher = find_watcher(job)
        wait_for(lambda: list(tmp_path.glob("runs/*/*/watch/node-*.json")), "a report", tell=job.read)
        assert not dead.exists()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(watcher, number)
        (report,) = tmp_path.glob("runs/*/*/watch/node-*.json")
        report.unlink()
        wait_for(report.exists, "another report", tell=job.read)
        found = json.loads(report.read_text())["ranks"]
        assert [(rank["rank"], rank["phase"]) for rank in found] == [(0, "unwatched")]
        folder = next(
            word.partition("=")[2]
            for word in Path(f"/proc/{found[0]['pid']}/environ").read_text().split("\0")
            if word.startswith("LAUNCH_WATCH=")
        )
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        watch, kept = report.parent, report.parents[1] / "kept"
        os.kill(watcher, signal.SIGSTOP)  # it would make the folder again
        wait_for(lambda: psutil.Process(watcher).status() == psutil.STATUS_STOPPED, "its stop")
        watch.rename(kept)
        watch.touch()
        os.kill(watcher, signal.SIGCONT)
        wait_for(lambda: told in job.read(), "the warning", tell=job.read)
        watch.unlink()
        kept.rename(watch)
        (tmp_path / "go").touch()
        assert job.wait() == 0 and job.read().count(told) == 1, job.read()
        state = json.loads((watch / "job.json").read_text())["state"]
        assert state == "ended" and not Path(folder).exists() and job.survivors() == []


def test_ranks_that_cannot_be_watched_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(os, "mkdir", fail)
    with keep_watch_folder({"TMPDIR": "/tmp/"}, enabled=True) as folder:
        assert folder == ""
    places = "/dev/shm: No space left on device, /tmp: No space left on device"
    assert f"the ranks are not watched: no folder for heartbeats can be made ({places})" in caplog.text


def test_one_that_was_given_up_is_reaped_when_it_ends() -> None:
    """As a zombie it would hold up the reaping of the ranks' orphans."""
    with subprocess.Popen(["true"]) as process:
        watching = Watching("", {}, process=process, given_up=True)
        wait_for(lambda: watching.attend(()) == [] and process.returncode == 0, "the end")


# The run directory's thread: a filesystem that hangs stops it alone, and what it has to say is not lost

REPORT = NodeReport("n0", 0, 2, 0, 100.0, 1, 5.0, ())
STATE = JobState(100.0, "n0", 0, "running", 1, 1.0, 1.0, 2)


def test_a_filesystem_that_hangs_is_noticed_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.watch.run_files.STUCK", 0.1)
    files, answer = SharedFiles(tmp_path), threading.Event()

    def read_dead_disk() -> None:
        answer.wait(PATIENCE)

    files.worker.put(read_dead_disk)
    files.submit(REPORT, STATE)
    wait_for(lambda: files.is_stuck(time.monotonic()), "the stuck call")
    assert files.found == Found() and not files.worker.wait_idle(0.05)
    answer.set()
    assert files.worker.wait_idle(PATIENCE) and not files.is_stuck(time.monotonic())
    assert [one.value for one in files.found.reports] == [REPORT]


def test_while_it_hangs_metrics_give_way_to_reports_and_both_to_what_is_known_of_a_hang(
    tmp_path: Path,
) -> None:
    files, answer = SharedFiles(tmp_path), threading.Event()
    log = MetricsLog(tmp_path, "n0", 30.0, files.put_metrics, pytest.fail)
    files.worker.put(partial(answer.wait, PATIENCE))
    for _ in range(999):
        log.add(MetricsEvent("checkpoint", 100.0))
    for number in range(999):
        files.submit(replace(REPORT, number=number), STATE)
    files.worker.put((tmp_path / "verdict").touch)
    answer.set()
    assert files.worker.wait_idle(PATIENCE)
    assert [one.value.number for one in files.found.reports] == [998]
    assert (tmp_path / "verdict").exists()
    assert 0 < len(read_metrics(tmp_path)[1]) < 256


def test_late_evidence_does_not_take_the_place_of_that_for_a_later_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = list[int](), threading.Event()

    def gather(_folder: object, _ranks: object, _beats: object, host: str, node: int, number: int) -> Any:
        asked.append(number)
        if number == 1:
            answer.wait(PATIENCE)
        return NodeEvidence(host, node, number, 100.0, 1.0, ())

    monkeypatch.setattr("launcher.watch.__main__.gather_node", gather)
    watcher = NodeWatcher(convert(WatcherSettings, make_settings(tmp_path, 1)))

    def is_asked(number: int) -> bool:
        write_value(tmp_path, replace(STATE, asks=number))
        watcher.tick(time.monotonic())
        return number in asked

    def read_number() -> int:
        found = tmp_path / "watch/evidence-n1.json"
        return json.loads(found.read_text())["number"] if found.exists() else 0

    for number in (1, 2):
        wait_for(partial(is_asked, number), "the question")
    wait_for(lambda: read_number() == 2, "the evidence")
    late = list(watcher.gatherers)
    answer.set()
    for thread in late:
        thread.join(PATIENCE)
    assert watcher.files.worker.wait_idle(PATIENCE) and read_number() == 2


def test_evidence_that_cannot_be_read_for_a_moment_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SharedFiles(tmp_path)

    def look(number: int) -> list[int]:
        files.submit(REPORT, replace(STATE, asks=number))
        assert files.worker.wait_idle(PATIENCE) and files.trouble == ""
        return [node.number for node in files.found.evidence]

    for number in (1, 2):
        write_value(tmp_path, NodeEvidence("n1", 1, number, 100.0, 1.0, ()))
        if number == 2:
            with monkeypatch.context() as broken:
                broken.setattr("launcher.watch.run_files.read_file", Mock(side_effect=OSError))
                assert (look(1), look(2)) == ([1], [])
        assert look(number) == [number]


def test_what_fails_is_told_and_tried_again_and_no_exception_ends_the_thread(tmp_path: Path) -> None:
    """Such as a thread that cannot be started: the node would count as stuck for ever."""

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    files = SharedFiles(tmp_path / "later")
    files.worker.put(fail)
    assert files.worker.wait_idle(PATIENCE) and files.trouble == "RuntimeError: can't start new thread"
    files.submit(REPORT, None)
    assert files.worker.wait_idle(PATIENCE) and "later" in files.trouble
    (tmp_path / "later").mkdir()
    files.submit(REPORT, STATE)
    assert files.worker.wait_idle(PATIENCE) and files.trouble == ""
    assert files.found.job is None
    assert {path.name for path in (tmp_path / "later/watch").iterdir()} == {"node-n0.json", "job.json"}


def test_another_node_follows_the_judge_by_the_filesystems_clock(tmp_path: Path) -> None:
    judge, other = SharedFiles(tmp_path), SharedFiles(tmp_path)
    judge.submit(REPORT, STATE)
    assert judge.worker.wait_idle(PATIENCE)
    state = tmp_path / "watch/job.json"
    os.utime(state, (0, state.stat().st_mtime - 60))
    other.submit(replace(REPORT, host="n1", node_rank=1), None)
    assert other.worker.wait_idle(PATIENCE) and other.found and other.found.job
    assert other.found.job.value == STATE
    assert time.monotonic() - other.found.job.seen == pytest.approx(60, abs=10)
