"""What a terminal acts on, escape sequences and control characters: shown, left out, or let through."""

import re
import shlex
import sys
from collections.abc import Sequence
from typing import TextIO

SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -/]*[0-~])"
)
"""Colours, moves, titles and the like (ECMA-48; OSC as xterm has it)."""
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
"""Select Graphic Rendition, which changes how what follows looks, and nothing else."""
ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters of ISO 6429, but tab and newline, and those of Unicode that turn the direction of writing."""
RESET = "\x1b[0m"
LONGEST = 2000
"""Characters of a line of ours."""


def escape_text(text: str, most: int = LONGEST) -> str:
    """Return a text on one line: what does not print as escapes, the middle of a long one left out."""
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]
    shown = text if text.isprintable() else "".join(map(show_character, text))
    half = (most - 3) // 2
    return shown if len(shown) <= most else f"{shown[:half]} … {shown[-half:]}"


def show_character(char: str) -> str:
    """Return a character that prints as it is, and another as an escape."""
    return char if char.isprintable() else escape_character(char)


def escape_character(char: str) -> str:
    """Return a character as Python writes it in a literal."""
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def strip_sequences(text: str) -> str:
    """Return a text without colours, moves and other such sequences, for lines that are quoted."""
    return SEQUENCE.sub("", text)


def tame_text(text: str, *, colours: bool = False) -> str:
    """Return a text of several lines with what a terminal would act on shown; `colours` may stay.

    A line whose colours are not reset is.
    """
    if not ACTING.search(text):
        return text
    if not colours:
        return ACTING.sub(lambda found: escape_character(found[0]), text)
    kept = COLOUR.findall(text)
    pieces = (ACTING.sub(lambda found: escape_character(found[0]), piece) for piece in COLOUR.split(text))
    tamed = next(pieces) + "".join(colour + piece for colour, piece in zip(kept, pieces, strict=True))
    if not kept or kept[-1] in (RESET, "\x1b[m"):
        return tamed
    return tamed.removesuffix("\n") + RESET + "\n" * tamed.endswith("\n")


def print_text(text: str, stream: TextIO | None = None, *, colours: bool = False) -> None:
    """Write to stdout, or another stream: as it is to a file or a pipe, and harmless to a terminal."""
    stream = stream or sys.stdout
    stream.write(tame_text(text, colours=colours) if stream.isatty() else text)


def quote_word(word: str) -> str:
    """Quote a word for bash; what a terminal acts on is written by bash's own escapes (ANSI-C quoting)."""
    if not ACTING.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{ACTING.sub(lambda found: escape_bytes(found[0]), plain)}'"


def escape_bytes(char: str) -> str:
    """Return a character's bytes as bash reads them between `$'` and `'`."""
    return "".join(f"\\x{byte:02x}" for byte in char.encode())


def join_words(words: Sequence[str]) -> str:
    """Return words as a line for bash that is harmless on a terminal."""
    return " ".join(map(quote_word, words))
