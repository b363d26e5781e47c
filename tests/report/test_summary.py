"""The account of a run, as people read it."""

import pytest

from launcher.runs.progress import Progress, describe_progress
from launcher.text import describe_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (41.25, "41.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60, "1 min 0 s"),
        (725, "12 min 5 s"),
        (3599.6, "1 h 0 min"),
        (12000, "3 h 20 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert describe_time(seconds) == text


def step(number: int, **metrics: str) -> Progress:
    return Progress(number, 200, tuple((name.replace("_", "/"), value) for name, value in metrics.items()))


def test_the_summary_goes_from_first_to_last() -> None:
    steps = [
        step(1, loss="5.55", tokens_s="9"),
        step(100, loss="3.0", tokens_s="12345", tflops="0.5", mfu="3%"),
        step(200, loss="2.41"),
    ]
    assert describe_progress(steps) == "loss 5.55 to 2.41 over 200 steps, 12345 tokens/s, 0.5 TFLOPS, MFU 3%"
    assert describe_progress([]) == ""
    assert describe_progress([step(1, lr="3")]) == ""
