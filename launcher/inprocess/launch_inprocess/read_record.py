"""What a rank has read to start, recorded at its end for the next start's read-ahead.

`LAUNCH_READ_ORDER` is the file. It gets the bytecode of the modules in the order of their imports and, of the
shared libraries, the pages that the process has touched. Only rank 0 writes one.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableMapping
    from types import ModuleType

    Entry = tuple[str, int, list[tuple[int, int]] | None]
    Touched = dict[str, set[int]]

PAGE = 4096
GAP = 32
"""Pages between two parts that are read with them: a request costs more than 128 KiB."""
TORCH = "torch"
"""The module that loads the libraries, before most of the others."""


def start_read_record(environ: MutableMapping[str, str]) -> None:
    """Have the record written at this process's end if it uses torch; what it starts is not the rank."""
    from .import_hook import when_framework_is_used

    path, process = environ.pop("LAUNCH_READ_ORDER", ""), os.getpid()
    if environ.get("RANK") != "0":
        return
    # A rank that was forked has only the pages that it touches itself; the process before it has the others.
    inherited = read_touched(find_origin()) if TORCH in sys.modules else {}

    def register(_module: ModuleType) -> None:
        import atexit

        atexit.register(write_reads_at_end, path, process, inherited)

    when_framework_is_used(register)


def find_origin() -> int:
    """Return the process that this one was forked from with torch: the first of the launcher's children.

    The fork's own parent has ended, and the launcher has adopted this process. It is this one if there is no
    other.
    """
    parent = os.getppid()
    with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as file:
        children = sorted(map(int, file.read().split()))
    own = read_libraries("self")
    return next((pid for pid in children if own and own == read_libraries(pid)), os.getpid())


def read_libraries(process: int | str) -> list[str]:
    """Return the lines of /proc/PID/maps with torch's main library; none for a process that is not ours."""
    try:
        with open(f"/proc/{process}/maps", encoding="utf-8", errors="surrogateescape") as maps:
            return [line for line in maps if "/libtorch_cpu." in line]
    except OSError:
        return []


def write_reads_at_end(path: str, process: int, inherited: Touched) -> None:
    """Write the record; whatever fails here, the program ends as it would have."""
    if os.getpid() != process:
        return
    try:
        write_reads(path, inherited)
    except Exception:
        return


def write_reads(path: str, inherited: Touched) -> None:
    """Write the record, whole or not at all, for this user alone."""
    import json

    draft = f"{path}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"schema": 1, "reads": list_own_reads(inherited)}, file)
        os.replace(draft, path)
    except (OSError, ValueError):  # no room, or a name that is no text
        os.unlink(draft)


def list_own_reads(inherited: Touched) -> list[Entry]:
    """Return files in the order in which they were needed, with size and parts; None is the whole file."""
    libraries = list_libraries(inherited)
    modules = list(list_modules())
    at = next((place for place, (name, _) in enumerate(modules, 1) if name == TORCH), len(modules))
    before, after = ([path for _, path in part] for part in (modules[:at], modules[at:]))
    return [*measure_files(before), *libraries, *measure_files(after)]


def measure_files(paths: Iterable[str]) -> list[Entry]:
    """Return the entries of whole files; those that are gone are left out."""
    return [(path, os.path.getsize(path), None) for path in paths if os.path.isfile(path)]


def list_modules() -> Iterator[tuple[str, str]]:
    """Give the names of the modules and the files of their bytecode, in the order of their imports.

    sys.modules has them in the order in which they were complete (`_load_unlocked` of importlib): a package
    comes after the modules that it imports, though its own bytecode is read first.
    """
    modules, order = dict(sys.modules), dict[str, None]()
    for name in modules:
        packages = name.split(".")
        order.update(dict.fromkeys(".".join(packages[:depth]) for depth in range(1, len(packages) + 1)))
    for name in order:
        cached = getattr(getattr(modules.get(name), "__spec__", None), "cached", None)
        if isinstance(cached, str) and cached.startswith("/"):
            yield name, cached


def list_libraries(inherited: Touched) -> list[Entry]:
    """Return the shared libraries that are mapped, the first to be loaded first, with what was touched."""
    found: list[Entry] = []
    for path, pages in read_touched("self").items():
        parts = join_pages(pages | inherited.get(path, set()))
        if parts and os.path.isfile(path):
            found.append((path, os.path.getsize(path), parts))
    return found


def read_touched(process: int | str) -> Touched:
    """Return the pages of each shared library that a process has touched (/proc/PID/pagemap of proc(5))."""
    pages: dict[str, set[int]] = {}
    code: set[str] = set()
    with open(f"/proc/{process}/maps", encoding="utf-8", errors="surrogateescape") as maps:
        lines = maps.readlines()
    with open(f"/proc/{process}/pagemap", "rb") as pagemap:
        for line in reversed(lines):  # a library is mapped below those before it
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) < 6 or not fields[5].startswith("/") or fields[5].endswith(" (deleted)"):
                continue
            begin, _, end = fields[0].partition("-")
            first, count = int(begin, 16) // PAGE, (int(end, 16) - int(begin, 16)) // PAGE
            pagemap.seek(8 * first)
            offset = int(fields[2], 16) // PAGE
            touched = find_present(pagemap.read(8 * count))
            pages.setdefault(fields[5], set()).update(offset + page for page in touched)
            if "x" in fields[1]:
                code.add(fields[5])
    return {path: touched for path, touched in pages.items() if path in code}


def find_present(raw: bytes) -> list[int]:
    """Return the numbers of the pages that are there, from entries of /proc/PID/pagemap (bit 63)."""
    return [page for page, high in enumerate(raw[7::8]) if high & 0x80]


def join_pages(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Return offsets and lengths in bytes of the parts of a file that have these pages."""
    parts: list[tuple[int, int]] = []
    for page in sorted(pages):
        if parts and page - parts[-1][1] <= GAP:
            parts[-1] = (parts[-1][0], page)
        else:
            parts.append((page, page))
    return [(first * PAGE, (last - first + 1) * PAGE) for first, last in parts]
