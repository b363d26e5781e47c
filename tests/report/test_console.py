"""What the console shows of a running job: on terminals, in files, and when the reader has left."""

import contextlib
import io
import os
import pty
import re
import select
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher.report.console import JobConsole
from launcher.report.viewer import OutputViewer, Stream, ViewOptions
from launcher.runs.rank_logs import Chunk, Follower
from launcher.runs.run_directory import RunDir
from tests.seam import PATIENCE

CHUNKS = [Chunk(0, "out", b"zero\n"), Chunk(0, "err", b"zero's stderr\n"), Chunk(1, "out", b"one\n")]


def make(mode: str, *, ranks: int = 2, shared: bool = False) -> JobConsole:
    origin = (lambda _: "h") if ranks > 1 else None
    return JobConsole(ViewOptions(mode, origin, shared=shared), "/run/logs")


@contextlib.contextmanager
def stdout_to(descriptor: int) -> Iterator[None]:
    """Let this process's stdout be something else."""
    with os.fdopen(os.dup(descriptor), "w") as stdout, contextlib.redirect_stdout(stdout):
        yield


@pytest.mark.parametrize(
    ("mode", "out", "err"),
    [
        ("rank0", "[h:0] zero\n", "[h:0] zero's stderr\n"),
        ("all", "[h:0] zero\n[h:1] one\n", "[h:0] zero's stderr\n"),
        ("none", "", ""),
    ],
)
def test_modes(capfd: pytest.CaptureFixture[str], mode: str, out: str, err: str) -> None:
    console = make(mode)
    for chunk in CHUNKS:
        console.show_chunk(chunk)
    console.print_own_line("ours")
    console.close()
    assert capfd.readouterr() == (out, f"{err}launch: ours\n")


def test_progress_is_noted_in_every_mode(capfd: pytest.CaptureFixture[str]) -> None:
    console = make("none")
    console.show_chunk(Chunk(0, "out", b"step 1/3 loss 2.5\n"))
    console.show_chunk(Chunk(1, "out", b"step 2/3 loss 2.0\n"))
    console.show_chunk(Chunk(0, "out", b"step 3/3 loss 1.5"))
    console.close()
    assert [step.step for step in console.progress.steps] == [1, 3]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_bytes_arrive_as_they_are(capfdbinary: pytest.CaptureFixture[bytes], ranks: int) -> None:
    """Of one rank as they are, and nothing waits; of several with a prefix on each line."""
    data = bytes(range(256)) * 4000 + b"no end \xff"
    console = make("all", ranks=ranks)
    shown = b""
    for at in range(0, len(data), 1000):
        console.show_chunk(Chunk(0, "out", data[at : at + 1000]))
        if ranks == 1:
            shown += capfdbinary.readouterr().out
            assert shown == data[: at + 1000]
        console.tick()
    console.close()
    if ranks > 1:
        shown = capfdbinary.readouterr().out
        assert b"\n" + shown == (b"\n" + data).replace(b"\n", b"\n[h:0] ")


@pytest.mark.parametrize(
    ("shared", "after_a_while", "at_the_end"),
    [
        (False, "[h:0] name? \n[h:1]  5%\r 6%", "\n[h:0] me\n[h:1] other\n[h:0] last"),
        (True, "[h:0] name? \n[h:1]  5%\r 6%\n", "[h:0] me\n[h:1] other\n[h:0] last\n"),
    ],
)
def test_in_a_pipe_lines_are_written_whole_or_once_they_have_waited(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
    after_a_while: str,
    at_the_end: str,
) -> None:
    """print() is two writes, and another rank may have written between them; `shared` with other nodes."""
    console = make("all", shared=shared)
    for chunk in (Chunk(0, "out", b"begin"), Chunk(1, "out", b"other\n"), Chunk(0, "out", b" end\nname? ")):
        console.show_chunk(chunk)
        console.tick()
    console.show_chunk(Chunk(1, "out", b" 5%\r 6%"))
    assert capfd.readouterr().out == "[h:1] other\n[h:0] begin end\n"
    monkeypatch.setattr("launcher.report.console.HOLD", 0)
    console.tick()
    assert capfd.readouterr().out == after_a_while
    monkeypatch.undo()
    for chunk in (Chunk(0, "out", b"me\n"), Chunk(1, "out", b"\nother\n"), Chunk(0, "out", b"last")):
        console.show_chunk(chunk)
        console.tick()
    console.close()
    assert capfd.readouterr().out == at_the_end


