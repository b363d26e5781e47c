"""SLURM's notations: times, sizes, GPUs, signals, dependencies, node lists (`rack[1-2]n[08-10],login`)."""

import itertools
import math
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from launcher.errors import UsageError

TIME = re.compile(r"(?:(?P<days>\d+)-(?P<dated>\d+(?::\d+){0,2})|(?P<plain>\d+(?::\d+){0,2}))", re.ASCII)
UNLIMITED = ("unlimited", "infinite")
SIZE = re.compile(r"[0-9]+[KMGT]?", re.IGNORECASE)
GPUS = re.compile(r"(?:(?P<type>[A-Za-z][\w.+-]*):)?(?P<count>[0-9]+)")
SIGNAL = re.compile(r"(?:B:)?(?P<signal>\w+)(?:@(?P<seconds>\d+))?")
CHECKPOINT = ("USR1", "USR2")
"""Signals that can mean `write a checkpoint`; the others stop a job, or mean another thing."""
GRACE = 60
"""Seconds before the limit if `--signal` names none (sbatch(1))."""
MOST_GRACE = 65535
"""The largest that `--signal` takes (sbatch(1))."""
DEPENDENCY = re.compile(
    r"(?:after(?:any|burstbuffer|corr|notok|ok)?(?::\d+(?:_(?:\d+|\*))?(?:\+\d+)?)+|singleton)"
)
ITEM = re.compile(r"(?:[^,\[\]]+|\[[^\]]*\])+")
"""One item of the outer list; commas within brackets belong to it."""
NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)
"""A name that ends in a number."""
PIECE = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of each node, as `--gpus-per-node` has them."""

    kind: str | None
    """SLURM's type, if one is asked for."""
    count: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}" if self.kind else str(self.count)


def parse_time_limit(key: str, text: str) -> float:
    """Return a time limit in minutes, infinity for none; raises UsageError.

    SLURM's: minutes, MM:SS, HH:MM:SS, DD-HH, DD-HH:MM, DD-HH:MM:SS; 0 is no limit.
    """
    if text.lower() in UNLIMITED:
        return math.inf
    match = TIME.fullmatch(text)
    numbers = [int(piece) for piece in (match["dated"] or match["plain"]).split(":")] if match else []
    if match and match["days"]:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        total, odd = int(match["days"]) * 1440 + hours * 60 + minutes + seconds / 60, hours > 23
    else:
        seconds = numbers[-1] if len(numbers) > 1 else 0
        hours, minutes = (numbers[0], numbers[1]) if len(numbers) > 2 else (0, (*numbers, 0)[0])
        total, odd = hours * 60 + minutes + seconds / 60, False
    if not match or odd or any(number > 59 for number in numbers[1:]):
        raise UsageError(
            f"{key}={text}: give a time as SLURM writes it: minutes, MM:SS, HH:MM:SS, DD-HH, DD-HH:MM,"
            " DD-HH:MM:SS or UNLIMITED"
        )
    return total or math.inf


def check_size(key: str, value: object) -> str:
    """Return a size of memory as sbatch takes it, `200G`; raises UsageError."""
    text = str(value)
    if isinstance(value, bool) or not SIZE.fullmatch(text):
        raise UsageError(
            f"{key}={text}: give whole MiB, or a number with K, M, G or T as in {key}=200G; 0 is all that a"
            " node has, auto the GPUs' share"
        )
    return text


def check_count(key: str, value: object) -> str:
    """Return a number of at least 1; raises UsageError."""
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{key}={text}: give a number of at least 1, auto, or null to leave it to SLURM")
    return str(int(text))


def parse_gpus(key: str, value: object) -> Gpus:
    """Read a number of GPUs, or `TYPE:NUMBER`; raises UsageError."""
    match = None if isinstance(value, bool) else GPUS.fullmatch(str(value))
    if not match or match["type"] == "gpu":
        raise UsageError(f"{key}={value}: give a number, TYPE:NUMBER as in {key}=a100:4, or auto")
    return Gpus(match["type"], int(match["count"]))


def parse_signal(text: str) -> tuple[signal.Signals, int]:
    """Read `cluster.signal`: the signal, by name or number, and the seconds before the limit.

    Raises UsageError for a signal that SLURM does not send, and for one that means something else.
    """
    match = SIGNAL.fullmatch(text)
    name = match["signal"].upper().removeprefix("SIG") if match else ""
    if name.isdecimal() and int(name) in {int(number) for number in signal.Signals}:
        name = signal.Signals(int(name)).name.removeprefix("SIG")
    seconds = int(match["seconds"] or GRACE) if match else 0
    if name not in CHECKPOINT or not 0 < seconds <= MOST_GRACE:
        raise UsageError(
            f"cluster.signal={text}: give {' or '.join(CHECKPOINT)} and the seconds before the time"
            f" limit, at most {MOST_GRACE}, as in cluster.signal=USR2@120"
        )
    return signal.Signals[f"SIG{name}"], seconds


def check_dependency(key: str, text: str) -> str:
    """Return what `--dependency` takes; raises UsageError."""
    pieces = re.split(r"[,?]", text)
    if not all(DEPENDENCY.fullmatch(piece) for piece in pieces) or ("," in text and "?" in text):
        raise UsageError(
            f"{key}={text}: give TYPE:JOB[:JOB] as in {key}=afterok:123, or singleton; several joined by"
            " commas (all of them) or by ? (any)"
        )
    return text


def check_text(key: str, value: object) -> str:
    """Return a value that fits into a line of a script; raises UsageError."""
    text = str(value)
    if not text.strip() or not text.isprintable():
        raise UsageError(f"{key}={text!r}: give a text of one line, or null to leave it to SLURM")
    return text


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
