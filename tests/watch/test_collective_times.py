"""The reader of flight recorders: by two real ranks of gloo, and by tables for what torch may answer."""

import json
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.codec import DecodeError
from launcher.watch.collective_marks import DURATION, ENQUEUED, STEP_ENDS, unpack_marks
from launcher.watch.collective_times import CollectiveReader, condense
from launcher.watch.own_time import measure_steps, measure_waits
from launcher.watch.watch_model import Heartbeat
from tests.benchmarks.stragglers import PROGRAM
from tests.inprocess.watched import list_heartbeats, make_watched_environ

STEPS = 20
BEAT = Heartbeat(
    0, 0, 1, "training", 0.0, 12, 13.0, 13.0, 0, 0.0, durations=(1.0, 1.0, 1.0), step_ends=(11.0, 12.0, 13.0)
)
"""Steps 10, 11 and 12."""


def start_ranks(stack: ExitStack, folder: Path) -> Path:
    """Start two ranks, of which rank 1 is slow; return the folder of their heartbeats."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    beats = folder / "beats"
    beats.mkdir(mode=0o700)
    (folder / "slow").touch()
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = ["--folder", str(folder), "--slow=1", "--sleep=0.02", "--extra=0.03", "--steps=10000"]
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *words],
            env=make_watched_environ(beats, **variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
    return beats


def test_real_ranks_show_who_is_late(tmp_path: Path) -> None:
    with ExitStack() as stack:
        folder = start_ranks(stack, tmp_path)
        end = time.monotonic() + 120
        while [beat.step > STEPS for beat in list_heartbeats(folder)] != [True, True]:
            assert time.monotonic() < end
            time.sleep(0.1)
        reader = CollectiveReader(folder, 2)
        while len(reader.found) < 2:
            assert time.monotonic() < end
            reader.fetch(list_heartbeats(folder))
    marks = {times.rank: unpack_marks(times) for times in reader.found}
    assert {times.measure for times in reader.found} == {ENQUEUED}
    assert marks.keys() == {0, 1}
    steps = measure_steps(marks, {0: "here", 1: "here"})
    assert len(steps) > STEPS / 2
    late = sorted(step.excess[1] for step in steps)[len(steps) // 2]
    assert late > 0.01  # of 0.03 s, on a busy machine
    waits = measure_waits(steps)
    assert waits[0] > waits[1]
    assert reader.cost > 0


def make_entry(number: int, created: float, **more: object) -> dict[str, object]:
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "time_created_ns": int(created * 1e9),
        **more,
    }


def make_trace(*entries: object, **more: object) -> bytes:
    return json.dumps({"entries": list(entries), **more}).encode()


def list_marks(trace: bytes, limit: int = 100) -> list[tuple[int, str, int]]:
    times = condense(trace, BEAT, limit)
    return [(mark.step, mark.group, mark.sequence) for mark in unpack_marks(times)] if times else []


WHOLE = tuple(make_entry(number, 10.25 + number / 2) for number in range(6))


def test_collectives_are_placed_in_whole_steps() -> None:
    assert list_marks(make_trace(*WHOLE)) == [
        (10, STEP_ENDS, 10),
        (11, "0", 2),
        (11, "0", 3),
        (11, STEP_ENDS, 11),
        (12, "0", 4),
        (12, "0", 5),
        (12, STEP_ENDS, 12),
    ]


def test_the_last_steps_within_the_limit_are_kept() -> None:
    assert {step for step, _, _ in list_marks(make_trace(*WHOLE), limit=4)} == {11, 12}
    assert list_marks(make_trace(*WHOLE), limit=1) == []


def test_steps_that_the_recorder_has_forgotten_are_left_out() -> None:
    assert {step for step, _, _ in list_marks(make_trace(make_entry(4, 12.4)))} == set()
    assert list_marks(make_trace()) == []


def test_durations_are_taken_where_there_are_any() -> None:
    times = condense(make_trace(*(entry | {"duration_ms": 250.0} for entry in WHOLE)), BEAT, 100)
    assert times is not None and times.measure == DURATION
    assert {mark.time for mark in unpack_marks(times) if mark.group} == {-0.25}


def test_members_tell_groups_of_the_same_name_apart() -> None:
    trace = make_trace(*WHOLE, pg_config={"0": {"ranks": "[2, 3]"}})
    assert {group for _, group, _ in list_marks(trace)} == {STEP_ENDS, "0[2, 3]"}


def test_point_to_point_does_not_count() -> None:
    assert list_marks(make_trace(*(entry | {"is_p2p": True} for entry in WHOLE))) == []


@pytest.mark.parametrize("trace", [b"", b"{", b"\xff"])
def test_what_is_no_json_is_refused(trace: bytes) -> None:
    with pytest.raises(DecodeError):
        condense(trace, BEAT, 100)


@pytest.mark.parametrize("trace", [b"[]", b'{"entries": 3}', b'{"entries": [3, {}, {"process_group": 1}]}'])
def test_odd_json_has_no_marks(trace: bytes) -> None:
    assert list_marks(trace) == []


def test_a_rank_without_a_server_is_missing(tmp_path: Path) -> None:
    reader = CollectiveReader(tmp_path, 1)
    reader.fetch([BEAT])
    assert reader.found == ()
    assert reader.read([], 100.0) == ()