def test_what_is_too_long_to_wait_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    console, long = make("all"), "x" * 65537
    console.show_chunk(Chunk(1, "out", b"one"))
    console.show_chunk(Chunk(0, "out", long.encode()))
    console.tick()
    assert capfd.readouterr().out == f"[h:0] {long}"
    console.show_chunk(Chunk(0, "out", b"\r 5%"))
    console.close()
    assert capfd.readouterr().out == "\r 5%\n[h:1] one"


def test_letters_of_ours_that_the_stream_does_not_know(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = make("all")
    with os.fdopen(os.dup(2), "w", encoding="ascii") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        console.print_own_line("é\udcff ok")
        monkeypatch.undo()
    assert capfdbinary.readouterr().err == b"launch: ?\\udcff ok\n"


def test_a_stream_that_is_gone_does_not_take_the_other_along(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with stdout_to(writing):
        console = make("all")
        for chunk in CHUNKS:
            console.show_chunk(chunk)
        console.tick()
        console.print_own_line("still here")
    os.close(writing)
    assert capfd.readouterr().err == "[h:0] zero's stderr\nlaunch: still here\n"


def test_a_disk_that_is_full_is_told_of_with_where_the_output_is(capfd: pytest.CaptureFixture[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with stdout_to(full):
        console = make("all")
        for chunk in CHUNKS:
            console.show_chunk(chunk)
            console.tick()
    os.close(full)
    told = "launch: warning: stdout takes no more (No space left on device): see /run/logs\n"
    assert sorted(capfd.readouterr().err.splitlines(keepends=True)) == sorted(["[h:0] zero's stderr\n", told])


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    data = b"x" * 1_000_000
    with stdout_to(writing):
        console = make("all", ranks=1)
        thread = threading.Thread(target=lambda: console.show_chunk(Chunk(0, "out", data)))
        thread.start()
        read = b""
        while len(read) < len(data):
            read += os.read(reading, 65536)
        thread.join()
    os.close(writing)
    os.close(reading)
    assert read == data


def test_a_closed_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        console = make("all")
        console.print_own_line("to nobody")
        console.print_renderable(lambda rich: rich.print("to nobody"))
        console.close()
        assert console.taken == 0


def test_what_rich_prints_comes_between_other_lines(capfd: pytest.CaptureFixture[str]) -> None:
    console = make("all")
    console.print_own_line("before")
    console.print_renderable(lambda rich: rich.print("[bold]table"))
    console.print_own_line("after")
    assert capfd.readouterr().err == "launch: before\ntable\nlaunch: after\n"


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
BAR = re.compile(r"step \d+/40 [━╸╺ -]")


def keep_erasing(found: re.Match[str]) -> str:
    """Leave out colours."""
    return found[0] if found[0].endswith("K") else ""


class Memory(Stream):
    """A stream that keeps what is written; one with a width is a terminal."""

    def __init__(self, width: int = 0) -> None:
        super().__init__("stdout", None)
        self.width, self.data = width, bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    @property
    def is_screen(self) -> bool:
        return bool(self.width)

    @property
    def columns(self) -> int:
        return self.width

    def is_same_file(self, other: Stream) -> bool:
        return self is other


def make_on(
    err: Memory, out: Memory | None = None, options: ViewOptions | None = None, **more: Any
) -> JobConsole:
    """A console whose stderr is this, and its stdout another or the same."""
    with pytest.MonkeyPatch.context() as patch:
        streams = {"stdout": out or err, "stderr": err}
        patch.setattr("launcher.report.console.open_stream", streams.__getitem__)
        return JobConsole(options or ViewOptions("all", lambda _: "h"), **more)


class OnTerminal:
    """A console on a terminal of 100 columns that has shown three steps; `out` is its stdout."""

    def __init__(self, out: Memory | None = None, encoding: str = "utf-8") -> None:
        self.screen = Memory(width=100)
        rich = Console(file=io.TextIOWrapper(io.BytesIO(), encoding), width=100, force_terminal=True)
        self.console = make_on(self.screen, out, ViewOptions("rank0", lambda _: "h"), console=rich)
        for number in (10, 20, 30):
            self.show(f"step {number}/40 loss {5 - number / 10} tokens/s 1234{number} tflops 0.01 lr 0.1\n")

    def show(self, text: str, stream: str = "out") -> None:
        self.console.show_chunk(Chunk(0, stream, text.encode()))
        self.console.drawn = 0.0
        self.console.tick()

    @property
    def rows(self) -> list[str]:
        return rows_of(self.screen.data.decode())

    @property
    def bars(self) -> list[str]:
        """The states that the bar has had."""
        plain = ESCAPES.sub(keep_erasing, self.screen.data.decode())
        return [piece for piece in re.split(r"\r\x1b\[K|\n", plain) if BAR.match(piece)]


def rows_of(seen: str, columns: int = 100) -> list[str]:
    """The rows that a terminal shows."""
    screen = pyte.Screen(columns, 50)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(seen)
    return [row.rstrip() for row in screen.display if row.strip()]


def test_on_a_terminal_there_is_a_bar_with_step_loss_and_tokens() -> None:
    terminal = OnTerminal()
    assert "step 30/40" in terminal.bars[-1] and "loss 2.0" in terminal.bars[-1]
    assert "tokens/s 123430" in terminal.bars[-1] and "lr 0.1" not in terminal.bars[-1]
    assert terminal.rows[-1].startswith("step 30/40")
    terminal.console.print_own_line("between [bold]")
    terminal.console.close()
    terminal.console.print_own_line("after")
    *steps, between, after = terminal.rows
    assert [step.split(" lo")[0] for step in steps] == [f"[h:0] step {n}/40" for n in (10, 20, 30)]
    assert (between, after) == ("launch: between [bold]", "launch: after"), "the bar is gone"
    plain = OnTerminal(encoding="ascii").bars[-1]
    assert plain.startswith("step 30/40 --") and plain.isascii()


def test_bar_and_time_stay_in_their_columns_and_metrics_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time left is known of a program that takes minutes for a step."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Memory(width=80)
    rich = Console(file=io.TextIOWrapper(io.BytesIO(), "utf-8"), width=80, force_terminal=True)
    console = make_on(screen, options=ViewOptions("none"), console=rich)
    rows = []
    for step in (1, 2, 199999):
        line = f"step {step}/200000 loss 5.5421 lr 3e-4 tokens/s 12345 tflops 123.45 mfu 45.1%\n"
        console.show_chunk(Chunk(0, "out", line.encode()))
        console.tick()
        rows.append(rows_of(screen.data.decode(), 80)[-1])
        now[0] += 0.12
    assert [row[:20] for row in rows] == [
        "step      1/200000  ",
        "step      2/200000  ",
        "step 199999/200000 ━",
    ]
    assert {row.index("loss") for row in rows} == {40} and {len(row) for row in rows} == {79}
    assert {row[40:-8] for row in rows} == {"loss 5.5421  tokens/s 12345    "}
    assert [row[-7:] for row in rows] == ["-:--:--", "6:40:00", "0:00:00"]


def test_with_stdout_in_a_file_the_lines_go_there_and_the_bar_to_the_terminal() -> None:
    out = Memory()
    (bar,) = OnTerminal(out).rows
    assert bar.startswith("step 30/40")
    lines = out.data.decode().splitlines()
    assert [line.split(" lo")[0] for line in lines] == [f"[h:0] step {n}/40" for n in (10, 20, 30)]


def test_the_bar_gives_way_to_what_the_program_draws() -> None:
    """Colours and DOS lines are none; while a line is unfinished there is no bar."""
    for printed in ("\r 5%\n", "\x1b[1A\n", "\x1b7\n", "\x1b[1;31mred\x1b[0m\r\n", "name? "):
        terminal = OnTerminal()
        terminal.show(printed, "err")
        terminal.show("step 35/40 loss 1\n")
        assert ("step 35/40" in terminal.bars[-1]) is ("red" in printed), printed
    assert terminal.rows[-2:] == ["[h:0] step 35/40 loss 1", "[h:0] name?"]


def test_a_dumb_terminal_and_a_pipe_are_no_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    termios.tcsetwinsize(theirs, (30, 77))
    assert Stream("stderr", theirs).is_screen and Stream("stderr", theirs).columns == 77
    monkeypatch.setenv("TERM", "dumb")
    assert not Stream("stderr", theirs).is_screen
    monkeypatch.setenv("TERM", "xterm")
    os.close(ours)
    os.close(theirs)
    reading, writing = os.pipe()
    assert not Stream("stdout", writing).is_screen and Stream("stdout", writing).columns == 0
    os.close(reading)
    os.close(writing)


A, B, ALONE, ALONE_ERR, OURS, FOOTER = "A", "B", "alone", "alone's stderr", "ours", "footer"


def put_all(width: int, *pieces: tuple[str, bytes], raw: bool = False) -> bytes:
    """What is written of two ranks' output, or of one that is alone, and of ours."""
    stream = Memory(width)
    alone = any(source in (ALONE, ALONE_ERR) for source, _ in pieces)
    options = ViewOptions("all", None if alone else lambda _: "h")
    console = make_on(stream, options=options, is_raw=lambda: raw)
    for source, data in pieces:
        if source is OURS:
            console.write_own_lines(data)
        elif source is FOOTER:
            console.show_footer(data.decode())
        else:
            console.show_chunk(Chunk(int(source is B), "err" if source is ALONE_ERR else "out", data))
    return bytes(stream.data)


@pytest.mark.parametrize(
    ("pieces", "written"),
    [
        ([(A, b"one\ntwo\n")], b"[h:0] one\n[h:0] two\n"),
        ([(A, b"in "), (A, b"pieces\n\n")], b"[h:0] in pieces\n[h:0] \n"),
        ([(A, b"a\n"), (B, b"b\n"), (A, b"a\n")], b"[h:0] a\n[h:1] b\n[h:0] a\n"),
        ([(A, b"cut "), (B, b"b\n"), (A, b"short\n")], b"[h:1] b\n[h:0] cut short\n"),
        ([(A, b"\x00\xff\r\n\r 1%\r 2%\n")], b"[h:0] \x00\xff\r\n[h:0] \r 1%\r 2%\n"),
        ([(ALONE, b"a\nb"), (ALONE_ERR, b"c\n"), (ALONE, b"\n\xff")], b"a\nbc\n\n\xff"),
        ([(ALONE, b"asks: "), (OURS, b"ours\n"), (ALONE, b"yes\n")], b"asks: \nours\nyes\n"),
        ([(A, b"asks: "), (OURS, b"ours\n"), (A, b"yes\n")], b"ours\n[h:0] asks: yes\n"),
    ],
)
def test_in_a_pipe_prefixes_alone_are_added(pieces: list[tuple[str, bytes]], written: bytes) -> None:
    assert put_all(0, *pieces) == written


@pytest.mark.parametrize(
    ("pieces", "rows"),
    [
        ([(A, b"\r 1%\r 2%")], ["[h:0]  2%"]),
        ([(A, b"10%\r"), (A, b"20%\r"), (A, b"\nnext\n")], ["[h:0] 20%", "[h:0] next"]),
        ([(A, b"100%\r5%\n"), (A, b"dos\r\n")], ["[h:0] 5%", "[h:0] dos"]),
        ([(A, b"wait"), (B, b"b\n")], ["[h:1] b", "[h:0] wait"]),
        ([(A, b"wait"), (B, b"b\n"), (A, b" done\n")], ["[h:1] b", "[h:0] wait done"]),
        ([(A, b"7%\r8%\r"), (B, b"1%\r"), (OURS, b"ours\n")], ["ours", "[h:1] 1%"]),
        ([(A, b"x" * 80), (B, b"b\n")], ["[h:1] b", "[h:0] " + "x" * 32 + "…"]),
        ([(A, "字".encode() * 40), (B, b"b\n")], ["[h:1] b", "[h:0] " + "字" * 16 + "…"]),
        ([(A, b"a\tb"), (B, b"b\n")], ["[h:1] b", "[h:0] a b"]),
        ([(FOOTER, b"bar"), (A, b"line\n"), (OURS, b"ours\n")], ["[h:0] line", "ours", "bar"]),
        ([(FOOTER, b"bar"), (A, b"name? "), (FOOTER, b"other")], ["[h:0] name?"]),
        ([(FOOTER, b"bar"), (A, b"name? "), (A, b"me\n")], ["[h:0] name? me", "bar"]),
        ([(FOOTER, b"bar"), (FOOTER, b""), (A, b"end\n")], ["[h:0] end"]),
        ([(ALONE, b"asks: "), (OURS, b"ours\n"), (ALONE, b"yes\n")], ["asks:", "ours", "yes"]),
    ],
)
def test_on_a_terminal_unfinished_lines_are_at_the_bottom(
    pieces: list[tuple[str, bytes]], rows: list[str]
) -> None:
    assert rows_of(put_all(40, *pieces).decode(), 40) == rows


def test_colours_of_an_unfinished_line_end_with_it_and_a_raw_terminal_wants_returns() -> None:
    red = put_all(40, (A, b"\x1b[31mred"), (B, b"b\n"))
    row = b"[h:0] \x1b[31mred\x1b[0m"
    assert red == row + b"\r\x1b[K[h:1] b\n" + row
    raw = put_all(40, (ALONE, b"(Pdb) "), (OURS, b"one\ntwo\n"), raw=True)
    assert raw == b"(Pdb) \r\none\r\ntwo\r\n"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.lists(st.sampled_from([b"a", b"bc", b"\n", b" 50%\r"]), min_size=1, max_size=5).map(b"".join),
        ),
        max_size=9,
    )
)
def test_a_terminal_shows_every_line_as_if_its_rank_were_alone(pieces: list[tuple[str, bytes]]) -> None:
    rows = rows_of(put_all(40, *pieces).decode(), 40)
    for source in (A, B):
        printed = [(own, data) for own, data in pieces if own is source]
        alone = rows_of(put_all(40, *printed).decode(), 40)
        shown = [row for row in rows if row.startswith(f"[h:{int(source is B)}]")]
        unfinished = bool(printed) and not printed[-1][1].endswith(b"\n")
        assert shown in (alone, alone[:-1] if unfinished else alone)


def make_viewer(folder: Path, data: bytes) -> OutputViewer:
    """A viewer of a job of one rank that has printed some data."""
    (folder / "logs/0").mkdir(parents=True)
    run = RunDir(folder)
    run.rank_log(0, 0, "out").write_bytes(data)
    shown = OutputViewer(run, Follower(), ViewOptions("rank0"))
    shown.watch_rank(0, 0)
    return shown


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The console's stdout as a pipe that nobody reads by itself; gives the end to read."""
    reading, writing = os.pipe()
    streams = {"stdout": Stream("stdout", writing), "stderr": Stream("stderr", None)}
    monkeypatch.setattr("launcher.report.console.open_stream", streams.__getitem__)
    monkeypatch.setattr("launcher.report.viewer.PATIENCE", 0.5)
    yield reading
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_a_slow_reader_is_waited_for_as_long_as_it_reads(tmp_path: Path, slow: int) -> None:
    data = os.urandom(2 << 20)
    shown = make_viewer(tmp_path, data)
    shown.start()
    waiting = threading.Thread(target=shown.finish, daemon=True)
    waiting.start()
    taken = b""
    while len(taken) < len(data) and select.select([slow], [], [], PATIENCE)[0]:
        taken += os.read(slow, 65536)
        time.sleep(0.05)  # in all, much longer than the patience for one piece
    waiting.join(30)
    assert taken == data and shown.shown.is_set()
    assert shown.close()


def test_a_reader_that_takes_no_more_is_left_with_a_word(
    tmp_path: Path, slow: int, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = make_viewer(tmp_path, b"x" * (1 << 20))
    shown.start()
    shown.finish()
    assert not shown.close()
    assert capfd.readouterr().err == f"launch: warning: not all output was taken: see {tmp_path}/logs\n"
    os.close(slow)
    shown.thread.join(30)
    assert shown.close()
