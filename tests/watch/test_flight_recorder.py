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
from launcher.watch.flight_recorder import MOST_CALLS, parse_trace
from launcher.watch.rank_answers import read_trace
from launcher.watch.rank_server import ServerError, parse_wait_counters, post_handler
from launcher.watch.stacks import parse_stacks
from launcher.watch.watch_model import Call, Frame


def make_entry(sequence: int, group: tuple[str, str] = ("0", "default_pg"), **more: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it with gloo."""
    entry = {
        "collective_seq_id": sequence,
        "input_dtypes": ["Float"],
        "input_sizes": [[100]],
        "is_p2p": False,
        "pg_id": int(group[0]),
        "process_group": list(group),
        "profiling_name": "gloo:all_reduce",
        "retired": True,
        "state": "scheduled",
    }
    return {**entry, **more}


def make_trace(*entries: dict[str, Any], **more: Any) -> bytes:
    """An answer; the status of each group is by its entries, of which the retired are complete."""
    status: dict[str, dict[str, str]] = {}
    for entry in entries:
        own = status.setdefault(str(entry["pg_id"]), {"last_completed_collective": "-1"})
        own["last_enqueued_collective"] = str(entry["collective_seq_id"])
        if entry["retired"]:
            own["last_completed_collective"] = str(entry["collective_seq_id"])
    return json.dumps({"entries": entries, "pg_status": status, "pg_config": {}, **more}).encode()


def test_gloo_with_several_groups() -> None:
    pair = ("2", "pair-1")
    trace = make_trace(
        make_entry(1),
        make_entry(1, pair, profiling_name="gloo:broadcast", input_sizes=[[2, 3], [4]]),
        make_entry(2, retired=False),
        make_entry(3, retired=False, profiling_name="gloo:barrier", input_sizes=[], input_dtypes=[]),
    )
    default, other = parse_trace(trace)
    assert (default.name, default.key, default.last_enqueued, default.last_completed) == (
        "default group",
        "0",
        3,
        1,
    )
    assert default.is_pending and (default.operation, default.sizes) == ("barrier", "")
    assert default.calls[1] == Call(2, "all_reduce", "[100] Float", is_complete=False)
    assert (other.name, other.key, other.is_pending) == ("pair-1", "2", False)
    assert (other.operation, other.sizes) == ("broadcast", "[2, 3] Float, [4]")


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (("0", "default_pg"), "default group"),
        (("0", "undefined"), "default group"),
        (("7", "undefined"), "7"),
        (("3", "mesh_dp"), "mesh_dp"),
    ],
)
def test_names_of_groups(group: tuple[str, str], name: str) -> None:
    (found,) = parse_trace(make_trace(make_entry(1, group)))
    assert (found.name, found.key) == (name, group[0])


def test_a_group_whose_name_is_a_hash() -> None:
    entry = make_entry(1) | {"process_group": ["4a2ad14e7181d5235b64cf37fcd715cb5ce5c8e7", "undefined"]}
    assert parse_trace(make_trace(entry))[0].name == "4a2ad14e…"


def test_what_nccl_adds() -> None:
    """States, members, and point-to-point operations."""
    exchange = {"is_p2p": True, "p2p_seq_id": 1, "retired": False, "state": "started"}
    trace = make_trace(
        make_entry(1, ("3", "pp"), profiling_name="nccl:_all_gather_base", state="completed", retired=False),
        make_entry(2, ("3", "pp"), profiling_name="nccl:all_reduce_barrier", state="started", retired=False),
        make_entry(2, ("3", "pp"), **exchange, profiling_name="nccl:recv 1<-0"),
        make_entry(2, ("3", "pp"), **exchange, profiling_name="nccl:recv 1<-0"),
        make_entry(2, ("3", "pp"), **(exchange | {"state": "completed"}), profiling_name="nccl:send 1->2"),
        pg_config={"3": {"name": "3", "desc": "pp", "ranks": "[4, 6, 9]"}},
    )
    (group,) = parse_trace(trace)
    assert group.ranks == (4, 6, 9) and group.exchanges == (("recv", 4),)
    assert [(call.operation, call.is_complete) for call in group.calls] == [
        ("all_gather_into_tensor", True),
        ("barrier", False),
    ]
    assert (group.last_enqueued, group.last_completed, group.is_pending) == (2, 1, True)


def test_only_the_last_calls_are_kept() -> None:
    (group,) = parse_trace(make_trace(*map(make_entry, range(1, 200))))
    assert len(group.calls) == MOST_CALLS and group.calls[-1].sequence == 199


@pytest.mark.parametrize("data", [b"", b"[]", b"nonsense", b'{"entries": NaN}', b"[" * 100_000])
def test_answers_that_are_none(data: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_trace(data)


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"entries": 3, "pg_status": [], "pg_config": None},
        {"entries": [1, None, {}, {"pg_id": [], "process_group": 4, "collective_seq_id": "x"}]},
    ],
    ids=str,
)
def test_unknown_forms_are_left_out(trace: object) -> None:
    assert parse_trace(json.dumps(trace).encode()) == ()


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


def test_an_older_torch_has_nccls_recorder_alone(tmp_path: Path) -> None:
    with serve(tmp_path / "sock", MISSING, OK) as asked:
        assert read_trace(tmp_path / "sock", 1.0) == b"{}"
    handlers = [line.split()[:2] for line in asked]
    assert handlers == [
        [b"POST", b"/handler/fr_trace_json"],
        [b"POST", b"/handler/dump_nccl_trace_json"],
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (MISSING, "it has no ping"),
        (b"HTTP/1.1 500 Oops\r\n\r\n", "status 500"),
        (b"what?\r\n\r\n", "what"),
        (b"", "closed"),
    ],
    ids=str,
)
def test_a_server_that_answers_badly(answer: bytes, reason: str, tmp_path: Path) -> None:
    with serve(tmp_path / "sock", answer), pytest.raises(ServerError, match=reason):
        post_handler(tmp_path / "sock", "ping", 5.0)


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="No such file"):
        post_handler(tmp_path / "sock", "ping", 5.0)


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
    first, second, main = parse_stacks(DUMP)
    assert (first.frames, second.thread) == ((), "worker")
    assert second.frames == (Frame("/a dir/x, line 3 in y.py", 12, "<lambda>"), Frame("<string>", 0, "f"))
    assert [stack.is_current for stack in (first, second, main)] == [False, False, True]


def test_a_dump_that_was_cut_off_after_a_hundred_threads() -> None:
    """The main thread is the oldest, and not there; the one that was asked is."""
    first, second = parse_stacks(DUMP.partition("\nThread 0x00007f3")[0] + "\n...\n")
    assert (first.is_current, second.is_current) == (False, True)
    assert parse_stacks("") == parse_stacks("nothing\n") == ()
