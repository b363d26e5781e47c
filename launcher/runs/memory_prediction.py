"""Which runs are of one program with the same memory: its words without the numbers that do not matter.

Every run's start loads this, so it is little.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterable, Sequence

from launcher.runs.run_directory import RunDir, write_json

PREDICTION = "prediction.json"
SCHEMA = 1
IGNORED = (
    r"-{1,2}(epochs?|num[-_]epochs|num[-_]train[-_]epochs|(max[-_]|train[-_])?steps|max[-_]iters|iters|"
    r"total[-_]steps|seed|lr|learning[-_]rate|min[-_]lr([-_]ratio)?|warmup([-_](steps|ratio))?|"
    r"weight[-_]decay|log[-_](every|interval)|logging[-_]steps|save[-_](every|steps|interval)|"
    r"eval[-_](every|steps|interval)|output[-_]dir|out[-_]dir|run[-_]name|name|resume([-_]from)?|"
    r"num[-_]workers|checkpoint[-_](dir|every))"
)
"""Options whose values change nothing of the memory of a step."""


def keep_prediction(run: RunDir, argv: Sequence[str], device: str, ranks: int, expected: int = 0) -> None:
    """Keep in a run directory which program it is, and the bytes that it was expected to take, if known.

    `device` is `gpu` or `cpu`. A file that cannot be written is left out.
    """
    fingerprint = fingerprint_ranks(argv, device, ranks)
    value = {"schema": SCHEMA, "fingerprint": fingerprint, "expected": expected, "device": device}
    with contextlib.suppress(OSError):
        write_json(run.path / PREDICTION, value)


def fingerprint_ranks(argv: Sequence[str], device: str, ranks: int) -> str:
    """Return what stands for a program on a number of ranks.

    The GPU's type is left out: the tensors are the same on another.
    """
    return fingerprint_program(argv, [device, f"ranks={ranks}"])


def fingerprint_program(argv: Sequence[str], settings: Iterable[str]) -> str:
    """Return what stands for a program, its arguments, and what else matters: 16 hexadecimal digits."""
    text = "\0".join([*strip_numbers(argv), "", *sorted(settings)])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def strip_numbers(argv: Sequence[str]) -> list[str]:
    """Return a program's words without the options that do not matter and their values."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if not (name.startswith("-") and re.fullmatch(IGNORED, name)):
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept
