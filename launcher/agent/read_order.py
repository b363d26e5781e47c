"""Which files a program reads at its start, in their order, as a rank has recorded it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

CHUNK = 1 << 20
"""Bytes of one read."""
MAX_ENTRIES, MAX_EXTENTS = 100_000, 200_000
"""Files and parts of files; torch has some 1,000 and 400."""
SAMPLES, PARTS = 24, 4
"""Files by which one judges whether all are cached, and parts of each."""
LARGE = 4 << 20
"""Bytes of a library of which several parts are looked at in any case."""
LARGEST = 1 << 40
"""Bytes of a file at most."""


ANY_SIZE = -1
"""Of a file that no record knows."""
BYTECODE = "/__pycache__/"
"""Between a package's folder and the files of its bytecode."""


@dataclass(frozen=True, slots=True)
class OrderEntry:
    """A file, and what is read of it."""

    path: str
    size: int
    """In bytes, when it was recorded: a file that has another size is another file."""
    extents: tuple[tuple[int, int], ...] | None
    """Offsets and lengths in bytes; None is the whole file."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the reader's."""

    path: str
    size: int
    offset: int
    length: int


def parse_order(value: object) -> tuple[OrderEntry, ...]:
    """Return the entries of a record, `{"schema": 1, "reads": [[PATH, SIZE, [[OFFSET, LENGTH], …]], …]}`.

    null in place of the parts is the whole file. Raises ValueError for anything else.
    """
    entries = tuple(map(parse_entry, take_reads(value)))
    if sum(len(entry.extents or ()) for entry in entries) > MAX_EXTENTS:
        raise ValueError("a record of too many parts")
    return entries


def take_reads(value: object) -> list[object]:
    """Return the entries of a record as JSON has them; raises ValueError."""
    reads = value.get("reads") if isinstance(value, dict) and value.get("schema") == 1 else None
    if not isinstance(reads, list) or len(reads) > MAX_ENTRIES:
        raise ValueError("no record of what is read")
    return reads


def pick_samples(value: object) -> list[Read]:
    """Return some of the reads of a record, without a look at the others; raises ValueError.

    These are the first parts of every large library, its last, and those between, and SAMPLES other files.
    """
    reads = take_reads(value)
    large = [entry for entry in reads if isinstance(entry, list) and len(entry) == 3 and is_large(entry[1])]
    entries = [parse_entry(entry) for entry in (*large[:SAMPLES], *reads[:: max(1, len(reads) // SAMPLES)])]
    return sample_entries(entries)


def sample_entries(entries: Iterable[OrderEntry]) -> list[Read]:
    """Return at most PARTS reads of each entry, of one page each."""
    found = []
    for entry in entries:
        parts = entry.extents or ((0, entry.size),)
        found += [Read(entry.path, entry.size, at, 1) for at, _ in parts[:: max(1, len(parts) // PARTS)]]
    return found


def is_large(size: object) -> bool:
    """Tell whether a file's size is that of a large library."""
    return is_size(size) and isinstance(size, int) and size > LARGE


def parse_entry(value: object) -> OrderEntry:
    """Return one entry; raises ValueError."""
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("an entry is [PATH, SIZE, PARTS]")
    path, size, parts = value
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path or not is_size(size):
        raise ValueError("an entry begins with an absolute path and a size")
    if parts is None:
        return OrderEntry(path, size, None)
    if not isinstance(parts, list) or not all(map(is_extent, parts)):
        raise ValueError("parts are pairs of offset and length")
    return OrderEntry(path, size, tuple((offset, length) for offset, length in parts))


def is_extent(value: object) -> bool:
    """Tell whether a value is `[OFFSET, LENGTH]` in bytes."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_size, value))


def is_size(value: object) -> bool:
    """Tell whether a value is a number of bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def list_reads(entries: tuple[OrderEntry, ...]) -> list[Read]:
    """Return the reads of a record in its order, none of more than CHUNK bytes."""
    return [
        Read(entry.path, entry.size, at, min(CHUNK, begin + length - at))
        for entry in entries
        for begin, length in ([(0, entry.size)] if entry.extents is None else entry.extents)
        for at in range(begin, begin + length, CHUNK)
    ]


def list_looks(path: str, suffixes: Iterable[str]) -> list[str]:
    """Return the names that an import asks the filesystem for before it opens a module's bytecode.

    Of a package, Python looks for an extension module by each of the suffixes, then for the source
    (`FileFinder.find_spec` of importlib), whose time and size the bytecode has to fit.
    """
    folder, between, name = path.partition(BYTECODE)
    module = f"{folder}/{name.partition('.')[0]}"
    if not between:
        return []
    extensions = [module + suffix for suffix in suffixes] if module.endswith("/__init__") else []
    return [*extensions, f"{module}.py"]


def find_torch_folder(entries: Iterable[OrderEntry]) -> str:
    """Return the folder that has the package torch, by the bytecode that a record names; empty without."""
    beginning = f"/torch{BYTECODE}__init__."
    return next((entry.path.partition(beginning)[0] for entry in entries if beginning in entry.path), "")


def limit_reads(reads: list[Read], budget: int) -> list[Read]:
    """Return the first reads that together have no more bytes than the budget."""
    kept, left = [], budget
    for read in reads:
        left -= read.length
        if left < 0:
            break
        kept.append(read)
    return kept


def name_record(python: str, environment: str, argv: tuple[str, ...], directory: str) -> tuple[str, str]:
    """Return the name of a program's record, and how the names of all that share its interpreter begin.

    `environment` is what else decides which files are read: PYTHONPATH. Of the program's argv what comes
    before its own arguments counts, and for a relative path the working directory.
    """
    words = cut_arguments(argv)
    interpreter = sha256("\0".join((python, environment)).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    program = sha256("\0".join((directory, *words)).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return f"{interpreter}-{program}.json", f"{interpreter}-"


def cut_arguments(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return a program's argv without what comes after the script or the module."""
    for number, word in enumerate(argv):
        if word == "-m":
            return argv[: number + 2]
        if word.endswith(".py"):
            return argv[: number + 1]
    return argv[:1]
