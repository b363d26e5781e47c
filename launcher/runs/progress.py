"""A training program's progress, read from what it prints."""

import re
from dataclasses import dataclass

STEP = re.compile(r"\bstep[ :=]+(\d{1,15})\b(?:\s*/\s*(\d{1,15})\b)?", re.IGNORECASE)
METRIC = re.compile(
    r"\b(loss|lr|tokens/s|tflops|mfu)[ :=]+(-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+-]?\d+)?%?|nan\b|-?inf\b)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """One logging step."""

    step: int
    total: int | None
    """Steps of the whole run, where the program says."""
    metrics: tuple[tuple[str, str], ...]
    """Name and value as printed: loss, lr, tokens/s, tflops, mfu."""


def parse_progress(text: str) -> Progress | None:
    """Read a line such as `step 10/200 loss 5.54 tokens/s 12345 tflops 0.01`; None for any other line."""
    step = STEP.search(text)
    if not step:
        return None
    metrics = tuple((name.lower(), value) for name, value in METRIC.findall(text))
    return Progress(int(step[1]), int(step[2]) if step[2] else None, metrics) if metrics else None
