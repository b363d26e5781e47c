"""What ranks print: as bytes and lines, and the steps, losses and early ends that are read from it."""

import os
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runs.progress import (
    CleanEnd,
    ProgressReader,
    describe_progress,
    explain_early_exits,
    measure_attempt,
    read_objective,
)
from launcher.runs.rank_logs import Follower, LineFollower, read_tail
from launcher.runs.run_directory import RunDir

F = TypeVar("F", bound=Follower)
CHUNK = 1 << 20
"""Bytes that are read at once."""
TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("progress.toml").read_text())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "logs/0").mkdir(parents=True)
    return RunDir(tmp_path)


@pytest.fixture
def follower(run: RunDir) -> Follower:
    return watch_rank(run, Follower(), 0)


@pytest.fixture
def lines(run: RunDir) -> LineFollower:
    return watch_rank(run, LineFollower(), 0)


def watch_rank(run: RunDir, follower: F, rank: int) -> F:
    for stream in ("out", "err"):
        follower.watch(run.rank_log(rank, 0, stream))
    return follower


def add(run: RunDir, data: bytes, ending: str = "out", rank: int = 0) -> None:
    with run.rank_log(rank, 0, ending).open("ab") as file:
        file.write(data)


def read(lines: LineFollower, *, final: bool = False) -> list[str]:
    return [line.text for line in lines.read_lines(final=final)]


def test_long_lines_are_not_torn_apart_and_a_reader_far_behind_gets_whole_ones_in_turns(
    run: RunDir, follower: Follower
) -> None:
    watch_rank(run, follower, 1)
    long, many = b"x" * (3 * CHUNK + 5) + b"\n", b"".join(b"line %d\n" % n for n in range(300_000))
    add(run, long)
    add(run, b"other\n", rank=1)
    turn = list(follower.read_turn())
    assert [chunk.rank for chunk in turn] == [0, 0, 0, 0, 1]
    assert b"".join(chunk.data for chunk in turn) == long + b"other\n"
    for rank in (0, 1):
        add(run, many, rank=rank)
    turn = list(follower.read_turn())
    assert [chunk.rank for chunk in turn] == [0, 1]
    assert all(chunk.data.endswith(b"\n") and len(chunk.data) <= CHUNK for chunk in turn)
    turn += [chunk for _ in range(99) for chunk in follower.read_turn()]
    for rank in (0, 1):
        assert b"".join(chunk.data for chunk in turn if chunk.rank == rank) == many


def test_lines_come_once_and_whole(run: RunDir, lines: LineFollower) -> None:
    for data, found in (
        (b"", []),
        (b"one\ntw", ["one"]),
        (b"o\n", ["two"]),
        (b"", []),
        (b"\xff\xfe\x00 caf\xe9\n", ["\ufffd\ufffd\x00 caf\ufffd"]),
        (b" 1%\r 50%\r100%\ndone\r\n\n\x0b\x0c\x85\n", ["100%", "done", "", "\x0b\x0c\ufffd"]),  # of a bar
        ("é😀\n".encode()[:3], []),
        ("é😀\n".encode()[3:], ["é😀"]),
        (b"rest", []),
    ):
        add(run, data)
        assert read(lines) == found
    assert read(lines, final=True) == ["rest"] and read(lines, final=True) == []
    add(run, b"cut")
    assert read(lines) == []
    run.rank_log(0, 0, "out").write_bytes(b"new\n")  # it has become shorter, and is read from its start
    assert read(lines) == ["new"]


