"""The viewer shows what the ranks print for as long as its reader takes some of it."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.report import console, output_viewer
from launcher.report.byte_stream import Stream
from launcher.report.output_viewer import OutputViewer, ViewOptions
from launcher.runs.rank_logs import Follower
from launcher.runs.run_directory import RunDir


def make_viewer(folder: Path, data: bytes) -> OutputViewer:
    """A viewer of a job of one rank that has printed some data."""
    (folder / "logs/0").mkdir(parents=True)
    run = RunDir(folder)
    run.rank_log(0, 0, "out").write_bytes(data)
    viewer = OutputViewer(run, Follower(), ViewOptions("rank0"))
    viewer.watch_rank(0, 0)
    return viewer


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The console's stdout as a pipe that nobody reads by itself; gives the end to read."""
    reading, writing = os.pipe()
    streams = {"stdout": Stream("stdout", writing), "stderr": Stream("stderr", None)}
    monkeypatch.setattr(console, "open_stream", streams.__getitem__)
    monkeypatch.setattr(output_viewer, "PATIENCE", 0.5)
    yield reading
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_a_slow_reader_is_waited_for_as_long_as_it_reads(tmp_path: Path, slow: int) -> None:
    data = os.urandom(2 << 20)
    viewer, results = make_viewer(tmp_path, data), list[bool]()
    viewer.start()
    waiting = threading.Thread(target=lambda: results.append(viewer.await_shown()), daemon=True)
    waiting.start()
    taken = b""
    while len(taken) < len(data) and select.select([slow], [], [], 30)[0]:
        taken += os.read(slow, 65536)
        time.sleep(0.05)  # in all, much longer than the patience for one piece
    waiting.join(30)
    assert taken == data and results == [True]
    assert viewer.close()


def test_a_reader_that_takes_no_more_is_left_with_a_word(
    tmp_path: Path, slow: int, capfd: pytest.CaptureFixture[str]
) -> None:
    viewer = make_viewer(tmp_path, b"x" * (1 << 20))
    viewer.start()
    assert not viewer.await_shown()
    viewer.warn_unread()
    assert capfd.readouterr().err == f"launch: warning: not all output was taken: see {tmp_path}/logs\n"
    os.close(slow)
    viewer.closing.set()
    viewer.thread.join(30)
    assert viewer.close()
