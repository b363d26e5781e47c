"""`python -I -S read_ahead_program.py REQUEST`: brings into the page cache what ranks are about to read.

A process of its own, which ends once all is read, or as soon as its stdin ends: the launcher holds the other
end, and the kernel closes that whatever becomes of the launcher. It prints one line of JSON with what it did.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))  # noqa: PTH100 - as launcher/rank/__main__.py

import contextlib
import glob
import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES

from launcher.agent.linked_parts import find_linked_parts
from launcher.agent.page_cache import are_cached, read_into_cache
from launcher.agent.read_order import (
    ANY_SIZE,
    BYTECODE,
    CHUNK,
    OrderEntry,
    Read,
    find_torch_folder,
    limit_reads,
    list_looks,
    list_reads,
    parse_order,
    sample_entries,
)
from launcher.files import READ, read_file
from launcher.probe.available_memory import read_free_memory

THREADS = 16
"""Reads at the same time: a network filesystem answers many as fast as one."""
LARGEST_RECORD = 16 << 20
"""Bytes of a record."""
LIBRARIES = (
    "torch/lib/libc10*.so",
    "torch/lib/libtorch_*.so",
    "nvidia/*/lib/lib*.so.*",
    "numpy/_core/_multiarray_umath*.so",
    "numpy.libs/*.so*",
)
"""What is read for a program that no start has recorded yet, below the folders of packages."""
NICE = 5
"""The ranks come first."""


@dataclass(slots=True)
class Work:
    """The reads that are left, and what has been read."""

    left: deque[Read]
    """In their order; threads take from the left."""
    folders: set[str] = field(default_factory=set)
    """Folders that have been listed."""
    lengths: list[int] = field(default_factory=list)
    """Bytes of each read that was done."""
    stale: int = 0
    """Reads of files that are gone, or have another size."""

    def run(self) -> None:
        """Read until nothing is left: a thread's body."""
        buffer = bytearray(CHUNK)
        while self.left:
            try:
                read = self.left.popleft()
            except IndexError:
                return
            try:
                self.look_around(read.path)
                self.lengths.append(read_into_cache(read, buffer))
            except OSError:
                self.stale += read.size != ANY_SIZE

    def look_around(self, path: str) -> None:
        """Ask for what an import asks for besides the bytecode: names in the folder, the source's status."""
        for name in list_looks(path, EXTENSION_SUFFIXES):
            with contextlib.suppress(OSError):
                os.stat(name)  # noqa: PTH116 - no pathlib a thousand times
        package, between, _ = path.partition(BYTECODE)
        if between and package not in self.folders:
            self.folders.add(package)
            with contextlib.suppress(OSError):
                os.listdir(package)  # noqa: PTH208 - as above


def main() -> None:
    """Do what the request asks for, and print what was done."""
    os.nice(NICE)
    request = json.loads(sys.argv[1])
    threading.Thread(target=end_reader_with_launcher, daemon=True).start()
    begin = time.monotonic()
    entries, source = find_entries(request["record"], request["folders"])
    recorded = list_reads(entries)
    wanted = sum(read.length for read in recorded)
    reads = [*recorded, *list_entry_points(find_torch_folder(entries))]
    cached = None if request["always"] else are_cached(sample_entries(entries))
    work = Work(deque(() if cached else limit_reads(reads, find_budget())))
    run_threads(work)
    account = {
        "source": source,
        "cached": bool(cached),
        "wanted": wanted,
        "read": sum(work.lengths),
        "stale": work.stale,
        "seconds": round(time.monotonic() - begin, 3),
    }
    sys.stdout.write(json.dumps(account) + "\n")


def end_reader_with_launcher() -> None:
    """End this process once its stdin ends: a thread's body."""
    while os.read(0, 1):
        pass
    os._exit(0)


def run_threads(work: Work) -> None:
    """Read all there is to read."""
    threads = [threading.Thread(target=work.run, daemon=True) for _ in range(min(THREADS, len(work.left)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def find_entries(record: str, folders: Sequence[str]) -> tuple[tuple[OrderEntry, ...], str]:
    """Return what to read, and whether that was `recorded` or follows a `rule`."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return parse_order(json.loads(read_file(record, LARGEST_RECORD, own=True))), "recorded"
    return tuple(entry for folder in folders for entry in find_libraries(folder)), "rule"


def list_entry_points(folder: str) -> list[Read]:
    """Return the files that `import torch` looks for last, the entry points of all packages beside it.

    It looks for backends of devices there (`_import_device_backends` of torch 2.5 and later).
    """
    if not folder:
        return []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))  # noqa: PTH208
        return [Read(f"{folder}/{name}/entry_points.txt", ANY_SIZE, 0, 1 << 16) for name in names]
    return []


def find_libraries(folder: str) -> list[OrderEntry]:
    """Return the parts of torch's libraries that are read in any case; nothing for a folder without torch."""
    if not os.path.isdir(f"{folder}/torch/lib"):  # noqa: PTH112 - no pathlib: its import is a third of a check
        return []
    found = []
    for pattern in LIBRARIES:
        for path in sorted(glob.glob(f"{glob.escape(folder)}/{pattern}")):  # noqa: PTH207 - as above
            with contextlib.suppress(OSError):
                descriptor = os.open(path, READ)
                try:
                    parts = tuple(find_linked_parts(descriptor))
                    found.append(OrderEntry(path, os.fstat(descriptor).st_size, parts))
                finally:
                    os.close(descriptor)
    return found


def find_budget() -> int:
    """Return how many bytes may be read: half of the memory that is free, for this cgroup too.

    What is read is charged to the reader's cgroup, and given back when something else needs it; but a rank
    that needs it at once is not to wait for that.
    """
    return read_free_memory() // 2


if __name__ == "__main__":
    with contextlib.suppress(Exception):  # whatever happens, the ranks read for themselves
        main()
