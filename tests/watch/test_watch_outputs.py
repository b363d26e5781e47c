"""What a node's watcher gives out, by its real process; and what it tells of hangs and stragglers."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from launcher.watch.metrics_log import read_metrics
from launcher.watch.stragglers import explain_straggler
from launcher.watch.watch_model import Hang, JobState, Straggler, Verdict
from launcher.watch.watch_outputs import open_outputs
from launcher.watch.watcher_settings import (
    NotifySettings,
    RankEntry,
    RankMessage,
    WatcherSettings,
    WatchSettings,
)
from tests.watch.test_notify import EVENTS, serving, wait_for


def make_settings(run: Path, url: str) -> WatcherSettings:
    watch = WatchSettings(interval=1.0, prometheus_port=None, textfile=str(run / "textfile"))
    notify = NotifySettings(url, events=EVENTS, ping_url=url, ping_interval=3600)
    (run / "beats").mkdir()
    (run / "textfile").mkdir()
    return WatcherSettings(str(run), "gpt/7", str(run / "beats"), "n1", 0, 1, 0, 1, watch, notify)


def test_the_watchers_process_gives_out_what_it_is_asked_for(tmp_path: Path) -> None:
    with (
        serving() as hook,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank,
    ):
        settings = make_settings(tmp_path, hook.url)
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.watch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "no_proxy": "*", "SLURM_JOB_ID": "4711"},
        ) as watcher:
            assert watcher.stdin and watcher.stdout
            found = RankMessage(found=(RankEntry(0, 0, 0, rank.pid),))
            for value in (settings, found):
                watcher.stdin.write(json.dumps(asdict(value)).encode() + b"\n")
            watcher.stdin.flush()
            file = tmp_path / "textfile/launch-gpt_7-n1.prom"
            wait_for(lambda: hook.requests and read_metrics(tmp_path) and file.exists())
            wait_for(lambda: 'launch_rank_resident_memory_bytes{host="n1"' in file.read_text())
            watcher.stdin.close()
            watcher.wait(30)
            assert watcher.stdout.read() == b""
        rank.kill()
    (message,) = (json.loads(data) for method, _, data in hook.requests if method == "POST")
    assert (message["event"], message["job_id"], message["sentence"]) == ("start", "4711", "1 rank")
    (metrics,) = read_metrics(tmp_path)
    assert metrics.rows[0].ranks[0].pid == rank.pid and metrics.events[0].event == "start"
    assert not file.exists(), "the run has ended"


def test_events_are_told_once_and_kept(tmp_path: Path) -> None:
    verdict = Verdict("absent", "rank 5 on n2 has not joined all_reduce #1042", (5,), ("n2",))
    hang = Hang(1, 1000.0, 970.0, 120, verdict, "restart")
    straggler = Straggler(3, "n1", 0.12, "run_delay", "make (PID 7) runs on its core 3", 100, 180, 990.0)
    with serving() as hook:
        outputs = open_outputs(make_settings(tmp_path, hook.url), hook.warnings.append)
        for step in (0, 120, 120, 121):
            outputs.add_state(
                JobState(time.time(), "n1", 0, "running", step, 1.0, 0.5, 2, stragglers=(straggler,))
            )
        outputs.tell_hang(hang)
        outputs.tell_recovery(Hang(1, 1000.0, 970.0, 120, verdict, "restart", recovered=1030.0))
        outputs.close(30)
    posts = [json.loads(data) for method, _, data in hook.requests if method == "POST"]
    assert [post["event"] for post in posts] == ["straggler", "hang", "recover"]
    assert posts[0]["sentence"] == explain_straggler(straggler)
    assert posts[2]["sentence"] == "steps go on after 60 s"
    assert [method for method, _, _ in hook.requests].count("GET") == 1
    (metrics,) = read_metrics(tmp_path)
    kept = [(event.event, event.ranks) for event in metrics.events]
    assert kept == [("straggler", (3,)), ("hang", (5,)), ("restart", (5,)), ("recovered", ())]
