"""Following log files that are being written, cut, replaced, or hold anything at all."""

from pathlib import Path

import pytest

from launcher.runs import rank_logs
from launcher.runs.rank_logs import (
    CHUNK,
    Chunk,
    Follower,
    Line,
    LineFollower,
    decode_line,
    measure_logs,
    read_tail,
)
from launcher.runs.run_directory import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "logs/0").mkdir(parents=True)
    return RunDir(tmp_path)


@pytest.fixture
def follower(run: RunDir) -> Follower:
    follower = Follower(measure_logs(run.path))
    watch_rank(run, follower, 0, 0)
    return follower


@pytest.fixture
def lines(follower: Follower) -> LineFollower:
    return LineFollower(follower)


def watch_rank(run: RunDir, follower: Follower, rank: int, attempt: int) -> None:
    for stream in ("out", "err"):
        follower.watch(run.rank_log(rank, attempt, stream))


def add(run: RunDir, data: bytes, ending: str = "out", rank: int = 0) -> None:
    with run.rank_log(rank, 0, ending).open("ab") as file:
        file.write(data)


def read(lines: LineFollower, *, final: bool = False) -> list[str]:
    return [decode_line(line.raw) for line in lines.read_lines(final=final)]


def read_all(follower: Follower) -> bytes:
    """What is new of one file, over as many turns as it takes."""
    data = b""
    while turn := b"".join(chunk.data for chunk in follower.read_turn()):
        data += turn
    return data


def test_bytes_come_once_and_as_they_are(run: RunDir, follower: Follower) -> None:
    assert read_all(follower) == b""
    data = bytes(range(256)) * 3
    add(run, data)
    assert list(follower.read_turn()) == [Chunk(0, "out", data)]
    assert list(follower.read_turn()) == []
    add(run, b"\xff\r")
    assert read_all(follower) == b"\xff\r"


def test_a_line_that_is_longer_than_a_chunk_is_not_torn_apart_by_other_ranks(
    run: RunDir, follower: Follower
) -> None:
    watch_rank(run, follower, 1, 0)
    long = b"x" * (3 * CHUNK + 5) + b"\n"
    add(run, long)
    add(run, b"other\n", rank=1)
    first, *rest = follower.read_turn()
    assert first.rank == 0
    assert [chunk.rank for chunk in rest] == [0, 0, 0, 1]
    assert b"".join(chunk.data for chunk in (first, *rest)) == long + b"other\n"


def test_a_reader_that_is_far_behind_gets_whole_lines_in_turns(run: RunDir, follower: Follower) -> None:
    watch_rank(run, follower, 1, 0)
    many = b"".join(b"line %d\n" % number for number in range(300_000))
    for rank in (0, 1):
        add(run, many, rank=rank)
    turn = list(follower.read_turn())
    assert [chunk.rank for chunk in turn] == [0, 1]
    assert all(chunk.data.endswith(b"\n") and len(chunk.data) <= CHUNK for chunk in turn)
    rest = [chunk for _ in range(99) for chunk in follower.read_turn()]
    for rank in (0, 1):
        assert b"".join(chunk.data for chunk in (*turn, *rest) if chunk.rank == rank) == many


def test_lines_come_once_and_whole(run: RunDir, lines: LineFollower) -> None:
    assert read(lines) == []
    add(run, b"one\ntw")
    assert read(lines) == ["one"]
    add(run, b"o\n")
    assert read(lines) == ["two"]
    assert read(lines) == []
    add(run, b"rest")
    assert read(lines) == []
    assert read(lines, final=True) == ["rest"]
    assert read(lines, final=True) == []


def test_ranks_and_streams_are_told_apart(run: RunDir, lines: LineFollower) -> None:
    watch_rank(run, lines.follower, 12, 0)
    add(run, b"a\n")
    add(run, b"b\n", "err")
    add(run, b"c\n", "out", 12)
    assert list(lines.read_lines()) == [
        Line(0, "out", b"a\n"),
        Line(0, "err", b"b\n"),
        Line(12, "out", b"c\n"),
    ]


def test_watching_again_changes_nothing(run: RunDir, lines: LineFollower) -> None:
    add(run, b"one\n")
    assert read(lines) == ["one"]
    watch_rank(run, lines.follower, 0, 0)
    assert read(lines) == []


