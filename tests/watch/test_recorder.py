"""Answers of torch's server in a rank, and dumps of faulthandler: as they are, and as they should not be."""

import json
import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from launcher.watch.evidence import gather_node
from launcher.watch.excess import unpack_marks
from launcher.watch.flight_recorder import CollectiveReader, condense
from launcher.watch.model import Heartbeat, Rank

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


def answer(data: bytes = b"", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def serve(path: Path, *answers: bytes) -> Generator[list[str]]:
    """A server that gives each connection one answer; the handlers that it was asked for are noted."""
    asked: list[str] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(8)

        def run() -> None:
            for one in answers:
                link, _ = server.accept()
                with link:
                    asked.append(link.recv(1000).split()[1].decode().rpartition("/")[2])
                    link.sendall(one)

        thread = threading.Thread(target=run)
        thread.start()
        yield asked
        thread.join()
    path.unlink()


def gather(folder: Path, *answers: bytes) -> Any:
    """The evidence of a rank whose server gives these answers: of this process, which has no handler."""
    rank = Rank(0, 0, os.getpid(), 0, "unwatched", 0, None)
    with serve(folder / "rank-0.sock", *answers):
        options: dict[str, Any] = {"deadline": 60.0}
        return gather_node(folder, [rank], {}, host="n1", node_rank=0, number=1, **options).ranks[0]


@pytest.mark.parametrize("case", TABLES["groups"], ids=lambda case: case["name"])
def test_groups_and_their_calls(case: dict[str, Any], tmp_path: Path) -> None:
    trace = make_trace(case["entries"], pg_config=case.get("pg_config", {}))
    found = gather(tmp_path, answer(trace))
    assert found.answered
    for group, expected in zip(found.groups, case["groups"], strict=True):
        calls = [
            f"{call.sequence} {call.operation} {call.sizes}".rstrip() + ", complete" * call.is_complete
            for call in group.calls
        ]
        pending = astuple(group.pending) if group.pending else None
        known = {name: getattr(group, name) for name in expected if name not in ("calls", "pending")}
        shown = json.loads(json.dumps({**known, **({"pending": pending} if "pending" in expected else {})}))
        assert shown | {"calls": calls} == {"calls": calls} | expected


def test_the_last_calls_are_kept_and_an_older_torch_has_nccls_recorder_alone(tmp_path: Path) -> None:
    trace = make_trace([{"collective_seq_id": number} for number in range(1, 200)])
    missing = answer(status="404 Not Found")
    found = gather(tmp_path, missing, answer(trace))
    (group,) = found.groups
    assert len(group.calls) == 64 and group.calls[-1].sequence == 199
    found = gather(tmp_path, missing, missing)
    assert not found.answered and "it has no fr_trace_json" in found.notes[-1]


@pytest.mark.parametrize("trace", TABLES["odd"])
def test_what_is_unknown_is_left_out(trace: str, tmp_path: Path) -> None:
    found = gather(tmp_path, answer(trace.encode()))
    assert found.answered and found.groups == ()
    times = condense(trace.encode(), BEAT, 100)
    assert times is None


BAD = {
    answer(status="500 Oops"): "500 Oops",
    b"what?\r\n\r\n": "what",
    b"": "closed",
    answer(b"nonsense"): "",
    answer(b"[]"): "no object",
    answer(b"[" * 100_000): "",
    answer(b"\xff"): "",
}


@pytest.mark.parametrize(("data", "reason"), BAD.items(), ids=range(len(BAD)))
def test_answers_that_are_none(data: bytes, reason: str, tmp_path: Path) -> None:
    notes = gather(tmp_path, data).notes
    (told,) = (note for note in notes if note.startswith("no flight recorder from torch's server: "))
    assert reason in told
    reader = CollectiveReader(tmp_path, 1)
    reader.fetch([BEAT])  # there is no server
    with serve(tmp_path / "rank-0.sock", data):
        reader.fetch([BEAT])
    assert reader.found == reader.read([], 100.0) == ()


@pytest.mark.parametrize("case", TABLES["marks"], ids=lambda case: case["name"])
def test_collectives_are_placed_in_steps(case: dict[str, Any]) -> None:
    entries = [
        {"collective_seq_id": number, "time_created_ns": int((10.25 + number / 2) * 1e9)}
        | case.get("more", {})
        for number in case["numbers"]
    ]
    trace = make_trace(entries, pg_config=case.get("pg_config", {}))
    times = condense(trace, BEAT, case.get("limit", 100))
    marks = unpack_marks(times).tolist() if times else ()
    groups = times.groups if times else ()
    assert [[step, groups[group], number] for step, group, number, _ in marks] == case["marks"]
    if "measure" in case:
        assert times and times.measure == case["measure"]
        assert {time / 1e6 for _, group, _, time in marks if groups[group]} == {case["seconds"]}


def test_readings_are_often_at_first_then_seldom_and_often_again_if_steps_are_longer(tmp_path: Path) -> None:
    def make_beat(step: int, seconds: float) -> Heartbeat:
        durations = (seconds,) * min(step, 256)
        return Heartbeat(0, 0, 1, "training", 0.0, step, 0.0, 0.0, 0, 0.0, durations)

    reader = CollectiveReader(tmp_path, 1)
    reader.cost = 0.04
    due = [now for now in range(0, 1200) if reader.is_due([make_beat(now * 5, 0.2)], now)]
    assert (due[1] - due[0], due[-1] - due[-2]) == (5, 80)
    slower = [now for now in range(1200, 1400) if reader.is_due([make_beat(now * 5, 0.22)], now)]
    assert len([now for now in slower if now <= 1262]) >= 10
    for beats in ([make_beat(1, 1.0)], []):
        assert not CollectiveReader(tmp_path, 1).is_due(beats, 100.0)
