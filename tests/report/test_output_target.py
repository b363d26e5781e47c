"""Several ranks' bytes on one terminal, pipe or file: exact but for prefixes, and readable on a terminal."""

from dataclasses import dataclass, field

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.byte_stream import Stream
from launcher.report.output_target import ERASE, Sink, Source

A, B = Source(0, "out", b"[h:0] "), Source(1, "out", b"[h:1] ")
ALONE, ALONE_ERR = Source(0, "out", b""), Source(0, "err", b"")


@dataclass(slots=True)
class Memory(Stream):
    """A stream that keeps what is written; as a terminal it has a width."""

    width: int = 0
    data: bytearray = field(default_factory=bytearray)

    def write(self, data: bytes) -> None:
        self.data += data

    @property
    def columns(self) -> int:
        return self.width


def put_all(sink: Sink, *pieces: tuple[Source, bytes], width: int = 0) -> bytes:
    stream = Memory("stdout", None, width=width)
    for source, data in pieces:
        sink.write_chunk(stream, source, data)
    return bytes(stream.data)


@pytest.mark.parametrize(
    ("pieces", "written"),
    [
        ([(A, b"one\ntwo\n")], b"[h:0] one\n[h:0] two\n"),
        ([(A, b"no end")], b"[h:0] no end"),
        ([(A, b"in "), (A, b"pieces\n\n")], b"[h:0] in pieces\n[h:0] \n"),
        ([(A, b"a\n"), (B, b"b\n"), (A, b"a\n")], b"[h:0] a\n[h:1] b\n[h:0] a\n"),
        # Where another rank prints within a line, that is ended, and goes on with the prefix.
        ([(A, b"cut "), (B, b"b\n"), (A, b"short\n")], b"[h:0] cut \n[h:1] b\n[h:0] short\n"),
        # A line that only had no end yet gets no second one.
        ([(A, b"whole"), (B, b"b\n"), (A, b"\n"), (A, b"c\n")], b"[h:0] whole\n[h:1] b\n[h:0] c\n"),
        ([(A, b"whole"), (B, b"b"), (A, b"\nc\n"), (B, b"\n")], b"[h:0] whole\n[h:1] b\n[h:0] c\n"),
        ([(A, b"\x00\xff\r\n\r 1%\r 2%\n")], b"[h:0] \x00\xff\r\n[h:0] \r 1%\r 2%\n"),
        ([(ALONE, b"a\nb"), (ALONE_ERR, b"c\n"), (ALONE, b"\n\xff")], b"a\nbc\n\n\xff"),
    ],
)
def test_in_a_pipe_prefixes_alone_are_added(pieces: list[tuple[Source, bytes]], written: bytes) -> None:
    assert put_all(Sink(erases=False), *pieces) == written


@pytest.mark.parametrize(
    ("pieces", "written"),
    [
        ([(A, b"\r 1%\r 2%")], b"[h:0] \r[h:0]  1%\r[h:0]  2%"),
        ([(A, b"10%\r"), (A, b"20%\r"), (A, b"\nnext\n")], b"[h:0] 10%\r[h:0] 20%\r\n[h:0] next\n"),
        ([(A, b"dos\r\n")], b"[h:0] dos\r\n"),
        (
            [(A, b"wait"), (B, b"b\n"), (A, b" done\n")],
            b"[h:0] wait" + ERASE + b"[h:1] b\n[h:0] wait" + b" done\n",
        ),
        (
            [(A, b"7%\r8%\r"), (B, b"b\n"), (A, b"9%\r")],
            b"[h:0] 7%\r[h:0] 8%\r" + ERASE + b"[h:1] b\n[h:0] 8%\r" + b"[h:0] 9%\r",
        ),
        # What does not fit into a row, or holds more than text, cannot be erased.
        ([(A, b"x" * 80), (B, b"b\n")], b"[h:0] " + b"x" * 80 + b"\n[h:1] b\n"),
        ([(A, b"a\tb"), (B, b"b\n")], b"[h:0] a\tb\n[h:1] b\n"),
        ([(A, b"x" * 9000), (A, b"y"), (B, b"b\n")], b"[h:0] " + b"x" * 9000 + b"y\n[h:1] b\n"),
        ([(A, "字".encode() * 40), (B, b"b\n")], b"[h:0] " + "字".encode() * 40 + b"\n[h:1] b\n"),
        ([(A, b"\x1b[31mred\x1b[0m"), (B, b"b\n")], b"[h:0] \x1b[31mred\x1b[0m" + ERASE + b"[h:1] b\n"),
    ],
)
def test_on_a_terminal_unfinished_lines_are_drawn_below(
    pieces: list[tuple[Source, bytes]], written: bytes
) -> None:
    assert put_all(Sink(erases=True), *pieces, width=80).startswith(written)


