"""SLURM's notations of signals and of node lists (`rack[1-2]n[08-10],login`)."""

import itertools
import re
import signal
from collections.abc import Iterable, Iterator

from launcher.errors import UsageError

SIGNAL = re.compile(r"(?:B:)?(?:SIG)?(?P<signal>USR[12])(?:@(?P<seconds>\d+))?", re.IGNORECASE)
"""Signals that can mean `write a checkpoint`; the others stop a job, or mean another thing."""
GRACE = 60
"""Seconds before the limit if `--signal` names none (sbatch(1))."""
MOST_GRACE = 65535
"""The largest that `--signal` takes (sbatch(1))."""
ITEM = re.compile(r"(?:[^,\[\]]+|\[[^\]]*\])+")
"""One item of the outer list; commas within brackets belong to it."""
NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)
"""A name that ends in a number."""
PIECE = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def parse_signal(text: str) -> tuple[signal.Signals, int]:
    """Read `cluster.signal`: the signal, and the seconds before the limit; raises UsageError."""
    match = SIGNAL.fullmatch(text)
    seconds = int(match["seconds"] or GRACE) if match else 0
    if not match or not 0 < seconds <= MOST_GRACE:
        raise UsageError(
            f"cluster.signal={text}: give USR1 or USR2 and the seconds before the time limit, at most"
            f" {MOST_GRACE}, as in cluster.signal=USR2@120"
        )
    return signal.Signals[f"SIG{match['signal'].upper()}"], seconds


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
    """Return names as SLURM writes them, `login,n[0-1,12]`: in the order of the numbers at their ends."""
    pairs = dict.fromkeys(map(split_number, names))
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in pairs))}
    return fold_pairs(sorted(pairs, key=lambda pair: (places[pair[0]], len(pair[1]), pair[1])))


def fold_in_order(names: Iterable[str]) -> str:
    """Return names in SLURM's form and in their order: `n[0,2-5],m1`; `expand_hosts` gives them back."""
    return fold_pairs(map(split_number, names))


def split_number(name: str) -> tuple[str, str]:
    """Return a name without the number at its end, and that number; empty if there is none."""
    found = NUMBERED.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def fold_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Fold what `split_number` gives: numbers that follow each other are ranges in brackets."""
    pieces: list[str] = []
    for (name, is_numbered), group in itertools.groupby(pairs, key=lambda pair: (pair[0], bool(pair[1]))):
        spans: list[tuple[str, str]] = []
        for _, number in group:
            low, high = spans[-1] if spans else ("", "-1")
            if low and number == str(int(high) + 1).zfill(len(low)):
                spans[-1] = (low, number)
            else:
                spans.append((number, number))
        words = [low if low == high else f"{low}-{high}" for low, high in spans]
        if not is_numbered:
            pieces += [name] * len(words)
        elif len(spans) == 1 and spans[0][0] == spans[0][1]:
            pieces.append(name + words[0])
        else:
            pieces.append(f"{name}[{','.join(words)}]")
    return ",".join(pieces)
