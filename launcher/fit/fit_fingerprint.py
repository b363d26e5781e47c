"""Which runs are of one program with the same memory: its words without the numbers that do not matter."""

import hashlib
import re
from collections.abc import Iterable, Sequence

IGNORED = re.compile(
    r"-{1,2}(epochs?|num[-_]epochs|num[-_]train[-_]epochs|(max[-_]|train[-_])?steps|max[-_]iters|iters|"
    r"total[-_]steps|seed|lr|learning[-_]rate|min[-_]lr([-_]ratio)?|warmup([-_](steps|ratio))?|"
    r"weight[-_]decay|log[-_](every|interval)|logging[-_]steps|save[-_](every|steps|interval)|"
    r"eval[-_](every|steps|interval)|output[-_]dir|out[-_]dir|run[-_]name|name|resume([-_]from)?|"
    r"num[-_]workers|checkpoint[-_](dir|every))"
)
"""Options whose values change nothing of the memory of a step."""


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
        if not IGNORED.fullmatch(name):
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept
