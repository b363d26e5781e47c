"""The watcher of a node beside its job: nothing that happens to it, or to its files, stops the job."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.seam import QUICK_AGENT, Started, run_outside, start, wait_for, write_program

WORDS = ("nproc_per_node=1", "binding=none", "watch.interval=1")
PROGRAM = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n"


def find_watcher(job: Started) -> int:
    def find() -> list[int]:
        return [pid for pid, words in job.survivors_words().items() if "launcher.watch" in words]

    wait_for(find, "the watcher", tell=job.read)
    return find()[0]


def test_signals_of_the_job_do_not_end_it(tmp_path: Path) -> None:
    program = write_program(tmp_path, PROGRAM)
    with start(tmp_path, *WORDS, "--", program, PYTHONPATH=QUICK_AGENT) as job:
        watcher = find_watcher(job)
        wait_for(lambda: list(tmp_path.glob("runs/*/*/watch/node-*.json")), "a report", tell=job.read)
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
        (tmp_path / "go").touch()
        assert job.wait(60) == 0, job.read()
        state = json.loads((report.parent / "job.json").read_text())["state"]
        assert state == "ended" and not Path(folder).exists() and job.survivors() == []


def test_a_run_directory_in_which_it_cannot_write_is_one_warning(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": QUICK_AGENT}
    assert run_outside([*WORDS, "new_run_dir=run", "--", "/bin/true"], tmp_path, environ).code == 0
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(tmp_path / "run/watch")
    (tmp_path / "run/watch").write_text("a file in the folder's place")
    told = "reports of watching cannot be written"
    with start(tmp_path, *WORDS, "run_dir=run", "--", write_program(tmp_path, PROGRAM), **environ) as job:
        wait_for(lambda: told in job.read(), "the warning", tell=job.read)
        (tmp_path / "go").touch()
        assert job.wait(60) == 0 and job.read().count(told) == 1, job.read()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="heartbeats are elsewhere")
def test_folders_of_launchers_that_were_killed_are_removed(tmp_path: Path) -> None:
    dead, fresh = (Path(f"/dev/shm/launch-watch-{name}-{os.getpid()}") for name in ("dead", "fresh"))
    try:
        for folder in (dead, fresh):
            folder.mkdir(mode=0o700)
            (folder / "rank-0.beat").touch()
        os.utime(dead, (time.time() - 3600,) * 2)
        assert run_outside([*WORDS, "--", "/bin/true"], tmp_path, {"PYTHONPATH": QUICK_AGENT}).code == 0
        assert not dead.exists() and fresh.exists()
    finally:
        for folder in (dead, fresh):
            shutil.rmtree(folder, ignore_errors=True)
