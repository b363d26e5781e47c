"""Answers of torch's server in a rank, and dumps of faulthandler: as they are, and as they should not be."""

import json
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.codec import DecodeError
from launcher.watch.evidence import parse_stacks
from launcher.watch.flight_recorder import (
    MOST_CALLS,
    CollectiveReader,
    ServerError,
    condense,
    parse_trace,
    parse_wait_counters,
    post_handler,
    read_trace,
    unpack_marks,
)
from launcher.watch.model import Frame, Heartbeat

TABLES = json.loads(Path(__file__).with_name("traces.json").read_text())
BEAT = Heartbeat(
    0, 0, 1, "training", 0.0, 12, 13.0, 13.0, 0, 0.0, durations=(1.0, 1.0, 1.0), step_ends=(11.0, 12.0, 13.0)
)
"""Steps 10, 11 and 12."""


def make_trace(entries: list[dict[str, Any]], **more: Any) -> bytes:
    """An answer; the status of each group is by its entries, of which the retired are complete."""
    status: dict[str, dict[str, str]] = {}
    entries = [TABLES["entry"] | entry for entry in entries]
    for entry in entries:
        own = status.setdefault(str(entry["pg_id"]), {"last_completed_collective": "-1"})
        own["last_enqueued_collective"] = str(entry["collective_seq_id"])
        if entry["retired"]:
            own["last_completed_collective"] = str(entry["collective_seq_id"])
    return json.dumps({"entries": entries, "pg_status": status, "pg_config": {}, **more}).encode()


@pytest.mark.parametrize("case", TABLES["groups"], ids=lambda case: case["name"])
def test_groups_and_their_calls(case: dict[str, Any]) -> None:
    found = parse_trace(make_trace(case["entries"], pg_config=case.get("pg_config", {})))
    for group, expected in zip(found, case["groups"], strict=True):
        calls = [
            f"{call.sequence} {call.operation} {call.sizes}".rstrip() + ", complete" * call.is_complete
            for call in group.calls
        ]
        shown = json.loads(json.dumps({name: getattr(group, name) for name in expected if name != "calls"}))
        assert shown | {"calls": calls} == {"calls": calls} | expected


def test_only_the_last_calls_are_kept() -> None:
    (group,) = parse_trace(make_trace([{"collective_seq_id": number} for number in range(1, 200)]))
    assert len(group.calls) == MOST_CALLS and group.calls[-1].sequence == 199


@pytest.mark.parametrize("case", TABLES["marks"], ids=lambda case: case["name"])
def test_collectives_are_placed_in_steps(case: dict[str, Any]) -> None:
    entries = [
        {"collective_seq_id": number, "time_created_ns": int((10.25 + number / 2) * 1e9)}
        | case.get("more", {})
        for number in case["numbers"]
    ]
    trace = make_trace(entries, pg_config=case.get("pg_config", {}))
    times = condense(trace, BEAT, case.get("limit", 100))
    marks = unpack_marks(times) if times else ()
    assert [[mark.step, mark.group, mark.sequence] for mark in marks] == case["marks"]
    if "measure" in case:
        assert times and times.measure == case["measure"]
        assert {mark.time for mark in marks if mark.group} == {case["seconds"]}


@pytest.mark.parametrize("trace", TABLES["odd"])
def test_what_is_unknown_is_left_out(trace: str) -> None:
    assert parse_trace(trace.encode()) == ()
    times = condense(trace.encode(), BEAT, 100)
    assert times is None or unpack_marks(times) == ()


@pytest.mark.parametrize("data", [b"", b"[]", b"nonsense", b'{"entries": NaN}', b"[" * 100_000, b"\xff"])
def test_answers_that_are_none(data: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_trace(data)
    if data != b"[]":
        with pytest.raises(DecodeError):
            condense(data, BEAT, 100)


def test_wait_counters() -> None:
    counters = {
        "pytorch.wait_counter.TCPStore__wait": {"active_count": 1},
        "pytorch.wait_counter.c10d.new_group": {"active_count": 1},
        "pytorch.wait_counter.c10d.init_process_group": {"active_count": 0},
    }
    assert parse_wait_counters(json.dumps(counters).encode()) == (True, "new_group")
    assert parse_wait_counters(b"{}") == (False, "")
    for data in (b"[]", b'{"a": 1}', b"x"):
        with pytest.raises(ServerError):
            parse_wait_counters(data)


@contextmanager
def serve(path: Path, *answers: bytes) -> Generator[list[bytes]]:
    """A server that gives each connection one answer; what it was asked is noted."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(8)

        def run() -> None:
            for answer in answers:
                link, _ = server.accept()
                with link:
                    asked.append(link.recv(1000).partition(b"\r\n")[0])
                    link.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        yield asked
        thread.join()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
BAD = {MISSING: "it has no ping", b"HTTP/1.1 500 Oops\r\n\r\n": "status 500", b"what?\r\n\r\n": "what"}


def test_a_ranks_server(tmp_path: Path) -> None:
    """An older torch has NCCL's recorder alone; a server that is missing or answers badly is told so."""
    path = tmp_path / "rank-0.sock"
    with pytest.raises(ServerError, match="No such file"):
        post_handler(path, "ping", 5.0)
    reader = CollectiveReader(tmp_path, 1)
    reader.fetch([BEAT])
    assert reader.found == reader.read([], 100.0) == ()
    with serve(path, MISSING, OK, *BAD, b"") as asked:
        assert read_trace(path, 1.0) == b"{}"
        for reason in (*BAD.values(), "closed"):
            with pytest.raises(ServerError, match=reason):
                post_handler(path, "ping", 5.0)
    handlers = [line.split()[1].decode().rpartition("/")[2] for line in asked[:3]]
    assert handlers == ["fr_trace_json", "dump_nccl_trace_json", "ping"]


DUMP = """\
noise of a child
Thread 0x00007f1 (most recent call first):
  <no Python frame>

Current thread 0x00007f2 [worker] (most recent call first):
  Garbage-collecting
  File "/a dir/x, line 3 in y.py", line 12 in <lambda>
  File "<string>", line ??? in f

Thread 0x00007f3 (most recent call first):
  File "main.py", line 1 in <module>
"""


def test_a_dump_of_faulthandler() -> None:
    """One that was cut off after a hundred threads lacks the main one, which is the oldest."""
    first, second, main = parse_stacks(DUMP)
    assert (first.frames, second.thread) == ((), "worker")
    assert second.frames == (Frame("/a dir/x, line 3 in y.py", 12, "<lambda>"), Frame("<string>", 0, "f"))
    assert [stack.is_current for stack in (first, second, main)] == [False, False, True]
    first, second = parse_stacks(DUMP.partition("\nThread 0x00007f3")[0] + "\n...\n")
    assert (first.is_current, second.is_current) == (False, True)
    assert parse_stacks("") == parse_stacks("nothing\n") == ()