def test_a_letter_that_is_cut_in_two_comes_whole(run: RunDir, lines: LineFollower) -> None:
    raw = "é😀\n".encode()
    for at in range(len(raw)):
        add(run, raw[at : at + 1])
        found = read(lines)
    assert found == ["é😀"]


def test_bytes_that_are_no_text(run: RunDir, lines: LineFollower) -> None:
    add(run, b"\xff\xfe\x00 caf\xe9\n")
    assert read(lines) == ["\ufffd\ufffd\x00 caf\ufffd"]


def test_of_a_progress_bar_the_last_state_counts(run: RunDir, lines: LineFollower) -> None:
    add(run, b" 1%\r 50%\r100%\ndone\r\n\n\x0b\x0c\x85\n")
    assert read(lines) == ["100%", "done", "", "\x0b\x0c\ufffd"]


def test_a_file_that_is_cut_or_replaced_is_read_anew(run: RunDir, lines: LineFollower) -> None:
    add(run, b"one\ntwo\nthr")
    assert read(lines) == ["one", "two"]
    run.rank_log(0, 0, "out").write_bytes(b"new\n")
    assert read(lines) == ["new"]
    run.rank_log(0, 0, "out").unlink()
    assert read(lines) == []
    add(run, b"x\n")
    assert read(lines) == ["x"]


def test_a_large_file_comes_in_parts_and_whole_at_the_end(run: RunDir, lines: LineFollower) -> None:
    written = [f"line {number} {'x' * 90}" for number in range(50_000)]
    add(run, "\n".join(written).encode())
    first = read(lines)
    assert 0 < len(first) < len(written)
    assert first + read(lines, final=True) == written


def test_a_line_of_many_megabytes_comes_whole(run: RunDir, lines: LineFollower) -> None:
    text = "0123456789" * 400_000
    add(run, text.encode())
    assert read(lines) == []
    add(run, b"\nnext\n")
    assert read(lines) == [text, "next"]


def test_a_bar_without_end_does_not_fill_the_memory(run: RunDir, lines: LineFollower) -> None:
    for number in range(6):
        add(run, b"%d " % number + b"#" * (CHUNK // 2) + b"\r")
        read(lines)
        assert all(len(rest) <= CHUNK for rest in lines.partial.values())
    (last,) = read(lines, final=True)
    assert last.startswith("5 #")


def test_lines_and_pieces_of_lines_are_all_that_was_printed(run: RunDir, lines: LineFollower) -> None:
    written = b"one\n" + b"%d\r" * CHUNK + bytes(range(256)) * 9 + b"x" * CHUNK
    found = b""
    for at in range(0, len(written), CHUNK // 3):
        add(run, written[at : at + CHUNK // 3])
        found += b"".join(line.raw for line in lines.read_lines())
    assert found + b"".join(line.raw for line in lines.read_lines(final=True)) == written


def test_a_line_without_end_comes_in_pieces(
    run: RunDir, lines: LineFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_logs, "LONGEST", 2 * CHUNK)
    text = "x" * (5 * CHUNK)
    add(run, text.encode())
    pieces = read(lines, final=True)
    assert len(pieces) == 2 and "".join(pieces) == text


def test_the_tail(run: RunDir) -> None:
    path = run.rank_log(0, 0, "err")
    assert read_tail(path, 5) == []
    path.write_bytes(b"")
    assert read_tail(path, 5) == []
    path.write_bytes(b"\n".join(b"%d" % number for number in range(9)))
    assert read_tail(path, 3) == ["6", "7", "8"]
    assert read_tail(path, 99) == [str(number) for number in range(9)]
    assert read_tail(path, 0) == []
    path.write_bytes(b"a\r\nb\x0cc\n 1%\r 2%\n\xff\n")
    assert read_tail(path, 9) == ["a", "b\x0cc", " 2%", "\ufffd"]


def test_the_tail_of_a_large_file_reads_its_end_alone(run: RunDir) -> None:
    path = run.rank_log(0, 0, "err")
    path.write_bytes(b"x" * (3 * CHUNK) + b"\nlast\n")
    lines = read_tail(path, 2)
    assert lines[-1] == "last" and len(lines[0]) <= CHUNK


def test_a_log_that_is_a_folder_has_nothing(run: RunDir, lines: LineFollower) -> None:
    run.rank_log(0, 0, "out").mkdir()
    assert read(lines, final=True) == []
    assert read_tail(run.rank_log(0, 0, "out"), 3) == []
