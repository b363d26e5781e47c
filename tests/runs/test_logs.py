"""Following log files that are being written, cut, replaced, or hold anything at all."""

from pathlib import Path

import pytest

from launcher.runs.logs import CHUNK, Follower, Line, read_tail
from launcher.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "logs/0").mkdir(parents=True)
    return RunDir(tmp_path)


@pytest.fixture
def follower(run: RunDir) -> Follower:
    follower = Follower(run)
    follower.watch_rank(0, 0)
    return follower


def add(run: RunDir, data: bytes, ending: str = "out", rank: int = 0) -> None:
    with run.rank_log(rank, 0, ending).open("ab") as file:
        file.write(data)


def read(follower: Follower, *, final: bool = False) -> list[str]:
    return [line.text for line in follower.read_lines(final=final)]


def test_lines_come_once_and_whole(run: RunDir, follower: Follower) -> None:
    assert read(follower) == []
    add(run, b"one\ntw")
    assert read(follower) == ["one"]
    add(run, b"o\n")
    assert read(follower) == ["two"]
    assert read(follower) == []
    add(run, b"rest")
    assert read(follower) == []
    assert read(follower, final=True) == ["rest"]
    assert read(follower, final=True) == []


def test_ranks_and_streams_are_told_apart(run: RunDir, follower: Follower) -> None:
    follower.watch_rank(12, 0)
    add(run, b"a\n")
    add(run, b"b\n", "err")
    add(run, b"c\n", "out", 12)
    assert list(follower.read_lines()) == [Line(0, "out", "a"), Line(0, "err", "b"), Line(12, "out", "c")]


def test_watching_again_changes_nothing(run: RunDir, follower: Follower) -> None:
    add(run, b"one\n")
    assert read(follower) == ["one"]
    follower.watch_rank(0, 0)
    assert read(follower) == []


def test_a_letter_that_is_cut_in_two_comes_whole(run: RunDir, follower: Follower) -> None:
    raw = "é😀\n".encode()
    for at in range(len(raw)):
        add(run, raw[at : at + 1])
        lines = read(follower)
    assert lines == ["é😀"]


def test_bytes_that_are_no_text(run: RunDir, follower: Follower) -> None:
    add(run, b"\xff\xfe\x00 caf\xe9\n")
    assert read(follower) == ["\ufffd\ufffd\x00 caf\ufffd"]


def test_of_a_progress_bar_the_last_state_counts(run: RunDir, follower: Follower) -> None:
    add(run, b" 1%\r 50%\r100%\ndone\r\n\n\x0b\x0c\x85\n")
    assert read(follower) == ["100%", "done", "", "\x0b\x0c\ufffd"]


def test_a_file_that_is_cut_or_replaced_is_read_anew(run: RunDir, follower: Follower) -> None:
    add(run, b"one\ntwo\nthr")
    assert read(follower) == ["one", "two"]
    run.rank_log(0, 0, "out").write_bytes(b"new\n")
    assert read(follower) == ["new"]
    run.rank_log(0, 0, "out").unlink()
    assert read(follower) == []
    add(run, b"x\n")
    assert read(follower) == ["x"]


def test_a_large_file_comes_in_parts_and_whole_at_the_end(run: RunDir, follower: Follower) -> None:
    lines = [f"line {number} {'x' * 90}" for number in range(50_000)]
    add(run, "\n".join(lines).encode())
    first = read(follower)
    assert 0 < len(first) < len(lines)
    assert first + read(follower, final=True) == lines


def test_a_line_without_end_does_not_fill_the_memory(run: RunDir, follower: Follower) -> None:
    for number in range(6):
        add(run, b"\r%d " % number + b"#" * (CHUNK // 2))
        assert read(follower) == []
        assert all(len(rest) <= CHUNK for rest in follower.partial.values())
    (last,) = read(follower, final=True)
    assert last.startswith("5 #")


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


def test_a_log_that_is_a_folder_has_nothing(run: RunDir, follower: Follower) -> None:
    run.rank_log(0, 0, "out").mkdir()
    assert read(follower, final=True) == []
    assert read_tail(run.rank_log(0, 0, "out"), 3) == []
