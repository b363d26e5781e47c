"""Sizes, counts, CPU lists and names in the form that people read, and our own lines."""

import contextlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from launcher.cpulist import format_cpulist
from launcher.terminal import escape_text, strip_sequences

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
LONG_LIST = 40
"""Characters from which a cpulist is written with strides."""


def format_size(kib: float) -> str:
    """A size in its largest unit, with three digits: `32 MiB`, `1.5 TiB`, `377 GiB`."""
    value, unit = float(kib), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {UNITS[unit]}"


def count_things(number: int, noun: str) -> str:
    """A number of things: `1 core`, `16 cores`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shorten_cpulist(numbers: Collection[int]) -> str:
    """A cpulist; where it is long for its strides, in the kernel's form `low-high:1/stride`.

    Nodes that hold every second CPU have lists of hundreds of characters else.
    """
    text = format_cpulist(frozenset(numbers))
    return ",".join(gather_strides(sorted(numbers))) if len(text) > LONG_LIST else text


def gather_strides(numbers: list[int]) -> list[str]:
    """Write ascending numbers as ranges with strides, each as long as it goes."""
    pieces, at = [], 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] - numbers[end] == step:
            end += 1
        if end - at < 2 and step > 1:
            end = at
        low, high = numbers[at], numbers[end]
        pieces.append(f"{low}-{high}" if low < high else f"{low}")
        pieces[-1] += f":1/{step}" if low < high and step > 1 else ""
        at = end + 1
    return pieces


def clean_text(text: str, most: int = 80) -> str:
    """A name from firmware on one line and without control characters, its end left out where it is long."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def tell_first(
    where: str, how: str, source: str, lines: Sequence[str], what: str = "failed first"
) -> list[str]:
    """Say which rank failed first, and show the end of its log; `how` continues `it …`."""
    shown = [f"  | {strip_sequences(line)}" for line in lines]
    said = [f"the end of {source}:", *shown] if lines else ["it printed nothing"]
    return [f"{where} {what}: it {how}", *said]


def leave(status: int) -> NoReturn:
    """Exit with a code, which Python would replace by 120 where the disk behind stdout or stderr is full."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def break_line() -> None:
    """Begin a new line on stderr, where a full disk may have cut the last one off."""
    with contextlib.suppress(OSError):
        sys.stderr.write("\n")


def say(text: str) -> None:
    """Print one of our own lines on stderr; one that cannot be written, as on a full disk, is left out.

    What others have put into it, such as the names of files, is harmless on a terminal.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(f"launch: {escape_text(text)}\n")
        sys.stderr.flush()
