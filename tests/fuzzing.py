"""Texts and values that somebody hostile would write."""

import io
import re

from hypothesis import strategies as st

from launcher.config.settings import Settings
from launcher.fields import list_settings

WORDS: dict[str, list[str]] = {
    key: [word for word in each.metadata["choices"] if word != "auto"]
    for key, _, each in list_settings(Settings())
    if "choices" in each.metadata
}
"""What each setting with a set of words takes beside `auto`."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What a terminal acts on, but newline, tab and carriage return."""
SEQUENCES = (
    *("\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x1b[31m", "\x1b[0m", "\x1bc"),
    *("\x1bP1$r\x1b\\", "\x9b2J", "\x9d0;t\x9c", "\x08", "\x7f", "\x07", "\r", "\n", "\t"),
    *("\u202e", "\u2028", "\x00", "\ud800"),
)
texts = st.lists(st.sampled_from(SEQUENCES) | st.text(max_size=8), max_size=6).map("".join)
numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 1 << 63, 10**400, 1e308])
scalars = st.none() | st.booleans() | numbers | texts


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def assert_harmless(text: str) -> None:
    """Assert that colours are all that a text would do to a terminal."""
    found = CONTROL.search(COLOUR.sub("", text))
    assert not found, repr(text[max(0, found.start() - 80) : found.end() + 20])