@pytest.mark.parametrize(
    ("source", "erases", "written"),
    [
        (A, False, b"[h:0] asks: \nours\n[h:0] yes\n"),
        (A, True, b"[h:0] asks: " + ERASE + b"ours\n[h:0] asks: yes\n"),
        (ALONE, False, b"asks: \nours\nyes\n"),
        (ALONE, True, b"asks: \nours\nyes\n"),
    ],
)
def test_our_own_lines_begin_on_a_line_of_their_own(source: Source, erases: bool, written: bytes) -> None:
    stream, sink = Memory("stderr", None, width=80), Sink(erases)
    sink.write_chunk(stream, source, b"asks: ")
    sink.write_message(stream, b"ours\n")
    sink.write_chunk(stream, source, b"yes\n")
    assert stream.data == written


def test_on_a_raw_terminal_our_own_lines_have_carriage_returns() -> None:
    stream, sink = Memory("stdout", None, width=80), Sink(erases=True, newline=b"\r\n")
    sink.write_chunk(stream, ALONE, b"(Pdb) ")
    sink.write_message(stream, b"one\ntwo\n")
    assert stream.data == b"(Pdb) \r\none\r\ntwo\r\n"


def test_the_footer_is_below_whole_lines_and_gives_way_to_others() -> None:
    stream, sink = Memory("stdout", None, width=80), Sink(erases=True)
    sink.show_footer(stream, b"bar")
    sink.write_chunk(stream, A, b"line\n")
    sink.write_message(stream, b"ours\n")
    sink.write_chunk(stream, A, b"name? ")
    sink.show_footer(stream, b"other bar")
    sink.write_chunk(stream, A, b"me\n")
    sink.show_footer(stream, b"")
    sink.write_chunk(stream, A, b"end\n")
    bars = b"bar" + ERASE + b"[h:0] line\nbar" + ERASE + b"ours\nbar"
    assert stream.data == bars + ERASE + b"[h:0] name? me\nother bar" + ERASE + b"[h:0] end\n"


PIECES = st.lists(
    st.tuples(
        st.sampled_from([A, B, Source(0, "err", b"[h:0] ")]),
        st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n\n", b"\xff\x00", b" "]), min_size=1).map(b"".join),
    ),
    max_size=30,
)


@given(PIECES)
def test_every_byte_of_every_rank_arrives_in_its_order(pieces: list[tuple[Source, bytes]]) -> None:
    text = put_all(Sink(erases=False), *pieces)
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    for source in (A, B):
        printed = [data for own, data in pieces if own.prefix == source.prefix]
        shown = [line.removeprefix(source.prefix) for line in lines if line.startswith(source.prefix)]
        if source is B:  # of rank 0, two streams mix
            assert b"".join(shown) == b"".join(printed).replace(b"\n", b"")
        assert sum(map(len, shown)) == len(b"".join(printed).replace(b"\n", b""))
    assert all(line.startswith((A.prefix, B.prefix)) for line in lines)


def draw(data: bytes) -> list[str]:
    """The rows that a terminal shows."""
    screen = pyte.Screen(80, 50)
    screen.set_mode(pyte.modes.LNM)
    pyte.ByteStream(screen).feed(data)
    return [row.rstrip() for row in screen.display]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.lists(st.sampled_from([b"a", b"bc", b"\n", b" 50%\r"]), min_size=1, max_size=5).map(b"".join),
        ),
        max_size=9,
    )
)
def test_a_terminal_shows_every_line_as_if_its_rank_were_alone(pieces: list[tuple[Source, bytes]]) -> None:
    rows = draw(put_all(Sink(erases=True), *pieces, width=80))
    for source in (A, B):
        printed = [(own, data) for own, data in pieces if own is source]
        alone = [row for row in draw(put_all(Sink(erases=True), *printed, width=80)) if row]
        shown = [row for row in rows if row.startswith(source.prefix.decode().rstrip())]
        # An unfinished line may not be on the screen, or without what a shorter state has left of a longer.
        hidden = bool(printed) and not printed[-1][1].endswith(b"\n") and len(shown) == len(alone) - 1
        assert len(shown) == len(alone) or hidden
        assert all(row.startswith(mine) for row, mine in zip(alone, shown, strict=False)), (alone, shown)


@pytest.mark.parametrize(
    ("pieces", "waits"),
    [
        ([(0, b"begun")], True),
        ([(2, b"begun")], False),
        ([(9, b"begun"), (1.5, b"more"), (0.9, b"more")], True),
        ([(11, b"begun"), (1.5, b"more"), (0.9, b"more")], False),
        ([(3, b"begun"), (1.5, b"more")], False),
        ([(3, b"whole\nbegun"), (0.9, b"more\nbegun")], True),
        ([(3, b" 5%"), (0.5, b"\r 6%")], False),
        ([(3, b" 5%"), (0.5, b"\r 6%\nbegun")], True),
    ],
    ids=str,
)
def test_a_line_that_grows_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[float, bytes]], waits: bool
) -> None:
    """Each piece came so many seconds ago."""
    now = 100.0
    monkeypatch.setattr("launcher.report.output_target.time.monotonic", lambda: now)
    stream, sink = Memory("stdout", None, width=80), Sink(erases=False)
    for ago, data in pieces:
        now = 100.0 - ago
        sink.write_chunk(stream, A, data)
    now = 100.0
    assert sink.find_cut(stream) == A
    assert sink.awaits_rest() is waits
