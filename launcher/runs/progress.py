"""A training program's progress, read from what it prints."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

STEP = re.compile(r"\bstep[ :=]+(\d{1,15})\b(?:\s*/\s*(\d{1,15})\b)?", re.IGNORECASE)
METRIC = re.compile(
    r"\b(loss|lr|tokens/s|tflops|mfu)[ :=]+(-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+-]?\d+)?%?|nan\b|-?inf\b)",
    re.IGNORECASE,
)
WORD = b"step"
MOST_LINES, MOST_STEPS = 64, 16
"""Lines with the word that are read of a chunk from either end, and steps that are taken of it."""
MOST_BYTES = 4096
"""Bytes of a line before and after the word that are read."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One logging step."""

    step: int
    total: int | None
    """Steps of the whole run, if the program prints them."""
    metrics: tuple[tuple[str, str], ...]
    """Name and value as printed: loss, lr, tokens/s, tflops, mfu."""


def parse_progress(text: str) -> Progress | None:
    """Read a line such as `step 10/200 loss 5.54 tokens/s 12345 tflops 0.01`; None for any other line."""
    step = STEP.search(text)
    if not step:
        return None
    metrics = tuple((name.lower(), value) for name, value in METRIC.findall(text))
    return Progress(int(step[1]), int(step[2]) if step[2] else None, metrics) if metrics else None


def merge_steps(earlier: Progress, step: Progress) -> Progress:
    """Return a step that keeps the metrics of an earlier one which it does not tell itself."""
    return replace(step, metrics=tuple({**dict(earlier.metrics), **dict(step.metrics)}.items()))


@dataclass(slots=True)
class ProgressReader:
    """Reads a program's progress from chunks of its output: the first step ever and the newest, not all."""

    steps: list[Progress] = field(default_factory=list)
    """The first logging step and the last, with the newest value of each metric."""
    partial: dict[str, bytes] = field(default_factory=dict)
    """By stream, the end of a line that is not finished yet."""

    def add(self, stream: str, data: bytes) -> bool:
        """Take a chunk of a stream, and tell whether there was a step in it."""
        data = self.partial.pop(stream, b"") + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self.partial[stream] = data[max(end, len(data) - MOST_BYTES) :]
        found = list(itertools.islice(find_last_steps(data[:end]), MOST_STEPS))[::-1]
        first = None if self.steps else find_first_step(data[:end])
        if first and first not in found:
            found.insert(0, first)
        for step in found:
            self.steps[1:] = [merge_steps(self.steps[-1], step) if self.steps else step]
        return bool(found)

    def finish(self) -> bool:
        """Take the lines that have no end, and tell whether there was a step in them."""
        found = [self.add(stream, b"\n") for stream in tuple(self.partial)]
        return any(found)


def find_first_step(data: bytes) -> Progress | None:
    """Return the first step of whole lines; of many lines with the word, some are read."""
    lower, end = data.lower(), 0
    for _ in range(MOST_LINES):
        at = lower.find(WORD, end)
        if at < 0:
            break
        begin, end = find_line(data, at)
        if step := parse_progress(data[begin:end].decode(errors="replace")):
            return step
    return None


def find_last_steps(data: bytes) -> Iterator[Progress]:
    """Give the steps of whole lines, from the last on; of many lines with the word, some are read."""
    lower, begin = data.lower(), len(data)
    for _ in range(MOST_LINES):
        at = lower.rfind(WORD, 0, begin)
        if at < 0:
            return
        begin, end = find_line(data, at)
        if step := parse_progress(data[begin:end].decode(errors="replace")):
            yield step


def find_line(data: bytes, at: int) -> tuple[int, int]:
    """Return where the line around a place begins and ends, within a limited distance."""
    low, high = max(0, at - MOST_BYTES), min(len(data), at + MOST_BYTES)
    begin = max(data.rfind(b"\n", low, at), data.rfind(b"\r", low, at), low - 1) + 1
    ends = (found for mark in (b"\n", b"\r") if (found := data.find(mark, at, high)) >= 0)
    return begin, min(ends, default=high)


def describe_progress(steps: Sequence[Progress]) -> str:
    """Return what rank 0 reported, first to last: `loss 5.55 to 2.41 over 200 steps, 12345 tokens/s …`."""
    if not steps:
        return ""
    first, last = dict(steps[0].metrics), dict(steps[-1].metrics)
    parts = []
    if "loss" in first and "loss" in last:
        begin, end = steps[0].step, steps[-1].step
        count = end if begin else end + 1  # a program may count from 0
        parts.append(
            f"loss {last['loss']} at step {end}"
            if begin == end
            else f"loss {first['loss']} to {last['loss']} over {count} steps"
        )
    best = {name: value for step in steps for name, value in step.metrics}
    parts += [
        f"{best[name]} {unit}"
        for name, unit in (("tokens/s", "tokens/s"), ("tflops", "TFLOPS"))
        if name in best
    ]
    parts += [f"MFU {best['mfu']}"] if "mfu" in best else []
    return ", ".join(parts)
