"""Text for people: sizes, counts and CPU lists, control characters made harmless, and our own lines."""

import contextlib
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NoReturn, TextIO

from launcher.cpulist import format_cpulist

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
LONGEST_ERROR = 800
"""Characters of an error."""


def escape_text(text: str, most: int = LONGEST) -> str:
    """Return a text on one line: what does not print as escapes, the middle of a long one left out."""
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]
    shown = "".join(char if char.isprintable() else escape_character(char) for char in text)
    half = (most - 3) // 2
    return shown if len(shown) <= most else f"{shown[:half]} … {shown[-half:]}"


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
    quoted = ACTING.sub(lambda found: "".join(f"\\x{byte:02x}" for byte in found[0].encode()), plain)
    return f"$'{quoted}'"


def join_words(words: Sequence[str]) -> str:
    """Return words as a line for bash that is harmless on a terminal."""
    return " ".join(map(quote_word, words))


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


def name_some(names: Sequence[str], most: int) -> str:
    """Return names in a line, of many the first: `n0, n1 and 6 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def suggest(word: str, known: Iterable[str], *, prefix: str = "", most: int = 0) -> str:
    """Return `: did you mean …?` for a name that there is not, from those there are, after a prefix.

    Without a similar one the names themselves, if they are `most` at most; empty if there are more.
    """
    from difflib import get_close_matches

    names = sorted(set(known))
    near = get_close_matches(word, names, n=2, cutoff=0.5) or [
        name for name in names if name.startswith(word)
    ]
    if near and word:
        return f": did you mean {' or '.join(prefix + name for name in near[:2])}?"
    return f": choose from {', '.join(prefix + name for name in names)}" if 0 < len(names) <= most else ""


def describe_time(seconds: float) -> str:
    """Return a duration for people: `41.3 s`, `12 min 5 s`, `3 h 20 min`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def shorten_cpulist(numbers: Collection[int]) -> str:
    """A cpulist; if strides make it long, in the kernel's form `low-high:1/stride`, each as long as it goes.

    Nodes that hold every second CPU have lists of hundreds of characters else.
    """
    text, left, pieces = format_cpulist(frozenset(numbers)), sorted(numbers), []
    while left and len(text) > LONG_LIST:
        step = left[1] - left[0] if len(left) > 1 else 1
        end = 1
        while end < len(left) and left[end] - left[end - 1] == step:
            end += 1
        if end < 3 and step > 1:
            end = 1
        low, high = left[0], left[end - 1]
        pieces.append(f"{low}-{high}" + f":1/{step}" * (step > 1) if low < high else f"{low}")
        left = left[end:]
    return ",".join(pieces) or text


def clean_text(text: str, most: int = 80) -> str:
    """A name from firmware on one line and without control characters, cut off if it is long."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def describe_first_failed_rank(
    where: str, how: str, source: str, lines: Sequence[str], what: str = "failed first"
) -> list[str]:
    """Say which rank failed first, and show the end of its log; `how` continues `it …`."""
    shown = [f"  | {strip_sequences(line)}" for line in lines]
    said = [f"the end of {source}:", *shown] if lines else ["it printed nothing"]
    return [f"{where} {what}: it {how}", *said]


def leave(status: int) -> NoReturn:
    """Exit with a code, which Python would replace by 120 if the disk behind stdout or stderr is full."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def break_line() -> None:
    """Begin a new line on stderr, since a full disk may have cut the last one off."""
    with contextlib.suppress(OSError):
        sys.stderr.write("\n")


class StderrHandler(logging.Handler):
    """Writes a record as one line of ours on stderr: `launch: warning: …`.

    What others have put into a message, such as the names of files, is harmless on a terminal. A line that
    cannot be written, as on a full disk, is left out.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to the stderr of this moment."""
        with contextlib.suppress(OSError):
            sys.stderr.write(f"launch: {escape_text(format_record(record))}\n")
            sys.stderr.flush()


def format_record(record: logging.LogRecord) -> str:
    """Return a record's text: `warning: …`."""
    level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
    return level + record.getMessage()


def redirect_log(show: Callable[[logging.LogRecord], None]) -> Callable[[], None]:
    """Have records given to a function in place of stderr; returns what undoes that."""
    logger, handler = logging.getLogger("launcher"), logging.Handler()
    before = logger.handlers
    handler.emit = show  # type: ignore[method-assign, assignment]
    logger.handlers = [handler]
    return lambda: setattr(logger, "handlers", before)


def set_up_logging() -> None:
    """Have what the modules of `launcher` log written to stderr; a program of ours calls this first."""
    logger = logging.getLogger("launcher")
    if not logger.handlers:
        logger.addHandler(StderrHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_error(text: str) -> None:
    """Log an error as one line, the middle of a very long one left out."""
    logging.getLogger(__name__).error(escape_text(" ".join(text.split()), LONGEST_ERROR))


def log_defect(error: Exception, text: str) -> None:
    """Log an error that was not foreseen, with its traceback if HYDRA_FULL_ERROR=1 asks for that."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    log_error(text)
