"""Progress, read from lines of all sorts of training programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.runs.progress import Progress, parse_progress


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


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
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
