"""SLURM's lists of nodes, `rack[1-2]n[08-10],login`, expanded and folded without asking anybody."""

import itertools
import re
from collections.abc import Iterable, Iterator

ITEM = re.compile(r"(?:[^,\[\]]+|\[[^\]]*\])+")
"""One item of the outer list; commas within brackets belong to it."""
NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)
"""A name that ends in a number."""
PIECE = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names, in the list's order; raises ValueError for what is no list of nodes."""
    return tuple(itertools.chain.from_iterable(expand_item(found[0]) for found in ITEM.finditer(text)))


def expand_item(item: str) -> Iterator[str]:
    """Give the names of one item; several brackets are all combined, the last running fastest."""
    pieces = [tuple(expand_ranges(found[1])) if found[1] else (found[2],) for found in PIECE.finditer(item)]
    return map("".join, itertools.product(*pieces))


def expand_ranges(text: str) -> Iterator[str]:
    """Give the numbers of `08-10,12,20-30:5`, with their zeros in front; raises ValueError."""
    for part in text.split(","):
        span, _, stride = part.partition(":")
        low, _, high = span.partition("-")
        for number in range(int(low), int(high or low) + 1, int(stride or 1)):
            yield str(number).zfill(len(low))


def fold_hosts(names: Iterable[str]) -> str:
    """Return names as SLURM writes them, `login,n[0-1,12]`: folded by the number at their ends."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        found = NUMBERED.fullmatch(name)
        key, number = ((found[1], True), found[2]) if found else ((name, False), "")
        groups.setdefault(key, []).append(number)
    pieces = (name + (fold_numbers(numbers) if folds else "") for (name, folds), numbers in groups.items())
    return ",".join(pieces)


def fold_numbers(numbers: Iterable[str]) -> str:
    """Return numbers as ranges in brackets; a single one as it is."""
    spans: list[tuple[str, str]] = []
    for text in sorted(set(numbers), key=lambda text: (len(text), text)):
        low, high = spans[-1] if spans else ("", "-1")
        if low and text == str(int(high) + 1).zfill(len(low)):
            spans[-1] = (low, text)
        else:
            spans.append((text, text))
    words = [low if low == high else f"{low}-{high}" for low, high in spans]
    return words[0] if len(spans) == 1 and spans[0][0] == spans[0][1] else f"[{','.join(words)}]"