def test_large_files_long_lines_and_bars_without_end(
    run: RunDir, lines: LineFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [f"line {number} {'x' * 90}" for number in range(50_000)]
    add(run, "\n".join(written).encode() + b"\n")
    first = read(lines)
    assert 0 < len(first) < len(written) and first + read(lines, final=True) == written
    text = b"one\n" + b"%d\r" * CHUNK + bytes(range(256)) * 9 + b"0123456789" * 400_000
    found = b""
    for at in range(0, len(text), CHUNK // 3):
        add(run, text[at : at + CHUNK // 3])
        found += b"".join(line.raw for line in lines.read_lines())
    assert found + b"".join(line.raw for line in lines.read_lines(final=True)) == text
    for number in range(6):
        add(run, b"%d " % number + b"#" * (CHUNK // 2) + b"\r")
        read(lines)
        assert all(len(rest) <= CHUNK for rest in lines.partial.values())
    assert read(lines, final=True)[-1].startswith("5 #")
    monkeypatch.setattr("launcher.runs.rank_logs.LONGEST", 2 * CHUNK)
    add(run, b"\n" + b"x" * (5 * CHUNK))
    assert [len(piece) for piece in read(lines, final=True)][1:] == [3 * CHUNK, 2 * CHUNK]


def test_the_tail(run: RunDir) -> None:
    path = run.rank_log(0, 0, "err")
    assert read_tail(path, 5) == []
    for data, count, tail in (
        (b"", 5, []),
        (b"\n".join(b"%d" % number for number in range(9)), 3, ["6", "7", "8"]),
        (b"1\n2", 99, ["1", "2"]),
        (b"1\n2", 0, []),
        (b"a\r\nb\x0cc\n 1%\r 2%\n\xff\n", 9, ["a", "b\x0cc", " 2%", "\ufffd"]),
        (b"x" * (3 * CHUNK) + b"\nlast\n", 2, ["x" * (CHUNK - 6), "last"]),  # its end alone is read
    ):
        path.write_bytes(data)
        assert read_tail(path, count) == tail


def find_step(text: str) -> Any:
    """The step that is read of a line."""
    reader = ProgressReader()
    assert reader.add("out", f"{text}\n".encode()) == bool(reader.steps)
    return reader.steps[-1] if reader.steps else None


def test_lines_with_progress_and_others() -> None:
    for line, *wanted in TABLE["lines"]:
        found = find_step(line)
        assert (found and [found.step, found.total or 0, dict(found.metrics)]) == (wanted or None), line


WORDS = ("step", " ", "/", ":", "loss", "9" * 5000, "\u0661", "nan", "tokens/s", "-", ".", "e", ",")


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=5)))
def test_any_line_is_read_without_an_error(parts: list[str]) -> None:
    found = find_step("".join(parts))
    assert found is None or found.step >= 0


def read_chunks(*chunks: bytes) -> list[int]:
    """The first and the last step that a reader finds in chunks of one stream."""
    reader = ProgressReader()
    for chunk in chunks:
        reader.add("out", chunk)
    return [step.step for step in reader.steps]


def make_lines(*steps: int) -> bytes:
    return b"".join(b"step %d/9999 loss 1.5\nother\n" % step for step in steps)


def test_of_many_steps_the_first_and_the_last_are_kept() -> None:
    assert read_chunks(make_lines(*range(3, 2000))) == [3, 1999]
    assert read_chunks(b"hello\n", make_lines(1), b"", b"x\n" * 9, make_lines(2, 3)) == [1, 3]
    assert read_chunks(make_lines(7)) == [7]
    # A bar tells its states.
    assert read_chunks(b"\rstep 1/9 loss 3", b"\rstep 2/9 loss 2", b"\rstep 3/9 los") == [1, 2]
    # Other lines with the word do not take for ever.
    noise = b"a misstep\n" * 200_000
    assert read_chunks(noise, make_lines(5) + b"a misstep\n" * 62, noise) == [5]
    assert read_chunks(b"step" * 300_000 + b"\n", b"x" * 5_000_000 + b" step 4 loss 2\n") == [4]


def tell(step: Any) -> tuple[int, int | None, dict[str, str]]:
    return step.step, step.total, dict(step.metrics)


def test_a_line_that_is_cut_in_two_counts_once_it_is_whole() -> None:
    line = b"step 12/200 Loss 1.25 x\n"
    for at in range(1, len(line)):
        reader = ProgressReader()
        assert not reader.add("out", line[:at])
        assert not reader.add("err", b"some step of another stream")
        assert reader.add("out", line[at:])
        assert [tell(one) for one in reader.steps] == [(12, 200, {"loss": "1.25"})]
    assert not reader.add("out", b"step 13/200 loss NaN")
    assert reader.finish() and not reader.finish()
    assert tell(reader.steps[-1]) == (13, 200, {"loss": "NaN"})


def test_the_summary_goes_from_first_to_last() -> None:
    reader = ProgressReader()
    assert describe_progress(reader.steps) == ""
    reader.add("out", b"step 1 lr 3\n")
    assert describe_progress(reader.steps) == ""
    reader = ProgressReader()
    reader.add(
        "out", b"step 1/200 loss 5.55 tokens/s 9\nstep 100 loss 3.0 tokens/s 12345 tflops 0.5 mfu 3%\n"
    )
    reader.add("err", b"step 200 loss 2.41\n")
    told = "loss 5.55 to 2.41 over 200 steps, 12345 tokens/s, 0.5 TFLOPS, MFU 3%"
    assert describe_progress(reader.steps) == told


def write_log(run: Path, attempt: int, text: str, ending: str = "out", rank: int | str = 0) -> None:
    path = run / "logs" / str(attempt) / f"rank-{rank}.{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def explain(path: Path, kind: str) -> str:
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        read_objective(path, kind)
    return str(caught.value)


def test_the_last_loss_is_that_of_the_newest_attempt_that_has_one(tmp_path: Path) -> None:
    assert "no line with a step and a loss" in explain(tmp_path, "loss")
    for text, loss in {
        "step 1 loss 3.5\nstep 2 loss 2.5\nstep 3 tokens/s 10\nbye\n": 2.5,
        "step 1 loss 1,234.5\n": 1234.5,
        "step 1 loss 1e-3": 1e-3,
        "step 9 loss -inf\n": float("-inf"),
    }.items():
        write_log(tmp_path, 9, text)
        assert read_objective(tmp_path, "loss") == loss
    write_log(tmp_path, 9, "step 9 loss 1\nstep 100 lr 1\n")
    write_log(tmp_path, 9, "eval step 50 loss 7\n", "err")
    assert read_objective(tmp_path, "loss") == 7
    write_log(tmp_path, 9, "step 100/100 lr 1\n")
    write_log(tmp_path, 9, "eval step 250 loss 7\n", "err")
    assert measure_attempt(RunDir(tmp_path, 9)).finished is True, "stdout tells how far the program is"
    write_log(tmp_path, 10, "step 3 loss 3\n", "err")
    write_log(tmp_path, 10, "nothing\n")
    write_log(tmp_path, 11, "killed\nstep 9 lr 2\n")
    assert read_objective(tmp_path, "loss") == 3


def test_the_numbers_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "objective.txt"
    assert "No such file" in explain(tmp_path, "file")
    for text, numbers in {"0.5": 0.5, " 1e-3\n": 1e-3, "1\n2.5 3\n": [1, 2.5, 3]}.items():
        path.write_text(text)
        assert read_objective(tmp_path, "file") == numbers
    for data, told in (
        (b"", "is empty"),
        (b"loss 3", "no number"),
        (b"1,5", "no number"),
        (b"\xff", "no number"),
    ):
        path.write_bytes(data)
        assert told in explain(tmp_path, "file")
    assert explain(tmp_path, "loss").endswith("objective.txt: set objective=file")
    (tmp_path / "elsewhere").write_text("1")
    for plant in (
        lambda: path.symlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.write_text("1 " * (1 << 16)),
    ):
        path.unlink()
        plant()
        assert "cannot be read" in explain(tmp_path, "file")


@pytest.mark.parametrize("case", TABLE["early"], ids=str)
def test_ranks_that_ended_early(run: RunDir, case: dict[str, Any]) -> None:
    for rank, step in case["logs"].items():
        write_log(run.path, 0, f"noise\nstep {step} loss 2.5\nrank {rank} leaves\n", rank=rank)
    clean = [CleanEnd(int(rank), f"n{int(rank) // 2}", time, 0) for rank, time in case["ends"].items()]
    assert explain_early_exits(run, clean, 10.0, case["world"]) == case["says"]
