"""The reader of heartbeats, with files that the hook's own code writes, and with what is none."""

import ctypes
import os
import signal
import time
from pathlib import Path
from time import monotonic

import pytest

from launcher.files import read_stat
from launcher.inprocess.launch_inprocess import heartbeat
from launcher.watch.ranks import read_heartbeat


@pytest.fixture
def beat(tmp_path: Path) -> heartbeat.Heartbeat:
    """A heartbeat of this process."""
    made = heartbeat.Heartbeat(str(tmp_path), 3, 1, 1)
    made.phase_since, made.has_begun = monotonic(), True
    made.map_file()
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-3.beat"


def test_what_is_written_is_read(beat: heartbeat.Heartbeat, path: Path) -> None:
    before = time.time()
    found = read_heartbeat(path)
    assert found is not None
    assert (found.rank, found.local_rank, found.pid) == (3, 1, os.getpid())
    assert (found.phase, found.step, found.step_time, found.can_dump) == ("starting", 0, 0, False)
    assert before - 1 < found.phase_since <= found.activity_time < time.time() + 1
    assert (found.durations, found.step_ends, found.notes) == ((), (), ())
    beat.add_note("no server: ü")
    beat.add_note("no room")
    for step in range(1, 4):
        beat.end_step(step)
    beat.set_phase(heartbeat.LOADING)
    found = read_heartbeat(path)
    assert found is not None
    assert (found.phase, found.step, found.notes) == ("loading", 3, ("no server: ü", "no room"))
    assert len(found.durations) == len(found.step_ends) == 2, "nobody knows when the first step began"
    assert found.step_ends[1] == pytest.approx(found.step_time, abs=1e-6)
    assert found.step_ends[1] - found.step_ends[0] == pytest.approx(found.durations[1], abs=1e-6)
    assert found.phase_since >= found.step_time


def test_time_that_is_no_part_of_steps_is_left_out(beat: heartbeat.Heartbeat, path: Path) -> None:
    beat.end_step(1)
    for phase in (heartbeat.SAVING, heartbeat.EVALUATING):
        beat.set_base(phase)
        beat.set_phase(heartbeat.LOADING)
        beat.phase_since -= 50
        beat.set_phase(beat.base)
        beat.phase_since -= 50
    beat.set_base(heartbeat.TRAINING)
    beat.set_phase(heartbeat.COMPILING)
    beat.phase_since -= 50
    beat.set_phase(heartbeat.LOADING)
    beat.last_end -= 250 + 3
    beat.phase_since -= 3
    beat.set_phase(heartbeat.TRAINING)
    beat.end_step(2)
    found = read_heartbeat(path)
    assert found is not None and len(found.durations) == 1
    assert found.durations[0] == pytest.approx(3, abs=0.5), "the wait for data counts"


NOBODYS = [
    ("magic", 0),
    ("layout", 1),
    ("pid", 1),
    ("pid", -1),
    ("pid", 1 << 62),
    ("start_time", 1),
    ("start_stack", 4096),
]


def test_a_step_that_ends_an_evaluation_has_no_known_begin(beat: heartbeat.Heartbeat, path: Path) -> None:
    beat.end_step(1)
    beat.note_mode(is_training=False)
    assert beat.begin_loading()
    beat.end_loading(object())
    beat.end_step(2)
    beat.end_step(3)
    found = read_heartbeat(path)
    assert found is not None
    assert (found.phase, found.step, len(found.durations)) == ("training", 3, 1)


def test_what_no_live_rank_writes_is_none(beat: heartbeat.Heartbeat, path: Path, tmp_path: Path) -> None:
    whole = bytes(beat.file)
    for name, value in NOBODYS:
        setattr(beat.file, name, value)
        assert read_heartbeat(path) is None, (name, value)
        ctypes.memmove(ctypes.addressof(beat.file), whole, len(whole))
    for number, data in enumerate((b"", whole[:-1], whole + b"x", os.urandom(len(whole)))):
        (tmp_path / f"rank-1{number}.beat").write_bytes(data)
    (tmp_path / "rank-20.beat").mkdir()
    os.mkfifo(tmp_path / "rank-21.beat")
    (tmp_path / "rank-22.beat").symlink_to(path)
    (tmp_path / "rank-x.beat").write_bytes(whole)
    found = list(filter(None, map(read_heartbeat, tmp_path.iterdir())))
    assert [one.rank for one in found] == [3, 3]  # one by its link
    assert read_heartbeat(tmp_path / "none") is None
    if os.geteuid() == 0:  # who alone can give a file to another user
        os.chown(path, 12345, 12345)
        assert read_heartbeat(path) is None


def test_the_last_256_steps_are_read_whatever_the_counts_and_clocks_say(
    beat: heartbeat.Heartbeat, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 1001):
        beat.end_step(step)
    for jump in (0.0, -1e6, 1e6):
        now = time.time() + jump
        monkeypatch.setattr(time, "time", lambda now=now: now)
        found = read_heartbeat(path)
        monkeypatch.undo()
        assert found is not None and found.step == 1000 and 0 <= now - found.step_time < 60
        assert len(found.durations) == len(found.step_ends) == 256
        assert list(found.step_ends) == sorted(found.step_ends) and min(found.durations) >= 0


def test_what_is_read_between_two_writes_is_sound(beat: heartbeat.Heartbeat, path: Path) -> None:
    """A process steps all the time, without a pause."""
    child = os.fork()
    if not child:
        beat.file.pid = os.getpid()
        beat.file.start_time = int(read_stat("self")[1][22 - 3])
        for step in range(1, 1 << 40):
            beat.end_step(step)
    try:
        deadline, last, reads = monotonic() + 60, 0, 0
        while reads < 100 and monotonic() < deadline:
            found = read_heartbeat(path)
            if found is None or found.pid != child:
                continue
            reads += 1
            assert found.step >= last
            last = found.step
            assert found.step_ends == tuple(sorted(found.step_ends))
            assert all(0 <= duration < 60 for duration in found.durations)
            assert len(found.step_ends) == 256 or found.step < 1000
        assert (reads, found is not None and found.step > 300) == (100, True)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
