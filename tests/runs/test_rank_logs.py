"""What ranks print: as bytes and lines, and the steps, losses and early ends that are read from it."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runs import rank_logs
from launcher.runs.progress import (
    MOST_BYTES_OF_FILE,
    MOST_LINES,
    CleanEnd,
    EarlyEnd,
    ObjectiveError,
    Progress,
    ProgressReader,
    describe_progress,
    find_early_exits,
    parse_progress,
    read_objective,
)
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


@pytest.mark.parametrize(
    ("line", "step", "total", "metrics"),
    [
        (
            "step 10/200 loss 5.54 tokens/s 12345 tflops 0.01 mfu 3.2%",
            10,
            200,
            {"loss": "5.54", "tokens/s": "12345", "tflops": "0.01", "mfu": "3.2%"},
        ),
        ("step 10 / 200  loss 5.54", 10, 200, {"loss": "5.54"}),
        ("Step: 7 | Loss: 1.2e-05, LR: 3e-4", 7, None, {"loss": "1.2e-05", "lr": "3e-4"}),
        ("[rank0] step=7 loss=nan", 7, None, {"loss": "nan"}),
        ("step 7 loss inf lr -1", 7, None, {"loss": "inf", "lr": "-1"}),
        ("step 7 loss -inf", 7, None, {"loss": "-inf"}),
        ("global step 1 loss 2.0, tokens/s 12,345.5,", 1, None, {"loss": "2.0", "tokens/s": "12,345.5"}),
    ],
)
def test_lines_with_progress(line: str, step: int, total: int | None, metrics: dict[str, str]) -> None:
    assert parse_progress(line) == Progress(step, total, tuple(metrics.items()))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 3",
        "loss 5.54",
        "steps 3 loss 1",
        "step 3 loss function",
        "stepping 3 loss 2",
        "misstep 3 loss 2",
        "step 1e5 losses 3",
    ],
)
def test_other_lines(line: str) -> None:
    assert parse_progress(line) is None


@given(
    st.lists(
        st.sampled_from(
            ["step", " ", "/", ":", "loss", "9" * 5000, "\u0661", "nan", "tokens/s", "-", ".", "e", ","]
        )
        | st.text(max_size=5)
    )
)
def test_any_line_is_read_without_an_error(parts: list[str]) -> None:
    found = parse_progress("".join(parts))
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


@pytest.mark.parametrize("at", range(1, 24))
def test_a_line_that_is_cut_in_two_counts_once_it_is_whole(at: int) -> None:
    line = b"step 12/200 Loss 1.25 x\n"
    reader = ProgressReader()
    assert not reader.add("out", line[:at])
    assert not reader.add("err", b"some step of another stream")
    assert reader.add("out", line[at:])
    assert reader.steps == [Progress(12, 200, (("loss", "1.25"),))]


def test_a_bar_that_is_drawn_anew_tells_its_states() -> None:
    assert read_chunks(b"\rstep 1/9 loss 3", b"\rstep 2/9 loss 2", b"\rstep 3/9 los") == [1, 2]


def test_a_last_line_without_end_counts_at_the_end() -> None:
    reader = ProgressReader()
    assert not reader.add("out", b"step 3/3 loss NaN")
    assert reader.finish() and not reader.finish()
    assert reader.steps == [Progress(3, 3, (("loss", "NaN"),))]


def test_a_step_keeps_the_metrics_of_those_before_it() -> None:
    reader = ProgressReader()
    reader.add("out", b"step 1 loss 3\nstep 2 tokens/s 50\n")
    reader.add("err", b"step 3 mfu 9%\n")
    assert dict(reader.steps[-1].metrics) == {"loss": "3", "tokens/s": "50", "mfu": "9%"}
    assert dict(reader.steps[0].metrics) == {"loss": "3"}


def test_other_lines_with_the_word_do_not_take_for_ever() -> None:
    noise = b"a misstep\n" * 200_000
    assert read_chunks(noise, make_lines(5) + b"a misstep\n" * (MOST_LINES - 2), noise) == [5]
    assert read_chunks(b"step" * 300_000 + b"\n", b"x" * 5_000_000 + b" step 4 loss 2\n") == [4]


def logging_step(number: int, **metrics: str) -> Progress:
    return Progress(number, 200, tuple((name.replace("_", "/"), value) for name, value in metrics.items()))


def test_the_summary_goes_from_first_to_last() -> None:
    steps = [
        logging_step(1, loss="5.55", tokens_s="9"),
        logging_step(100, loss="3.0", tokens_s="12345", tflops="0.5", mfu="3%"),
        logging_step(200, loss="2.41"),
    ]
    assert describe_progress(steps) == "loss 5.55 to 2.41 over 200 steps, 12345 tokens/s, 0.5 TFLOPS, MFU 3%"
    assert describe_progress([]) == ""
    assert describe_progress([logging_step(1, lr="3")]) == ""


def write_log(run: Path, attempt: int, text: str, ending: str = "out") -> None:
    path = run / "logs" / str(attempt) / f"rank-0.{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("step 1 loss 3.5\nstep 2 loss 2.5\nstep 3 tokens/s 10\nbye\n", 2.5),
        ("step 1 loss 1,234.5\n", 1234.5),
        ("step 1 loss 1e-3", 1e-3),
        ("step 9 loss -inf\n", float("-inf")),
    ],
)
def test_the_last_loss(tmp_path: Path, text: str, loss: float) -> None:
    write_log(tmp_path, 0, text)
    assert read_objective(tmp_path, "loss") == loss


def test_it_is_that_of_the_newest_attempt_that_has_one(tmp_path: Path) -> None:
    write_log(tmp_path, 9, "step 5 loss 5\n")
    write_log(tmp_path, 10, "step 3 loss 3\n", "err")
    write_log(tmp_path, 10, "nothing\n")
    write_log(tmp_path, 11, "killed\n")
    assert read_objective(tmp_path, "loss") == 3


@pytest.mark.parametrize(("text", "numbers"), [("0.5", 0.5), (" 1e-3\n", 1e-3), ("1\n2.5 3\n", [1, 2.5, 3])])
def test_the_numbers_of_the_file(tmp_path: Path, text: str, numbers: object) -> None:
    (tmp_path / "objective.txt").write_text(text)
    assert read_objective(tmp_path, "file") == numbers


def test_what_there_is_none_in(tmp_path: Path) -> None:
    def explain(kind: str) -> str:
        with pytest.raises(ObjectiveError) as caught:
            read_objective(tmp_path, kind)
        return str(caught.value)

    assert "no line with a step and a loss" in explain("loss")
    assert "No such file" in explain("file")
    for text, told in (("", "is empty"), ("loss 3", "no number"), ("1,5", "no number")):
        (tmp_path / "objective.txt").write_text(text)
        assert told in explain("file")
    (tmp_path / "objective.txt").write_bytes(b"\xff")
    assert "no number" in explain("file")
    assert explain("loss").endswith("objective.txt: set objective=file")


def test_what_is_no_file_of_numbers_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "objective.txt"
    (tmp_path / "elsewhere").write_text("1")
    for plant in (
        lambda: path.symlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.write_text("1 " * MOST_BYTES_OF_FILE),
    ):
        plant()
        with pytest.raises(ObjectiveError, match="cannot be read"):
            read_objective(tmp_path, "file")
        path.unlink()


def print_step(run: RunDir, rank: int, text: str) -> None:
    log = run.rank_log(rank, 0, "out")
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"noise\n{text}\nrank {rank} leaves\n")


def end(rank: int, time: float, host: str = "n1") -> CleanEnd:
    return CleanEnd(rank, host, time, 0)


def describe(run: RunDir, ends: list[CleanEnd], before: float = 10.0, world: int = 8) -> str:
    found = find_early_exits(run, ends, before, world)
    return found.describe() if found else ""


def test_one_rank(run: RunDir) -> None:
    print_step(run, 3, "step 40/100 loss 2.5")
    assert describe(run, [end(3, 9.0)]) == "rank 3 on n1 ended with 0 at step 40 while 7 ranks went on"
    assert (
        describe(run, [end(3, 9.0)], world=2) == "rank 3 on n1 ended with 0 at step 40 while 1 rank went on"
    )
    assert (
        describe(run, [end(3, 9.0)], world=0) == "rank 3 on n1 ended with 0 at step 40 while others went on"
    )


def test_a_rank_that_prints_no_steps(run: RunDir) -> None:
    print_step(run, 0, "step 41/100 loss 2.5")
    told = "rank 3 on n1 ended with 0 while 7 ranks went on (rank 0 came to step 41)"
    assert describe(run, [end(3, 9.0)]) == told


def test_several(run: RunDir) -> None:
    ends = [end(rank, 9.0 - rank / 10, f"n{rank // 2}") for rank in range(6)]
    told = "ranks 0, 1, 2, 3 and 2 more on n0, n1, n2 ended with 0 while 2 ranks went on"
    assert describe(run, ends) == told


def test_what_ends_well_is_no_event(run: RunDir) -> None:
    assert describe(run, []) == ""
    assert describe(run, [end(3, 10.5)]) == "", "it came after the failure"
    assert describe(run, [end(rank, 9.0) for rank in range(8)]) == "", "all did"
    print_step(run, 3, "step 100/100 loss 2.5")
    assert describe(run, [end(3, 9.0)]) == "", "its steps were done"


def test_the_value(run: RunDir) -> None:
    print_step(run, 3, "step 40/100 loss 2.5")
    assert find_early_exits(run, [end(3, 9.0)], 10.0, 8) == EarlyEnd((3,), ("n1",), 7, 40, None)
