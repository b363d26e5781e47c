"""SLURM's lists of nodes: `rack[1-2]n[08-10],login`, expanded without asking anybody."""

import itertools
import re
from collections.abc import Iterator

ITEM = re.compile(r"(?:[^,\[\]]+|\[[^\]]*\])+")
"""One item of the outer list; commas within brackets belong to it."""
PIECE = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names, in the list's order; raises ValueError for what is no list of nodes."""
    return tuple(itertools.chain.from_iterable(expand_item(found[0]) for found in ITEM.finditer(text)))


def expand_item(item: str) -> Iterator[str]:
    """Give the names of one item; several brackets are all combined, the last running fastest."""
    pieces = [tuple(expand_ranges(found[1])) if found[1] else (found[2],) for found in PIECE.finditer(item)]
    return map("".join, itertools.product(*pieces))


def expand_ranges(text: str) -> Iterator[str]:
    """Give the numbers of `08-10,12`, with their zeros in front; raises ValueError."""
    for part in text.split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            yield str(number).zfill(len(low))
