"""Progress, read from lines of all sorts of training programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runs.progress import MOST_LINES, Progress, ProgressReader, describe_progress, parse_progress


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


def read(*chunks: bytes) -> list[int]:
    """The first and the last step that a reader finds in chunks of one stream."""
    reader = ProgressReader()
    for chunk in chunks:
        reader.add("out", chunk)
    return [step.step for step in reader.steps]


def make_lines(*steps: int) -> bytes:
    return b"".join(b"step %d/9999 loss 1.5\nother\n" % step for step in steps)


def test_of_many_steps_the_first_and_the_last_are_kept() -> None:
    assert read(make_lines(*range(3, 2000))) == [3, 1999]
    assert read(b"hello\n", make_lines(1), b"", b"x\n" * 9, make_lines(2, 3)) == [1, 3]
    assert read(make_lines(7)) == [7]


@pytest.mark.parametrize("at", range(1, 24))
def test_a_line_that_is_cut_in_two_counts_once_it_is_whole(at: int) -> None:
    line = b"step 12/200 Loss 1.25 x\n"
    reader = ProgressReader()
    assert not reader.add("out", line[:at])
    assert not reader.add("err", b"some step of another stream")
    assert reader.add("out", line[at:])
    assert reader.steps == [Progress(12, 200, (("loss", "1.25"),))]


def test_a_bar_that_is_drawn_anew_tells_its_states() -> None:
    assert read(b"\rstep 1/9 loss 3", b"\rstep 2/9 loss 2", b"\rstep 3/9 los") == [1, 2]


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
    assert read(noise, make_lines(5) + b"a misstep\n" * (MOST_LINES - 2), noise) == [5]
    assert read(b"step" * 300_000 + b"\n", b"x" * 5_000_000 + b" step 4 loss 2\n") == [4]


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
